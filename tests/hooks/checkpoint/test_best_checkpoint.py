"""Which checkpoint is the best by a metric of evaluations: one whose weights were evaluated."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    MonitoredSession,
    Retention,
)

from ...support.faults import covering
from ..evaluations import Gated
from ..preemptions import Counter, saved_counts, saving
from ..savers import metrics_of, until
from ..training import run_to

KEEP_ALL = Retention(max_to_keep=None, keep_best=1)
NOT_THERE = "is not among the best checkpoints"
BOTH_ORDERS = pytest.mark.parametrize("order", [1, -1])


def distance(count: int) -> float:
    """A loss that is smallest after ten steps."""
    return float(abs(count - 10))


class Rig:
    """A counter whose loss is evaluated every few steps, and saved every few others.

    Args:
        odd: by step, a result or an error that is not the distance.
        options: of the saver hook.
    """

    def __init__(
        self, path: Path, every: int, save_steps: int, *, patience: int = 3, at_end: bool = False,
        mode: Evaluate = Evaluate.EXCLUSIVE, odd: Mapping[int, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.path, self.odd = path, odd or {}
        self.model = Counter()
        self.seen: list[int] = []
        self.evaluation = EvaluationHook(
            self.evaluate, every_n_steps=every, mode=mode, at_end=at_end
        )
        by = self.evaluation.metric("loss")
        options = {"retention": Retention(max_to_keep=1, keep_best=1), **options}
        saver = saving(path, self.model, save_steps, metric=by, **options)
        self.stopping = EarlyStoppingHook(by, patience=patience, restore_best=True)
        self.hooks: list[Any] = [self.evaluation, self.stopping, saver]

    def session(self, order: int = 1) -> MonitoredSession:
        """With the hooks in this order: as they stand, or with -1 the other way round."""
        return MonitoredSession(self.hooks[::order], self.model.step)

    async def evaluate(self, session: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        self.seen.append(self.model.count)
        loss = self.odd.get(step, distance(step))
        if isinstance(loss, Exception):
            raise loss
        return {"loss": loss}

    async def train(self, at_most: int = 100, order: int = 1) -> dict[int, float | None]:
        """Train, and return the metrics of what is saved."""
        async with self.session(order) as session:
            while not session.should_stop() and self.model.count < at_most:
                await session.run([])
        return metrics_of(self.path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("steps", "order", "background"),
    covering(
        [(5, 5), (5, 3), (5, 100), (2, 7), (1, 4), (5, 1), (10, 3)],
        [(0, 1, 2), (2, 1, 0), (1, 2, 0)],
        [False, True],
    ),
)
async def test_the_best_weights_that_were_evaluated_are_brought_back(
    tmp_path: Path, steps: tuple[int, int], order: tuple[int, ...], background: bool
) -> None:
    rig = Rig(tmp_path, *steps, background=background)
    rig.hooks = [rig.hooks[place] for place in order]
    assert (await rig.train())[10] == 0.0
    assert (rig.model.count, rig.stopping.best_step) == (10, 10)
    assert rig.seen[-1] == 10 + 3 * steps[0], "it stopped there"


@pytest.mark.parametrize("place", [0, 3])
async def test_any_last_evaluation_is_of_the_last_step_and_not_of_the_best(
    tmp_path: Path, place: int
) -> None:
    rig, counts = Rig(tmp_path, 5, 5), dict[int, int]()

    def count(session: Any, step: int) -> dict[str, float]:
        counts[step] = rig.model.count
        return {}

    rig.hooks.insert(place, EvaluationHook(count, every_n_steps=7, name="other"))
    await rig.train()
    assert rig.model.count == 10
    assert counts == {7: 7, 14: 14, 21: 21, 25: 25}


@BOTH_ORDERS
async def test_a_checkpoint_has_the_metric_of_its_own_step_or_none_and_the_final_one_of_the_end(
    tmp_path: Path, order: int
) -> None:
    rig = Rig(tmp_path, 4, 3, patience=100, at_end=True, retention=KEEP_ALL)
    expected = {0: None, 3: None, 6: None, 9: None, 12: 2.0, 4: 6.0, 8: 2.0, 14: 4.0}
    assert await rig.train(at_most=14, order=order) == expected
    assert rig.seen == [4, 8, 12, 14]
    assert all(count == step for step, count in saved_counts(tmp_path).items())


async def test_a_resumed_training_knows_the_best_of_the_one_before(tmp_path: Path) -> None:
    assert await Rig(tmp_path, 5, 3).train(at_most=15) == {10: 0.0, 15: 5.0}
    assert await Rig(tmp_path, 5, 3, patience=100).train(at_most=19) == {10: 0.0, 19: None}


async def test_a_final_evaluation_that_fails_keeps_no_final_checkpoint_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4, 3, at_end=True, odd={10: ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        await rig.train(at_most=10, order=-1)
    assert set(saved_counts(tmp_path)) == {8, 10}


class BesideRig(Rig):
    """As that, but an evaluation ends when it is let, some steps later."""

    def __init__(self, path: Path, every: int, save_steps: int, **options: Any) -> None:
        options = {"retention": Retention(max_to_keep=2, keep_best=1), **options}
        super().__init__(path, every, save_steps, mode=Evaluate.CONCURRENT, **options)
        self.hooks.remove(self.stopping)
        self.gated = Gated()

    async def evaluate(self, session: Any, step: int) -> dict[str, float]:
        await self.gated(session, step)
        return await super().evaluate(session, step)


@pytest.mark.parametrize(("order", "background"), [(1, True), (-1, False)])
async def test_a_checkpoint_gets_its_metric_when_the_evaluation_beside_training_ends(
    tmp_path: Path, background: bool, order: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = BesideRig(tmp_path, 5, 5, background=background)
    async with rig.session(order) as run:
        for step in (5, 10, 15, 20):
            await run_to(run, step)
            await rig.gated.wait_for_begun(step)
            assert metrics_of(tmp_path).get(step) is None
            await run_to(run, step + 2)
            rig.gated.let(step)
            # private: before that the next one does not begin, and no public name says it
            await until(lambda: not rig.evaluation._concurrent.is_running)
            assert metrics_of(tmp_path).get(step) == distance(step)
    assert metrics_of(tmp_path) == {10: 0.0, 20: 10.0, 22: None}
    assert NOT_THERE not in caplog.text


@BOTH_ORDERS
async def test_what_is_evaluated_at_the_end_beside_training_ranks_the_final_checkpoint(
    tmp_path: Path, order: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = BesideRig(tmp_path, 5, 5, at_end=True)
    async with anyio.create_task_group() as group, rig.session(order) as session:
        await run_to(session, 7)
        rig.gated.let(5)
        group.start_soon(rig.gated.let_when_begun, 7)
    assert metrics_of(tmp_path) == {5: 5.0, 7: 3.0}
    assert NOT_THERE not in caplog.text


@pytest.mark.parametrize("save_steps", [3, 5])
async def test_an_evaluation_beside_training_of_what_is_not_there_is_said_in_the_log(
    tmp_path: Path, save_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = BesideRig(tmp_path, 5, save_steps, retention=Retention(max_to_keep=1, keep_best=1))
    async with rig.session() as session:
        await run_to(session, 14)
        rig.gated.let(5)
        await until(lambda: f"Step 5 {NOT_THERE}" in caplog.text)
    assert metrics_of(tmp_path) == {14: None}


@pytest.mark.parametrize(("order", "background"), [(1, False), (-1, True)])
async def test_an_evaluation_that_gives_nan_costs_no_checkpoint(
    tmp_path: Path, order: int, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"retention": KEEP_ALL, "background": background}
    rig = Rig(tmp_path, 4, 8, at_end=True, odd=dict.fromkeys((8, 12), math.nan), **options)
    rig.hooks.remove(rig.stopping)
    metrics = await rig.train(at_most=12, order=order)
    assert metrics == {0: None, 4: 6.0, 8: None, 12: None}
    assert saved_counts(tmp_path) == {step: step for step in metrics}
    assert ["is NaN at step 8" in each for each in caplog.messages if "NaN" in each] == [True]
