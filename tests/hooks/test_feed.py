"""FeedHook on step functions: where items are fed, the end of the source, errors, workers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
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
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import Stage, batch, map_concurrent, prefetch
from asynchooks.testing import RecordingHook

from ..support.faults import FaultError
from ..support.helpers import settle
from ..support.threads import threads_left
from .inputs import SHORT_SECS, Counted, Diary, gated, until_stopped
from .training import Calls, Holds, run_and_close, run_session, tasks

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
    await run_session([FeedHook(items, names)], model.creator)
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
        await run_session([FeedHook(items, names)], model.creator)
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
        yield 0
        raise failure

    recording, diary = RecordingHook("r"), Diary()
    source = Counted(1, failure) if is_async else plainly()
    with pytest.raises(ZeroDivisionError) as caught:
        await run_session([FeedHook(source, "x"), recording], diary.creator)
    assert caught.value is failure
    assert diary.items == [0]
    assert recording.errors == [failure]
    assert ("r", "end") not in recording.log
    assert not threads_left()


@pytest.mark.parametrize("make", [list, lambda: iter(()), lambda: prefetch([], 2)])
async def test_an_empty_source_is_an_error(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match="has no items: there is nothing to train with"):
        await run_session([FeedHook(make(), "x")], Diary().creator, runs=1, fetches="x")


async def test_a_hook_that_is_listed_twice_is_refused() -> None:
    hook = FeedHook([1, 2], "x")
    with pytest.raises(RuntimeError, match="in use already; give each session one of its own"):
        async with MonitoredSession([hook, hook], Diary().creator):
            pass


async def test_the_source_is_opened_by_the_first_run_and_closed_at_the_end() -> None:
    source = Counted()
    hooks = [RecordingHook("r"), FeedHook(source, "x")]
    async with MonitoredSession(hooks, Diary().creator) as session:
        assert source.log == []
        await session.run("x")
        assert source.log == ["open"]
    assert source.log == ["open", "closed"]


async def test_a_source_that_fails_to_close_has_its_error_leave_or_noted() -> None:
    async def source() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        await run_session([FeedHook(source(), "x")], Diary().creator, runs=1, fetches="x")
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
            await run_and_close(session)

    session = MonitoredSession([FeedHook(source, "x")], diary.creator, step_runner="inline")
    async with tasks() as group:
        group.start_soon(train)
        await settle()
        assert diary.items == [0, 1]
        scope.cancel() if how == "cancel" else session.request_stop()
    assert diary.items == [0, 1]


async def test_a_preemption_ends_the_wait_and_the_run_is_made_again_with_nothing_lost() -> None:
    gate, diary = anyio.Event(), Diary()
    coords: list[Any] = []
    keeps = Calls(after_create_session=lambda session, coord: coords.append(coord))
    hooks = [FeedHook(gated(range(4), {2: gate}), "x"), keeps]
    session = MonitoredSession(hooks, diary.creator, step_runner="inline")
    async with tasks() as group:
        group.start_soon(run_and_close, session)
        await settle()
        coords[0].request_stop(PreemptionError("the machine goes away"))
        await settle()
        assert len(coords) == 2, "before the item came"
        assert not session.should_stop()
        gate.set()
    assert diary.items == [0, 1, 2, 3]


@pytest.mark.parametrize("feeds", [True, False], ids=["feed", "loop"])
async def test_an_item_whose_step_outlives_its_cancelled_run_is_used(feeds: bool) -> None:
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


async def test_an_item_of_a_run_that_failed_is_fed_to_the_next() -> None:
    diary = Diary({2: FaultError(), 3: FaultError(), 5: FaultError()})
    async with MonitoredSession([FeedHook(range(4), "x")], diary.creator) as session:
        while not session.should_stop():
            with contextlib.suppress(FaultError):
                await session.run([])
    assert diary.items == [0, 1, 2, 3]
    assert diary.num_calls == 7


async def test_an_error_of_the_source_that_all_workers_meet_is_noted_once() -> None:
    error = FaultError()
    source = prefetch(Counted(1, error), 1)
    async with contextlib.AsyncExitStack() as stack:
        workers = [MonitoredSession([FeedHook(source, "x")], Diary().creator) for _ in range(3)]
        for worker in workers:
            await stack.enter_async_context(worker)
        await workers[0].run([])
        for worker in workers:
            with pytest.raises(FaultError):
                await worker.run([])
    assert error.__notes__ == [
        f"in {source._sources[0]!r}, after 1 items",
        "in before_run of FeedHook",
    ]


async def test_an_item_is_used_by_a_run_that_fails_behind_its_step_before_after_run() -> None:
    def fail(run_context: Any, run_values: Any) -> None:
        if len(diary.items) == 2:
            raise FaultError

    diary = Diary()
    hooks = [Calls(after_run=fail), FeedHook(range(3), "x")]
    async with MonitoredSession(hooks, diary.creator) as session:
        await session.run([])
        with pytest.raises(FaultError):
            await session.run([])
        await until_stopped(session)
        assert session.global_step.value == 3
    assert diary.items == [0, 1, 2]


async def test_a_lost_session_is_fed_the_same_item_again() -> None:
    diary = Diary({2: PreemptionError("lost"), 3: PreemptionError("lost"), 6: PreemptionError()})
    recording = RecordingHook("r")
    with anyio.fail_after(SHORT_SECS):
        await run_session([recording, FeedHook(range(5), "x")], diary.creator)
    assert diary.items == [0, 1, 2, 3, 4]
    assert recording.log.count(("r", "after_create_session")) == 4


async def test_an_item_refused_at_the_limit_goes_to_another_worker_before_all_others() -> None:
    source, diary = prefetch(range(6), 2), Diary()
    creator, may_run = SharedSessionCreator(diary.creator), anyio.Event()
    hold = Holds("before_run", may_run)
    refused = MonitoredSession([FeedHook(source, "x"), hold], creator, step_runner="inline")

    limit, last = StopAtStepHook(last_step=2), StopAtStepHook(last_step=5)
    async with MonitoredSession([FeedHook(source, "x"), limit], creator) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_and_close, refused, runs=1))
            await settle()  # it has item 0 in hand
            await until_stopped(session)
            assert diary.items == [1, 2]
            may_run.set()
        assert diary.items == [1, 2], "it was refused"
        await run_session([FeedHook(source, "x"), last], creator)
    assert diary.items == [1, 2, 0, 3, 4]


async def test_an_unused_item_goes_to_another_worker_before_all_hooks_have_ended() -> None:
    source, diary, may_end = prefetch(range(3), 1), Diary({1: FaultError()}), anyio.Event()
    creator, holds = SharedSessionCreator(diary.creator), Holds("end", may_end)

    async def fail_and_end() -> None:
        async with MonitoredSession([FeedHook(source, "x"), holds], creator) as session:
            with pytest.raises(FaultError):
                await session.run([])

    async with MonitoredSession([FeedHook(source, "x")], creator) as other:
        async with tasks() as group:
            group.start_soon(fail_and_end)
            await holds.has_come.wait()
            for _ in range(3):
                await other.run([])
            may_end.set()
    assert diary.items == [0, 1, 2]


async def test_the_limit_reached_by_another_worker_ends_a_wait_for_data() -> None:
    never, diary, left = anyio.Event(), Diary(), anyio.Event()
    source = prefetch(gated(range(9), {1: never}), 1)
    creator = SharedSessionCreator(diary.creator)
    waits = MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline")

    async def train() -> None:
        async with waits:
            await until_stopped(waits)
        left.set()

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await settle()
        assert diary.items == [0]
        limit = StopAtStepHook(last_step=2)
        async with MonitoredSession([limit], creator, step_runner="inline") as session:
            await session.run([], {"x": 7})
            await settle()
            assert waits.should_stop()
            is_in_time = left.is_set()
        waits.request_stop()
    assert diary.items == [0, 7]
    assert is_in_time


@pytest.mark.parametrize("num_workers", [1, 8, 64])
@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_nothing_is_lost_and_nothing_used_twice(num_workers: int, runner: Any) -> None:
    diary = Diary()
    source, creator = prefetch(range(300), 5), SharedSessionCreator(diary.creator)

    async with tasks() as group:
        for _ in range(num_workers):
            hooks = [FeedHook(source, "x")]
            worker = MonitoredSession(hooks, creator, step_runner=runner)
            group.start_soon(partial(run_and_close, worker, takes_turns=True))
    assert sorted(diary.items) == list(range(300))


class Chaos:
    """A step that fails, is lost, or takes its time, as a seed says; and what was used."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.used: list[int] = []
        self.source: Stage[Any] = prefetch(range(150), self.random.randrange(1, 9))

    async def step(self, x: int) -> dict[str, int]:
        for _ in range(self.random.randrange(3)):
            await anyio.lowlevel.checkpoint()
        fate = self.random.random()
        if fate < 0.1:
            raise FaultError
        if fate < 0.13:
            raise PreemptionError("lost")
        self.used.append(x)
        return {}


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_under_random_failures_losses_and_cancellations(seed: int) -> None:
    chaos = Chaos(seed)
    creator = SharedSessionCreator(FunctionSessionCreator(chaos.step))
    recovery = Recovery(first_pause_secs=0.0)
    scopes: dict[int, anyio.CancelScope] = {}

    async def worker(place: int) -> None:
        while place == 0 or chaos.random.random() < 0.9:  # the first one comes back till the end
            scopes[place] = anyio.CancelScope()
            with scopes[place]:
                hooks = [FeedHook(chaos.source, "x")]
                async with MonitoredSession(hooks, creator, recovery=recovery) as session:
                    while not session.should_stop():
                        with contextlib.suppress(FaultError):
                            await session.run([])
                        await anyio.lowlevel.checkpoint()
                return
            await anyio.lowlevel.checkpoint()

    async def cancel_now_and_then() -> None:
        while len(chaos.used) < 120:
            for _ in range(chaos.random.randrange(5, 40)):
                await anyio.lowlevel.checkpoint()
            scopes[chaos.random.choice(sorted(scopes))].cancel()

    with anyio.fail_after(SHORT_SECS):
        # it keeps the source open, and uses what a worker had in hand that ended last
        async with MonitoredSession([FeedHook(chaos.source, "x")], creator) as session:
            async with anyio.create_task_group() as group:
                for place in range(8):
                    group.start_soon(worker, place)
                group.start_soon(cancel_now_and_then)
            while not session.should_stop():
                with contextlib.suppress(FaultError):
                    await session.run([])
    assert sorted(chaos.used) == list(range(150))


