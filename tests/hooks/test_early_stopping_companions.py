"""EarlyStoppingHook with other hooks and workers: what opening refuses, and what must wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    EvaluationHook,
    FunctionSessionCreator,
    Mode,
    MonitoredSession,
    Retention,
    SharedSessionCreator,
)

from ..support.helpers import settle
from .preemptions import saving
from .savers import Cell, CopyingSaver, Latch, until
from .test_early_stopping import Losses, train

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_saver_must_keep_the_best_by_the_same_mode(mode: Mode, tmp_path: Path) -> None:
    other = Mode.MIN if mode is Mode.MAX else Mode.MAX
    for kept in (other, mode):
        model = Losses(1, 3, 2, 2)
        retention = Retention(keep_best=1, mode=kept)
        path = tmp_path / kept.value
        saver = saving(path, model, 1, retention=retention, metric="loss")
        hook = EarlyStoppingHook("loss", patience=2, mode=mode, restore_best=True)
        if kept is mode:
            await train(model, saver, hook)
            assert model.count == hook.best_step
            continue
        message = (
            rf"EarlyStoppingHook\(mode={mode}, restore_best=True\) got a CheckpointSaverHook that "
            rf"keeps the best by {kept}, expected {mode}: .*; give both the same mode"
        )
        with pytest.raises(ValueError, match=message):
            await train(model, saver, hook)


async def test_modes_may_differ_where_nothing_is_brought_back(tmp_path: Path) -> None:
    model = Losses(1, 3, 2, 2)
    saver = saving(tmp_path, model, 1, retention=Retention(keep_best=1), metric="loss")
    await train(model, saver, EarlyStoppingHook("loss", patience=2, mode=Mode.MAX))


async def test_a_metric_of_an_evaluation_that_never_takes_place_is_refused() -> None:
    evaluation = EvaluationHook(lambda session, step: {"loss": 0.5}, every_n_steps=1)
    hook = EarlyStoppingHook(evaluation.metric("loss"), patience=1)
    message = (
        "EarlyStoppingHook decides by a metric of an EvaluationHook that is none of the session's "
        r"hooks, so it would never be taken; add it: MonitoredSession\(\["
    )
    with pytest.raises(RuntimeError, match=message):
        await train(Losses(1), hook)
    await train(Losses(1), hook, evaluation)


class Slow(Cell):
    """A cell whose second worker's steps take as long as the latch is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.latch = Latch()

    def step(self, is_other: bool = False) -> dict[str, float]:
        if is_other:
            self.latch.pass_by()
        return {**super().step(), "loss": 1.0 if self.value == 1 else 2.0}


async def test_the_best_is_brought_back_while_no_worker_runs_a_step(tmp_path: Path) -> None:
    cell = Slow()
    saver = CopyingSaver(cell)
    hooks: list[Any] = [
        CheckpointSaverHook(
            tmp_path, save_steps=1, saver=saver, retention=Retention(keep_best=1), metric="loss"
        ),
        EarlyStoppingHook("loss", patience=1, restore_best=True),
    ]
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step), num_workers=2)
    async with MonitoredSession([], shared, step_runner="thread") as other:
        async with anyio.create_task_group() as group:
            async with MonitoredSession(hooks, shared) as session:
                while not session.should_stop():
                    await session.run([])
                cell.latch.close()
                group.start_soon(other.run, [], {"is_other": True})
                await cell.latch.wait_for_arrival()
                group.start_soon(session.close)
                await until(lambda: other.global_step.statistics().tasks_waiting_for_ticket == 1)
                await settle()
                assert (cell.value, [line for line in saver.log if "restore" in line]) == (2, [])
                cell.latch.open()
        assert (saver.log[-1], cell.value) == ("restore 1", 1)
