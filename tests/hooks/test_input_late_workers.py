"""An input that all workers have left, of a creator whose other workers are yet to draw from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.data import Stage, batch, prefetch

from .inputs import SHORT_SECS, Counted, Diary, until_stopped

pytestmark = pytest.mark.anyio


class BeginsAt(SessionRunHook):
    """Its begin waits for an event."""

    def __init__(self, event: anyio.Event) -> None:
        self.is_beginning = anyio.Event()
        self._event = event

    async def begin(self) -> None:
        self.is_beginning.set()
        await self._event.wait()


class Refuses(SessionRunHook):
    """Stops its worker before the step."""

    async def before_run(self, run_context: SessionRunContext) -> None:
        await anyio.wait_all_tasks_blocked()
        raise StopTraining


async def train(session: MonitoredSession, source: Any, how: str, num_runs: int = 99) -> None:
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


@pytest.mark.parametrize("how", ["hook", "loop"])
@pytest.mark.parametrize("is_for_all", [False, True])
async def test_a_worker_that_begins_when_the_others_were_stopped_finds_the_rest_of_the_input(
    how: str, is_for_all: bool
) -> None:
    diary, counted, may_begin = Diary(), Counted(9), anyio.Event()
    creator, source = SharedSessionCreator(diary.creator), prefetch(counted, 2)
    begins = BeginsAt(may_begin)

    def hooks() -> list[SessionRunHook]:
        return [FeedHook(source, "x")] if how == "hook" else []

    async def come_late() -> None:
        async with MonitoredSession([begins, *hooks()], creator) as session:
            if how == "hook":  # also one that does not look at should_stop
                await until_stopped(session) if not is_for_all else await session.run([])
            else:
                await train(session, source, how)

    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            async with MonitoredSession(hooks(), creator) as session:
                group.start_soon(come_late)
                await begins.is_beginning.wait()
                await train(session, source, how, 3)
                session.request_stop(all_workers=is_for_all)
            assert counted.log == ["open"]
            may_begin.set()
    assert diary.items == list(range(3 if is_for_all else 9))
    assert counted.log == ["open", "closed"]


@pytest.mark.parametrize("how", ["hook", "loop"])
async def test_the_last_item_that_a_stopped_worker_gave_back_is_there_for_one_that_begins_later(
    how: str,
) -> None:
    diary, may_begin = Diary(), anyio.Event()
    creator, begins = SharedSessionCreator(diary.creator), BeginsAt(may_begin)
    source: Stage[Any] = batch(range(1), 1)  # read to its end by what reads ahead of it

    async def come_late() -> None:
        async with MonitoredSession([begins], creator) as session:
            await train(session, source, "loop")

    async with anyio.create_task_group() as group:
        hooks = [FeedHook(source, "x"), Refuses()] if how == "hook" else []
        async with MonitoredSession(hooks, creator) as session:
            group.start_soon(come_late)
            await begins.is_beginning.wait()
            if how == "hook":
                await session.run([])
            else:
                await anext(session.batches(source))
                await anyio.wait_all_tasks_blocked()
                session.request_stop()
        may_begin.set()
    assert diary.items == [0]


@pytest.mark.parametrize("how", ["hook", "loop"])
async def test_an_input_that_no_worker_draws_from_any_more_is_closed_with_the_last_of_them(
    how: str,
) -> None:
    counted, creator = Counted(9), SharedSessionCreator(Diary().creator)
    source = prefetch(counted, 2)
    async with MonitoredSession([], creator):
        hooks = [FeedHook(source, "x")] if how == "hook" else []
        async with MonitoredSession(hooks, creator) as session:
            await train(session, source, how, 3)
        assert counted.log == ["open"]
    assert counted.log == ["open", "closed"]


@pytest.mark.parametrize("how", ["hook", "loop"])
async def test_errors_in_closing_inputs_that_others_have_left_leave_the_last_worker(
    how: str,
) -> None:
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
                hooks = [FeedHook(source, "x")] if how == "hook" else []
                async with MonitoredSession(hooks, creator) as session:
                    await train(session, source, how, 3)
    assert "then, closing another input: OSError('cannot close b')" in caught.value.__notes__


async def test_a_worker_that_opens_while_such_inputs_are_closed_keeps_those_that_are_left() -> None:
    may_close, is_closing, may_begin = anyio.Event(), anyio.Event(), anyio.Event()

    class Slow(Counted):
        async def __aiter__(self) -> Any:
            try:
                yield 0
                yield 1
            finally:
                is_closing.set()
                await may_close.wait()

    diary, begins = Diary(), BeginsAt(may_begin)
    creator = SharedSessionCreator(diary.creator)
    slow, kept = prefetch(Slow(), 1), prefetch(range(9), 2)

    async def work() -> None:
        async with MonitoredSession([], creator):
            for source in (slow, kept):
                async with MonitoredSession([FeedHook(source, "x")], creator) as session:
                    await session.run([])

    async def come_late() -> None:
        async with MonitoredSession([begins, FeedHook(kept, "x")], creator) as session:
            await until_stopped(session)

    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await is_closing.wait()
            group.start_soon(come_late)
            await begins.is_beginning.wait()
            may_close.set()
            await anyio.wait_all_tasks_blocked()
            may_begin.set()
    assert diary.items == [0, *range(9)]
