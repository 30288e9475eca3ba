"""The metric of a checkpoint is that of the run that made its step, whichever worker ran it."""

import itertools
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    Retention,
    SessionRunArgs,
    SessionRunContext,
    SessionRunValues,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    StopTraining,
)

from ...support.moments import HeldStep, at, together, train
from ..savers import metrics_of
from ..training import run_session

ALL = Retention(max_to_keep=None, keep_best=1)


class Model:
    """The number of updates, and the loss of the last one, which is the number of that call."""

    def __init__(self) -> None:
        self.weights = {"w": np.zeros(1), "loss": np.zeros(1)}
        self._lock, self._calls = threading.Lock(), itertools.count(1)

    @property
    def count(self) -> int:
        return int(self.weights["w"][0])

    def step(self) -> dict[str, Any]:
        with self._lock:
            self.weights["w"] += 1
            loss = float(next(self._calls))
            self.weights["loss"][:] = loss
            return {"loss": loss, "minus": -loss}

    async def step_later(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return self.step()

    def step_in_two_phases(self) -> Any:
        return self.step_later()

    def step_that_counts(self) -> dict[str, Any]:
        return {**self.step(), "global_step": self.count}

    def saver_hook(self, path: Path, save_steps: int = 100, **options: Any) -> CheckpointSaverHook:
        options = {"metric": "loss", "retention": ALL, **options}
        saver = StateDictSaver(weights=self.weights)
        return CheckpointSaverHook(path, save_steps=save_steps, saver=saver, **options)


@pytest.mark.parametrize(
    ("kind", "runner", "num_workers", "background"),
    [
        ("step", "inline", 1, True), ("step", "inline", 4, False), ("step", "thread", 4, True),
        ("step_later", "auto", 4, False), ("step_in_two_phases", "inline", 4, True),
        ("step_in_two_phases", "thread", 4, False), ("step_that_counts", "inline", 4, False),
        ("step_that_counts", "thread", 4, True),
    ],
)  # fmt: skip
async def test_a_checkpoint_has_the_metric_of_the_run_of_its_step_with_any_number_of_workers(
    tmp_path: Path, kind: str, runner: Any, num_workers: int, background: bool
) -> None:
    """Each of two savers ranks by one of its own; calls in threads overlap."""

    def note(run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        losses[run_context.step] = run_values.results

    def session(*savers: Any) -> MonitoredSession:
        hooks = [StopAtStepHook(last_step=5 * num_workers), notes, *savers]
        return MonitoredSession(hooks, creator, step_runner=runner)

    async def work() -> None:
        async with session() as other:
            await train(other)

    model, losses = Model(), dict[int, float]()
    notes = at(before_run=lambda run_context: SessionRunArgs("loss"), after_run=note)
    is_thread_safe = runner == "thread" and kind == "step"
    step = FunctionSessionCreator(getattr(model, kind), thread_safe=is_thread_safe)
    creator = SharedSessionCreator(step)
    signs = {"loss": 1, "minus": -1}
    savers = [
        model.saver_hook(tmp_path / metric, 1, background=background, metric=metric)
        for metric in signs
    ]

    async def lead() -> None:
        with suppress(StopTraining):  # else it would cancel the others in their last run
            await train(first)

    async with session(*savers) as first:
        await together(lead, *[work] * (num_workers - 1))
    for metric, sign in signs.items():
        metrics = metrics_of(tmp_path / metric)
        known = {step: value for step, value in metrics.items() if value is not None}
        assert known == {step: sign * losses[step] for step in known}
        assert len(known) >= len(metrics) - 1 > 0, "the first may come before any run"


@pytest.mark.parametrize(
    ("feed", "metrics"),
    [
        ({}, {0: None, 2: 2.0}),
        ({"is_bare": True}, {0: None, 2: None}),  # the step has no such output
        ({"fails": True}, {0: None, 1: 1.0}),
    ],
)
async def test_a_saver_whose_worker_does_not_run_has_the_metric_of_the_last_run_that_made_a_step(
    feed: dict[str, bool], metrics: dict[int, Any], tmp_path: Path
) -> None:
    model = Model()

    def step(is_bare: bool = False, fails: bool = False) -> dict[str, Any]:
        if fails:
            raise ZeroDivisionError
        outputs = model.step()
        return {} if is_bare else outputs

    creator = SharedSessionCreator(step)
    async with MonitoredSession([model.saver_hook(tmp_path)], creator):
        async with MonitoredSession([], creator) as other:
            await other.run([])
            with suppress(ZeroDivisionError):
                await other.run([], feed)
    assert metrics_of(tmp_path) == metrics


async def test_a_cancelled_run_whose_step_was_made_gives_the_metric_of_its_step(
    tmp_path: Path,
) -> None:
    model = Model()
    saver, step = model.saver_hook(tmp_path), HeldStep(model.step)
    async with MonitoredSession([saver], step, step_runner="thread") as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await step.has_begun()
            group.cancel_scope.cancel()
            step.may_end.set()
        assert session.global_step.value == 1
    assert metrics_of(tmp_path) == {0: None, 1: 1.0}


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

    await run_session([model.saver_hook(tmp_path)], step, runs=5)
    assert metrics_of(tmp_path) == {0: None, 2: 4.0}
