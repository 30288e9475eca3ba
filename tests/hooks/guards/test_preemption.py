"""PreemptionHook: what leaves the block at a signal or a call, and what is put back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    PreemptionHook,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine.current import current_engine
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ...support.helpers import settle
from ...support.threads import threads_left
from ..preemptions import (
    At,
    Counter,
    handlers_are_kept,
    left_by_signal,
    saved_counts,
    saving,
    session_with,
    sigterm,
    train,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    if request.param == "trio":
        return "trio", {}
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


LEAVES: list[tuple[signal.Signals, type[BaseException], Any]] = [
    (signal.SIGTERM, SystemExit, 143),
    (signal.SIGINT, KeyboardInterrupt, None),
    (signal.SIGUSR1, SystemExit, 138),
]


@pytest.mark.parametrize("is_raised", [True, False], ids=["raise_signal", "kill"])
@pytest.mark.parametrize(("number", "kind", "code"), LEAVES)
async def test_the_signal_leaves_after_the_end_of_all_hooks(
    number: signal.Signals, kind: type[BaseException], code: int | None, is_raised: bool,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model, log = Counter(), list[tuple[str, str]]()
    hook = PreemptionHook()
    hooks = [hook, RecordingHook("a", log), saving(tmp_path, model), RecordingHook("b", log)]
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step))
    assert hook.received is None
    with left_by_signal(kind) as caught:
        async with session:
            for _ in range(3):
                await session.run([])
            if is_raised:
                signal.raise_signal(number)
            else:
                os.kill(os.getpid(), number)
            await train(session)
    assert log[-2:] == [("a", "end"), ("b", "end")]
    assert getattr(caught.value, "code", None) == code
    assert str(session.stop_reason) == f"PreemptionHook: the process got {number.name}"
    assert hook.received is number
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        f"{number.name}: training stops, and its hooks end, within 25 s. Another "
        "signal, after 1 s, does what it did without the hook"
    ]


async def test_only_the_given_signals_are_handled() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    async with session_with(PreemptionHook([signal.SIGTERM])):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)) == before
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


async def test_without_a_signal_the_end_is_the_usual_one_and_the_hook_can_be_used_again() -> None:
    hook = PreemptionHook()
    for _ in range(20):
        tasks = len(current_engine().running_tasks())
        with handlers_are_kept():
            async with session_with(hook, StopAtStepHook(last_step=3)) as session:
                await train(session)
            # the thread of the deadline has ended when the block has
            assert threads_left() == []
        await settle()
        assert hook.received is None
        assert len(current_engine().running_tasks()) == tasks


async def test_a_hook_that_saw_a_signal_can_be_used_again() -> None:
    hook = PreemptionHook()
    for _ in range(2):
        with left_by_signal():
            async with session_with(hook) as session:
                assert hook.received is None
                sigterm()
                await train(session)


def fail() -> None:
    raise LookupError("broken")


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "before_run", "end"])
@pytest.mark.parametrize("is_signalled", [False, True], ids=["no signal", "signal"])
async def test_an_error_of_another_hook_leaves_with_a_note_and_handlers_are_back(
    moment: str, is_signalled: bool
) -> None:
    def signal_and_fail() -> None:
        if is_signalled:
            sigterm()
        fail()

    with handlers_are_kept():
        with pytest.raises(LookupError, match="broken") as caught:
            async with session_with(At(**{moment: signal_and_fail})) as session:
                await session.run([])
    assert ("after the process got SIGTERM" in caught.value.__notes__) is is_signalled


class SeesHandlers(SessionRunHook):
    """Sees in after_close whose handler there is, and what leaves the session."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, BaseException | None]] = []

    async def after_close(self, exception: BaseException | None) -> None:
        await anyio.lowlevel.checkpoint()
        self.seen.append((signal.getsignal(signal.SIGTERM), exception))


