"""Which checkpoint is the best by a metric of evaluations: one whose weights were evaluated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    Mode,
    MonitoredSession,
    Retention,
    SharedSessionCreator,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..evaluations import Gated
from ..preemptions import Counter, saved_counts, saving
from ..savers import metrics_of, until
from ..training import run_to

pytestmark = pytest.mark.anyio
BEST = Retention(max_to_keep=1, keep_best=1)


def distance(count: int, target: int = 10) -> float:
    """A loss that is smallest after ten steps."""
    return float(abs(count - target))


class Rig:
    """A counter whose loss is evaluated every few steps, and saved every few others."""

    def __init__(
        self, path: Path, every: int, save_steps: int, *, patience: int = 3, at_end: bool = False,
        mode: Evaluate = Evaluate.EXCLUSIVE, **options: Any,
    ) -> None:  # fmt: skip
        self.model = Counter()
        self.seen: list[int] = []
        self.evaluation = EvaluationHook(
            self.evaluate, every_n_steps=every, mode=mode, at_end=at_end
        )
        by = self.evaluation.metric("loss")
        options = {"retention": BEST, **options}
        self.saver = saving(path, self.model, save_steps, metric=by, **options)
        self.stopping = EarlyStoppingHook(by, patience=patience, restore_best=True)
        self.hooks: list[Any] = [self.evaluation, self.stopping, self.saver]

    def session(self, order: int = 1) -> MonitoredSession:
        """With the hooks in this order: as they stand, or with -1 the other way round."""
        return MonitoredSession(self.hooks[::order], FunctionSessionCreator(self.model.step))

    async def evaluate(self, session: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        self.seen.append(self.model.count)
        return {"loss": distance(self.model.count)}

    async def train(self, at_most: int = 100, order: int = 1) -> MonitoredSession:
        async with self.session(order) as session:
            while not session.should_stop() and self.model.count < at_most:
                await session.run([])
        return session


@pytest.mark.exhaustive
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize(
    ("every", "save_steps"), [(5, 5), (5, 3), (5, 100), (2, 7), (1, 4), (5, 1), (10, 3)]
)
async def test_the_best_weights_that_were_evaluated_are_brought_back(
    tmp_path: Path, every: int, save_steps: int, order: list[int], background: bool
) -> None:
    rig = Rig(tmp_path, every, save_steps, background=background)
    rig.hooks = [rig.hooks[place] for place in order]
    session = await rig.train()
    assert "no better than 0 of step 10 for 3 looks" in str(session.stop_reason)
    assert session.global_step.value == 10 + 3 * every
    assert rig.model.count == 10
    assert metrics_of(tmp_path)[10] == 0.0


@pytest.mark.parametrize("place", range(4))
async def test_any_last_evaluation_is_of_the_last_step_and_not_of_the_best(
    tmp_path: Path, place: int
) -> None:
    rig, counts = Rig(tmp_path, 5, 5), dict[int, int]()

    async def count(session: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        counts[step] = rig.model.count
        return {"count": rig.model.count}

    other = EvaluationHook(count, every_n_steps=7, mode=Evaluate.EXCLUSIVE, name="other")
    rig.hooks.insert(place, other)
    await rig.train()
    assert rig.model.count == 10
    assert counts == {7: 7, 14: 14, 21: 21, 25: 25}


async def test_a_checkpoint_has_the_metric_of_its_own_step_or_none(tmp_path: Path) -> None:
    keep_all = Retention(max_to_keep=None, keep_best=1)
    rig = Rig(tmp_path, 4, 3, patience=100, retention=keep_all)
    await rig.train(at_most=14)
    expected = {0: None, 3: None, 6: None, 9: None, 12: 2.0, 4: 6.0, 8: 2.0, 14: None}
    assert metrics_of(tmp_path) == expected
    assert all(count == step for step, count in saved_counts(tmp_path).items())


async def test_as_many_as_stay_are_saved(tmp_path: Path) -> None:
    retention = Retention(max_to_keep=1, keep_best=3, mode=Mode.MIN)
    rig = Rig(tmp_path, 2, 1000, patience=100, retention=retention)
    await rig.train(at_most=20)
    assert metrics_of(tmp_path) == {8: 2.0, 10: 0.0, 12: 2.0, 20: 10.0}


async def test_a_resumed_training_knows_the_best_of_the_one_before(tmp_path: Path) -> None:
    await Rig(tmp_path, 5, 3).train(at_most=18)
    assert metrics_of(tmp_path) == {10: 0.0, 18: None}
    rig = Rig(tmp_path, 5, 3, patience=100)
    await rig.train(at_most=32)
    assert metrics_of(tmp_path) == {10: 0.0, 32: None}


@pytest.mark.parametrize("order", [1, -1])
async def test_the_final_checkpoint_has_the_metric_of_the_final_evaluation(
    tmp_path: Path, order: int
) -> None:
    rig = Rig(tmp_path, 4, 3, at_end=True)
    await rig.train(at_most=10, order=order)
    assert rig.seen == [4, 8, 10]
    assert metrics_of(tmp_path) == {10: 0.0}


async def test_a_final_evaluation_that_fails_keeps_no_final_checkpoint_back(tmp_path: Path) -> None:
    class Fails(Rig):
        async def evaluate(self, session: Any, step: int) -> dict[str, float]:
            if step == 10:
                raise ZeroDivisionError("no examples")
            return await super().evaluate(session, step)

    rig = Fails(tmp_path, 4, 3, at_end=True)
    with pytest.raises(ZeroDivisionError, match="no examples"):
        await rig.train(at_most=10, order=-1)
    assert set(saved_counts(tmp_path)) == {8, 10}


@pytest.mark.parametrize("background", [False, True])
async def test_other_workers_move_nothing_between_an_evaluation_and_its_save(
    tmp_path: Path, background: bool
) -> None:
    rig = Rig(tmp_path, 3, 50, background=background)

    async def step() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return rig.model.step()

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def work() -> None:
        async with MonitoredSession([], creator) as session:
            while not session.should_stop():
                await session.run([])

    with anyio.fail_after(60):
        async with MonitoredSession(rig.hooks, creator) as session:
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(work)
                while not session.should_stop():
                    await session.run([])
    best = rig.model.count  # where other workers run decides which of equals was saved
    assert best in rig.seen
    assert distance(best) == min(map(distance, rig.seen))
    assert metrics_of(tmp_path)[best] == distance(best)


class BesideRig(Rig):
    """As that, but an evaluation ends when it is let, some steps later."""

    def __init__(self, path: Path, every: int, save_steps: int, **options: Any) -> None:
        options = {"retention": Retention(max_to_keep=2, keep_best=1), **options}
        super().__init__(path, every, save_steps, mode=Evaluate.CONCURRENT, **options)
        self.hooks.remove(self.stopping)
        self.gated = Gated()

    async def evaluate(self, session: Any, step: int) -> dict[str, float]:
        await self.gated(session, step)
        return {"loss": distance(step)}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("order", [1, -1])
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
            await until(lambda: not rig.hooks[0]._concurrent.is_running)
            assert metrics_of(tmp_path)[step] == distance(step)
    assert metrics_of(tmp_path) == {10: 0.0, 20: 10.0, 22: None}
    assert "is not among the best" not in caplog.text
    opened = CheckpointDirectory(tmp_path)
    opened.open()
    assert (best := opened.best()) is not None
    assert best.step == 10
    opened.close()


@pytest.mark.parametrize("order", [1, -1])
async def test_what_is_evaluated_at_the_end_beside_training_ranks_the_final_checkpoint(
    tmp_path: Path, order: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = BesideRig(tmp_path, 5, 5, at_end=True)
    async with anyio.create_task_group() as group, rig.session(order) as session:
        await run_to(session, 7)
        rig.gated.let(5)
        group.start_soon(rig.gated.let_when_begun, 7)
    assert metrics_of(tmp_path) == {5: 5.0, 7: 3.0}
    assert "is not among the best" not in caplog.text


@pytest.mark.parametrize(("every", "save_steps"), [(5, 3), (5, 5)])
async def test_an_evaluation_beside_training_of_what_is_not_there_is_said_in_the_log(
    tmp_path: Path, every: int, save_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = BesideRig(tmp_path, every, save_steps, retention=Retention(max_to_keep=1, keep_best=1))
    async with rig.session() as session:
        await run_to(session, 14)
        rig.gated.let(5)
        await until(lambda: "Step 5 is not among the best checkpoints" in caplog.text)
    assert "mode=Evaluate.EXCLUSIVE" in caplog.text
    assert metrics_of(tmp_path) == {14: None}


async def test_an_evaluation_beside_training_that_ends_at_once_is_saved_with_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AtOnce(BesideRig):
        async def evaluate(self, session: Any, step: int) -> dict[str, float]:
            return {"loss": distance(step)}

    rig = AtOnce(tmp_path, 5, 100)
    creator = FunctionSessionCreator(rig.model.step)
    async with MonitoredSession(rig.hooks, creator, step_runner="inline") as session:
        for step in (5, 10, 15):
            await run_to(session, step)
            await until(lambda: not rig.hooks[0]._concurrent.is_running)
        await run_to(session, 17)
    assert metrics_of(tmp_path) == {10: 0.0, 17: None}
    assert "is not among the best" not in caplog.text


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("order", [1, -1])
async def test_an_evaluation_that_gives_nan_costs_no_checkpoint(
    tmp_path: Path, order: int, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class SometimesNan(Rig):
        async def evaluate(self, session: Any, step: int) -> dict[str, float]:
            results = await super().evaluate(session, step)
            return {"loss": math.nan} if step in (8, 12) else results

    keep_all = Retention(max_to_keep=None, keep_best=1)
    rig = SometimesNan(tmp_path, 4, 8, at_end=True, retention=keep_all, background=background)
    rig.hooks.remove(rig.stopping)
    await rig.train(at_most=12, order=order)
    assert metrics_of(tmp_path) == {0: None, 4: 6.0, 8: None, 12: None}
    assert saved_counts(tmp_path) == {step: step for step in (0, 4, 8, 12)}
    assert ["is NaN at step 8" in each for each in caplog.messages if "NaN" in each] == [True]


@pytest.mark.parametrize("background", [False, True])
async def test_an_evaluation_beside_training_that_gives_nan_ranks_nothing(
    tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Nan(BesideRig):
        async def evaluate(self, session: Any, step: int) -> dict[str, float]:
            await super().evaluate(session, step)
            return {"loss": math.nan}

    rig = Nan(tmp_path, 5, 5, background=background)
    async with rig.session() as run:
        await run_to(run, 7)
        rig.gated.let(5)
        await until(lambda: rig.evaluation.num_running == 0)
        await run_to(run, 8)
    assert metrics_of(tmp_path) == {5: None, 8: None}
    assert ["is NaN at step 5" in each for each in caplog.messages if "NaN" in each] == [True]
