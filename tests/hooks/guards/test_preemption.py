"""PreemptionHook: what leaves the block at a signal or a call, and what is put back."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    MonitoredSession,
    PreemptionError,
    PreemptionHook,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ...support.afterwards import nothing_left
from ...support.faults import LOOPS
from ...support.helpers import raises_at, settle
from ...support.moments import at
from ...support.stop_requests import call_in_thread
from ...support.threads import threads_left
from ..preemptions import (
    Counter,
    handlers_are_kept,
    left_by_signal,
    saved_counts,
    saving,
    session_with,
    sigterm,
    train,
)

on_all_loops = pytest.mark.parametrize("anyio_backend", LOOPS)
SIGTERM, SIGINT = signal.SIGTERM, signal.SIGINT


@on_all_loops
@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (SIGTERM, SystemExit, 143),
        (SIGINT, KeyboardInterrupt, None),
        (signal.SIGUSR1, SystemExit, 138),
    ],
)
async def test_the_signal_leaves_after_the_end_of_all_hooks(
    number: signal.Signals, kind: Any, code: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, hook, other = Counter(), PreemptionHook(), RecordingHook("a")
    session = MonitoredSession([hook, saving(tmp_path, model), other], model.step)
    with left_by_signal(kind) as caught:
        async with session:
            await session.run([])
            os.kill(os.getpid(), number)
            await train(session)
    assert other.log[-1] == ("a", "end")
    assert getattr(caught.value, "code", None) == code
    assert str(session.stop_reason) == f"PreemptionHook: the process got {number.name}"
    assert hook.received is number
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}
    assert f"{number.name}: training stops, and its hooks end, within 25 s" in caplog.text


@pytest.mark.parametrize("is_signalled", [False, True])
async def test_a_hook_leaves_no_task_thread_or_handler_and_can_be_used_again(
    is_signalled: bool,
) -> None:
    hook = PreemptionHook()
    for _ in range(2):
        async with nothing_left():
            with left_by_signal() if is_signalled else handlers_are_kept():
                async with session_with(hook, StopAtStepHook(last_step=3)) as session:
                    assert hook.received is None
                    if is_signalled:
                        sigterm()
                    await train(session)
            assert threads_left() == [], "it has ended when the block has"


STOPS: dict[str, Callable[[PreemptionHook], object]] = {
    "": lambda hook: None,
    "the process got SIGTERM": lambda hook: sigterm(),
    "the host ends": lambda hook: hook.preempt("the host ends"),
}


@pytest.mark.parametrize("why", STOPS)
@pytest.mark.parametrize("moment", ["begin", "after_create_session", "before_run", "after_close"])
async def test_an_error_of_another_hook_leaves_with_a_note_and_handlers_are_back(
    moment: str, why: str
) -> None:
    hook = PreemptionHook()

    def fail(*_: object) -> None:
        STOPS[why](hook)
        raise LookupError("broken")

    with handlers_are_kept(), pytest.raises(LookupError, match="broken") as caught:
        async with session_with(hook, at(**{moment: fail})) as session:
            await session.run([])
    assert (f"after {why}" in getattr(caught.value, "__notes__", [])) is bool(why)


async def test_a_begin_that_fails_before_the_hooks_own_leaves_handlers_alone() -> None:
    with handlers_are_kept(), pytest.raises(LookupError):
        async with session_with(raises_at("begin", LookupError), PreemptionHook()):
            pass


@pytest.mark.parametrize("is_signalled", [True, False])
@pytest.mark.parametrize("order", [1, -1])
async def test_handlers_stay_until_every_after_close_has_returned_and_take_a_second_signal(
    order: int, is_signalled: bool
) -> None:
    def look(exception: object) -> None:
        seen.append(signal.getsignal(SIGTERM))
        if is_signalled:
            sigterm()

    hooks, seen = [PreemptionHook(same_signal_secs=60), at(after_close=look)], list[Any]()
    with left_by_signal() if is_signalled else handlers_are_kept():
        before = signal.getsignal(SIGTERM)
        async with session_with(*hooks[::order]) as session:
            if is_signalled:
                sigterm()
                await train(session)
    assert len(seen) == 1
    assert seen != [before]


async def test_handlers_are_back_after_a_cancellation() -> None:
    with handlers_are_kept(), anyio.CancelScope() as scope:
        async with session_with():
            sigterm()
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.parametrize(("secs", "expected"), [(60, []), (0, [SIGTERM])])
async def test_a_users_own_handler_gets_signals_after_the_time_and_is_put_back(
    secs: float, expected: list[int]
) -> None:
    seen: list[int] = []
    mine = lambda number, frame: seen.append(number)  # noqa: E731
    with handlers_are_kept():
        before = signal.signal(SIGTERM, mine)
        with pytest.raises(SystemExit):
            async with session_with(PreemptionHook(same_signal_secs=secs)) as session:
                sigterm()
                assert seen == []
                sigterm()
                await train(session)
        assert seen == expected
        assert signal.signal(SIGTERM, before) is mine


async def test_a_handler_that_was_put_over_the_hooks_stays() -> None:
    with handlers_are_kept():
        before = signal.getsignal(SIGTERM)
        async with session_with():
            signal.signal(SIGTERM, signal.SIG_IGN)
        assert signal.signal(SIGTERM, before) is signal.SIG_IGN


def test_the_loops_own_handler_of_ctrl_c_and_what_wakes_it_are_put_back() -> None:
    def current() -> tuple[Any, int]:
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return signal.getsignal(SIGINT), fd

    async def main() -> None:
        before = current()
        async with session_with():
            assert all(now != then for now, then in zip(current(), before, strict=True))
        assert current() == before

    asyncio.run(main())


async def test_a_signal_stops_the_sessions_of_all_hooks_also_where_they_overlap_in_a_ring() -> None:
    first, second = PreemptionHook(), PreemptionHook([SIGTERM, SIGTERM])
    with handlers_are_kept():
        a, b = await session_with(first).open(), await session_with(second).open()
        await a.close()
        c = await session_with(first).open()
        sigterm()
        assert (first.received, second.received) == (SIGTERM, SIGTERM)
        for session in (c, b):
            with pytest.raises(StopTraining):
                await session.global_step.wait_for(10**6)
            with pytest.raises(SystemExit):
                await session.close()


@on_all_loops
async def test_a_signal_that_another_thread_gets_ends_a_wait_at_once() -> None:
    """Python's handler runs in the main thread, which sleeps in its event loop until a timer."""
    with left_by_signal(), anyio.fail_after(30):  # the timer
        async with session_with() as session:
            threading.Timer(0.1, sigterm).start()
            await session.global_step.wait_for(10**6)