@pytest.mark.parametrize("ending", ["signal", "none", "error"])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_handlers_stay_until_after_close_of_every_hook_has_returned(
    place: int, ending: str
) -> None:
    others = [SeesHandlers(), SeesHandlers()]
    hooks: list[Any] = [*others]
    hooks.insert(place, PreemptionHook())
    before = signal.getsignal(signal.SIGTERM)
    error = LookupError("broken") if ending == "error" else None
    with handlers_are_kept(), contextlib.ExitStack() as stack:
        if ending != "none":
            stack.enter_context(pytest.raises(LookupError if error else SystemExit))
        async with session_with(*hooks) as session:
            await session.run([])
            if ending == "signal":
                sigterm()
                await train(session)
            if error is not None:
                raise error
    for [(handler, exception)] in (each.seen for each in others):
        assert handler is not before
        assert exception is error  # a signal leaves after all hooks


async def test_what_another_hooks_after_close_raises_after_a_signal_leaves_with_a_note() -> None:
    class Raises(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            raise LookupError("broken")

    with handlers_are_kept(), pytest.raises(LookupError, match="broken") as caught:
        async with session_with(PreemptionHook(), Raises()) as session:
            sigterm()
            await train(session)
    assert "after the process got SIGTERM" in caught.value.__notes__


async def test_a_begin_that_fails_before_the_hooks_own_leaves_handlers_alone() -> None:
    with handlers_are_kept(), pytest.raises(LookupError, match="broken"):
        async with session_with(At(begin=fail), PreemptionHook()):
            pass


@pytest.mark.parametrize("is_signalled", [False, True], ids=["no signal", "signal"])
async def test_handlers_are_back_after_a_cancellation(is_signalled: bool) -> None:
    with handlers_are_kept():
        with anyio.CancelScope() as scope:
            async with session_with():
                if is_signalled:
                    sigterm()
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_users_own_handler_is_put_back_and_gets_the_next_signal() -> None:
    seen: list[int] = []
    with handlers_are_kept():
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        mine = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            async with session_with() as session:
                sigterm()
                await train(session)
        assert seen == []
        assert signal.getsignal(signal.SIGTERM) is mine
        sigterm()
        assert seen == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def test_a_users_own_handler_gets_a_second_signal_after_the_window() -> None:
    seen: list[int] = []
    with handlers_are_kept():
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        with pytest.raises(SystemExit):
            async with session_with(PreemptionHook(same_signal_secs=0)) as session:
                sigterm()
                assert seen == []
                sigterm()
                assert seen == [signal.SIGTERM]
                await train(session)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def test_a_handler_that_was_put_over_the_hooks_stays() -> None:
    seen: list[int] = []

    def over(number: int, frame: Any) -> None:
        seen.append(number)

    with handlers_are_kept():
        async with session_with():
            signal.signal(signal.SIGTERM, over)
        assert signal.getsignal(signal.SIGTERM) is over
        sigterm()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert seen == [signal.SIGTERM]


def test_the_event_loops_own_handler_of_ctrl_c_is_put_back() -> None:
    async def main() -> None:
        own = signal.getsignal(signal.SIGINT)
        assert own is not signal.default_int_handler
        async with session_with():
            assert signal.getsignal(signal.SIGINT) is not own
        assert signal.getsignal(signal.SIGINT) is own
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with handlers_are_kept(), pytest.raises(KeyboardInterrupt):
        # a shell starts what runs in its background with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio.run(main())


@pytest.mark.parametrize("is_taken", [False, True], ids=["no other", "add_signal_handler"])
def test_what_wakes_the_loop_at_signals_is_put_back(is_taken: bool) -> None:
    def current() -> int:
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd

    async def main() -> None:
        if is_taken:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, print)
        before, num_fds = current(), len(os.listdir("/proc/self/fd"))
        async with session_with():
            assert (current() == before) is is_taken
            assert current() != -1
        assert current() == before
        assert len(os.listdir("/proc/self/fd")) == num_fds

    with handlers_are_kept():
        asyncio.run(main())


