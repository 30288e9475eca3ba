"""Hooks at the input that meet several sessions: one after the other, and side by side."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
)
from asynchooks.data import batch, prefetch

from ..support.helpers import settle
from .inputs import SHORT_SECS, Counted, Diary, gated, saving, until_stopped

pytestmark = pytest.mark.anyio


class RecordsPosition(SessionRunHook):
    """What a checkpoint that is written in after_run would hold."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.states: list[Any] = []

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.states.append(self.hook.state_dict())


async def test_a_session_that_was_refused_the_hook_leaves_the_source_to_be_closed() -> None:
    source = Counted()
    hook = FeedHook(source, "x")
    with pytest.raises(KeyError):
        async with MonitoredSession([hook], Diary().creator) as session:
            await session.run([])
            with pytest.raises(RuntimeError, match="in use already"):
                async with MonitoredSession([hook], Diary().creator):
                    pass
            assert source.log == ["open"]
            raise KeyError
    assert source.log == ["open", "closed"]


async def test_a_stop_of_the_second_session_ends_the_wait_of_a_hook_that_had_another() -> None:
    never, diary = anyio.Event(), Diary()
    async with prefetch(gated(range(3), {1: never}), 1) as source:
        hook = FeedHook(source, "x")
        async with MonitoredSession([hook], diary.creator) as session:
            await session.run([])
        session = MonitoredSession([hook], diary.creator, step_runner="inline")

        async def train() -> None:
            async with session:
                await until_stopped(session)

        with anyio.fail_after(SHORT_SECS):
            async with anyio.create_task_group() as group:
                group.start_soon(train)
                await settle()
                session.request_stop()
    assert diary.items == [0]


async def test_a_run_that_has_ended_counts_before_the_hooks_turn_and_for_its_session_only() -> None:
    source = prefetch(range(9), 4)
    hook = InputPositionHook(source)
    records, creator = RecordsPosition(hook), SharedSessionCreator(Diary().creator)
    async with (
        MonitoredSession([records, hook], creator) as session,
        MonitoredSession([], creator) as other,
    ):
        batches, others = session.batches(source), other.batches(source)
        assert await anext(others) == 0
        await session.run([], {"x": await anext(batches)})
        assert records.states == [{"stage": "sequence", "items": 0, "used_beyond": [1]}]


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_fed_run_that_has_ended_counts_before_the_hooks_turn(runner: Any) -> None:
    hook = FeedHook(prefetch(range(9), 4), "x")
    records = RecordsPosition(hook)
    hooks = [records, hook]
    async with MonitoredSession(hooks, Diary().creator, step_runner=runner) as session:
        for _ in range(3):
            await session.run([])
            assert hook.state_dict() == records.states[-1]
    assert [each["items"] for each in records.states] == [1, 2, 3]


async def test_a_step_that_has_ended_in_its_thread_counts_before_its_task_comes_back() -> None:
    source, diary = prefetch(range(9), 4), Diary()
    go, states = threading.Event(), []

    def step(x: int) -> dict[str, Any]:
        if x == 0:
            assert go.wait(SHORT_SECS)
        return diary.step(x)

    creator = SharedSessionCreator(FunctionSessionCreator(step, thread_safe=True))
    slow = MonitoredSession([FeedHook(source, "x")], creator, step_runner="thread")
    fast = MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline")
    async with slow, fast, anyio.create_task_group() as group:
        group.start_soon(slow.run, [])
        await settle()
        await fast.run([])
        go.set()
        until = time.monotonic() + SHORT_SECS
        while fast.global_step.value < 2:  # no other task has a turn meanwhile
            assert time.monotonic() < until
        states.append(source.state_dict())
    assert states == [{"stage": "sequence", "items": 2}]
    assert diary.items == [1, 0]


@pytest.mark.parametrize("is_bare", [False, True])
async def test_a_pipeline_of_a_function_goes_back_with_the_model_and_of_a_generator_cannot(
    is_bare: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def numbers() -> Iterator[int]:
        yield from range(12)

    diary = Diary({7: PreemptionError("lost")})
    source = prefetch(batch(numbers() if is_bare else numbers, 1), 2)
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
    with caplog.at_level(logging.WARNING, "asynchooks"):
        async with MonitoredSession(hooks, diary.creator) as session:
            await until_stopped(session)
    lost = {4, 5} if is_bare else set()  # behind the checkpoint
    assert diary.items == [number for number in range(12) if number not in lost]
    assert ("its input cannot" in caplog.text) == is_bare
