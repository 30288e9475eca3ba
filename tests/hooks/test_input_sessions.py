"""Input of several sessions: one after the other, side by side, and pipelines of the program's."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.data import Stage, batch, prefetch

from ..data.sources import Source, at
from ..support.afterwards import nothing_left
from ..support.faults import FaultError
from ..support.helpers import settle
from .inputs import SHORT_SECS, Counted, Diary, gated, saving, until_stopped
from .training import Calls, Holds, run_and_close, run_session, tasks

pytestmark = pytest.mark.anyio
hook_or_loop = pytest.mark.parametrize("how", ["hook", "loop"])


AROUND: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 2),
    "a stage without tasks": lambda source: batch(source, 1),
}


@pytest.mark.parametrize("around", AROUND)
async def test_a_second_session_goes_on_behind_the_first(around: str) -> None:
    diary = Diary()
    async with AROUND[around](range(8)) as source:
        for _ in range(2):
            await run_session([FeedHook(source, "x")], diary.creator, runs=2)
        if around == "prefetch":
            assert source.state_dict() == at(4)
            assert [item async for item in source] == [4, 5, 6, 7]
    assert diary.items == [0, 1, 2, 3]


async def test_a_session_goes_on_behind_what_was_looked_at() -> None:
    diary = Diary()
    async with prefetch(range(4), 2) as source:
        assert await anext(source) == 0
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            assert source.state_dict() == at(1)
            await session.run([])
            assert source.state_dict() == at(2)
            await until_stopped(session)
    assert diary.items == [1, 2, 3]


async def test_an_item_that_a_session_gave_back_costs_the_next_session_none() -> None:
    diary = Diary({3: FaultError()})
    async with prefetch(range(8), 3) as source:
        with pytest.raises(FaultError):
            await run_session([FeedHook(source, "x")], diary.creator)
        await run_session([FeedHook(source, "x")], diary.creator, runs=5)
    assert diary.items == [0, 1, 2, 3, 4, 5, 6]


async def test_a_session_on_a_source_that_has_ended_ends_cleanly() -> None:
    diary = Diary()
    async with prefetch(range(3), 2) as source:
        for _ in range(2):
            await run_session([FeedHook(source, "x")], diary.creator)
    assert diary.items == [0, 1, 2]


async def train(source: Stage[Any], diary: Diary, path: Path, how: str, num_runs: int) -> None:
    hook = FeedHook(source, "x") if how == "hook" else InputPositionHook(source)
    async with MonitoredSession([hook, saving(path, diary)], diary.creator) as session:
        batches = session.batches(source)
        for _ in range(num_runs):
            await session.run([], None if how == "hook" else {"x": await anext(batches)})


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("lost_at", [(3,), (3, 6)])
@hook_or_loop
async def test_what_took_the_place_of_a_pipeline_that_went_back_is_the_programs_too(
    around: str, lost_at: tuple[int, ...], how: str, tmp_path: Path
) -> None:
    source = Counted(20)
    lost, diary = Diary(dict.fromkeys(lost_at, PreemptionError("lost"))), Diary()
    log = ["open", *["closed", "open"] * len(lost_at)]
    async with nothing_left():
        async with AROUND[around](source) as items:
            await train(items, lost, tmp_path / "lost", how, 6)
            assert source.log == log, "the program has not closed it"
            await train(items, diary, tmp_path / "later", how, 2)
            seen = int(np.ravel(await anext(items))[0])
            assert source.log == log
        assert source.log == [*log, "closed"]
    num = len(lost.items)
    assert sorted(lost.items) == list(range(num))
    assert diary.items == [num, num + 1]
    # what is read ahead of a stage without tasks is the next session's
    assert seen == num + 2 if around == "prefetch" else seen > num + 2


async def test_the_programs_block_closes_what_was_read_ahead_for_a_next_session() -> None:
    source, diary = Source(None), Diary()
    async with nothing_left():
        async with batch(source.items(), 1) as stage:
            for _ in range(2):
                await run_session([FeedHook(stage, "x")], diary.creator, runs=1)
            assert not source.is_closed
        assert source.is_closed
    assert diary.items == [0, 1]


async def test_an_item_that_was_given_back_and_read_by_the_program_counts_as_used() -> None:
    diary = Diary({3: FaultError()})
    async with prefetch(range(9), 2) as source:
        with contextlib.suppress(FaultError):
            await run_session([FeedHook(source, "x")], diary.creator)
        assert await anext(source) == 2
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            await session.run([])
            assert source.state_dict() == at(4)
    assert diary.items == [0, 1, 3]


async def test_an_item_that_was_given_back_behind_used_ones_is_not_lost() -> None:
    diary = Diary({1: FaultError(), 4: FaultError()})
    creator = SharedSessionCreator(diary.creator)
    expected = at(0, 1, 2)
    async with prefetch(range(9), 3) as source:
        async with (
            MonitoredSession([FeedHook(source, "x")], creator) as fails,
            MonitoredSession([FeedHook(source, "x")], creator) as session,
        ):
            with pytest.raises(FaultError):
                await fails.run([])  # it has item 0 in hand
            await session.run([])
            await session.run([])
            assert source.state_dict() == expected
        async with MonitoredSession([FeedHook(source, "x")], creator) as session:
            with pytest.raises(FaultError):
                await session.run([])
            assert source.state_dict() == expected
            await session.run([])
            assert source.state_dict() == at(3)
    assert diary.items == [1, 2, 0]


async def test_a_session_goes_on_with_a_source_that_the_program_has_let_go_of() -> None:
    source, diary = Source(6), Diary()
    async with nothing_left():
        stage = batch(source.items(), 1)
        async with MonitoredSession([FeedHook(stage, "x")], diary.creator) as session:
            async with stage:
                await session.run([])
            await until_stopped(session)
    assert diary.items == [0, 1, 2, 3, 4, 5]
    assert source.is_closed


async def test_a_session_that_is_refused_the_hook_leaves_the_first_to_go_on_and_to_close() -> None:
    source, diary = Counted(), Diary()
    hook = FeedHook(source, "x")
    with pytest.raises(KeyError):
        async with MonitoredSession([hook], diary.creator) as session:
            await session.run([])
            with pytest.raises(RuntimeError, match="in use already; give each session one of its"):
                async with MonitoredSession([hook], Diary().creator):
                    pass
            await session.run([])
            assert source.log == ["open"]
            raise KeyError
    assert (diary.items, source.log) == ([0, 1], ["open", "closed"])


async def test_a_stop_of_the_second_session_ends_the_wait_of_a_hook_that_had_another() -> None:
    never, diary = anyio.Event(), Diary()
    async with prefetch(gated(range(3), {1: never}), 1) as source:
        hook = FeedHook(source, "x")
        await run_session([hook], diary.creator, runs=1)
        session = MonitoredSession([hook], diary.creator, step_runner="inline")
        async with tasks() as group:
            group.start_soon(run_and_close, session)
            await settle()
            session.request_stop()
    assert diary.items == [0]


async def test_a_run_that_has_ended_counts_before_the_hooks_turn_and_for_its_session_only() -> None:
    source = prefetch(range(9), 4)
    hook = InputPositionHook(source)
    states: list[Any] = []
    records = Calls(after_run=lambda *_: states.append(hook.state_dict()))
    creator = SharedSessionCreator(Diary().creator)
    async with (
        MonitoredSession([records, hook], creator) as session,
        MonitoredSession([], creator) as other,
    ):
        batches, others = session.batches(source), other.batches(source)
        assert await anext(others) == 0
        await session.run([], {"x": await anext(batches)})
        assert states == [at(0, 1)]


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_fed_run_that_has_ended_counts_before_the_hooks_turn(runner: Any) -> None:
    hook = FeedHook(prefetch(range(9), 4), "x")
    states: list[Any] = []
    records, creator = Calls(after_run=lambda *_: states.append(hook.state_dict())), Diary().creator
    async with MonitoredSession([records, hook], creator, step_runner=runner) as session:
        for _ in range(3):
            await session.run([])
            assert hook.state_dict() == states[-1]
    assert [each["items"] for each in states] == [1, 2, 3]


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
    assert states == [at(2)]
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
        await run_session(hooks, diary.creator)
    lost = {4, 5} if is_bare else set()  # behind the checkpoint
    assert diary.items == [number for number in range(12) if number not in lost]
    assert ("its input cannot" in caplog.text) == is_bare


def feeding(source: Any, how: str, *hooks: SessionRunHook) -> list[SessionRunHook]:
    """The hooks of a worker, none where its own loop draws from the source."""
    return [FeedHook(source, "x"), *hooks] if how == "hook" else []


async def draw(session: MonitoredSession, source: Any, how: str, num_runs: int = 99) -> None:
    if how == "hook":
        while num_runs and not session.should_stop():
            await session.run([])
            num_runs -= 1
        return
    async for item in session.batches(source):
        await session.run([], {"x": item})
        num_runs -= 1
        if not num_runs:
            break


@hook_or_loop
@pytest.mark.parametrize("is_for_all", [False, True])
async def test_a_worker_that_begins_when_the_others_were_stopped_finds_the_rest_of_the_input(
    how: str, is_for_all: bool
) -> None:
    diary, counted, may_begin = Diary(), Counted(9), anyio.Event()
    creator, source = SharedSessionCreator(diary.creator), prefetch(counted, 2)
    begins = Holds("begin", may_begin)

    async def come_late() -> None:
        async with MonitoredSession([begins, *feeding(source, how)], creator) as session:
            if how == "hook":  # also one that does not look at should_stop
                await until_stopped(session) if not is_for_all else await session.run([])
            else:
                await draw(session, source, how)

    async with tasks() as group:
        async with MonitoredSession(feeding(source, how), creator) as session:
            group.start_soon(come_late)
            await begins.has_come.wait()
            await draw(session, source, how, 3)
            session.request_stop(all_workers=is_for_all)
        assert counted.log == ["open"]
        may_begin.set()
    assert diary.items == list(range(3 if is_for_all else 9))
    assert counted.log == ["open", "closed"]


@hook_or_loop
async def test_the_last_item_that_a_stopped_worker_gave_back_is_there_for_one_that_begins_later(
    how: str,
) -> None:
    diary, may_begin = Diary(), anyio.Event()
    creator, begins = SharedSessionCreator(diary.creator), Holds("begin", may_begin)
    source: Stage[Any] = batch(range(1), 1)  # read to its end by what reads ahead of it

    async def come_late() -> None:
        async with MonitoredSession([begins], creator) as session:
            await draw(session, source, "loop")

    async def refuse(run_context: Any) -> None:
        await settle()
        raise StopTraining

    async with anyio.create_task_group() as group:
        hooks = feeding(source, how, Calls(before_run=refuse))
        async with MonitoredSession(hooks, creator) as session:
            group.start_soon(come_late)
            await begins.has_come.wait()
            if how == "hook":
                await session.run([])
            else:
                await anext(session.batches(source))
                await anyio.wait_all_tasks_blocked()
                session.request_stop()
        may_begin.set()
    assert diary.items == [0]


@hook_or_loop
async def test_an_input_is_closed_with_the_last_worker_that_may_draw_from_it(how: str) -> None:
    counted, creator = Counted(9), SharedSessionCreator(Diary().creator)
    source = prefetch(counted, 2)
    async with MonitoredSession([], creator):
        async with MonitoredSession(feeding(source, how), creator) as session:
            await draw(session, source, how, 3)
        assert counted.log == ["open"]
    assert counted.log == ["open", "closed"]


@hook_or_loop
async def test_errors_in_closing_inputs_of_others_leave_the_last_worker(how: str) -> None:
    def fails(name: str) -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            raise OSError(f"cannot close {name}")

    creator = SharedSessionCreator(Diary().creator)
    with pytest.raises(OSError, match="cannot close a") as caught:
        async with MonitoredSession([], creator):
            for name in "ab":
                source = prefetch(fails(name), 2)
                async with MonitoredSession(feeding(source, how), creator) as session:
                    await draw(session, source, how, 3)
    assert "then, closing another input: OSError('cannot close b')" in caught.value.__notes__


async def test_a_worker_that_opens_while_such_inputs_are_closed_keeps_those_that_are_left() -> None:
    may_close, is_closing, may_begin = anyio.Event(), anyio.Event(), anyio.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
        finally:
            is_closing.set()
            await may_close.wait()

    diary, begins = Diary(), Holds("begin", may_begin)
    creator = SharedSessionCreator(diary.creator)
    slow, kept = prefetch(numbers(), 1), prefetch(range(9), 2)

    async def work() -> None:
        async with MonitoredSession([], creator):
            for source in (slow, kept):
                await run_session([FeedHook(source, "x")], creator, runs=1)

    async with tasks() as group:
        group.start_soon(work)
        await is_closing.wait()
        group.start_soon(run_session, [begins, FeedHook(kept, "x")], creator)
        await begins.has_come.wait()
        may_close.set()
        await anyio.wait_all_tasks_blocked()
        may_begin.set()
    assert diary.items == [0, *range(9)]
