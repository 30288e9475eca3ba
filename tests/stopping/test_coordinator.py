"""Coordinator: stops, the first error, threads, side tasks."""

from __future__ import annotations

import logging
import sys
import threading

import anyio
import pytest

from asynchooks import Coordinator, GlobalStep, MonitoredSession, SessionRunHook
from asynchooks._engine.current import current_engine

from ..support.helpers import counting_creator, settle


def started(target: object, name: str = "worker") -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_a_stop_needs_no_event_loop_and_no_error() -> None:
    coord = Coordinator()
    assert not coord.should_stop()
    coord.request_stop()
    assert coord.should_stop()
    assert coord.wait_for_stop(timeout=0)
    coord.join()
    assert coord.joined


def test_the_first_error_wins_and_later_ones_are_its_notes() -> None:
    coord = Coordinator()
    coord.request_stop(ValueError("first"))
    coord.request_stop(KeyError("second"))
    with pytest.raises(ValueError, match="first") as caught:
        coord.join()
    assert "KeyError('second')" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="first"):
        coord.raise_requested_exception()


def test_exc_info_is_accepted() -> None:
    coord = Coordinator()
    try:
        raise ValueError("from exc_info")
    except ValueError:
        coord.request_stop(sys.exc_info())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from exc_info"):
        coord.join()


def test_an_error_after_a_clean_stop_is_kept() -> None:
    coord = Coordinator()
    coord.request_stop()
    coord.request_stop(ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        coord.join()


def test_clean_types_stop_without_an_error() -> None:
    coord = Coordinator(clean_stop_exception_types=(KeyError,))
    coord.request_stop(KeyError("end of input"))
    assert coord.should_stop()
    coord.join()


def test_after_join_an_error_is_raised_at_its_reporter() -> None:
    coord = Coordinator()
    coord.request_stop()
    coord.join()
    with pytest.raises(ValueError, match="too late"):
        coord.request_stop(ValueError("too late"))
    coord.request_stop()


def test_clear_stop_makes_it_new() -> None:
    coord = Coordinator()
    coord.request_stop(ValueError("old"))
    coord.clear_stop()
    assert not coord.should_stop()
    assert not coord.joined
    coord.request_stop()
    coord.join()


def test_something_that_is_no_exception_is_refused() -> None:
    with pytest.raises(TypeError, match=r"request_stop got 'stop!'; give an exception"):
        Coordinator().request_stop("stop!")  # type: ignore[arg-type]


def test_join_waits_for_registered_threads() -> None:
    coord, log = Coordinator(), []

    def work() -> None:
        coord.wait_for_stop()
        log.append("stopped")

    coord.register_thread(started(work))
    coord.request_stop()
    coord.join()
    assert log == ["stopped"]


def test_join_returns_when_all_threads_have_ended_without_a_stop() -> None:
    coord = Coordinator()
    coord.join([started(lambda: None)])
    assert not coord.should_stop()


def test_threads_that_live_on_are_an_error_that_names_them_unless_ignored() -> None:
    release = threading.Event()
    coord = Coordinator()
    coord.request_stop()
    thread = started(release.wait, name="stubborn")
    with pytest.raises(RuntimeError, match="threads still running: stubborn"):
        coord.join([thread], stop_grace_period_secs=0)
    coord.join([thread], stop_grace_period_secs=0, ignore_live_threads=True)
    release.set()


def test_stop_on_exception_reports_and_swallows_in_a_thread() -> None:
    coord = Coordinator()

    def work() -> None:
        with coord.stop_on_exception():
            raise ValueError("in a thread")

    started(work).join()
    with pytest.raises(ValueError, match="in a thread"):
        coord.join()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_stop_on_exception_lets_interrupts_through(error: type[BaseException]) -> None:
    coord = Coordinator()
    with pytest.raises(error), coord.stop_on_exception():
        raise error
    assert not coord.should_stop()


@pytest.mark.anyio
async def test_stop_on_exception_lets_cancellation_through() -> None:
    coord = Coordinator()
    with anyio.CancelScope() as scope, coord.stop_on_exception():
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert not coord.should_stop()


@pytest.mark.anyio
async def test_wait_stopped_returns_whether_a_stop_or_the_timeout_came() -> None:
    coord = Coordinator()
    assert not await coord.wait_stopped(timeout=0)
    async with anyio.create_task_group() as group:
        group.start_soon(coord.wait_stopped)
        await settle()
        started(coord.request_stop).join()
    assert await coord.wait_stopped()


@pytest.mark.anyio
async def test_a_side_task_is_stopped_gets_the_grace_period_and_is_cancelled_then() -> None:
    coord, log = Coordinator(), []

    async def polite() -> None:
        await coord.wait_stopped()
        log.append("polite stopped")

    async def stubborn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("stubborn cancelled")

    coord.start_soon(polite)
    coord.start_soon(stubborn)
    await settle()
    engine = current_engine()
    await coord.end(engine, engine.now() + 0.05, cancel_tasks=False)
    assert log == ["polite stopped", "stubborn cancelled"]
    assert coord.joined
    with pytest.raises(RuntimeError, match="after the coordinator was joined"):
        coord.start_soon(polite)


@pytest.mark.anyio
async def test_every_wait_of_a_side_task_ends_with_the_stop() -> None:
    coord, step, log = Coordinator(), GlobalStep(), []

    async def wait() -> None:
        try:
            await step.wait_for(1000)
        finally:
            log.append("ended")

    coord.start_soon(wait)
    await settle()
    engine = current_engine()
    await coord.end(engine, engine.now() + 100, cancel_tasks=False)
    assert log == ["ended"]


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
async def test_a_session_s_coordinator_has_no_clean_types_and_ignores_live_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    class Registers(SessionRunHook):
        async def after_create_session(self, session: object, coord: Coordinator) -> None:
            self.coord = coord
            coord.register_thread(started(release.wait, name="stubborn"))

    hook = Registers()
    with caplog.at_level(logging.INFO, "asynchooks"):
        async with MonitoredSession([hook], counting_creator(), 0.01):
            assert isinstance(hook.coord, Coordinator)
            assert hook.coord._clean_types == ()
    assert "threads still running: stubborn" in caplog.text
    release.set()


@pytest.mark.anyio
async def test_no_thread_is_waited_for_longer_than_until_it_ends() -> None:
    coord, gate = Coordinator(), threading.Event()
    coord.register_thread(started(gate.wait))
    engine = current_engine()
    async with anyio.create_task_group() as group:

        async def end() -> None:
            await coord.end(engine, engine.now() + 1000, cancel_tasks=False)

        group.start_soon(end)
        await settle()
        assert not coord.joined
        gate.set()
    assert coord.joined
