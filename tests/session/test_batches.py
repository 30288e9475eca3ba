"""session.batches: what ends the loop, several loops over one source, and errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import aclosing, nullcontext
from typing import Any

import anyio
import pytest

from asynchooks import (
    InputError,
    InputPositionHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import batch, prefetch

from ..data.sources import at
from ..hooks.inputs import SHORT_SECS, Counted, Diary, FromFunction, gated
from ..support.helpers import settle
from ..support.threads import threads_left

pytestmark = pytest.mark.anyio


async def train(session: MonitoredSession, source: Any) -> None:
    async for item in session.batches(source):
        await session.run([], {"x": item})


@pytest.mark.parametrize(
    "make",
    [
        lambda: [0, 1, 2],
        lambda: iter(range(3)),
        lambda: prefetch(range(3), 5),
        lambda: batch(range(3), 1),
        lambda: gated(range(3), {}),
        lambda: lambda: gated(range(3), {}),
    ],
)
async def test_a_loop_ends_with_its_source(make: Callable[[], Any]) -> None:
    diary = Diary()
    async with MonitoredSession([], diary.creator) as session:
        await train(session, make())
        assert not session.should_stop()
    assert diary.items == [0, 1, 2]
    assert not threads_left()


async def test_a_loop_ends_at_the_limit_and_what_is_left_is_there_for_others() -> None:
    diary, source = Diary(), prefetch(range(9), 3)
    creator = SharedSessionCreator(diary.creator)
    async with MonitoredSession([], creator) as other:
        batches = other.batches(source)
        async with MonitoredSession([StopAtStepHook(last_step=3)], creator) as session:
            await train(session, source)
            assert diary.items == [0, 1, 2]
        creator_step = other.global_step
        creator_step.raise_limit(100)
        async for item in batches:
            await other.run([], {"x": item})
    assert diary.items == list(range(9))


async def test_an_item_that_was_refused_at_the_limit_goes_back() -> None:
    diary, source = Diary(), prefetch(range(4), 1)
    creator = SharedSessionCreator(diary.creator)
    async with MonitoredSession([], creator) as other:
        batches = other.batches(source)
        async with MonitoredSession([StopAtStepHook(last_step=1)], creator) as session:
            mine = session.batches(source)
            item = await anext(mine)
            await other.run([], {"x": 99})
            await session.run([], {"x": item})
        other.global_step.raise_limit(100)
        assert [each async for each in batches] == [0, 1, 2, 3]
    assert diary.items == [99]


@pytest.mark.parametrize("how", ["request_stop", "hook"])
async def test_a_stop_ends_the_wait_of_a_loop(how: str) -> None:
    never, diary = anyio.Event(), Diary()
    session = MonitoredSession([], diary.creator, step_runner="inline")
    after: list[bool] = []

    async def body() -> None:
        async with session:
            await train(session, gated(range(9), {2: never}))
            after.append(session.should_stop())

    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            group.start_soon(body)
            await settle()
            if how == "request_stop":
                session.request_stop()
            else:
                session._stop.coord.request_stop()  # type: ignore[union-attr]
    assert (diary.items, after) == ([0, 1], [True])


async def test_the_limit_reached_by_another_worker_ends_the_wait_of_a_loop() -> None:
    never, diary, left = anyio.Event(), Diary(), anyio.Event()
    creator = SharedSessionCreator(diary.creator)
    waits = MonitoredSession([], creator, step_runner="inline")

    async def body() -> None:
        async with waits:
            await train(waits, gated(range(9), {1: never}))
        left.set()

    async with anyio.create_task_group() as group:
        group.start_soon(body)
        await settle()
        limit = StopAtStepHook(last_step=2)
        async with MonitoredSession([limit], creator, step_runner="inline") as session:
            await session.run([], {"x": 7})
            await settle()
            assert waits.should_stop()
            is_in_time = left.is_set()
        waits.request_stop()
    assert is_in_time


async def test_a_stop_in_the_loop_ends_it_before_the_next_item() -> None:
    diary = Diary()
    async with MonitoredSession([], diary.creator) as session:
        async for item in session.batches(range(9)):
            await session.run([], {"x": item})
            if item == 2:
                session.request_stop()
    assert diary.items == [0, 1, 2]


@pytest.mark.parametrize("how", ["break", "error", "end", "never begun"])
async def test_the_source_is_closed_at_the_end_of_the_session(how: str) -> None:
    source = Counted()
    with pytest.raises(KeyError) if how == "error" else nullcontext():
        async with MonitoredSession([], Diary().creator) as session:
            batches = session.batches(source)
            if how != "never begun":
                async for _ in batches:
                    if how == "error":
                        raise KeyError
                    if how == "break":
                        break
                expected = ["open"] if how == "break" else ["open", "closed"]
                assert source.log == expected
    assert source.log == ([] if how == "never begun" else ["open", "closed"])
    assert [item async for item in batches] == [], "after the session it has ended"


async def test_a_cancellation_loses_no_item() -> None:
    gate, diary = anyio.Event(), Diary()
    async with MonitoredSession([], diary.creator) as session:
        batches = session.batches(prefetch(gated(range(3), {1: gate}), 1))
        assert await anext(batches) == 0
        with anyio.move_on_after(0):
            await anext(batches)
        gate.set()
        assert [item async for item in batches] == [1, 2]


async def test_two_loops_one_after_the_other_go_on_with_the_source() -> None:
    source = prefetch(range(7), 2)
    hook, seen = InputPositionHook(source), []
    async with MonitoredSession([hook], Diary().creator) as session:
        for last in (2, 4, 99):
            async for item in session.batches(source):
                seen.append(item)
                await session.run([], {"x": item})
                if item == last:
                    break
        assert hook.state_dict()["items"] == 7
    assert seen == list(range(7))


async def test_an_item_that_no_run_has_used_is_given_to_the_next_loop() -> None:
    source = prefetch(range(4), 2)
    hook, seen = InputPositionHook(source), []
    async with MonitoredSession([hook], Diary().creator) as session:
        async for _ in session.batches(source):
            break
        async for item in session.batches(source):
            seen.append(item)
            await session.run([], {"x": item})
    assert seen == [0, 1, 2, 3]


async def test_each_loop_reads_a_list_from_its_start() -> None:
    seen = []
    async with MonitoredSession([], Diary().creator) as session:
        for _ in range(2):
            seen += [item async for item in session.batches([1, 2])]
    assert seen == [1, 2, 1, 2]


async def test_a_loop_of_a_side_task_ends_with_the_session() -> None:
    never, seen = anyio.Event(), []
    session = MonitoredSession([], Diary().creator)

    async def read() -> None:
        async for item in session.batches(FromFunction(lambda: gated(range(3), {1: never}))):
            seen.append(item)

    with anyio.fail_after(SHORT_SECS):
        async with session:
            session.start_soon(read)
            await settle()
    assert seen == [0]


async def test_a_loop_that_was_closed_early_is_closed_once() -> None:
    source = Counted()
    async with MonitoredSession([], Diary().creator) as session:
        batches = session.batches(source)
        assert await anext(batches) == 0
        await batches.aclose()
        assert source.log == ["open", "closed"]
        await batches.aclose()
    assert source.log == ["open", "closed"]


async def test_a_loop_that_is_left_early_closes_its_source_where_it_is_closed() -> None:
    source, diary = Counted(), Diary()
    async with MonitoredSession([], diary.creator) as session:
        async with aclosing(session.batches(source)) as batches:
            async for item in batches:
                await session.run([], {"x": item})
                if item == 2:
                    break
            assert source.log == ["open"]
        assert source.log == ["open", "closed"]
    assert diary.items == [0, 1, 2]


async def test_what_a_session_took_out_stays_its_own_when_another_begins_a_loop() -> None:
    source = prefetch(range(5), 2)
    creator = SharedSessionCreator(Diary().creator)
    hook = InputPositionHook(source)
    async with MonitoredSession([hook], creator) as a, MonitoredSession([], creator) as b:
        item = await anext(a.batches(source))  # it keeps no iterator
        gc.collect()
        assert await anext(b.batches(source)) == 1
        await a.run([], {"x": item})
        assert hook.state_dict() == at(1)


async def test_a_second_loop_leaves_the_first_its_item() -> None:
    source, diary = prefetch(range(4), 2), Diary()
    async with MonitoredSession([], diary.creator) as session:
        first, second = session.batches(source), session.batches(source)
        item = await anext(first)
        third = session.batches(source)
        await session.run([], {"x": await anext(third)})
        await session.run([], {"x": await anext(second)})
        await session.run([], {"x": item})
        assert [each async for each in first] == [3]
    assert diary.items == [1, 2, 0]


async def test_errors_of_the_source_leave_the_loop_as_themselves() -> None:
    failure = ZeroDivisionError("in the source")
    source, diary = Counted(2, failure), Diary()
    with pytest.raises(ZeroDivisionError) as caught:
        async with MonitoredSession([], diary.creator) as session:
            async for item in session.batches(source):
                await session.run([], {"x": item})
    assert caught.value is failure
    assert diary.items == [0, 1]
    assert source.log == ["open", "closed"]


async def test_an_error_in_closing_the_source_leaves_or_is_noted() -> None:
    def fails() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        async with MonitoredSession([], Diary().creator) as session:
            await anext(session.batches(fails()))
    with pytest.raises(KeyError) as caught:
        async with MonitoredSession([], Diary().creator) as session:
            await anext(session.batches(fails()))
            raise KeyError("first")
    assert caught.value.__notes__ == ["then, closing the input: OSError('cannot close')"]


async def test_an_empty_source_is_an_error() -> None:
    async with MonitoredSession([], Diary().creator) as session:
        with pytest.raises(InputError, match="a list of 0 has no items"):
            await anext(session.batches([]))


async def test_it_needs_an_open_session() -> None:
    session = MonitoredSession([], Diary().creator)
    with pytest.raises(RuntimeError, match=r"batches\(\) before the session was opened"):
        session.batches([1])
    async with session:
        for nonsense in (5, "text", None, {"a": 1}):
            with pytest.raises(TypeError, match="give a stage, an iterable or async iterable"):
                session.batches(nonsense)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"batches\(\) after the session was closed"):
        session.batches([1])
