"""EarlyStoppingHook: when it stops, by what it decides, and what it restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FetchError,
    FunctionSessionCreator,
    MetricError,
    Mode,
    MonitoredSession,
    Retention,
    StopAtStepHook,
)

from ..support.helpers import settle
from .preemptions import Counter, saving

pytestmark = pytest.mark.anyio
INF = float("inf")


class Losses(Counter):
    """A model whose n-th step gives the n-th loss, the last one for ever after."""

    def __init__(self, *losses: Any) -> None:
        super().__init__()
        self.losses = losses

    @property
    def loss(self) -> Any:
        return self.losses[min(max(self.count, 1), len(self.losses)) - 1]

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"loss": self.loss}


async def train(model: Counter, *hooks: Any, at_most: int = 50) -> MonitoredSession:
    """Run to the end; `at_most` steps, so that a stop that never comes is seen."""
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step))
    async with session:
        while not session.should_stop() and model.count < at_most:
            await session.run([])
            await settle()  # concurrent evaluations
    return session


STOPS = [
    # losses, options, the step of the stop, best, its step
    ([5, 4, 3, 3, 2, 2, 2], {"patience": 2}, 7, 2, 5),
    ([5, 5], {"patience": 1}, 2, 5, 1),
    ([5, 6, 4, 6, 7, 8], {"patience": 3}, 6, 4, 3),
    ([5, 4.5, 3.9, 3.5], {"patience": 2, "min_delta": 1.0}, 5, 3.9, 3),
    ([5, 4], {"patience": 3, "min_delta": 1.0}, 4, 5, 1),
    ([5, 4, 3, 1.9, 2], {"patience": 2, "min_delta": 1.0}, 6, 1.9, 4),
    ([1, 2, 3.5, 4.5], {"patience": 2, "min_delta": 1.0, "mode": Mode.MAX}, 5, 3.5, 3),
    ([1, 2, 3, 3, 0], {"patience": 2, "mode": Mode.MAX}, 5, 3, 3),
    ([1, 2], {"patience": 2, "mode": Mode.MIN}, 3, 1, 1),
    ([INF, INF, 3, 3], {"patience": 2}, 5, 3, 3),
    ([-INF, -INF], {"patience": 2}, 3, -INF, 1),
    ([0.0, -0.0, -0.0], {"patience": 2}, 3, 0, 1),
]


@pytest.mark.parametrize("kind", ["fetch", "function"])
@pytest.mark.parametrize(("losses", "options", "stop", "best", "best_step"), STOPS)
async def test_stops_after_so_many_looks_without_improvement(
    losses: list[float], options: Any, stop: int, best: float, best_step: int, kind: str
) -> None:
    model = Losses(*losses)
    metric: Any = "loss" if kind == "fetch" else lambda: model.loss
    hook = EarlyStoppingHook(metric, **options)
    session = await train(model, hook)
    assert model.count == stop
    assert (hook.best, hook.best_step) == (best, best_step)
    looks = options["patience"]
    assert str(session.stop_reason).endswith(
        f"EarlyStoppingHook: no better than {best:g} of step {best_step} for {looks} looks"
    )


async def test_a_function_that_knows_nothing_is_no_look() -> None:
    model = Losses(0)
    seen = iter([None, 3.0, None, None, 4.0, None, 5.0])
    hook = EarlyStoppingHook(lambda: next(seen), patience=2)
    await train(model, hook)
    assert model.count == 7
    assert (hook.best, hook.best_step) == (3.0, 2)


async def test_before_the_first_look_nothing_is_the_best() -> None:
    hook = EarlyStoppingHook(lambda: None, patience=1)
    await train(Losses(0), hook, at_most=3)
    assert (hook.best, hook.best_step) == (None, None)


async def test_a_hook_that_is_used_again_starts_from_nothing() -> None:
    hook = EarlyStoppingHook("loss", patience=2)
    await train(Losses(1, 2), hook)
    model = Losses(9, 8, 8)
    await train(model, hook)
    assert model.count == 4
    assert (hook.best, hook.best_step) == (8, 2)


@pytest.mark.parametrize("mode", list(Evaluate))
async def test_each_evaluation_counts_once(mode: Evaluate) -> None:
    model = Counter()
    results = {3: 0.5, 6: 0.7, 9: 0.6, 12: 0.7}

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"accuracy": results[step]}

    evaluation = EvaluationHook(evaluate, every_n_steps=3, mode=mode, at_end=False)
    hook = EarlyStoppingHook(evaluation.metric("accuracy"), patience=2, mode=Mode.MAX)
    session = await train(model, evaluation, hook)
    assert model.count == 12  # concurrent, too: it waits for nothing
    assert (hook.best, hook.best_step) == (0.7, 6)
    assert "no better than 0.7 of step 6 for 2 looks" in str(session.stop_reason)


async def test_the_order_of_the_hooks_does_not_delay_the_stop() -> None:
    model = Counter()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"accuracy": 0.5}

    evaluation = EvaluationHook(evaluate, every_n_steps=3, mode=Evaluate.EXCLUSIVE, at_end=False)
    hook = EarlyStoppingHook(evaluation.metric("accuracy"), patience=2, mode=Mode.MAX)
    await train(model, hook, evaluation)
    assert model.count == 9


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
async def test_nan_fails_the_run(kind: str) -> None:
    model = Losses(5, 4, float("nan"))

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"loss": model.loss}

    evaluation = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE, at_end=False)
    metrics: dict[str, Any] = {
        "fetch": "loss",
        "function": lambda: model.loss,
        "evaluation": evaluation.metric("loss"),
    }
    hook = EarlyStoppingHook(metrics[kind], patience=2)
    with pytest.raises(MetricError, match="is NaN") as caught:
        await train(model, evaluation, hook)
    assert model.count == 3
    assert caught.value.__notes__ == ["in after_run of EarlyStoppingHook"]
    assert (hook.best, hook.best_step) == (4, 2)


async def test_a_fetch_that_is_missing_fails_the_first_run() -> None:
    with pytest.raises(FetchError, match="fetch 'missing' is not among"):
        await train(Losses(1), EarlyStoppingHook("missing", patience=1))


async def test_a_result_that_evaluations_do_not_give_fails_the_run() -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"accuracy": 0.5}

    evaluation = EvaluationHook(evaluate, every_n_steps=2, mode=Evaluate.EXCLUSIVE)
    hook = EarlyStoppingHook(evaluation.metric("loss"), patience=1)
    with pytest.raises(MetricError, match="'eval' gave no 'loss' at step 2, but 'accuracy'"):
        await train(Counter(), evaluation, hook)


async def test_what_is_no_number_fails_the_run() -> None:
    with pytest.raises(MetricError, match="give one number"):
        await train(Losses([1, 2]), EarlyStoppingHook("loss", patience=1))


@pytest.mark.parametrize("background", [False, True])
async def test_the_best_checkpoints_weights_are_back_after_the_block(
    tmp_path: Path, background: bool
) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    retention = Retention(max_to_keep=1, keep_best=1)
    saver = saving(tmp_path, model, 1, retention=retention, metric="loss", background=background)
    hook = EarlyStoppingHook("loss", patience=3, restore_best=True)
    session = await train(model, saver, hook)
    assert session.global_step.value == 7
    assert (hook.best, hook.best_step) == (2, 4)
    assert model.count == 4
    resumed = Losses(9)  # a next session goes on from the newest, not from the best
    await train(resumed, saving(tmp_path, resumed, 100), StopAtStepHook(last_step=8))
    assert resumed.count == 8


@pytest.mark.parametrize("options", [{}, {"retention": Retention()}])
async def test_restoring_the_best_needs_a_saver_that_keeps_it(tmp_path: Path, options: Any) -> None:
    model = Losses(1)
    hook = EarlyStoppingHook("loss", patience=1, restore_best=True)
    with pytest.raises(RuntimeError, match="finds no checkpoint to restore: give the session"):
        await train(model, saving(tmp_path, model, **options), hook)
    with pytest.raises(RuntimeError, match="finds no checkpoint to restore: give the session"):
        await train(model, hook)


async def test_a_clean_end_of_another_cause_restores_nothing(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6)
    saver = saving(tmp_path, model, 1, retention=Retention(keep_best=1), metric="loss")
    hook = EarlyStoppingHook("loss", patience=3, restore_best=True)
    await train(model, saver, hook, StopAtStepHook(last_step=5))
    assert model.count == 5


async def test_where_no_checkpoint_has_a_metric_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Losses(5)
    saver = saving(tmp_path, model, 1, retention=Retention(keep_best=1), metric=lambda: None)
    caplog.set_level("INFO", logger="asynchooks")
    await train(model, saver, EarlyStoppingHook("loss", patience=1, restore_best=True))
    assert "best checkpoint, None" not in caplog.text
