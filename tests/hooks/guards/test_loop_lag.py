"""LoopLagHook: which code held the event loop, for how long, on asyncio, uvloop and trio."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    FunctionSessionCreator,
    LoopLag,
    LoopLagHook,
    MonitoredSession,
    SharedSessionCreator,
    StepContext,
)
from asynchooks._engine.base import Engine
from asynchooks.hooks.guards import _loop_lag
from asynchooks.hooks.guards._loop_lag import LOOP_ITSELF, holder_of

from ...support.helpers import counting_creator
from ..preemptions import At
from ..virtual_time import guard_threads, in_virtual_time

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


watches: list[_loop_lag._Watch] = []
"""Those of the test that is running."""


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


class Slow(At):
    """Holds the event loop in one moment."""

    def __init__(self, moment: str, secs: float = HELD_SECS) -> None:
        def hold() -> None:
            compute(secs)

        super().__init__(**{moment: hold})


def the_lag(watchdog: LoopLagHook) -> LoopLag:
    """The longest lag, as a busy machine brings others."""
    lag = max(watchdog.lags, key=lambda each: each.secs)
    assert lag.secs >= HELD_SECS
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


async def run_the_very_first_step(session: MonitoredSession) -> None:
    await session.run([], {"secs": HELD_SECS})


async def run_a_step_fn(session: MonitoredSession) -> None:
    async def step_fn(step_context: StepContext) -> None:
        compute()

    await session.run_step_fn(step_fn)


async def compute_in_the_body(session: MonitoredSession) -> None:
    await session.run([], {"secs": 0.0})
    compute()
    await anyio.lowlevel.checkpoint()


async def compute_in_a_side_task(session: MonitoredSession) -> None:
    is_over = anyio.Event()

    async def busy() -> None:
        compute()
        is_over.set()

    session.start_soon(busy, name="busy")
    await is_over.wait()


@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        (run_the_very_first_step, "the step"),
        (run_a_step_fn, "the step_fn"),
        (compute_in_the_body, "code outside of a run"),
        (compute_in_a_side_task, "the side task 'busy'"),
    ],
)
async def test_other_code_that_holds_the_loop_is_named(
    body: Callable[[MonitoredSession], Awaitable[None]], culprit: str
) -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS)
    creator = FunctionSessionCreator(compute)
    async with MonitoredSession([watchdog], creator, step_runner="inline") as session:
        await body(session)
    lag = the_lag(watchdog)
    assert (lag.culprit, lag.where) == (culprit, HERE)


async def test_a_step_in_a_thread_holds_nothing() -> None:
    watchdog = LoopLagHook(MAX_LAG_SECS * 2)
    creator = FunctionSessionCreator(compute)
    async with MonitoredSession([watchdog], creator, step_runner="thread") as session:
        await session.run([], {"secs": HELD_SECS, "from_ping": False})
    assert [lag for lag in watchdog.lags if lag.where == HERE] == []


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
    # on a busy machine the shorter one takes several times as long as it asks for
    slow = [Slow("after_run", 1.0), Brief("after_run", 1.5 * MAX_LAG_SECS)]
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


class Abort(BaseException):
    """Cancels side tasks at once, even those that have not run yet."""


@pytest.mark.parametrize("error", [ValueError, Abort])
async def test_on_an_error_the_lag_until_then_is_noted(error: type[BaseException]) -> None:
    """Even if no other task has run since the creation."""
    watchdog = LoopLagHook(MAX_LAG_SECS)
    with pytest.raises(error):
        async with MonitoredSession([watchdog], counting_creator()):
            compute()
            raise error
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


@in_virtual_time
async def test_in_virtual_time_it_does_nothing(engine: Engine) -> None:
    watchdog = LoopLagHook(0.001)
    async with MonitoredSession([watchdog], counting_creator()) as session:
        assert guard_threads() == []
        compute(0.01)
        await session.run([])
    assert list(watchdog.lags) == []


def test_a_lag_reads_as_a_sentence() -> None:
    assert str(LoopLag(0.349, "the step", "a.py:3 in f")) == "0.35 s by the step (a.py:3 in f)"
    unseen = "code that let no other thread run"
    assert str(LoopLag(2.0, unseen, "")) == f"2.00 s by {unseen}"


async def test_a_loop_that_waits_is_held_by_no_code() -> None:
    loop_thread = threading.get_ident()

    def last_holder() -> str:
        until = time.monotonic() + 10
        holder = ""
        while holder != LOOP_ITSELF and time.monotonic() < until:
            time.sleep(0.001)  # the loop may still be at starting this thread
            holder, _ = holder_of(sys._current_frames()[loop_thread])
        return holder

    assert await anyio.to_thread.run_sync(last_holder) == LOOP_ITSELF


def test_a_thread_that_has_ended_holds_nothing() -> None:
    assert holder_of(None) == (LOOP_ITSELF, "")
