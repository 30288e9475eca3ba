"""PreemptionHook: its sessions, moments, saves and workers, when a signal comes."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    PreemptionHook,
    Recovery,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ...support.helpers import settle
from ..preemptions import (
    At,
    Counter,
    handlers_are_kept,
    left_by_signal,
    saved_counts,
    saving,
    session_with,
    signal_main,
    sigterm,
    train,
)

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
    with left_by_signal() as caught:
        async with opened(tmp_path, model, hook) as session:
            if moment in ("begin", "after_create_session"):
                assert session.should_stop()
            else:
                await session.run([])
    assert caught.value.code == 143
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
    with left_by_signal():
        async with session:
            await session.run([])
            await session.run([])
            raise AssertionError("it ran")
    assert new.num_runs == 0  # the run that was lost is not made again; a pause ends at once
    assert new.is_closed == (not pause)


async def test_a_step_that_loses_the_session_after_the_signal_keeps_the_stop() -> None:
    class Lost(ScriptedSession):
        def run(self, *args: Any, **options: Any) -> Any:
            sigterm()
            raise PreemptionError("lost")

    new = ScriptedSession()
    creator = ScriptedSessionCreator([Lost(), new])
    with left_by_signal():
        async with MonitoredSession([PreemptionHook()], creator) as session:
            with pytest.raises(StopTraining, match="by PreemptionHook"):
                await session.run([])
            assert session.should_stop()
    assert str(session.stop_reason) == "PreemptionHook: the process got SIGTERM"
    assert new.num_runs == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda session: session.global_step.wait_for(10**6),
        lambda session: session.or_stop(anyio.sleep_forever),
    ],
    ids=["for a step", "elsewhere"],
)
@pytest.mark.parametrize("is_caught", [True, False])
async def test_a_signal_ends_a_wait_which_ends_the_block_cleanly(
    tmp_path: Path, wait: Callable[[MonitoredSession], Any], is_caught: bool
) -> None:
    async def signal_when_blocked() -> None:
        await anyio.wait_all_tasks_blocked()
        sigterm()

    model = Counter()
    with left_by_signal():
        async with opened(tmp_path, model) as session:
            await session.run([])
            session.start_soon(signal_when_blocked)
            with pytest.raises(StopTraining) if is_caught else contextlib.nullcontext():
                await wait(session)
    assert saved_counts(tmp_path) == {0: 0, 1: 1}


async def test_a_signal_ends_the_wait_of_a_side_task() -> None:
    ends: list[str] = []

    async def watch(session: MonitoredSession) -> None:
        try:
            await session.global_step.wait_for(10**6)
        except StopTraining:
            ends.append("stopped")
            raise

    with left_by_signal():
        async with session_with() as session:
            session.start_soon(watch, session)
            await anyio.wait_all_tasks_blocked()
            sigterm()
            await train(session)
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
    with left_by_signal():
        async with session:
            while not session.should_stop():
                await session.run([])
                if is_yielding:
                    await anyio.lowlevel.checkpoint()
    # a further step may begin: inline, before the hook's task has had its turn; in a thread, where
    # asyncio's loop, just falling asleep, misses the signal until something else wakes it
    assert model.count in (3, 4)
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}


class SlowSaver:
    """A saver in whose n-th save the signal comes."""

    def __init__(self, model: Counter, nth: int) -> None:
        self.saver = StateDictSaver(model=model)
        self.restore = self.saver.restore
        self.left = nth

    def save(self, path: str) -> None:
        self.left -= 1
        if self.left == 0:
            signal_main()
            time.sleep(0.05)
        self.saver.save(path)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3])  # at the start, in a run, at the end
async def test_a_signal_during_a_save_loses_neither_it_nor_a_later_one(
    tmp_path: Path, nth: int, background: bool
) -> None:
    model, saved = Counter(), list[int]()

    class Listener(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            saved.append(global_step_value)

    saver = CheckpointSaverHook(
        tmp_path, save_steps=2, saver=SlowSaver(model, nth), listeners=[Listener()],
        background=background,
    )  # fmt: skip
    session = MonitoredSession([PreemptionHook(), saver], FunctionSessionCreator(model.step))
    with left_by_signal():
        async with session:
            for _ in range(3):
                if not session.should_stop():
                    await session.run([])
    assert session.should_stop()
    assert saved[-1] == model.count
    assert saved == sorted(set(saved))
    assert saved_counts(tmp_path) == {step: step for step in saved}


def fail() -> None:
    raise LookupError("broken")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_session_gets_a_signal_after_others_of_its_hook_have_ended(fails: bool) -> None:
    hook = PreemptionHook()
    other = At(end=fail) if fails else At()
    with left_by_signal():
        async with session_with(hook) as last:
            for _ in range(2):  # the second end counts as that of the last one
                with pytest.raises(LookupError) if fails else contextlib.nullcontext():
                    async with session_with(hook, other):
                        pass
            sigterm()
            with anyio.move_on_after(0.2):
                await train(last)
            assert last.should_stop()


async def test_overlapping_sessions_and_a_signal_that_is_given_twice_leave_no_handler_behind() -> (
    None
):
    twice = PreemptionHook([signal.SIGTERM, signal.SIGTERM])
    sessions = [session_with(), session_with(), session_with(twice)]
    with handlers_are_kept():
        for session in sessions:
            await session.__aenter__()
        for session in sessions:
            await session.close()


@pytest.mark.faults  # at its deadline the hook ends the process, so this one is generous
async def test_blocks_that_do_not_end_are_saved_after_half_of_the_time_each_as_of_its_own_step(
    tmp_path: Path,
) -> None:
    """Both blocks wait for another library; what is saved beside them lets them go on."""
    hook = PreemptionHook(deadline_secs=8.0)
    models = [Counter(), Counter()]
    sessions, release = list[MonitoredSession](), anyio.Event()

    async def work(number: int) -> None:
        model, directory = models[number], tmp_path / str(number)
        hooks = [hook, saving(directory, model)]
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            for _ in range(3 + 4 * number):
                await session.run([])
            sessions.append(session)
            await release.wait()

    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            group.start_soon(caught, work, 0)
            group.start_soon(caught, work, 1)
            while len(sessions) < 2:
                await anyio.lowlevel.checkpoint()
            sigterm()
            since = anyio.current_time()
            while len(saved_steps(tmp_path)) < 2:
                await anyio.lowlevel.checkpoint()
            assert 3.7 < anyio.current_time() - since < 8.0
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
    recovery = Recovery(first_pause_secs=60.0, longest_pause_secs=60.0)
    with left_by_signal():
        async with MonitoredSession([PreemptionHook()], creator, recovery=recovery) as session:

            async def signal_soon() -> None:
                await settle()  # until the pause
                sigterm()

            session.start_soon(signal_soon)
            with anyio.fail_after(30):
                await session.run([])


@pytest.mark.parametrize("secs", [math.inf, 1e10])
async def test_a_deadline_may_be_as_late_as_one_likes(
    secs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with left_by_signal():
        async with session_with(PreemptionHook(deadline_secs=secs)) as session:
            sigterm()
            await train(session)
    assert errors == []


async def test_one_hook_for_one_of_two_workers_lets_the_other_one_save(tmp_path: Path) -> None:
    """On asyncio and trio alike: the signal cancels the group while the other one still ends."""
    model = Counter()
    shared = SharedSessionCreator(FunctionSessionCreator(model.step), num_workers=2)
    log: list[tuple[str, str]] = []

    async def work(hooks: list[Any]) -> None:
        async with MonitoredSession(hooks, shared) as session:
            while not session.should_stop():
                await session.run([])
                if model.count == 20:
                    sigterm()
                await anyio.lowlevel.checkpoint()

    async def first(scope: anyio.CancelScope) -> None:
        try:
            await work([PreemptionHook(), At(end=first_ends.set)])
        except SystemExit:
            scope.cancel()  # as any task group does

    async def end_late() -> None:
        await first_ends.wait()
        await settle()  # until the first one waits, or has left

    first_ends = anyio.Event()
    hold = At(end=end_late)
    others = [
        hold, saving(tmp_path, model), RecordingHook("other", log), StopAtStepHook(last_step=999),
    ]  # fmt: skip
    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            group.start_soon(work, others)
            group.start_soon(first, group.cancel_scope)
    assert max(saved_counts(tmp_path)) == model.count


NUM_WORKERS = 8


class Workers:
    """Eight sessions that share one model, each in a task; some get hooks of their own."""

    def __init__(self, directory: Path) -> None:
        self.model = Counter()
        self.shared = SharedSessionCreator(FunctionSessionCreator(self.model.step), NUM_WORKERS)
        self.directory = directory
        self.sessions: list[MonitoredSession] = []
        self.moments = [At() for _ in range(NUM_WORKERS)]
        self.left: list[type[BaseException]] = []
        self.is_signalled = False
        self.num_open = 0

    async def work(self, number: int, hooks: list[Any]) -> None:
        hooks = [*hooks, self.moments[number]]
        if number == 3:
            hooks.append(saving(self.directory, self.model))
        session = MonitoredSession(hooks, self.shared)
        self.sessions.append(session)
        async with session:
            self.num_open += 1
            while not session.should_stop():
                # not before all are open; and a second signal would end the process
                is_time = self.num_open == NUM_WORKERS and self.model.count >= 40
                if is_time and not self.is_signalled:
                    self.is_signalled = True
                    sigterm()
                await session.run([])
                await anyio.lowlevel.checkpoint()

    async def work_caught(self, number: int, hooks: list[Any]) -> None:
        try:
            await self.work(number, hooks)
        except SystemExit as error:
            self.left.append(type(error))

    async def run(self, hooks: list[list[Any]]) -> None:
        """Train with these hooks of each; the signal leaves one of them."""
        with handlers_are_kept():
            async with anyio.create_task_group() as group:
                for number in range(NUM_WORKERS):
                    group.start_soon(self.work_caught, number, hooks[number])
        assert self.left == [SystemExit]
        assert [each.log[-1] for each in self.moments] == ["end"] * NUM_WORKERS
        for session in self.sessions:
            assert str(session.stop_reason) == "PreemptionHook: the process got SIGTERM"
        assert saved_counts(self.directory)[self.model.count] == self.model.count


async def test_one_hook_for_all_workers_ends_all_and_the_signal_leaves_the_last(
    tmp_path: Path,
) -> None:
    hook = PreemptionHook()
    await Workers(tmp_path).run([[hook]] * NUM_WORKERS)
    assert hook.received is signal.SIGTERM


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_a_hook_for_one_worker_stops_the_others_too(tmp_path: Path, place: int) -> None:
    hooks: list[list[Any]] = [[] for _ in range(NUM_WORKERS)]
    hooks[place] = [PreemptionHook()]
    await Workers(tmp_path).run(hooks)


async def test_a_worker_that_opens_after_the_signal_stops_at_once(tmp_path: Path) -> None:
    workers, hook = Workers(tmp_path), PreemptionHook()
    with left_by_signal():
        async with MonitoredSession([hook], workers.shared) as first:
            sigterm()
            async with MonitoredSession([hook], workers.shared) as second:
                assert second.should_stop()
            assert first.should_stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_leaves_a_task_group_is_the_loops_own_way(number: signal.Signals) -> None:
    """asyncio lets SystemExit and KeyboardInterrupt out of its loop; trio's groups wrap them."""
    kind = KeyboardInterrupt if number is signal.SIGINT else SystemExit

    async def main() -> None:
        hook, model = PreemptionHook(), Counter()
        shared = SharedSessionCreator(FunctionSessionCreator(model.step), NUM_WORKERS)

        async def work() -> None:
            async with MonitoredSession([hook], shared) as session:
                while not session.should_stop():
                    if model.count >= 40 and hook.received is None:
                        signal.raise_signal(number)
                    await session.run([])
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            for _ in range(NUM_WORKERS):
                group.start_soon(work)

    with left_by_signal(kind):
        anyio.run(main)
    with left_by_signal(BaseExceptionGroup) as caught:
        anyio.run(main, backend="trio")
    assert [type(each) for each in caught.value.exceptions] == [kind]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", ["asyncio.TaskGroup()", "anyio.create_task_group()"])
