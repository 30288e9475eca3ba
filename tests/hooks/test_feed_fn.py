"""FeedFnHook on step functions: sync and async feeds, their errors, and the end of input."""

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks import FeedFnHook, MonitoredSession, SessionRunHook, StopTraining
from asynchooks.testing import RecordingHook

from ..support.moments import at

runners = pytest.mark.parametrize("step_runner", ["inline", "thread"])


def session_on(
    fed: list[Any], *feed_fns: Any, hooks: tuple[SessionRunHook, ...] = (), **options: Any
) -> MonitoredSession:
    """A session whose step writes down what it is fed."""

    def step(rate: Any = None, scale: Any = None) -> dict[str, Any]:
        fed.append((rate, scale))
        return {"rate": rate}

    return MonitoredSession([*map(FeedFnHook, feed_fns), *hooks], step, **options)


class Feeder:
    """Counts up, the n-th feed is n; it knows how far it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, int]:
        self.count += 1
        return {"rate": self.count}

    async def suspends(self) -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return self()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


FORMS: dict[str, Callable[[Feeder], Any]] = {
    "sync": lambda feeder: feeder.__call__,
    "async": lambda feeder: feeder.suspends,
    "a lambda of a coroutine": lambda feeder: lambda: feeder.suspends(),
    "an object": lambda feeder: feeder,
}


@runners
@pytest.mark.parametrize("form", FORMS)
async def test_each_run_is_fed_what_one_call_returns(form: str, step_runner: Any) -> None:
    fed, feeder = list[Any](), Feeder()
    async with session_on(fed, FORMS[form](feeder), step_runner=step_runner) as session:
        for run in (1, 2, 3):
            assert feeder.count == run - 1
            assert await session.run("rate") == run
    assert fed == [(1, None), (2, None), (3, None)]


async def test_a_sync_one_runs_where_blocking_steps_run_and_an_async_one_on_the_loop() -> None:
    threads: list[int] = []

    def sync() -> None:
        threads.append(threading.get_ident())

    async def suspends() -> None:
        sync()

    async with session_on([], sync, suspends, step_runner="thread") as session:
        await session.run([])
    assert [each == threading.get_ident() for each in threads] == [False, True]


TWO = [{"rate": 1}, {"rate": 2}]


async def in_turn() -> AsyncIterator[Any]:
    for each in TWO:
        yield each


@runners
@pytest.mark.parametrize("make", [lambda: iter(TWO).__next__, lambda: in_turn().__anext__])
async def test_the_end_of_input_ends_training_cleanly(make: Any, step_runner: Any) -> None:
    fed, other = list[Any](), RecordingHook("other")
    async with session_on(fed, make(), hooks=(other,), step_runner=step_runner) as session:
        for _ in TWO:
            await session.run([])
        with pytest.raises(StopTraining, match="the input ended in before_run of FeedFnHook"):
            await session.run([])
        await session.run([])
        raise AssertionError("it ran on")
    assert fed == [(1, None), (2, None)], "the run without a feed runs no step"
    moments = [moment for _, moment in other.log]
    assert moments[-5:] == ["before_run", "after_run", "before_run", "after_run", "end"]


async def test_what_was_fed_to_a_run_that_never_took_place_is_behind_the_saved_position() -> None:
    hook, fed = FeedFnHook(Feeder()), list[Any]()
    refusals: list[Exception] = []

    def refuse(run_context: Any) -> None:
        if refusals:
            raise refusals.pop()

    assert hook.state_dict() == {"count": 0}
    async with session_on(fed, hooks=(hook, at(before_run=refuse))) as session:
        await session.run([])
        refusals += [ZeroDivisionError(), ZeroDivisionError()]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await session.run([])
            assert hook.state_dict() == {"count": 1}
        await session.run([])
        assert (fed, hook.state_dict()) == ([(1, None), (4, None)], {"count": 4})
    hook.load_state_dict({"count": 7})
    assert hook.state_dict() == {"count": 7}