@pytest.mark.parametrize("num_workers", [2, 64])
async def test_a_source_that_fails_hangs_no_worker(num_workers: int) -> None:
    gate, diary = anyio.Event(), Diary()

    async def fail_late(x: int) -> int:
        if x == 5:
            await gate.wait()
            raise FaultError
        return x

    source = prefetch(map_concurrent(fail_late, range(99), 1), 1)
    creator = SharedSessionCreator(diary.creator)
    left: list[BaseException] = []

    async def worker() -> None:
        try:
            await run_session([FeedHook(source, "x")], creator, step_runner="inline")
        except FaultError as error:
            left.append(error)

    async with tasks() as group:
        for _ in range(num_workers):
            group.start_soon(worker)
        await settle()
        gate.set()
    assert 1 <= len(left) <= num_workers
    assert sorted(diary.items) == [0, 1, 2, 3, 4]


async def test_an_empty_source_is_an_error_for_every_worker() -> None:
    source, creator = prefetch(list[int](), 1), SharedSessionCreator(Diary().creator)
    with pytest.raises(InputError, match="has no items"):
        async with MonitoredSession([FeedHook(source, "x")], creator) as a:
            async with MonitoredSession([FeedHook(source, "x")], creator) as b:
                with pytest.raises(InputError, match="has no items"):
                    await a.run([])
                await b.run([])
