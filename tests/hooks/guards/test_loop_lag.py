"""LoopLagHook: which code held the event loop, and for how long."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    LoopLag,
    LoopLagHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
)
from asynchooks.hooks.guards import _loop_lag

from ..training import run_session
from ..virtual_time import guard_threads, in_virtual_time

MAX_LAG_SECS = 0.03
HELD_SECS = 0.12


watches: list[_loop_lag._Watch] = []
"""Those of the test that is running; private, as only they know since when the loop is watched."""


@pytest.fixture(autouse=True)
def _watches_are_noted_and_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Noted(_loop_lag._Watch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watches.append(self)

    monkeypatch.setattr(_loop_lag, "_Watch", Noted)
    yield
    watches.clear()
    assert guard_threads() == []


def compute(secs: float = HELD_SECS, from_ping: bool = True) -> dict[str, int]:
    """Holds the event loop, which is what is under test; counts from a ping on."""
    until = time.monotonic() + 5
    while from_ping and watches and watches[-1].ping is None and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(secs)
    return {}


HERE = f"{Path(__file__).name}:{compute.__code__.co_firstlineno + 5} in compute"


def slow(moment: str, secs: float = HELD_SECS, name: str = "Slow") -> SessionRunHook:
    """A hook, of a class with this name, that holds the event loop in one moment."""

    async def hold(*_: object) -> None:
        compute(secs)

    hook: SessionRunHook = type(name, (SessionRunHook,), {moment: hold})()
    return hook


def the_lag(watchdog: LoopLagHook) -> LoopLag:
    """The longest lag by what computes, as a busy machine brings others."""
    lag = max((each for each in watchdog.lags if each.where == HERE), key=lambda each: each.secs)
    assert lag.secs >= HELD_SECS
    return lag


async def run_once(session: MonitoredSession) -> None:
    await session.run([])


async def run_a_step_fn(session: MonitoredSession) -> None:
    async def step_fn(step_context: StepContext) -> None:
        compute()

    await session.run_step_fn(step_fn)


async def compute_in_the_body(session: MonitoredSession) -> None:
    await session.run([])
    compute()
    await anyio.lowlevel.checkpoint()


async def compute_in_a_side_task(session: MonitoredSession) -> None:
    is_over = anyio.Event()

    async def busy() -> None:
        compute()
        is_over.set()

    session.start_soon(busy, name="busy")
    await is_over.wait()


class Abort(BaseException):
    """Cancels side tasks at once, even those that have not run yet."""


async def abort(session: MonitoredSession) -> None:
    raise Abort


async def compute_and_abort(session: MonitoredSession) -> None:
    compute()
    raise Abort


class SlowHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        compute()


async def log_slowly(session: MonitoredSession) -> None:
    logger, handler = logging.getLogger("asynchooks"), SlowHandler()
    logger.addHandler(handler)
    try:
        session.request_stop("enough")
    finally:
        logger.removeHandler(handler)


BODIES: dict[str, tuple[Callable[[MonitoredSession], Awaitable[None]], str]] = {
    "after_create_session": (run_once, "after_create_session of Slow"),
    "before_run": (run_once, "before_run of Slow"),
    "after_run": (run_once, "after_run of Slow"),
    "end": (run_once, "end of Slow"),
    "on_error": (abort, "on_error of Slow"),
    "the very first step": (run_once, "the step"),
    "step_fn": (run_a_step_fn, "the step_fn"),
    "body, then an error": (compute_and_abort, "code outside of a run"),
    "body": (compute_in_the_body, "code outside of a run"),
    "side task": (compute_in_a_side_task, "the side task 'busy'"),
    "log": (log_slowly, "the session"),
}


@pytest.mark.parametrize("place", BODIES)
async def test_the_code_that_holds_the_loop_is_named(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    watchdog, (body, culprit) = LoopLagHook(MAX_LAG_SECS), BODIES[place]
    hooks, step = list[SessionRunHook]([watchdog]), compute if "step" in culprit else dict
    if culprit.endswith("of Slow"):
        hooks.append(slow(place))
    with suppress(Abort):
        async with MonitoredSession(hooks, step, step_runner="inline") as session:
            await body(session)
    lag = the_lag(watchdog)
    assert lag.culprit == culprit
    assert f"the event loop was held for {lag.secs:.2f} s by {culprit} ({HERE})" in caplog.messages


async def test_a_step_in_a_thread_holds_nothing() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS * 2)
    async with MonitoredSession([watchdog], compute, step_runner="thread") as session:
        await session.run([], {"from_ping": False})
    assert [lag for lag in watchdog.lags if lag.where == HERE] == []


async def test_what_held_it_for_the_largest_part_is_named() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    # on a busy machine the shorter ones take several times as long as they ask for
    brief = [slow("after_run", 1.5 * MAX_LAG_SECS, name) for name in ("Brief", "Later")]
    hooks = [watchdog, brief[0], slow("after_run", 0.5), brief[1]]
    await run_session(hooks, dict, runs=1, step_runner="inline")
    assert the_lag(watchdog).culprit == "after_run of Slow"


async def test_one_hook_sees_what_other_sessions_do() -> None:
    watchdog, creator = LoopLagHook(MAX_LAG_SECS), SharedSessionCreator(dict)
    async with MonitoredSession([watchdog], creator):
        await run_session([slow("after_run")], creator, runs=1, step_runner="inline")
    assert the_lag(watchdog).culprit == "after_run of Slow"


@in_virtual_time
async def test_a_session_forgets_earlier_lags_and_in_virtual_time_it_has_none() -> None:
    watchdog = LoopLagHook(0.001)
    watchdog.lags.append(LoopLag(1.0, "an earlier session", ""))
    async with MonitoredSession([watchdog], dict) as session:
        assert guard_threads() == []
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass
        await session.run([])
    assert list(watchdog.lags) == []
    assert watchdog.lags.maxlen == 100