@pytest.mark.parametrize("is_uvloop", [False, True])
def test_a_signal_leaves_asyncios_task_groups_without_a_report_of_tasks(
    number: signal.Signals, group: str, is_uvloop: bool
) -> None:
    if is_uvloop:
        pytest.importorskip("uvloop")
    program = f"""
import asyncio, gc, signal, anyio
from asynchooks import FunctionSessionCreator, MonitoredSession, PreemptionHook

async def train():
    creator = FunctionSessionCreator(lambda: dict(loss=0.0))
    async with MonitoredSession([PreemptionHook()], creator) as session:
        signal.raise_signal({int(number)})
        await session.or_stop(anyio.sleep_forever)

async def main():
    async with {group} as group:
        start = getattr(group, "start_soon", None)
        for fn in (train, anyio.sleep_forever):
            start(fn) if start else group.create_task(fn())

try:
    anyio.run(main, backend_options=dict(use_uvloop={is_uvloop}))
except (SystemExit, KeyboardInterrupt) as left:
    print(type(left).__name__, *left.args)
gc.collect()
"""
    expected = "KeyboardInterrupt" if number is signal.SIGINT else f"SystemExit {128 + number}"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [expected]
    warning = f"{number.name}: training stops, and its hooks end"
    assert done.stderr.startswith(warning)
    assert len(done.stderr.splitlines()) == 1
