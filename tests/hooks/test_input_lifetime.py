"""A pipeline that the program opens: sessions one after the other, and reading it besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FeedHook,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
)
from asynchooks.data import Stage, batch, prefetch

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .inputs import SHORT_SECS, Counted, Diary, FromFunction, gated, saving, until_stopped

pytestmark = pytest.mark.anyio


class FaultError(Exception):
    """What is made to happen."""


async def test_a_second_session_goes_on_behind_the_first() -> None:
    diary = Diary()
    async with prefetch(range(6), 2) as source:
        for _ in range(2):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await session.run([])
                await session.run([])
        assert source.state_dict() == {"stage": "sequence", "items": 4}
        assert [item async for item in source] == [4, 5]
    assert diary.items == [0, 1, 2, 3]


async def test_a_session_goes_on_behind_what_was_looked_at() -> None:
    diary = Diary()
    async with prefetch(range(4), 2) as source:
        assert await anext(source) == 0
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            await session.run([])
            assert source.state_dict() == {"stage": "sequence", "items": 2}
            await until_stopped(session)
    assert diary.items == [1, 2, 3]


async def test_an_item_that_a_session_gave_back_costs_the_next_session_none() -> None:
    diary = Diary({3: FaultError()})
    async with prefetch(range(8), 3) as source:
        with pytest.raises(FaultError):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            for _ in range(5):
                await session.run([])
    assert diary.items == [0, 1, 2, 3, 4, 5, 6]


async def test_an_item_that_a_session_gave_back_is_read_as_itself() -> None:
    diary = Diary({2: FaultError()})
    async with prefetch(range(4), 3) as source:
        with pytest.raises(FaultError):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
        assert [item async for item in source] == [1, 2, 3]


async def test_a_session_on_a_source_that_has_ended_ends_cleanly() -> None:
    diary = Diary()
    async with prefetch(range(3), 2) as source:
        for _ in range(2):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
    assert diary.items == [0, 1, 2]


async def test_what_was_read_ahead_of_a_stage_without_tasks_is_not_lost() -> None:
    diary = Diary()
    async with batch(range(8), 1) as source:
        for _ in range(2):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await session.run([])
                await session.run([])
    assert diary.items == [0, 1, 2, 3]


async def test_the_position_before_the_first_draw_is_behind_what_was_looked_at() -> None:
    async with prefetch(range(4), 2) as source:
        await anext(source)
        async with MonitoredSession([FeedHook(source, "x")], Diary().creator):
            assert source.state_dict() == {"stage": "sequence", "items": 1}


AROUND: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 2),
    "a stage without tasks": lambda source: batch(source, 1),
}


async def train(source: Stage[Any], diary: Diary, path: Path, how: str, num_runs: int) -> None:
    hook = FeedHook(source, "x") if how == "hook" else InputPositionHook(source)
    async with MonitoredSession([hook, saving(path, diary)], diary.creator) as session:
        batches = session.batches(source)
        for _ in range(num_runs):
            await session.run([], None if how == "hook" else {"x": await anext(batches)})


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("lost_at", [(3,), (3, 6)])
@pytest.mark.parametrize("how", ["hook", "loop"])
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


async def test_a_worker_that_waits_learns_that_the_programs_pipeline_goes_back(
    tmp_path: Path,
) -> None:
    gate, diary = anyio.Event(), Diary({3: PreemptionError("lost")})
    creator = SharedSessionCreator(diary.creator)
    async with prefetch(FromFunction(lambda: gated(range(4), {2: gate})), 1) as source:
        hooks = [FeedHook(source, "x"), saving(tmp_path, diary, every=100)]
        async with (
            MonitoredSession(hooks, creator, step_runner="inline") as saves,
            MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline") as waits,
            MonitoredSession([], creator, step_runner="inline") as loses,
        ):
            await saves.run([])
            await saves.run([])
            with anyio.fail_after(SHORT_SECS):
                async with anyio.create_task_group() as group:
                    group.start_soon(waits.run, [])
                    await settle()
                    await loses.run([], {"x": 99})
                    await saves.run([])
                    await settle()
                    assert sorted(diary.items) == [0, 1, 99]
                    gate.set()
