"""FeedFnHook on step functions: sync and async feeds, their errors, and the end of input."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    FeedError,
    FeedFnHook,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
    StopTraining,
)
from asynchooks._running.hook_state import _decoded, _encoded, as_saved
from asynchooks.testing import RecordingHook

from .training import Calls

pytestmark = pytest.mark.anyio


def session_on(
    fed: list[Any], *feed_fns: Any, hooks: tuple[SessionRunHook, ...] = (), **options: Any
) -> MonitoredSession:
    """A session whose step writes down what it is fed."""

    def step(rate: Any = None, scale: Any = None) -> dict[str, Any]:
        fed.append((rate, scale))
        return {"rate": rate}

    all_hooks = [*(FeedFnHook(feed_fn) for feed_fn in feed_fns), *hooks]
    return MonitoredSession(all_hooks, FunctionSessionCreator(step), **options)


class Feeder:
    """Counts up: the n-th feed is n."""

    def __init__(self) -> None:
        self.count = 0

    def sync(self) -> dict[str, int]:
        self.count += 1
        return {"rate": self.count}

    async def suspends(self) -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return self.sync()

    def returns_a_coroutine(self) -> Any:
        return self.suspends()

    __call__ = sync


FORMS: dict[str, Callable[[Feeder], Any]] = {
    "sync": lambda feeder: feeder.sync,
    "async": lambda feeder: feeder.suspends,
    "a lambda of a coroutine": lambda feeder: feeder.returns_a_coroutine,
    "an object": lambda feeder: feeder,
    "a partial": lambda feeder: functools.partial(Feeder.suspends, feeder),
}


@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
@pytest.mark.parametrize("form", FORMS)
async def test_each_run_is_fed_what_one_call_returns(form: str, step_runner: Any) -> None:
    fed: list[Any] = []
    feeder = Feeder()
    async with session_on(fed, FORMS[form](feeder), step_runner=step_runner) as session:
        assert feeder.count == 0
        for run in (1, 2, 3):
            assert await session.run("rate") == run
    assert fed == [(1, None), (2, None), (3, None)]
    assert feeder.count == 3


async def test_a_sync_one_runs_where_blocking_steps_run_and_an_async_one_on_the_loop() -> None:
    threads: list[int] = []

    def sync() -> None:
        threads.append(threading.get_ident())

    async def suspends() -> None:
        threads.append(threading.get_ident())

    async with session_on([], sync, suspends, step_runner="thread") as session:
        await session.run([])
    assert threads[0] != threading.get_ident()
    assert threads[1] == threading.get_ident()


@pytest.mark.parametrize("nothing", [None, {}])
async def test_nothing_may_be_fed(nothing: Any) -> None:
    fed: list[Any] = []
    async with session_on(fed, lambda: nothing) as session:
        await session.run([], {"rate": 7})
    assert fed == [(7, None)]


async def test_feeds_of_hooks_and_caller_go_into_one_run() -> None:
    fed: list[Any] = []
    mine = {"scale": 2}
    async with session_on(fed, lambda: {"rate": 1}) as session:
        await session.run([], mine)
    assert fed == [(1, 2)]
    assert mine == {"scale": 2}, "the caller's mapping is not changed"


@pytest.mark.parametrize(
    ("feeds", "callers", "error", "message"),
    [
        ([{"rate": 1}], {"rate": 2}, RuntimeError, "is fed by a SessionRunHook and user"),
        ([{"rate": 1}, {"rate": 2}], None, RuntimeError, "Same tensor is fed by two hooks.*rate"),
        ([{"tempo": 1}], None, FeedError, r"unknown \['tempo'\]"),
        ([[("rate", 1)]], None, TypeError, "FeedFnHook.before_run returned the feed_dict"),
    ],
)
async def test_what_cannot_be_fed_is_an_error(
    feeds: list[Any], callers: Any, error: type[Exception], message: str
) -> None:
    fed: list[Any] = []
    feed_fns = [lambda each=each: each for each in feeds]
    async with session_on(fed, *feed_fns) as session:
        with pytest.raises(error, match=message):
            await session.run([], callers)
    assert fed == []


TWO = [{"rate": 1}, {"rate": 2}]


def ends_async() -> Callable[[], Any]:
    async def feeds() -> AsyncIterator[Any]:
        for each in TWO:
            yield each

    return feeds().__anext__


def ends_sync_in_async() -> Callable[[], Any]:
    feeds = iter(TWO)

    async def feed() -> Any:
        return next(feeds)

    return feed


def ends_by_stop_training() -> Callable[[], Any]:
    feeds = iter(TWO)

    async def feed() -> Any:
        for each in feeds:
            return each
        raise StopTraining("no more")

    return feed


@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
@pytest.mark.parametrize(
    "make",
    [lambda: iter(TWO).__next__, ends_async, ends_sync_in_async, ends_by_stop_training],
    ids=["sync", "async", "sync in async", "StopTraining"],
)
async def test_the_end_of_input_ends_training_cleanly(make: Any, step_runner: Any) -> None:
    fed: list[Any] = []
    other = RecordingHook("other")
    async with session_on(fed, make(), hooks=(other,), step_runner=step_runner) as session:
        for _ in TWO:
            await session.run([])
        ends_by_itself = make is ends_by_stop_training
        says = "no more" if ends_by_itself else "the input ended in before_run of FeedFnHook"
        with pytest.raises(StopTraining, match=says):
            await session.run([])
        await session.run([])
        raise AssertionError("it ran on")
    assert fed == [(1, None), (2, None)], "the run without a feed runs no step"
    moments = [moment for _, moment in other.log]
    assert moments == [
        "begin", "after_create_session", "before_run", "after_run", "before_run", "after_run", "end"
    ]  # fmt: skip


class Counting(Feeder):
    """Knows how far it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


