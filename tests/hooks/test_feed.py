"""FeedHook on step functions: where items are fed, the end of the source, errors and stops."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputError,
    InputStructureError,
    MonitoredSession,
    PreemptionError,
    StopTraining,
)
from asynchooks.data import batch, prefetch
from asynchooks.testing import RecordingHook

from ..support.helpers import settle
from .inputs import SHORT_SECS, Diary, Gate, gated, until_stopped
from .savers import threads_left

pytestmark = pytest.mark.anyio


class Pairs:
    """A step of two parameters that keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, Any]] = []

    def step(self, a: Any = None, b: Any = None) -> dict[str, Any]:
        self.given.append((a, b))
        return {"a": a}

    @property
    def creator(self) -> FunctionSessionCreator:
        return FunctionSessionCreator(self.step)


@pytest.mark.parametrize(
    ("names", "items", "given"),
    [
        (None, [{"a": 1, "b": 2}, {"b": 3}], [(1, 2), (None, 3)]),
        ("a", [1, (2, 3), {"b": 4}], [(1, None), ((2, 3), None), ({"b": 4}, None)]),
        (["a", "b"], [(1, 2), [3, 4]], [(1, 2), (3, 4)]),
        (("b", "a"), [(1, 2)], [(2, 1)]),
        ({"x": "b", "y": "a"}, [{"x": 1, "y": 2, "z": 3}], [(2, 1)]),
    ],
)
async def test_items_are_fed_where_names_say(names: Any, items: list[Any], given: Any) -> None:
    model = Pairs()
    async with MonitoredSession([FeedHook(items, names)], model.creator) as session:
        await until_stopped(session)
    assert model.given == given


@pytest.mark.parametrize(
    ("names", "items", "message"),
    [
        (None, [{"a": 1}, 7], r"^item 1 of .* is 7; FeedHook expected a mapping from names to val"),
        (["a", "b"], [(1, 2), (1, 2, 3)], r"^item 1 .* is a tuple of 3; .* a tuple of 2, one for"),
        (["a"], [["x" * 300], "x" * 300], r"^item 1 .* is 'x{196}\.\.\.; FeedHook expected"),
        ({"k": "a"}, [{"k": 1}, {"c": 1}], r"^item 1 .*mapping with the keys \['c'\]; .*\['k'\]"),
        ({"k": "a"}, [{"k": 1}, 5], r"^item 1 .* is 5; .* expected a mapping with the keys"),
    ],
)
async def test_an_item_of_another_structure_is_named_and_so_is_what_was_expected(
    names: Any, items: list[Any], message: str
) -> None:
    model = Pairs()
    with pytest.raises(InputStructureError, match=message) as caught:
        async with MonitoredSession([FeedHook(items, names)], model.creator) as session:
            await until_stopped(session)
    assert len(model.given) == 1
    assert any("before_run of FeedHook" in note for note in caught.value.__notes__)


async def test_the_end_of_the_source_ends_training_cleanly() -> None:
    log: list[tuple[str, str]] = []
    hooks = [RecordingHook("first", log), FeedHook([1, 2], "x"), RecordingHook("last", log)]
    diary = Diary()
    async with MonitoredSession(hooks, diary.creator) as session:
        await session.run("x")
        await session.run("x")
        assert not session.should_stop()
        with pytest.raises(StopTraining, match="the input a list of 2 has ended"):
            await session.run("x")
        await session.run("x")
    assert session.should_stop()
    assert "has ended" in str(session.stop_reason)
    assert diary.items == [1, 2]
    ends = [each for each in log if each[1] in ("end", "on_error")]
    assert ends == [("first", "end"), ("last", "end")]


@pytest.mark.parametrize("is_async", [True, False])
async def test_errors_of_the_source_leave_as_themselves(is_async: bool) -> None:
    failure = ZeroDivisionError("in the source")

    def plainly() -> Iterator[int]:
        yield 1
        raise failure

    async def in_a_coroutine() -> AsyncIterator[int]:
        yield 1
        raise failure

    recording, diary = RecordingHook("r"), Diary()
    hooks = [FeedHook(in_a_coroutine() if is_async else plainly(), "x"), recording]
    with pytest.raises(ZeroDivisionError) as caught:
        async with MonitoredSession(hooks, diary.creator) as session:
            await until_stopped(session)
    assert caught.value is failure
    assert diary.items == [1]
    assert recording.errors == [failure]
    assert ("r", "end") not in recording.log
    assert not threads_left()


