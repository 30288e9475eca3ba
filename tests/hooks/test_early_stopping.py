"""EarlyStoppingHook: when it stops, by what it decides, what it restores; other workers."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    MetricError,
    Mode,
    MonitoredSession,
    PreemptionError,
    Retention,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import settle
from ..support.hook_models import Losses
from .preemptions import Counter, saving
from .savers import BACKGROUND
from .training import Holds, run_session, tasks

INF = float("inf")


async def train(model: Counter, *hooks: Any, at_most: int = 50) -> MonitoredSession:
    """Run to the end; `at_most` steps, so that a stop that never comes is seen."""
    async with MonitoredSession(hooks, model.step) as session:
        while not session.should_stop() and model.count < at_most:
            await session.run([])
            await settle()  # concurrent evaluations
    return session


def keeping_best(
    path: Path, model: Counter, mode: Mode = Mode.MIN, *, save_steps: int = 1,
    metric: Any = "loss", **options: Any,
) -> Any:  # fmt: skip
    """Keeps the newest checkpoint, and the best by the metric."""
    options["retention"] = Retention(max_to_keep=1, keep_best=1, mode=mode)
    return saving(path, model, save_steps, metric=metric, **options)


def restoring(
    metric: Any, patience: int, mode: Mode | None = None, **options: Any
) -> EarlyStoppingHook:
    return EarlyStoppingHook(metric, patience, mode=mode, restore_best=True, **options)


def evaluating(
    evaluate: Callable[[], dict[str, float]], every: int, mode: Evaluate = Evaluate.EXCLUSIVE
) -> EvaluationHook:
    async def call(session: Any, step: int) -> dict[str, float]:
        return evaluate()

    return EvaluationHook(call, every_n_steps=every, mode=mode, at_end=False)


def metric_of(kind: str, model: Losses, every: int = 2) -> tuple[list[Any], Any]:
    """Hooks that go before, and what EarlyStoppingHook is given."""

    def loss() -> Any:
        return model.loss

    if kind == "evaluation":
        evaluation = evaluating(lambda: {"loss": model.loss}, every)
        return [evaluation], evaluation.metric("loss")
    return [], "loss" if kind == "fetch" else loss


@pytest.mark.parametrize(
    ("looks", "patience", "delta", "mode", "found"),
    [
        ([3.0, 2.0, 2.5, 2.0], 2, 0.0, Mode.MIN, (4, 2.0, 2)),  # an equal one is no better
        ([3.0, None, 3.5, None, 4.0, 1.0], 2, 0.0, Mode.MIN, (5, 3.0, 1)),  # None is no look
        ([None, 0.0, 1.0, -1.0], 2, 1.0, Mode.MIN, (4, 0.0, 2)),  # by the delta is not enough
        ([1.0, 2.5, 3.0, 3.5, INF], 2, 1.0, Mode.MAX, (4, 2.5, 2)),
        ([-INF, INF, -INF], 3, 0.0, Mode.MIN, (3, -INF, 1)),
    ],
)
async def test_it_stops_after_so_many_looks_without_improvement_in_each_session(
    looks: list[float | None], patience: int, delta: float, mode: Mode, found: Any
) -> None:
    rest: Iterator[float | None] = iter(())
    hook = EarlyStoppingHook(lambda: next(rest), patience, min_delta=delta, mode=mode)
    for _ in range(2):
        rest = iter(looks)
        session = await run_session([hook, StopAtStepHook(last_step=len(looks))])
        assert (session.global_step.value, hook.best, hook.best_step) == found


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
async def test_nan_fails_the_run(kind: str) -> None:
    model = Losses(5, 4, float("nan"))
    before, metric = metric_of(kind, model, every=1)
    hook = EarlyStoppingHook(metric, patience=2)
    with pytest.raises(MetricError, match="is NaN") as caught:
        await train(model, *before, hook)
    assert caught.value.__notes__ == ["in after_run of EarlyStoppingHook"]
    assert (model.count, hook.best, hook.best_step) == (3, 4, 2)


@pytest.mark.parametrize(
    ("losses", "save_steps", "min_delta", "mode", "best"),
    [
        ([5, 3, 4, 2, 6, 7, 8], 1, 0.0, Mode.MIN, 4),
        ([5.0, 3.9, 3.5, 3.6, 3.7], 1, 1.0, Mode.MIN, 3),  # which min_delta made no improvement
        ([-5.0, -3.9, -3.5, -3.6, -3.7], 1, 1.0, Mode.MAX, 3),
        ([5, 4, 1, 2, 3, 6, 7], 2, 0.0, Mode.MIN, 4),  # step 3 is in no checkpoint
    ],
)
@BACKGROUND
async def test_the_best_weights_are_restored_after_the_block(
    tmp_path: Path, background: bool, losses: list[float], save_steps: int, min_delta: float,
    mode: Mode, best: int,
) -> None:  # fmt: skip
    model = Losses(*losses)
    hook = restoring("loss", 3, mode, min_delta=min_delta)
    saver = keeping_best(tmp_path, model, mode, save_steps=save_steps, background=background)
    session = await train(model, saver, hook)
    assert (model.count, hook.best, hook.best_step) == (best, losses[best - 1], best)
    resumed = Losses(9)  # a next session goes on from the newest, not from the best
    await train(resumed, saving(tmp_path, resumed), StopAtStepHook(num_steps=1))
    assert resumed.count == session.global_step.value + 1


class TwoMetrics(Counter):
    """A model whose loss falls on after its error has risen."""

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"loss": 10.0 - self.count, "error": abs(self.count - 3.0)}


OTHER = evaluating(lambda: {"error": 1.0}, 1)


@pytest.mark.parametrize(
    ("metrics", "num"),
    [([None], 0), (["loss"], 0), ([OTHER.metric("error")], 0), (["error", "error"], 2)],
)
async def test_restoring_the_best_needs_one_saver_that_keeps_it_by_the_same_metric(
    tmp_path: Path, metrics: list[Any], num: int
) -> None:
    model = TwoMetrics()
    savers = [
        saving(tmp_path / str(place), model) if each is None
        else keeping_best(tmp_path / str(place), model, metric=each)
        for place, each in enumerate(metrics)
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match=f"got {num} CheckpointSaverHooks that keep the best by"):
        await train(model, OTHER, *savers, restoring("error", 3))
    assert model.count == 0


async def test_a_clean_end_of_another_cause_restores_nothing(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6)
    limit = StopAtStepHook(last_step=5)
    await train(model, keeping_best(tmp_path, model), restoring("loss", 3), limit)
    assert model.count == 5


async def test_where_no_checkpoint_has_a_metric_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await session.global_step.wait_for(step + 1)
        return {"loss": 5}

    model, evaluation = Counter(), EvaluationHook(evaluate, every_n_steps=2, at_end=False)
    loss = evaluation.metric("loss")
    saver, hook = keeping_best(tmp_path, model, metric=loss, save_steps=3), restoring(loss, 1)
    session = await train(model, saver, evaluation, hook)
    assert model.count == session.global_step.value
    assert (hook.best, hook.best_step, session.global_step.value > 4) == (5, 2, True)
    assert "No checkpoint has a metric: the model stays as it is" in caplog.text


@pytest.mark.parametrize("restores", [True, False])
async def test_a_saver_that_keeps_the_best_by_the_other_mode_is_refused(
    restores: bool, tmp_path: Path
) -> None:
    hook = EarlyStoppingHook("loss", patience=2, mode=Mode.MAX, restore_best=restores)
    with pytest.raises(ValueError, match="the one in Mode.MAX, the other in Mode.MIN; say it once"):
        await train(Losses(1), keeping_best(tmp_path, Losses(1)), hook)


@pytest.mark.parametrize("names", [["loss", "error"], ["error", "loss"]])
async def test_of_several_savers_the_one_with_the_same_metric_restores(
    tmp_path: Path, names: list[str]
) -> None:
    model = TwoMetrics()
    evaluation = evaluating(
        lambda: {"loss": 10.0 - model.count, "error": abs(model.count - 3.0)}, 1
    )
    of = evaluation.metric
    savers = [keeping_best(tmp_path / name, model, metric=of(name)) for name in names]
    # a metric of the same name of another evaluation is another one
    savers.append(keeping_best(tmp_path / "other", model, metric=OTHER.metric("error")))
    hook = restoring(of("error"), 3)
    await train(model, OTHER, evaluation, hook, *savers)
    assert (hook.best, hook.best_step, model.count) == (0, 3, 3)


@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_hooks_that_stop_in_one_run_the_one_that_is_the_reason_restores(
    tmp_path: Path, order: int
) -> None:
    class Two(TwoMetrics):
        def step(self) -> dict[str, Any]:
            return {**super().step(), "loss": abs(self.count - 2.0)}

    model = Two()
    hooks = [restoring("loss", 3), restoring("error", 2)][::order]
    savers = [keeping_best(tmp_path / name, model, metric=name) for name in ("loss", "error")]
    session = await train(model, *hooks, *savers)
    assert session.global_step.value == 5
    assert f"of step {hooks[0].best_step} " in str(session.stop_reason)
    assert model.count == hooks[0].best_step


LONGEST = 12


async def train_life(
    directory: Path | None,
    numbers: list[int],
    kind: str,
    *,
    interrupted_at: int | None = None,
    save_steps: int = 3,
    saver_first: bool = False,
    lost_at: int | None = None,
) -> tuple[int, float | None, int | None]:
    """Returns (steps of the model, best, its step)."""
    model = Losses(*numbers)
    before, metric = metric_of(kind, model)
    hook = EarlyStoppingHook(metric, patience=2)
    hooks: list[Any] = [*before, hook]
    if directory is not None:
        hooks.insert(0 if saver_first else len(hooks), saving(directory, model, save_steps))
    losses_of_session = [lost_at]

    def step() -> dict[str, Any]:
        if model.count in losses_of_session:
            losses_of_session.clear()
            raise PreemptionError("lost")
        return model.step()

    with suppress(ZeroDivisionError):  # the process ends without a last save
        async with MonitoredSession(hooks, step, step_runner="inline") as session:
            while not session.should_stop() and model.count < 3 * LONGEST:
                if model.count == interrupted_at:
                    raise ZeroDivisionError
                await session.run([])
    return model.count, hook.best, hook.best_step


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
@settings(max_examples=10)
@given(
    numbers=st.lists(st.integers(0, 6), min_size=1, max_size=LONGEST),
    at=st.integers(0, LONGEST), save_steps=st.integers(1, 4), saver_first=st.booleans(),
    is_lost=st.booleans(),
)  # fmt: skip
def test_a_training_that_was_resumed_or_lost_its_session_stops_at_the_same_step_and_best(
    kind: str, numbers: list[int], at: int, is_lost: bool, **options: Any
) -> None:
    """One that had stopped, too: it stops at once when it is resumed."""

    async def main(directory: Path) -> None:
        expected = await train_life(None, numbers, kind)
        if is_lost and kind == "fetch":
            options["lost_at"] = at
        else:
            interrupted_at = at if at < expected[0] else None
            await train_life(directory, numbers, kind, interrupted_at=interrupted_at, **options)
        assert await train_life(directory, numbers, kind, **options) == expected

    with tempfile.TemporaryDirectory() as path:
        anyio.run(main, Path(path))


async def test_all_workers_of_a_training_that_had_stopped_stop_with_its_reason(
    tmp_path: Path,
) -> None:
    # the last life has a greater patience, and trains on
    for patience, best in ((3, 2), (3, 2), (4, 6)):
        model = Losses(5, 2, 4, 6, 7, 1, 9)
        creator = SharedSessionCreator(model.step)
        first = MonitoredSession(
            [restoring("loss", patience), keeping_best(tmp_path, model)], creator
        )
        others = [MonitoredSession([], creator) for _ in range(2)]
        async with AsyncExitStack() as stack:  # the last one to leave brings the best back
            for session in (first, *others):
                await stack.enter_async_context(session)
            while not first.should_stop():
                await first.run([])
            assert all(session.should_stop() for session in others)
        assert model.count == best
        said = f"EarlyStoppingHook: no better than {model.losses[best - 1]} of step {best}"
        assert all(said in str(session.stop_reason) for session in (first, *others))


def early_stopping(directory: Path, model: Losses, **options: Any) -> list[Any]:
    """The metric is that of all steps: a function, not a fetch of one worker's runs."""
    loss = metric_of("function", model)[1]
    return [restoring(loss, 3), keeping_best(directory, model, metric=loss, **options)]


async def run_until_refused(session: MonitoredSession) -> None:
    async with session:
        while True:  # until a run ends the block
            await session.run([])
            await anyio.lowlevel.checkpoint()


async def test_a_worker_that_stays_in_its_block_holds_nothing_up_and_makes_no_step_by_then(
    tmp_path: Path,
) -> None:
    model, may_go_on, log = Losses(5, 3, 4, 2, 6, 7, 8), anyio.Event(), RecordingHook("other")
    creator, holds = SharedSessionCreator(model.step), Holds("before_run", may_go_on)
    other = MonitoredSession([holds, log], creator)
    async with tasks() as group:
        group.start_soon(run_until_refused, other)
        await holds.has_come.wait()
        await run_until_refused(MonitoredSession(early_stopping(tmp_path, model), creator))
        assert model.count == 4
        may_go_on.set()
    assert model.count == 4
    assert "EarlyStoppingHook: no better than 2 of step 4" in str(other.stop_reason)
    assert log.log[-1] == ("other", "end")
