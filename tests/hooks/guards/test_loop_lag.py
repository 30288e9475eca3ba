"""LoopLagHook: who held the event loop, for how long, on asyncio, uvloop and trio."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    LoopLag,
    LoopLagHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
)
from asynchooks._engine.base import Engine

from ...support.helpers import counting_creator
from ..virtual_time import guard_threads, on_trampoline

MAX_LAG_SECS = 0.03
HELD_SECS = 0.12


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    if request.param == "trio":
        return "trio", {}
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


def compute(secs: float = HELD_SECS) -> dict[str, int]:
    """Holds the event loop, which is what is under test."""
    time.sleep(secs)
    return {}


HERE = f"{Path(__file__).name}:{compute.__code__.co_firstlineno + 2} in compute"


class Slow(SessionRunHook):
    """Holds the event loop in one moment."""

    def __init__(self, moment: str, secs: float = HELD_SECS) -> None:
        self.moment = moment
        self.secs = secs

    def hold(self, moment: str) -> None:
        if moment == self.moment:
            compute(self.secs)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.hold("after_create_session")

    async def before_run(self, run_context: Any) -> None:
        self.hold("before_run")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.hold("after_run")

    async def end(self, session: Any) -> None:
        self.hold("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.hold("on_error")


def the_lag(watchdog: LoopLagHook) -> LoopLag:
    """The longest lag, as a busy machine brings others; checks its length as far as it is known."""
    lag = max(watchdog.lags, key=lambda each: each.secs)
    assert lag.secs > HELD_SECS - MAX_LAG_SECS / 2 - 0.01  # a thread's pause is not exact
    return lag


@pytest.mark.parametrize("moment", ["after_create_session", "before_run", "after_run", "end"])
async def test_a_hook_that_holds_the_loop_is_named(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    hooks = [watchdog, Slow("nothing"), Slow(moment)]
    async with MonitoredSession(hooks, counting_creator(), step_runner="inline") as session:
        await session.run([])
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == (f"{moment} of Slow", HERE)
    messages = [(each.levelname, each.getMessage()) for each in caplog.records]
    expected = f"the event loop was held for {lag.secs:.2f} s by {moment} of Slow ({HERE})"
    assert messages.count(("WARNING", expected)) == 1


async def test_a_step_that_runs_inline_is_named_even_the_very_first() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    creator = FunctionSessionCreator(compute)
    async with MonitoredSession([watchdog], creator, step_runner="inline") as session:
        await session.run([], {"secs": HELD_SECS})
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == ("the step", HERE)


async def test_a_step_in_a_thread_holds_nothing() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS * 2)
    creator = FunctionSessionCreator(compute)
    async with MonitoredSession([watchdog], creator, step_runner="thread") as session:
        await session.run([], {"secs": HELD_SECS})
    assert [lag for lag in watchdog.lags if lag.where == HERE] == []


async def test_a_step_fn_is_named() -> None:
    async def step_fn(step_context: StepContext) -> None:
        compute()

    watchdog = LoopLagHook(MAX_LAG_SECS)
    async with MonitoredSession([watchdog], counting_creator()) as session:
        await session.run_step_fn(step_fn)
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == ("the step_fn", HERE)


async def test_the_body_is_code_outside_of_a_run() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    async with MonitoredSession([watchdog], counting_creator()) as session:
        await session.run([])
        compute()
        await anyio.lowlevel.checkpoint()
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == ("code outside of a run", HERE)


async def test_a_side_task_is_named() -> None:
    is_over = anyio.Event()

    async def busy() -> None:
        compute()
        is_over.set()

    watchdog = LoopLagHook(MAX_LAG_SECS)
    async with MonitoredSession([watchdog], counting_creator()) as session:
        session.start_soon(busy, name="busy")
        await is_over.wait()
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == ("the side task 'busy'", HERE)


class SlowHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        compute()


async def test_what_the_session_itself_does_is_no_hook_s_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watchdog, handler = LoopLagHook(MAX_LAG_SECS), SlowHandler()
    async with MonitoredSession([watchdog, Slow("nothing")], counting_creator()) as session:
        await session.run([])
        with caplog.at_level(logging.INFO, "asynchooks"):
            logging.getLogger("asynchooks").addHandler(handler)
            try:
                session.request_stop("enough")
            finally:
                logging.getLogger("asynchooks").removeHandler(handler)
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == ("the session", HERE)


class Brief(Slow):
    """Holds it not as long as the other one."""


@pytest.mark.parametrize("is_first", [True, False])
async def test_what_held_it_for_the_largest_part_is_named(is_first: bool) -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    slow = [Slow("after_run"), Brief("after_run", 1.5 * MAX_LAG_SECS)]
    hooks = [watchdog, *(slow if is_first else slow[::-1])]
    async with MonitoredSession(hooks, counting_creator(), step_runner="inline") as session:
        await session.run([])
    assert the_lag(watchdog).culprit == "after_run of Slow"


async def test_one_hook_sees_what_other_sessions_do() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([watchdog], creator):
        async with MonitoredSession([Slow("after_run")], creator, step_runner="inline") as other:
            await other.run([])
    assert the_lag(watchdog).culprit == "after_run of Slow"


async def test_on_error_of_a_hook_is_named() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    with pytest.raises(ValueError, match="in the block"):
        async with MonitoredSession([watchdog, Slow("on_error")], counting_creator()):
            raise ValueError("in the block")
    assert the_lag(watchdog).culprit == "on_error of Slow"


async def test_on_an_error_the_lag_until_then_is_noted() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    with pytest.raises(ValueError, match="in the block"):
        async with MonitoredSession([watchdog], counting_creator()):
            compute()
            raise ValueError("in the block")
    assert the_lag(watchdog).culprit == "code outside of a run"


class Abort(BaseException):
    """Cancels side tasks at once, even those that have not run yet."""


async def test_a_lag_is_noted_even_if_no_other_task_has_run_since_the_creation() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    with pytest.raises(Abort):
        async with MonitoredSession([watchdog], counting_creator()):
            compute()
            raise Abort
    assert the_lag(watchdog).culprit == "code outside of a run"


async def test_lags_are_the_latest_hundred_since_begin() -> None:
    watchdog = LoopLagHook(0.0001)
    watchdog.lags.append(LoopLag(1.0, "an earlier session", ""))
    async with MonitoredSession([watchdog], counting_creator()):
        assert list(watchdog.lags) == []
        for _ in range(120):
            compute(0.0005)
            await anyio.sleep(0.0005)
    assert watchdog.lags.maxlen == 100


def test_in_virtual_time_it_does_nothing() -> None:
    async def main(engine: Engine) -> None:
        watchdog = LoopLagHook(0.001)
        async with MonitoredSession([watchdog], counting_creator()) as session:
            assert guard_threads() == []
            compute(0.01)
            await session.run([])
        assert list(watchdog.lags) == []

    on_trampoline(main)


def test_a_lag_reads_as_a_sentence() -> None:
    assert str(LoopLag(0.349, "the step", "a.py:3 in f")) == "0.35 s by the step (a.py:3 in f)"
    unseen = "code that let no other thread run"
    assert str(LoopLag(2.0, unseen, "")) == f"2.00 s by {unseen}"