@pytest.mark.parametrize("make", [list, lambda: iter(()), lambda: prefetch([], 2)])
async def test_an_empty_source_is_an_error(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match="has no items: there is nothing to train with"):
        async with MonitoredSession([FeedHook(make(), "x")], Diary().creator) as session:
            await session.run("x")


async def test_a_hook_that_is_listed_twice_is_refused() -> None:
    hook = FeedHook([1, 2], "x")
    with pytest.raises(RuntimeError, match="in use already; give each session one of its own"):
        async with MonitoredSession([hook, hook], Diary().creator):
            pass


async def test_a_hook_in_a_second_session_is_refused_and_the_first_goes_on() -> None:
    hook, diary = FeedHook([1, 2, 3], "x"), Diary()
    async with MonitoredSession([hook], diary.creator) as session:
        await session.run("x")
        with pytest.raises(RuntimeError, match="in use already; give each session one of its own"):
            async with MonitoredSession([hook], Diary().creator):
                pass
        await session.run("x")
    assert diary.items == [1, 2]


async def test_the_source_is_opened_by_the_first_run_and_closed_at_the_end() -> None:
    log: list[str] = []

    async def source() -> AsyncIterator[int]:
        log.append("open")
        try:
            for number in range(9):
                yield number
        finally:
            log.append("closed")

    hooks = [RecordingHook("r"), FeedHook(source(), "x")]
    async with MonitoredSession(hooks, Diary().creator) as session:
        assert log == []
        await session.run("x")
        assert log == ["open"]
    assert log == ["open", "closed"]


async def test_a_source_that_fails_to_close_has_its_error_leave_or_noted() -> None:
    async def source() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        async with MonitoredSession([FeedHook(source(), "x")], Diary().creator) as session:
            await session.run("x")
    with pytest.raises(KeyError) as caught:
        async with MonitoredSession([FeedHook(source(), "x")], Diary().creator) as session:
            await session.run("x")
            raise KeyError("first")
    assert "then, closing the input: OSError('cannot close')" in caught.value.__notes__


@pytest.mark.parametrize("how", ["request_stop", "cancel"])
async def test_a_stop_ends_the_wait_for_data_at_once(how: str) -> None:
    never, diary, scope = anyio.Event(), Diary(), anyio.CancelScope()
    source = batch(gated(range(9), {2: never}), 1)

    async def train() -> None:
        with scope:
            async with session:
                await until_stopped(session)

    session = MonitoredSession([FeedHook(source, "x")], diary.creator, step_runner="inline")
    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await settle()
            assert diary.items == [0, 1]
            scope.cancel() if how == "cancel" else session.request_stop()
    assert diary.items == [0, 1]


async def test_a_preemption_ends_the_wait_and_the_run_is_made_again_with_nothing_lost() -> None:
    gate, diary, hold = anyio.Event(), Diary(), Gate()
    coords: list[Any] = []

    class Keeps(Gate):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coords.append(coord)

    hooks = [FeedHook(gated(range(4), {2: gate}), "x"), Keeps(), hold]
    session = MonitoredSession(hooks, diary.creator, step_runner="inline")

    async def train() -> None:
        async with session:
            await until_stopped(session)

    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await settle()
            coords[0].request_stop(PreemptionError("the machine goes away"))
            await settle()
            assert hold.num_created == 2, "before the item came"
            assert not session.should_stop()
            gate.set()
    assert diary.items == [0, 1, 2, 3]


@pytest.mark.parametrize("feeds", [True, False], ids=["feed", "loop"])
async def test_an_item_whose_step_outlives_a_cancelled_run_in_a_thread_is_used(
    feeds: bool,
) -> None:
    diary, source, scope = Diary(), prefetch(range(4), 2), anyio.CancelScope()
    token = anyio.lowlevel.current_token()

    def step(x: Any) -> dict[str, Any]:
        if x == 1:
            anyio.from_thread.run_sync(scope.cancel, token=token)
        return diary.step(x)

    hooks = [FeedHook(source, "x")] if feeds else []
    creator = FunctionSessionCreator(step)
    async with MonitoredSession(hooks, creator, step_runner="thread") as session:
        if feeds:
            await session.run("x")
            with scope:
                await session.run("x")
            assert scope.cancelled_caught
            assert diary.items == [0, 1]
            await until_stopped(session)
        else:
            async for item in session.batches(source):
                with scope if item == 1 else contextlib.nullcontext():
                    await session.run("x", {"x": item})
    assert diary.items == [0, 1, 2, 3]
    assert session.global_step.value == 4