async def test_sessions_that_overlap_in_a_ring_end_at_a_signal() -> None:
    first, second = PreemptionHook(), PreemptionHook()
    with handlers_are_kept():
        a = await session_with(first).__aenter__()
        b = await session_with(second).__aenter__()
        await a.close()
        c = await session_with(first).__aenter__()
        sigterm()
        for session in (b, c):
            with pytest.raises(StopTraining):
                await session.global_step.wait_for(10**6)
        for session in (c, b):
            with pytest.raises(SystemExit):
                await session.close()


async def test_a_signal_stops_the_sessions_of_all_hooks() -> None:
    hooks = [PreemptionHook(), PreemptionHook()]
    with handlers_are_kept():
        sessions = [await session_with(hook).__aenter__() for hook in hooks]
        sigterm()
        for session in sessions:
            with pytest.raises(StopTraining):
                await session.global_step.wait_for(10**6)
        assert [hook.received for hook in hooks] == [signal.SIGTERM, signal.SIGTERM]
        for session in reversed(sessions):
            with pytest.raises(SystemExit):
                await session.close()


async def test_a_signal_that_another_thread_gets_ends_a_wait_at_once() -> None:
    """Python's handler runs in the main thread, which sleeps in its event loop until a timer."""
    with left_by_signal():
        async with session_with() as session:
            with anyio.fail_after(30):  # the timer
                threading.Timer(0.1, sigterm).start()
                with pytest.raises(StopTraining):
                    await session.global_step.wait_for(10**6)


def test_in_another_thread_a_call_stops_and_the_log_says_that_no_signal_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, has_run, seen = PreemptionHook(), threading.Event(), list[str]()

    async def main() -> None:
        async with session_with(hook) as session:
            for _ in range(3):
                await session.run([])
            has_run.set()
            await train(session)
        seen.append(str(session.stop_reason))

    with handlers_are_kept():
        thread = threading.Thread(target=anyio.run, args=(main,), name="trainer")
        thread.start()
        assert has_run.wait(10)
        hook.preempt("the host ends")
        thread.join(10)
    assert seen == ["PreemptionHook: the host ends"]
    [warning, _] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("PreemptionHook sees no signals: this is the thread 'trainer'")
    assert "have the handler of the signals call the hook's preempt()" in warning


def from_another_thread(hook: PreemptionHook) -> None:
    thread = threading.Thread(target=hook.preempt, args=("the host ends",))
    thread.start()
    thread.join()


def from_a_handler(hook: PreemptionHook) -> None:
    """As a web server's, which stays in its place."""
    signal.signal(signal.SIGTERM, lambda number, frame: hook.preempt("the host ends"))
    try:
        sigterm()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def from_here(hook: PreemptionHook) -> None:
    hook.preempt("the host ends")


CALLS = pytest.mark.parametrize("call", [from_here, from_another_thread, from_a_handler])


@CALLS
async def test_a_call_stops_and_saves_and_the_block_ends_cleanly(
    tmp_path: Path, call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, log = Counter(), list[tuple[str, str]]()
    hook = PreemptionHook(signals=())
    hooks = [hook, saving(tmp_path, model), RecordingHook("a", log)]
    with handlers_are_kept():
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
            assert threads_left("asynchooks-deadline") == []
            assert not hook.is_preempted
            for _ in range(3):
                await session.run([])
            call(hook)
            assert hook.is_preempted
            await train(session)
    assert log[-1] == ("a", "end")
    assert str(session.stop_reason) == "PreemptionHook: the host ends"
    assert (hook.is_preempted, hook.received) == (True, None)
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}
    assert threads_left() == []
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["PreemptionHook: the host ends: training stops, and its hooks end"]


