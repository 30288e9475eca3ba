"""Coordinator: stops, the first error, threads, side tasks."""

import logging
import sys
import threading
from typing import Any

import anyio
import pytest

from asynchooks import Coordinator, MonitoredSession

from ..support.helpers import KeepsCoord, counting_creator, in_task, turns
from ..support.moments import at


def started(target: Any, name: str = "worker") -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


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
    assert (coord.should_stop(), coord.joined) == (False, False)
    coord.request_stop()
    coord.join()
    with pytest.raises(TypeError, match=r"request_stop got 'stop!'; give an exception"):
        coord.request_stop("stop!")  # type: ignore[arg-type]


def test_join_waits_for_threads_and_names_those_that_live_on_unless_they_are_ignored() -> None:
    coord, log, release = Coordinator(), list[str](), threading.Event()
    coord.join([started(lambda: log.append("ended"))])
    assert not coord.should_stop()
    coord = Coordinator()
    coord.register_thread(started(lambda: log.append(f"stopped: {coord.wait_for_stop()}")))
    coord.request_stop()
    coord.join()
    assert log == ["ended", "stopped: True"]
    thread = started(release.wait, name="stubborn")
    with pytest.raises(RuntimeError, match="threads still running: stubborn"):
        coord.join([thread], stop_grace_period_secs=0)
    coord.join([thread], stop_grace_period_secs=0, ignore_live_threads=True)
    release.set()


async def test_stop_on_exception_reports_errors_and_lets_interrupts_and_cancellation_through() -> (
    None
):
    coord = Coordinator()
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), coord.stop_on_exception():
            raise error
    with anyio.CancelScope() as scope, coord.stop_on_exception():
        scope.cancel()
        await turns()
    assert scope.cancelled_caught
    assert not coord.should_stop()
    with coord.stop_on_exception():
        raise ValueError("reported")
    with pytest.raises(ValueError, match="reported"):
        coord.join()


async def test_wait_stopped_returns_whether_a_stop_or_the_timeout_came() -> None:
    coord = Coordinator()
    assert not await coord.wait_stopped(timeout=0)
    async with in_task(coord.wait_stopped) as waiting:
        started(coord.request_stop).join()
    assert waiting.value
    assert await coord.wait_stopped()


async def test_an_error_in_a_side_task_stops_and_is_held() -> None:
    coord = Coordinator()

    async def fail() -> None:
        raise ValueError("in a side task")

    coord.start_soon(fail)
    await coord.wait_stopped()
    with pytest.raises(ValueError, match="in a side task") as caught:
        coord.raise_requested_exception()
    assert "fail" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("lives_on", [True, False])
async def test_a_session_s_coordinator_ignores_live_threads_and_waits_no_longer_than_they_live(
    lives_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    release, keeps = threading.Event(), KeepsCoord()
    thread = started(release.wait, name="stubborn")
    registers = at(after_create_session=lambda _, coord: coord.register_thread(thread))
    grace_secs = 0.01 if lives_on else 1000.0

    async def train() -> None:
        async with MonitoredSession([keeps, registers], counting_creator(), grace_secs):
            pass

    with caplog.at_level(logging.INFO, "asynchooks"):
        async with in_task(train):
            if not lives_on:
                assert not keeps.coord.joined
                release.set()
    assert keeps.coord.joined
    assert ("threads still running: stubborn" in caplog.text) == lives_on
    with pytest.raises(RuntimeError, match="after the coordinator was joined"):
        keeps.coord.start_soon(anyio.sleep_forever)
    release.set()
