"""PreemptionHook: its sessions, moments, saves and workers, when a stop is asked for."""

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    PreemptionError,
    PreemptionHook,
    Recovery,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.simulation import current_simulation
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ...support.helpers import settle
from ...support.moments import at
from ..preemptions import (
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
from ..savers import BACKGROUND
from ..virtual_time import pause, simulate


@pytest.mark.parametrize(
    ("moment", "count"),
    [("begin", 0), ("after_create_session", 0), ("before_run", 1), ("after_run", 1), ("end", 2)],
)
@pytest.mark.parametrize("is_signal", [True, False])
async def test_a_stop_at_any_moment_of_another_hook_ends_training_and_saves(
    tmp_path: Path, moment: str, count: int, is_signal: bool
) -> None:
    async def stop(*_: object) -> None:
        (sigterm if is_signal else hook.preempt)()
        await settle()

    model, hook, ended = Counter(), PreemptionHook(), RecordingHook("ended")
    others = [at(**{moment: stop}), ended]
    hooks = [hook, saving(tmp_path, model), *others, StopAtStepHook(last_step=2)]
    with left_by_signal() if is_signal else handlers_are_kept():
        async with MonitoredSession(hooks, model.step) as session:
            await train(session)
    assert (hook.is_preempted, model.count) == (True, count)
    assert saved_counts(tmp_path) == {0: 0, count: count}
    assert ended.log[-1] == ("ended", "end")


@pytest.mark.parametrize("moment", ["step", "creation", "pause"])
async def test_a_session_that_is_lost_about_a_signal_runs_no_further_step(moment: str) -> None:
    class Lost(ScriptedSession):
        def run(self, *args: Any, **options: Any) -> Any:
            if moment == "step":
                sigterm()
            raise PreemptionError("lost")

    class Creator(ScriptedSessionCreator):
        def create_session(self) -> Any:
            if moment == "creation" and lost.is_closed:
                sigterm()
            return super().create_session()

    async def signal_in_the_pause() -> None:
        await settle()
        sigterm()

    lost, new = Lost(), ScriptedSession()
    away = [PreemptionError("still away")] * (moment == "pause")
    recovery = Recovery(first_pause_secs=3600, longest_pause_secs=3600)
    with left_by_signal(), anyio.fail_after(30):
        async with MonitoredSession(
            [PreemptionHook()], Creator([lost, *away, new]), recovery=recovery
        ) as session:
            if moment == "pause":
                session.start_soon(signal_in_the_pause)
            with pytest.raises(StopTraining, match="by PreemptionHook"):
                await session.run([])
    assert new.num_runs == 0


@pytest.mark.parametrize("runner", ["thread", "inline"])
async def test_a_step_that_blocks_completes_and_is_saved(tmp_path: Path, runner: Any) -> None:
    model = Counter()

    def step() -> dict[str, int]:
        if model.count == 2:
            signal_main()
        return model.step()

    hooks = [PreemptionHook(), saving(tmp_path, model)]
    with left_by_signal():
        async with MonitoredSession(hooks, step, step_runner=runner) as session:
            await train(session)
    assert model.count >= 3, "a further step may begin before the hook's task has had its turn"
    assert saved_counts(tmp_path) == {0: 0, model.count: model.count}


@BACKGROUND
@pytest.mark.parametrize("nth", [1, 2, 3])  # at the start, in a run, at the end
async def test_a_signal_during_a_save_loses_neither_it_nor_a_later_one(
    tmp_path: Path, nth: int, background: bool
) -> None:
    def save(path: str) -> None:
        saved.append(path)
        if len(saved) == nth:
            signal_main()
        saver.save(path)

    model, saved = Counter(), list[str]()
    saver = StateDictSaver(model=model)
    signals: Any = SimpleNamespace(save=save, restore=saver.restore)
    saves = CheckpointSaverHook(tmp_path, save_steps=2, saver=signals, background=background)
    with left_by_signal():
        async with MonitoredSession([PreemptionHook(), saves], model.step) as session:
            for _ in range(3):
                if not session.should_stop():
                    await session.run([])
    counts = saved_counts(tmp_path)
    assert max(counts) == model.count
    assert all(step == count for step, count in counts.items())
    assert len(counts) == len(saved)


@pytest.mark.parametrize("is_signal", [True, False])
def test_blocks_that_do_not_end_are_saved_after_half_of_the_time_each_as_of_its_own_step(
    tmp_path: Path, is_signal: bool
) -> None:
    """Both blocks wait for another library; what is saved beside them lets them go on."""
    hook = PreemptionHook(deadline_secs=8.0)

    async def work(number: int) -> None:
        model = Counter()
        hooks = [hook, saving(tmp_path / str(number), model)]
        with suppress(SystemExit):
            async with MonitoredSession(hooks, model.step, step_runner="inline") as session:
                for _ in range(number):
                    await session.run([])
                await pause(6.0)

    def saved() -> list[bool]:
        return [(tmp_path / f"{number}/model.ckpt-{number}").exists() for number in (3, 7)]

    async def main() -> None:
        tasks = [current_simulation().start(work, number) for number in (3, 7)]
        await pause(1.0)
        (sigterm if is_signal else hook.preempt)()
        await pause(3.9)
        assert saved() == [False, False]
        await pause(0.2)
        assert saved() == [True, True]
        for task in tasks:
            await task.wait()

    with handlers_are_kept():
        simulate(main)


@pytest.mark.parametrize("secs", [math.inf, 1e10])
async def test_a_deadline_may_be_as_late_as_one_likes(secs: float) -> None:
    with left_by_signal():
        async with session_with(PreemptionHook(deadline_secs=secs)) as session:
            sigterm()
            await train(session)


@pytest.mark.parametrize("has_hook", ["yyy", "ynn", "nyn", "nny"])
async def test_the_signal_leaves_the_last_worker_with_the_hook_when_all_have_ended(
    tmp_path: Path, has_hook: str
) -> None:
    """Three workers share one model, which the second one saves; the signal cancels the others."""

    async def end(session: object) -> None:
        await settle()
        ended.append(session)

    model, hook, left, ended = Counter(), PreemptionHook(), list[int](), list[object]()
    shared, sessions = SharedSessionCreator(model.step, 3), list[MonitoredSession]()

    async def work(place: int) -> None:
        hooks = [hook] * (has_hook[place] == "y") + [at(end=end)]
        hooks += [saving(tmp_path, model)] * (place == 1)
        try:
            async with MonitoredSession(hooks, shared) as session:
                sessions.append(session)
                while not session.should_stop():
                    if model.count >= 20 and len(sessions) == 3 and hook.received is None:
                        sigterm()
                    await session.run([])
                    await anyio.lowlevel.checkpoint()
        except SystemExit:
            left.append(place)
            group.cancel_scope.cancel()  # as any task group does

    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            for place in range(3):
                group.start_soon(work, place)
    assert [has_hook[place] for place in left] == ["y"]
    assert len(ended) == 3
    reasons = {str(session.stop_reason) for session in sessions}
    assert reasons == {"PreemptionHook: the process got SIGTERM"}
    assert saved_counts(tmp_path)[model.count] == model.count