async def test_what_was_fed_to_a_run_that_never_took_place_is_behind_the_saved_position() -> None:
    hook, fed = FeedFnHook(Counting()), list[Any]()
    refusals: list[Exception] = []

    def refuse(run_context: Any) -> None:
        if refusals:
            raise refusals.pop()

    assert hook.state_dict() == {"count": 0}
    async with session_on(fed, hooks=(hook, Calls(before_run=refuse))) as session:
        await session.run([])
        assert hook.state_dict() == {"count": 1}
        refusals += [ZeroDivisionError(), ZeroDivisionError()]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await session.run([])
        assert hook.state_dict() == {"count": 1}
        await session.run([])
        assert (fed, hook.state_dict()) == ([(1, None), (4, None)], {"count": 4})
    hook.load_state_dict({"count": 7})
    assert hook.state_dict() == {"count": 7}


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_error_leaves_with_the_name_of_the_hook(is_async: bool) -> None:
    def fails() -> None:
        raise ZeroDivisionError("no rate")

    async def fails_later() -> None:
        await anyio.lowlevel.checkpoint()
        fails()

    fed: list[Any] = []
    async with session_on(fed, fails_later if is_async else fails) as session:
        with pytest.raises(ZeroDivisionError, match="no rate") as caught:
            await session.run([])
        assert not session.should_stop()
    assert caught.value.__notes__ == ["in before_run of FeedFnHook"]
    assert fed == []


LONG = np.arange(5000)
STATES: list[Any] = [
    {"a": 1, "b": (2, [3.5, None])},
    {"a": 1, "b": (2, [3.5, True])},
    {"a": 2, "b": (2, [3.5, None])},
    {"a": {"1": "x"}},
    {"a": LONG},
    {"a": np.where(LONG == 2500, 0, LONG)},
    {"a": LONG.reshape(50, 100)},
    {"a": LONG.astype(np.float64)},
    {"a": np.int64(3)},
    {"a": "3"},
    {},
]


# of a private name: it takes a rollback to meet all of these by public ones
def test_a_state_as_saved_is_that_of_what_a_file_gives_back_and_of_no_other() -> None:
    again = [
        json.loads(json.dumps(each, default=_encoded, sort_keys=True), object_pairs_hook=_decoded)
        for each in STATES
    ]
    assert [as_saved(each) for each in again] == [as_saved(each) for each in STATES]
    assert len({as_saved(each) for each in STATES}) == len(STATES)
    assert as_saved({"b": 1, "a": 2}) == as_saved({"a": 2, "b": 1})