@CALLS
async def test_a_call_ends_a_wait(call: Any) -> None:
    hook = PreemptionHook(signals=())
    async with anyio.create_task_group() as group, session_with(hook) as session:
        step = session.global_step

        async def call_when_waiting() -> None:
            while not step.statistics().tasks_waiting_for_step:
                await anyio.lowlevel.checkpoint()
            call(hook)

        group.start_soon(call_when_waiting)
        await step.wait_for(10**9)
    assert str(session.stop_reason) == "PreemptionHook: the host ends"


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "before_run", "end"])
async def test_a_call_at_any_moment_stops_the_session(moment: str) -> None:
    hook = PreemptionHook(signals=())
    other = At(**{moment: lambda: hook.preempt()})
    limit = StopAtStepHook(last_step=2) if moment == "end" else At()
    with anyio.fail_after(20):
        async with session_with(hook, other, limit) as session:
            await train(session)
    assert hook.is_preempted
    assert other.log[-1] == "end"
    if moment != "end":
        assert str(session.stop_reason) == "PreemptionHook: preempt() was called"


async def test_a_call_before_the_session_stops_it_as_soon_as_it_is_open_and_not_the_next() -> None:
    hook = PreemptionHook(signals=())
    hook.preempt()
    for stops in (True, False):
        async with session_with(hook) as session:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            assert session.should_stop() is stops
            assert hook.is_preempted is stops
    hook.preempt("again")
    hook.preempt("the first one counts")
    async with session_with(hook) as session:
        await train(session)
    assert str(session.stop_reason) == "PreemptionHook: again"


async def test_a_call_stops_all_workers_of_a_model() -> None:
    hook = PreemptionHook(signals=())
    creator = SharedSessionCreator(FunctionSessionCreator(dict), num_workers=3)

    async def work(hooks: list[Any]) -> None:
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])
                if session.global_step.value >= 40:
                    hook.preempt()
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for hooks in ([hook], [hook], []):
                group.start_soon(work, hooks)


async def test_an_error_after_a_call_leaves_with_a_note() -> None:
    hook = PreemptionHook(signals=())
    with pytest.raises(LookupError, match="broken") as caught:
        async with session_with(hook):
            hook.preempt("the host ends")
            raise LookupError("broken")
    assert caught.value.__notes__ == ["after the host ends"]


async def test_a_session_that_is_lost_while_it_stops_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = PreemptionHook(signals=())
    creator = ScriptedSessionCreator([ScriptedSession([PreemptionError("gone")])])
    async with MonitoredSession([hook], creator) as session:
        hook.preempt()
        await anyio.lowlevel.checkpoint()
        raise PreemptionError("gone")
    assert session.stop_reason is not None
    assert "While training stopped, the session was lost: PreemptionError('gone')" in caplog.text


def is_saved(directory: Path, step: int) -> bool:
    return (directory / f"model.ckpt-{step}" / "manifest.json").exists()


async def test_a_block_that_does_not_end_is_saved_and_goes_on(tmp_path: Path) -> None:
    model = Counter()
    hook = PreemptionHook(signals=(), deadline_secs=0.4)
    hooks = [hook, saving(tmp_path, model)]
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        await session.run([])
        hook.preempt()
        await anyio.sleep(0.8)  # longer than a process would be let live after a signal
        with anyio.fail_after(30):
            while not is_saved(tmp_path, 1):
                await anyio.lowlevel.checkpoint()


async def test_a_signal_after_a_call_ends_as_a_signal_does() -> None:
    hook = PreemptionHook()
    with left_by_signal() as caught:
        async with session_with(hook) as session:
            hook.preempt("the host ends")
            sigterm()
            await train(session)
    assert caught.value.code == 143
    assert hook.received is signal.SIGTERM
    assert str(session.stop_reason) == "PreemptionHook: the host ends"


async def test_further_signals_within_the_time_are_the_same_whatever_their_kind() -> None:
    hook = PreemptionHook(same_signal_secs=60)
    with left_by_signal(KeyboardInterrupt):
        async with session_with(hook) as session:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
            await train(session)
    assert hook.received is signal.SIGINT
