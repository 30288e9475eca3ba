"""PreemptionHook in odd company: several hooks, several sessions, odd signals and deadlines."""

from __future__ import annotations

import contextlib
import math
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
    Recovery,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ...support.helpers import counting_creator
from ..preemptions import At, Counter, handlers_are_kept, saved_counts, saving, sigterm, train

pytestmark = pytest.mark.anyio


def fail() -> None:
    raise LookupError("broken")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_session_gets_a_signal_after_others_of_its_hook_have_ended(fails: bool) -> None:
    hook = PreemptionHook()
    other = At(end=fail) if fails else At()
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with MonitoredSession([hook], counting_creator()) as last:
            for _ in range(2):  # the second end counts as that of the last one
                with pytest.raises(LookupError) if fails else contextlib.nullcontext():
                    async with MonitoredSession([hook, other], counting_creator()):
                        pass
            sigterm()
            with anyio.move_on_after(0.2):
                await train(last)
            assert last.should_stop()


async def test_two_hooks_of_sessions_that_overlap_leave_no_handler_behind() -> None:
    sessions = [MonitoredSession([PreemptionHook()], counting_creator()) for _ in range(2)]
    with handlers_are_kept():
        for session in sessions:
            await session.__aenter__()
        for session in sessions:
            await session.close()


async def test_a_signal_that_is_given_twice_leaves_no_handler_behind() -> None:
    with handlers_are_kept():
        hook = PreemptionHook([signal.SIGTERM, signal.SIGTERM])
        async with MonitoredSession([hook], counting_creator()):
            pass


async def test_the_rescue_saves_each_session_as_of_its_own_step(tmp_path: Path) -> None:
    """Both blocks wait for another library; what is saved beside them lets them go on."""
    hook = PreemptionHook(deadline_secs=1.5)
    models = [Counter(), Counter()]
    release = anyio.Event()

    async def work(number: int) -> None:
        model, directory = models[number], tmp_path / str(number)
        hooks = [hook, saving(directory, model)]
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            for _ in range(3 + 4 * number):
                await session.run([])
            opened.append(session)
            await release.wait()

    opened: list[Any] = []
    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            group.start_soon(caught, work, 0)
            group.start_soon(caught, work, 1)
            while len(opened) < 2:
                await anyio.lowlevel.checkpoint()
            sigterm()
            while len(saved_steps(tmp_path)) < 2:  # after half of the time
                await anyio.lowlevel.checkpoint()
            release.set()
    assert saved_counts(tmp_path / "0") == {0: 0, 3: 3}
    assert saved_counts(tmp_path / "1") == {0: 0, 7: 7}


def saved_steps(directory: Path) -> list[Path]:
    return list(directory.glob("*/model.ckpt-[1-9]"))


async def caught(fn: Any, *args: Any) -> None:
    with contextlib.suppress(SystemExit):
        await fn(*args)


async def test_a_signal_ends_the_pause_before_a_session_is_recreated() -> None:
    lost = ScriptedSession([PreemptionError("lost")])
    away = PreemptionError("still away")
    creator = ScriptedSessionCreator([lost, away, ScriptedSession()])
    recovery = Recovery(first_pause_secs=0.8, longest_pause_secs=0.8)
    with handlers_are_kept():
        with pytest.raises(SystemExit):
            async with MonitoredSession([PreemptionHook()], creator, recovery=recovery) as session:

                async def tell() -> None:
                    await anyio.sleep(0.1)
                    sigterm()

                session.start_soon(tell)
                since = anyio.current_time()
                await session.run([])
        assert anyio.current_time() - since < 0.5


@pytest.mark.parametrize("secs", [math.inf, 1e10])
async def test_a_deadline_may_be_as_late_as_one_likes(
    secs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with MonitoredSession([PreemptionHook(deadline_secs=secs)], counting_creator()) as s:
            sigterm()
            await train(s)
    assert errors == []


async def test_one_hook_for_one_of_two_workers_lets_the_other_one_save(tmp_path: Path) -> None:
    """On asyncio and trio alike: the signal cancels the group while the other one still ends."""
    from asynchooks import SharedSessionCreator

    model = Counter()
    shared = SharedSessionCreator(FunctionSessionCreator(model.step), num_workers=2)
    log: list[tuple[str, str]] = []

    async def work(hooks: list[Any]) -> None:
        async with MonitoredSession(hooks, shared) as session:
            while not session.should_stop():
                await session.run([])
                if model.count == 20:
                    sigterm()
                await anyio.sleep(0.01)

    async def hold() -> None:
        await anyio.sleep(0.1)

    async def first(scope: anyio.CancelScope) -> None:
        try:
            await work([PreemptionHook()])
        except SystemExit:
            scope.cancel()  # as any task group does

    others = [
        At(end=hold),
        saving(tmp_path, model),
        RecordingHook("other", log),
        StopAtStepHook(last_step=999),
    ]
    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            group.start_soon(work, others)
            group.start_soon(first, group.cancel_scope)
    assert max(saved_counts(tmp_path)) == model.count
