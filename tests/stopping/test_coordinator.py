"""Coordinator: stops, the first error, threads, side tasks."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import Coordinator, GlobalStep, MonitoredSession
from asynchooks._engine.current import current_engine

from ..support.helpers import counting_creator, in_task, settle
from ..support.moments import at


def started(target: Any, name: str = "worker") -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


async def end(coord: Coordinator, grace_secs: float = 1000.0) -> None:
    """As a session ends it."""
    engine = current_engine()
    await coord.end(engine, engine.now() + grace_secs, cancel_tasks=False)


@pytest.mark.parametrize("error", [None, KeyError("end of input")])
def test_a_stop_needs_no_event_loop_and_no_error(error: Exception | None) -> None:
    coord = Coordinator(clean_stop_exception_types=(KeyError,))
    assert not coord.should_stop()
    coord.request_stop(error)
    assert coord.should_stop()
    assert coord.wait_for_stop(timeout=0)
    coord.join()
    assert coord.joined
    with pytest.raises(ValueError, match="too late"):  # at its reporter
        coord.request_stop(ValueError("too late"))
    coord.request_stop()


def test_the_first_error_wins_and_later_ones_are_its_notes_until_it_is_cleared() -> None:
    coord = Coordinator()
    coord.request_stop()  # an error after a clean stop is kept
    try:
        raise ValueError("first")
    except ValueError:
        coord.request_stop(sys.exc_info())  # type: ignore[arg-type]
    coord.request_stop(KeyError("second"))
    for call in (coord.join, coord.raise_requested_exception):
        with pytest.raises(ValueError, match="first") as caught:
            call()
        assert "KeyError('second')" in "".join(caught.value.__notes__)
    coord.clear_stop()
    assert not coord.should_stop()
    assert not coord.joined
    coord.request_stop()
    coord.join()


def test_something_that_is_no_exception_is_refused() -> None:
    with pytest.raises(TypeError, match=r"request_stop got 'stop!'; give an exception"):
        Coordinator().request_stop("stop!")  # type: ignore[arg-type]


def test_join_waits_for_threads_with_and_without_a_stop() -> None:
    coord, log = Coordinator(), list[str]()
    coord.join([started(lambda: log.append("ended"))])
    assert not coord.should_stop()
    coord = Coordinator()
    coord.register_thread(started(lambda: log.append(f"stopped: {coord.wait_for_stop()}")))
    coord.request_stop()
    coord.join()
    assert log == ["ended", "stopped: True"]


def test_threads_that_live_on_are_an_error_that_names_them_unless_ignored() -> None:
    release, coord = threading.Event(), Coordinator()
    coord.request_stop()
    thread = started(release.wait, name="stubborn")
    with pytest.raises(RuntimeError, match="threads still running: stubborn"):
        coord.join([thread], stop_grace_period_secs=0)
    coord.join([thread], stop_grace_period_secs=0, ignore_live_threads=True)
    release.set()


@pytest.mark.anyio
async def test_stop_on_exception_reports_errors_and_lets_interrupts_and_cancellation_through() -> (
    None
):
    coord = Coordinator()
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), coord.stop_on_exception():
            raise error
    with anyio.CancelScope() as scope, coord.stop_on_exception():
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert not coord.should_stop()
    with coord.stop_on_exception():
        raise ValueError("reported")
    with pytest.raises(ValueError, match="reported"):
        coord.join()


@pytest.mark.anyio
async def test_wait_stopped_returns_whether_a_stop_or_the_timeout_came() -> None:
    coord = Coordinator()
    assert not await coord.wait_stopped(timeout=0)
    async with in_task(coord.wait_stopped) as waiting:
        started(coord.request_stop).join()
    assert waiting.value
    assert await coord.wait_stopped()


@pytest.mark.anyio
async def test_a_side_task_is_stopped_gets_the_grace_period_and_is_cancelled_then() -> None:
    coord, step, log = Coordinator(), GlobalStep(), list[str]()

    async def note_end(name: str, wait: Any, *args: Any) -> None:
        try:
            await wait(*args)
        finally:
            log.append(name)

    coord.start_soon(note_end, "polite", coord.wait_stopped)
    coord.start_soon(note_end, "waits for a step", step.wait_for, 1000)
    coord.start_soon(note_end, "stubborn", anyio.sleep_forever)
    await settle()
    await end(coord, 0.05)
    assert (sorted(log[:2]), log[2:]) == (["polite", "waits for a step"], ["stubborn"])
    assert coord.joined
    with pytest.raises(RuntimeError, match="after the coordinator was joined"):
        coord.start_soon(anyio.sleep_forever)


@pytest.mark.anyio
async def test_an_error_in_a_side_task_stops_and_is_held() -> None:
    coord = Coordinator()

    async def fail() -> None:
        raise ValueError("in a side task")

    coord.start_soon(fail)
    await coord.wait_stopped()
    with pytest.raises(ValueError, match="in a side task") as caught:
        coord.raise_requested_exception()
    assert "fail" in "".join(caught.value.__notes__)


@pytest.mark.anyio
async def test_a_session_s_coordinator_ignores_live_threads_and_waits_no_longer_than_they_live(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    registers = at(
        after_create_session=lambda _, coord: coord.register_thread(
            started(release.wait, name="stubborn")
        )
    )
    with caplog.at_level(logging.INFO, "asynchooks"):
        async with MonitoredSession([registers], counting_creator(), 0.01):
            pass
    assert "threads still running: stubborn" in caplog.text
    coord = Coordinator()
    coord.register_thread(started(release.wait))
    async with in_task(end, coord):
        assert not coord.joined
        release.set()
    assert coord.joined
