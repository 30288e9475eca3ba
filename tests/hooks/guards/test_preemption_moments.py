"""PreemptionHook: a signal at whatever moment of a session leads to the same orderly end."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    Recovery,
    StopTraining,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..preemptions import (
    At,
    Counter,
    handlers_are_kept,
    saved_counts,
    saving,
    signal_main,
    sigterm,
    train,
)  # fmt: skip

pytestmark = pytest.mark.anyio


def opened(directory: Path, model: Counter, *hooks: Any, **options: Any) -> MonitoredSession:
    """A session with a PreemptionHook, a saver and these hooks."""
    all_hooks = [PreemptionHook(), saving(directory, model), *hooks]
    return MonitoredSession(all_hooks, FunctionSessionCreator(model.step), **options)


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "before_run", "end"])
async def test_a_signal_during_another_hooks_moment(tmp_path: Path, moment: str) -> None:
    async def signal_and_wait() -> None:
        sigterm()
        await anyio.sleep(0.01)

    model, hook = Counter(), At(**{moment: signal_and_wait})
    with handlers_are_kept(), pytest.raises(SystemExit, match="143"):
        async with opened(tmp_path, model, hook) as session:
            if moment in ("begin", "after_create_session"):
                assert session.should_stop()
            else:
                await session.run([])
    assert model.count == int(moment in ("before_run", "end"))
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}
    assert hook.log[-1] == "end"
    assert "on_error" not in hook.log


@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_a_signal_before_a_session_is_recreated_stops_the_new_one(pause: float) -> None:
    """Where it is recreated at once, and where it takes a second attempt after a pause."""
    lost, new = ScriptedSession([{}, PreemptionError("lost")]), ScriptedSession()
    moments = [sigterm]

    class Creator(ScriptedSessionCreator):
        def create_session(self) -> Any:
            if lost.is_closed and moments:
                moments.pop()()
            return super().create_session()

    away = [PreemptionError("still away")] if pause else []
    recovery = Recovery(first_pause_secs=pause, longest_pause_secs=pause)
    session = MonitoredSession([PreemptionHook()], Creator([lost, *away, new]), recovery=recovery)
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with session:
            await session.run([])
            await session.run([])
            raise AssertionError("it ran")
    assert new.num_runs == 0  # the run that was lost is not made again; a pause ends at once
    assert new.is_closed == (not pause)


async def test_a_step_that_loses_the_session_after_the_signal_keeps_the_stop() -> None:
    def tell(*_: Any) -> None:
        sigterm()

    class Lost(ScriptedSession):
        def run(self, *args: Any, **options: Any) -> Any:
            tell()
            raise PreemptionError("lost")

    new = ScriptedSession()
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with MonitoredSession(
            [PreemptionHook()], ScriptedSessionCreator([Lost(), new])
        ) as session:
            await session.run([])
            assert session.should_stop()
    assert str(session.stop_reason) == "PreemptionHook: the process got SIGTERM"


async def wait_for_step(session: MonitoredSession) -> None:
    await session.global_step.wait_for(10**6)


async def wait_elsewhere(session: MonitoredSession) -> None:
    await session.or_stop(anyio.sleep_forever)


@pytest.mark.parametrize("wait", [wait_for_step, wait_elsewhere])
async def test_a_signal_ends_waits(tmp_path: Path, wait: Callable[..., Any]) -> None:
    model = Counter()
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with opened(tmp_path, model) as session:
            await session.run([])
            async with anyio.create_task_group() as group:

                async def signal_when_blocked() -> None:
                    await anyio.wait_all_tasks_blocked()
                    sigterm()

                group.start_soon(signal_when_blocked)
                with pytest.raises(StopTraining):
                    await wait(session)
    assert saved_counts(tmp_path) == {0: 0, 1: 1}


async def test_a_wait_that_stops_the_block_by_itself_ends_it_cleanly(tmp_path: Path) -> None:
    model = Counter()
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with opened(tmp_path, model) as session:
            await session.run([])
            sigterm()
            await wait_for_step(session)
    assert saved_counts(tmp_path) == {0: 0, 1: 1}


async def test_a_signal_ends_the_wait_of_a_side_task() -> None:
    ends: list[str] = []

    async def watch(session: MonitoredSession) -> None:
        try:
            await session.global_step.wait_for(10**6)
        except StopTraining:
            ends.append("stopped")
            raise

    with handlers_are_kept(), pytest.raises(SystemExit):
        async with MonitoredSession(
            [PreemptionHook()], ScriptedSessionCreator([ScriptedSession()])
        ) as s:
            s.start_soon(watch, s)
            await anyio.wait_all_tasks_blocked()
            sigterm()
            await train(s)
    assert ends == ["stopped"]


@pytest.mark.parametrize("is_yielding", [False, True])
@pytest.mark.parametrize("runner", ["thread", "inline"])
async def test_a_step_that_blocks_completes_and_is_saved(
    tmp_path: Path, runner: Any, is_yielding: bool
) -> None:
    model = Counter()

    def step() -> dict[str, int]:
        if model.count == 2:
            signal_main()
            time.sleep(0.05)
        return model.step()

    hooks = [PreemptionHook(), saving(tmp_path, model)]
    session = MonitoredSession(hooks, FunctionSessionCreator(step), step_runner=runner)
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with session:
            while not session.should_stop():
                await session.run([])
                if is_yielding:
                    await anyio.lowlevel.checkpoint()
    # a further step may begin: inline, before the hook's task has had its turn; in a thread, where
    # asyncio's loop, just falling asleep, misses the signal until something else wakes it
    assert model.count in (3, 4)
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}
