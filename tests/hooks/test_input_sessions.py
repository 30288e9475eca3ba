"""Input of several sessions: one after the other, side by side, and pipelines of the program's."""

from collections.abc import Callable, Iterator
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
    SessionRunHook,
    SharedSessionCreator,
)
from asynchooks.data import Stage, batch, prefetch

from ..data.sources import at
from ..support.afterwards import nothing_left
from .inputs import Counted, Diary, saving, until_stopped
from .training import Holds, run_session, tasks

hook_or_loop = pytest.mark.parametrize("how", ["hook", "loop"])


AROUND: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 2),
    "a stage without tasks": lambda source: batch(source, 1),
}


async def test_a_session_goes_on_behind_the_one_before_and_what_was_looked_at() -> None:
    diary = Diary()
    async with prefetch(range(8), 2) as source:
        await run_session([FeedHook(source, "x")], diary.creator, runs=2)
        assert source.state_dict() == at(2)
        assert await anext(source) == 2
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            assert source.state_dict() == at(3)
            await until_stopped(session)
        await run_session([FeedHook(source, "x")], diary.creator)  # the source has ended
    assert diary.items == [0, 1, 3, 4, 5, 6, 7]


async def train(source: Stage[Any], diary: Diary, path: Path, how: str, num_runs: int) -> None:
    hook = FeedHook(source, "x") if how == "hook" else InputPositionHook(source)
    async with MonitoredSession([hook, saving(path, diary)], diary.creator) as session:
        batches = session.batches(source)
        for _ in range(num_runs):
            await session.run([], None if how == "hook" else {"x": await anext(batches)})


@pytest.mark.parametrize("around", AROUND)
@hook_or_loop
async def test_what_took_the_place_of_a_pipeline_that_went_back_is_the_programs_too(
    around: str, how: str, tmp_path: Path
) -> None:
    source = Counted(20)
    lost, diary = Diary(dict.fromkeys((3, 6), PreemptionError("lost"))), Diary()
    log = ["open", "closed", "open", "closed", "open"]
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


# Workers of one model: an input is open as long as one may come to read it


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
            if how == "hook" and is_for_all:  # also one that does not look at should_stop
                await session.run([])
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
async def test_inputs_are_closed_with_the_last_worker_which_their_errors_leave(how: str) -> None:
    def fails(name: str) -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            raise OSError(f"cannot close {name}")

    counted, creator = Counted(9), SharedSessionCreator(Diary().creator)
    with pytest.raises(OSError, match="cannot close a") as caught:
        async with MonitoredSession([], creator):
            for each in (counted, fails("a"), fails("b")):
                source = prefetch(each, 2)
                async with MonitoredSession(feeding(source, how), creator) as session:
                    await draw(session, source, how, 3)
            assert counted.log == ["open"]
    assert counted.log == ["open", "closed"]
    assert "then, closing another input: OSError('cannot close b')" in caught.value.__notes__