def test_in_another_thread_a_call_stops_and_the_log_says_that_no_signal_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, has_run = PreemptionHook(), threading.Event()

    async def main() -> None:
        async with session_with(hook) as session:
            await session.run([])
            has_run.set()
            await train(session)

    with handlers_are_kept():
        thread = threading.Thread(target=anyio.run, args=(main,), name="trainer")
        thread.start()
        assert has_run.wait(10)
        hook.preempt("the host ends")
        thread.join(10)
        assert not thread.is_alive()
    assert "PreemptionHook sees no signals: this is the thread 'trainer'" in caplog.text


def from_a_handler(call: Callable[[], None]) -> None:
    """As a web server's, which stays in its place."""
    before = signal.signal(SIGTERM, lambda number, frame: call())
    sigterm()
    signal.signal(SIGTERM, before)


@on_all_loops
@pytest.mark.parametrize("through", [call_in_thread, from_a_handler])
async def test_a_call_ends_a_wait_saves_and_ends_the_block_cleanly(
    tmp_path: Path, through: Any
) -> None:
    async def call_when_it_waits() -> None:
        await settle()
        assert not hook.is_preempted
        through(lambda: hook.preempt("the host ends"))

    model, hook = Counter(), PreemptionHook(signals=())
    with handlers_are_kept():
        before = signal.getsignal(SIGTERM)
        async with session_with(hook, saving(tmp_path, model)) as session:
            assert signal.getsignal(SIGTERM) is before, "only signals that are given are handled"
            assert threads_left("asynchooks-deadline") == []
            session.start_soon(call_when_it_waits)
            await session.run([])
            await session.global_step.wait_for(10**9)
    assert str(session.stop_reason) == "PreemptionHook: the host ends"
    assert (hook.is_preempted, hook.received) == (True, None)
    assert max(saved_counts(tmp_path)) == 1


async def test_a_call_before_the_session_stops_it_as_soon_as_it_is_open_and_not_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = PreemptionHook(signals=())
    hook.preempt("the first one counts")
    hook.preempt("again")
    for stops in (True, False):
        async with session_with(hook) as session:
            await settle()
            assert (session.should_stop(), hook.is_preempted) == (stops, stops)
        assert ("the first one counts" in str(session.stop_reason)) is stops
    assert caplog.text.count("the first one counts: training stops") == 1


async def test_a_session_that_is_lost_while_it_stops_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, creator = PreemptionHook(signals=()), ScriptedSessionCreator([ScriptedSession()])
    async with MonitoredSession([hook], creator):
        hook.preempt()
        await anyio.lowlevel.checkpoint()
        raise PreemptionError("gone")
    assert "While training stopped, the session was lost: PreemptionError('gone')" in caplog.text


async def test_the_first_signal_leaves_also_after_a_call_and_further_ones_are_the_same() -> None:
    hook = PreemptionHook(same_signal_secs=60)
    with left_by_signal(KeyboardInterrupt):
        async with session_with(hook) as session:
            hook.preempt("the host ends")
            for number in (SIGINT, SIGTERM, signal.SIGUSR1, SIGINT):
                signal.raise_signal(number)
            await train(session)
    assert hook.received is SIGINT
    assert str(session.stop_reason) == "PreemptionHook: the host ends"
