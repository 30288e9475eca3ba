"""The metric of a checkpoint is that of the run that made its step, whichever worker ran it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    FetchError,
    FunctionSessionCreator,
    GlobalStep,
    Mode,
    MonitoredSession,
    PreemptionError,
    RawSession,
    Recovery,
    Retention,
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.simulation import Simulation

from ..savers import metrics_of

pytestmark = pytest.mark.anyio
ALL = Retention(max_to_keep=None, keep_best=1)


class Model:
    """Weights of one number, the number of updates; the loss of an update is that number."""

    def __init__(self, loss_of: Callable[[float], float] = float) -> None:
        self.weights = {"w": np.zeros(1)}
        self._loss_of, self._lock = loss_of, threading.Lock()
        self._pauses = itertools.cycle((2, 0, 3, 1))

    @property
    def count(self) -> int:
        return int(self.weights["w"][0])

    def step(self) -> dict[str, Any]:
        with self._lock:
            self.weights["w"] += 1
            return {"loss": self._loss_of(self.count)}

    async def step_later(self) -> dict[str, Any]:
        for _ in range(next(self._pauses)):
            await anyio.lowlevel.checkpoint()
        return self.step()

    def step_in_two_phases(self) -> Any:
        return self.step_later()

    def step_that_counts(self) -> dict[str, Any]:
        return {**self.step(), "global_step": self.count}

    def saver_hook(self, path: Path, **options: Any) -> CheckpointSaverHook:
        options = {"save_steps": 1, "metric": "loss", "retention": ALL, **options}
        return CheckpointSaverHook(path, saver=StateDictSaver(weights=self.weights), **options)


class Notes(SessionRunHook):
    """Notes the loss of each step by the step that its run made."""

    def __init__(self, losses: dict[int, float]) -> None:
        self.losses = losses

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.losses[run_context.step] = run_values.results


async def run_workers(
    creator: SessionCreator, hooks: list[list[Any]], to: int, **options: Any
) -> None:
    """One worker for each list of hooks, until the step is there or training stops.

    The others run one step for each of the first worker, overlapping with it.
    """
    has_run = anyio.Event()  # the first worker, since the others looked

    async def lead(session: MonitoredSession) -> None:
        nonlocal has_run
        await session.run([])
        has_run.set()
        has_run = anyio.Event()

    async def follow(session: MonitoredSession) -> None:
        await session.run([])
        if not session.should_stop():
            await session.or_stop(has_run.wait)

    async def work(own: list[Any]) -> None:
        session = MonitoredSession([StopAtStepHook(last_step=to), *own], creator, **options)
        run = lead if own is hooks[0] else follow
        async with session:
            try:
                while not session.should_stop():
                    await run(session)
            finally:
                if run is lead:  # perhaps at the limit, which ends no wait of the others
                    has_run.set()

    async with anyio.create_task_group() as group:
        for own in hooks:
            group.start_soon(work, own)


def loss_in(path: str, model: Model) -> float:
    """The loss of the weights in a checkpoint."""
    weights = {"w": np.zeros(1)}
    StateDictSaver(weights=weights).restore(path)
    return model._loss_of(float(weights["w"][0]))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize(
    ("kind", "runner"),
    [
        ("step", "inline"), ("step", "thread"), ("step_later", "auto"),
        ("step_in_two_phases", "inline"), ("step_in_two_phases", "thread"),
        ("step_that_counts", "inline"), ("step_that_counts", "thread"),
    ],
)  # fmt: skip
async def test_a_checkpoint_has_the_metric_of_its_weights_with_any_number_of_workers(
    tmp_path: Path, kind: str, runner: Any, num_workers: int, background: bool
) -> None:
    model = Model()
    creator = SharedSessionCreator(FunctionSessionCreator(getattr(model, kind)))
    hooks: list[list[Any]] = [[] for _ in range(num_workers)]
    hooks[0].append(model.saver_hook(tmp_path, background=background))
    await run_workers(creator, hooks, 10 * num_workers, step_runner=runner)
    found = CheckpointDirectory(tmp_path).checkpoints()
    measured = [each for each in found if each.metric is not None]
    assert [each.metric for each in measured] == [loss_in(each.prefix, model) for each in measured]
    assert len(measured) >= max(2, len(found) - 1)  # the first may come before any run


@pytest.mark.parametrize("runner", ["thread", "auto"])
async def test_of_calls_that_overlap_in_threads_the_metric_is_that_of_the_run_of_the_step(
    tmp_path: Path, runner: Any
) -> None:
    model, losses = Model(), dict[int, float]()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step, thread_safe=True))
    hooks: list[list[Any]] = [[Notes(losses)] for _ in range(4)]
    hooks[0].append(model.saver_hook(tmp_path))
    await run_workers(creator, hooks, 20, step_runner=runner)
    found = metrics_of(tmp_path)
    metrics = {step: metric for step, metric in found.items() if metric is not None}
    assert metrics == {step: losses[step] for step in metrics}
    assert len(metrics) >= max(1, len(found) - 1)


async def test_a_saver_whose_worker_does_not_run_has_the_metrics_of_the_others(
    tmp_path: Path,
) -> None:
    model = Model()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    async with MonitoredSession([model.saver_hook(tmp_path, save_steps=100)], creator) as outer:
        async with MonitoredSession([], creator) as session:
            for _ in range(3):
                await session.run([])
        assert outer.global_step.value == 3
    assert metrics_of(tmp_path) == {0: None, 3: 3.0}


async def test_two_savers_rank_by_a_metric_of_their_own(tmp_path: Path) -> None:
    model = Model()

    async def step() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        loss = model.step()["loss"]
        return {"loss": loss, "error": -loss}

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    hooks = [
        [model.saver_hook(tmp_path / "a"), model.saver_hook(tmp_path / "b", metric="error")],
        [],
        [],
    ]
    await run_workers(creator, hooks, 20)
    for name, sign in (("a", 1), ("b", -1)):
        metrics = metrics_of(tmp_path / name)
        measured = {step: metric for step, metric in metrics.items() if metric is not None}
        assert measured == {step: sign * step for step in measured}
        assert len(measured) >= len(metrics) - 1


async def test_a_step_whose_outputs_lack_the_metric_is_saved_without_one(tmp_path: Path) -> None:
    model = Model()

    def step(bare: bool = False) -> dict[str, Any]:
        outputs = model.step()
        return {} if bare else outputs

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    saver = model.saver_hook(tmp_path, save_steps=100)
    async with MonitoredSession([saver], creator) as session:
        await session.run([])
        async with MonitoredSession([], creator) as other:
            await other.run([], {"bare": True})
    assert metrics_of(tmp_path) == {0: None, 2: None}


async def test_a_run_that_failed_after_its_step_leaves_no_metric_of_another_step(
    tmp_path: Path,
) -> None:
    model = Model()
    creator = FunctionSessionCreator(model.step)
    async with MonitoredSession([model.saver_hook(tmp_path, save_steps=100)], creator) as session:
        await session.run([])
        with pytest.raises(FetchError):
            await session.run("missing")
    assert model.count == 2
    assert metrics_of(tmp_path)[2] in (None, 2.0)


async def test_a_run_that_failed_before_its_step_changes_no_metric(tmp_path: Path) -> None:
    model = Model()

    def step(fails: bool = False) -> dict[str, Any]:
        if fails:
            raise ZeroDivisionError
        return model.step()

    creator = FunctionSessionCreator(step)
    async with MonitoredSession([model.saver_hook(tmp_path, save_steps=100)], creator) as session:
        await session.run([])
        with pytest.raises(ZeroDivisionError):
            await session.run([], {"fails": True})
    assert metrics_of(tmp_path) == {0: None, 1: 1.0}


async def test_a_cancelled_run_whose_step_was_made_gives_the_metric_of_its_step(
    tmp_path: Path,
) -> None:
    model, holds, may_end = Model(), threading.Event(), threading.Event()

    def step(held: bool = False) -> dict[str, Any]:
        if held:
            holds.set()
            may_end.wait(10)
        return model.step()

    creator = FunctionSessionCreator(step)
    saver = model.saver_hook(tmp_path, save_steps=100)
    async with MonitoredSession([saver], creator, step_runner="thread") as session:
        await session.run([])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, [], {"held": True})
                await anyio.to_thread.run_sync(holds.wait, 10)
                scope.cancel()
                may_end.set()
        assert session.global_step.value == 2
    assert metrics_of(tmp_path) == {0: None, 2: 2.0}


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_after_a_loss_no_checkpoint_has_a_metric_of_what_was_undone(
    tmp_path: Path, num_workers: int
) -> None:
    model, calls, is_lost = Model(), itertools.count(), False
    model.weights["loss"] = np.zeros(1)

    async def step() -> dict[str, Any]:
        nonlocal is_lost
        await anyio.lowlevel.checkpoint()
        if model.count == 7 and not is_lost:
            is_lost = True
            raise PreemptionError("the machine went away")
        model.step()
        model.weights["loss"][0] = next(calls)  # another one where a step is made again
        return {"loss": model.weights["loss"][0]}

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    hooks: list[list[Any]] = [[] for _ in range(num_workers)]
    hooks[0].append(model.saver_hook(tmp_path, save_steps=5))
    await run_workers(creator, hooks, 20, recovery=Recovery(first_pause_secs=0))
    assert is_lost
    found = CheckpointDirectory(tmp_path).checkpoints()
    for each in found:
        StateDictSaver(weights=model.weights).restore(each.prefix)
        assert each.metric in (None, model.weights["loss"][0])
    assert len([each for each in found if each.metric is not None]) >= 2


async def test_of_two_models_that_count_on_one_step_each_has_its_own_metric(
    tmp_path: Path,
) -> None:
    step, models = GlobalStep(), [Model(), Model(lambda count: -count)]
    sessions = [
        MonitoredSession(
            [model.saver_hook(tmp_path / str(i), save_steps=100)],
            FunctionSessionCreator(model.step, global_step=step),
        )
        for i, model in enumerate(models)
    ]
    async with sessions[0], sessions[1]:
        for session in sessions:
            await session.run([])
    assert metrics_of(tmp_path / "0")[2] is None
    assert metrics_of(tmp_path / "1")[2] == -1.0


async def test_a_metric_that_comes_to_a_step_twice_is_that_of_the_run_that_made_it(
    tmp_path: Path,
) -> None:
    """Of a function that accumulates gradients: only each third call moves the step."""
    model, calls = Model(), itertools.count(1)

    def step() -> dict[str, Any]:
        call = next(calls)
        if call % 3 == 1:
            model.step()
        return {"loss": float(call), "global_step": model.count}

    async with MonitoredSession(
        [model.saver_hook(tmp_path, save_steps=100)], FunctionSessionCreator(step)
    ) as session:
        for _ in range(5):
            await session.run([])
    assert metrics_of(tmp_path) == {0: None, 2: 4.0}


def valley(count: float) -> float:
    """A loss that is smallest after 20 updates."""
    return abs(float(count) - 20.0)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_the_weights_brought_back_are_those_of_best_and_best_step(
    tmp_path: Path, num_workers: int, background: bool
) -> None:
    model = Model(valley)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step_later))
    stopping = EarlyStoppingHook("loss", patience=5, restore_best=True)
    saver = model.saver_hook(tmp_path, background=background, retention=Retention(2, keep_best=1))
    hooks: list[list[Any]] = [[stopping, saver], *([] for _ in range(num_workers - 1))]
    await run_workers(creator, hooks, 400)
    assert model.count == stopping.best_step
    assert valley(model.count) == stopping.best
    kept = metrics_of(tmp_path)
    assert kept[model.count] == stopping.best == min(v for v in kept.values() if v is not None)


def test_four_workers_in_virtual_time_bring_back_what_they_call_best(tmp_path: Path) -> None:
    model = Model(valley)
    stopping = EarlyStoppingHook("loss", patience=5, restore_best=True)

    async def step() -> dict[str, Any]:
        await anyio.sleep(0.25)
        return model.step()

    async def main() -> None:
        creator = SharedSessionCreator(FunctionSessionCreator(step))
        saver = model.saver_hook(tmp_path, save_steps=1)
        await run_workers(creator, [[stopping, saver], [], [], []], 400)

    Simulation(seed=1).run(main)
    assert valley(model.count) == stopping.best
    assert model.count == stopping.best_step


@pytest.mark.parametrize("mode", list(Mode))
async def test_best_is_the_checkpoint_that_came_back_where_min_delta_made_it_no_improvement(
    tmp_path: Path, mode: Mode
) -> None:
    sign = 1.0 if mode is Mode.MIN else -1.0
    values = [5.0, 3.9, 3.5, 3.6, 3.7]
    model = Model(lambda count: sign * values[int(count) - 1])
    stopping = EarlyStoppingHook("loss", 3, min_delta=1.0, mode=mode, restore_best=True)
    saver = model.saver_hook(tmp_path, retention=Retention(1, keep_best=1, mode=mode))
    await run_workers(FunctionSessionCreator(model.step), [[stopping, saver]], 50)
    assert (stopping.best, stopping.best_step, model.count) == (sign * 3.5, 3, 3)


async def test_a_best_step_that_was_not_saved_is_not_called_best_after_the_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [5.0, 4.0, 1.0, 2.0, 3.0, 6.0, 7.0]
    model = Model(lambda count: values[int(count) - 1])
    stopping = EarlyStoppingHook("loss", 3, restore_best=True)
    saver = model.saver_hook(tmp_path, save_steps=2)
    async with MonitoredSession([stopping, saver], FunctionSessionCreator(model.step)) as session:
        while not session.should_stop():
            await session.run([])
    assert (stopping.best, stopping.best_step, model.count) == (2.0, 4, 4)
    assert "no better than 1 of step 3" in str(session.stop_reason)
    assert "the best one that was seen, 1 of step 3, is in no checkpoint" in caplog.text


class OwnBackend(RawSession):
    """A backend of the user's own, whose runs overlap in threads and meet in the middle."""

    def __init__(self, model: Model, num_runs: int) -> None:
        super().__init__()
        self.model, self.meeting = model, threading.Barrier(num_runs)

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, metadata: Any = None
    ) -> Any:
        loss = self.model.step()["loss"]
        self.meeting.wait(10)
        return [loss if each == "loss" else each for each in fetches]

    def read_step(self) -> int:
        return self.model.count

    def close(self) -> None:
        """Nothing to free."""


class OwnCreator(SessionCreator):
    def __init__(self, raw: RawSession) -> None:
        self.raw = raw

    def create_session(self) -> RawSession:
        return self.raw


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_on_a_backend_whose_step_is_read_after_the_run_only_a_run_alone_gives_a_metric(
    tmp_path: Path, num_workers: int
) -> None:
    model = Model()
    creator = SharedSessionCreator(OwnCreator(OwnBackend(model, num_workers)), num_workers)
    saver = model.saver_hook(tmp_path, save_steps=100, metric="loss")
    sessions = [MonitoredSession([saver], creator, step_runner="thread")]
    sessions += [MonitoredSession([], creator, step_runner="thread")] * (num_workers - 1)
    async with AsyncExitStack() as stack:
        for session in sessions:
            await stack.enter_async_context(session)
        async with anyio.create_task_group() as group:
            for session in sessions:
                group.start_soon(session.run, [])
        assert sessions[0].global_step.value == num_workers
        for session in reversed(sessions):
            await session.close()
    assert metrics_of(tmp_path) == {0: None, num_workers: 1.0 if num_workers == 1 else None}
