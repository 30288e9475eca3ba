"""PreemptionHook: what leaves the block, what is put back, and which arguments are refused."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine.current import current_engine
from asynchooks.testing import RecordingHook

from ...support.helpers import counting_creator, settle
from ..preemptions import At, Counter, handlers_are_kept, saved_counts, saving, sigterm, train

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
    tmp_path: Path,
    number: signal.Signals,
    kind: type[BaseException],
    code: int | None,
    is_raised: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, log = Counter(), list[tuple[str, str]]()
    hook = PreemptionHook()
    hooks = [hook, RecordingHook("a", log), saving(tmp_path, model), RecordingHook("b", log)]
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step))
    assert hook.received is None
    with handlers_are_kept():
        with pytest.raises(kind) as caught:
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
        "signal, after 1 s, ends the process at once"
    ]


async def test_only_the_given_signals_are_handled() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    async with MonitoredSession([PreemptionHook([signal.SIGTERM])], counting_creator()):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)) == before
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


async def test_without_a_signal_the_end_is_the_usual_one_and_the_hook_can_be_used_again() -> None:
    hook = PreemptionHook()
    for _ in range(2):
        tasks = len(current_engine().running_tasks())
        with handlers_are_kept():
            async with MonitoredSession(
                [hook, StopAtStepHook(last_step=3)], counting_creator()
            ) as s:
                await train(s)
        await settle()
        assert hook.received is None
        assert len(current_engine().running_tasks()) == tasks


async def test_the_thread_of_the_deadline_has_ended_when_the_block_has() -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        creator = counting_creator()
        async with MonitoredSession([PreemptionHook(), StopAtStepHook(last_step=1)], creator) as s:
            await s.run("calls")
    left = [each.name for each in set(threading.enumerate()) - before]
    assert [name for name in left if name.startswith("asynchooks")] == []


async def test_a_hook_that_saw_a_signal_can_be_used_again() -> None:
    hook = PreemptionHook()
    for _ in range(2):
        with handlers_are_kept(), pytest.raises(SystemExit):
            async with MonitoredSession([hook], counting_creator()) as session:
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
            async with MonitoredSession(
                [PreemptionHook(), At(**{moment: signal_and_fail})], counting_creator()
            ) as session:
                await session.run([])
    assert ("after the process got SIGTERM" in caught.value.__notes__) is is_signalled


async def test_a_begin_that_fails_before_the_hooks_own_leaves_handlers_alone() -> None:
    with handlers_are_kept(), pytest.raises(LookupError, match="broken"):
        async with MonitoredSession([At(begin=fail), PreemptionHook()], counting_creator()):
            pass


@pytest.mark.parametrize("is_signalled", [False, True], ids=["no signal", "signal"])
async def test_handlers_are_back_after_a_cancellation(is_signalled: bool) -> None:
    with handlers_are_kept():
        with anyio.CancelScope() as scope:
            async with MonitoredSession([PreemptionHook()], counting_creator()):
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
            async with MonitoredSession([PreemptionHook()], counting_creator()) as session:
                sigterm()
                await train(session)
        assert seen == []
        assert signal.getsignal(signal.SIGTERM) is mine
        sigterm()
        assert seen == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_event_loops_own_handler_of_ctrl_c_is_put_back() -> None:
    async def main() -> None:
        own = signal.getsignal(signal.SIGINT)
        assert own is not signal.default_int_handler
        async with MonitoredSession([PreemptionHook()], counting_creator()):
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
        async with MonitoredSession([PreemptionHook()], counting_creator()):
            assert (current() == before) is is_taken
            assert current() != -1
        assert current() == before
        assert len(os.listdir("/proc/self/fd")) == num_fds

    with handlers_are_kept():
        asyncio.run(main())


async def test_sessions_that_overlap_in_a_ring_end_at_a_signal() -> None:
    first, second = PreemptionHook(), PreemptionHook()
    with handlers_are_kept():
        a = await MonitoredSession([first], counting_creator()).__aenter__()
        b = await MonitoredSession([second], counting_creator()).__aenter__()
        await a.close()
        c = await MonitoredSession([first], counting_creator()).__aenter__()
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
        sessions = [
            await MonitoredSession([hook], counting_creator()).__aenter__() for hook in hooks
        ]
        sigterm()
        for session in sessions:
            with pytest.raises(StopTraining):
                await session.global_step.wait_for(10**6)
        assert [hook.received for hook in hooks] == [signal.SIGTERM, signal.SIGTERM]
        for session in reversed(sessions):
            with pytest.raises(SystemExit):
                await session.close()


def test_outside_of_the_main_thread_the_log_says_so_and_the_session_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps: list[int] = []

    async def main() -> None:
        hooks = [PreemptionHook(), StopAtStepHook(last_step=3)]
        async with MonitoredSession(hooks, counting_creator()) as session:
            await train(session)
        steps.append(session.global_step.value)

    with handlers_are_kept():
        thread = threading.Thread(target=anyio.run, args=(main,), name="trainer")
        thread.start()
        thread.join(10)
    assert steps == [3]
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("PreemptionHook sees no signals: this is the thread 'trainer'")
