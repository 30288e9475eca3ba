"""PreemptionHook where a host has the signals, or training is in another thread: `preempt`."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    PreemptionHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ...support.helpers import counting_creator
from ..preemptions import At, Counter, handlers_are_kept, saved_counts, saving, sigterm, train

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    if request.param == "trio":
        return "trio", {}
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


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
            assert not any(each.name == "asynchooks-deadline" for each in threading.enumerate())
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
    assert not any(each.name.startswith("asynchooks") for each in threading.enumerate())
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["PreemptionHook: the host ends: training stops, and its hooks end"]


@CALLS
async def test_a_call_ends_a_wait(call: Any) -> None:
    hook = PreemptionHook(signals=())
    async with (
        anyio.create_task_group() as group,
        MonitoredSession([hook], counting_creator()) as session,
    ):
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
        async with MonitoredSession([hook, other, limit], counting_creator()) as session:
            await train(session)
    assert hook.is_preempted
    assert other.log[-1] == "end"
    if moment != "end":
        assert str(session.stop_reason) == "PreemptionHook: preempt() was called"


async def test_a_call_before_the_session_stops_it_as_soon_as_it_is_open_and_not_the_next() -> None:
    hook = PreemptionHook(signals=())
    hook.preempt()
    for stops in (True, False):
        async with MonitoredSession([hook], counting_creator()) as session:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            assert session.should_stop() is stops
            assert hook.is_preempted is stops
    hook.preempt("again")
    hook.preempt("the first one counts")
    async with MonitoredSession([hook], counting_creator()) as session:
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
        async with MonitoredSession([hook], counting_creator()):
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
        assert is_saved(tmp_path, 1)


async def test_a_signal_after_a_call_ends_as_a_signal_does() -> None:
    hook = PreemptionHook()
    with handlers_are_kept(), pytest.raises(SystemExit) as caught:
        async with MonitoredSession([hook], counting_creator()) as session:
            hook.preempt("the host ends")
            sigterm()
            await train(session)
    assert caught.value.code == 143
    assert hook.received is signal.SIGTERM
    assert str(session.stop_reason) == "PreemptionHook: the host ends"


async def test_further_signals_within_the_time_are_the_same_whatever_their_kind() -> None:
    hook = PreemptionHook(same_signal_secs=60)
    with handlers_are_kept(), pytest.raises(KeyboardInterrupt):
        async with MonitoredSession([hook], counting_creator()) as session:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
            await train(session)
    assert hook.received is signal.SIGINT


def test_in_another_thread_a_call_stops_and_the_log_says_that_no_signal_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, is_open, seen = PreemptionHook(), threading.Event(), []

    async def main() -> None:
        async with MonitoredSession([hook], counting_creator()) as session:
            is_open.set()
            await train(session)
        seen.append(str(session.stop_reason))

    thread = threading.Thread(target=anyio.run, args=(main,), name="trainer")
    thread.start()
    assert is_open.wait(10)
    hook.preempt("the host ends")
    thread.join(10)
    assert seen == ["PreemptionHook: the host ends"]
    assert "have the handler of the signals call the hook's preempt()" in caplog.text
