"""Which metric is better: its name says so where that is plain, else it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    Metric,
    Mode,
    MonitoredSession,
    Retention,
    StateDictSaver,
)
from asynchooks.checkpoints import CheckpointDirectory

SMALLER = (
    "loss", "val_loss", "eval/loss", "valLoss", "loss:0", "loss_1:0", "train/total_loss",
    "loss_mean", "error", "error_rate", "mean_squared_error", "mse", "rmse", "mae", "perplexity",
    "val perplexity", "nll", "cross_entropy", "log_loss", "accuracy/loss", "cost",
)  # fmt: skip
LARGER = (
    "accuracy", "acc", "valid_acc", "eval/accuracy", "top5_accuracy", "top-1-accuracy", "acc@1",
    "auc", "roc_auc", "f1", "F1", "f1_macro", "val_f1", "reward", "episode_reward_mean",
    "score", "precision", "recall", "return", "r2", "R2", "r2_score", "bleu", "bleu4", "mAP",
    "loss/accuracy", "iou",
)  # fmt: skip
ASK = (
    "value", "metric", "x", "", "count", "learning_rate", "grad_norm", "1-accuracy", "1 - acc",
    "eval/1-accuracy", "1/accuracy", "100-acc", "1_accuracy", "-loss", "neg_mean_squared_error",
    "negative_loss", "one_minus_accuracy", "inverse_loss", "accuracy_loss", "loss_accuracy",
    "error_score", "accuracy_drop", "rewards", "loss_scale", "loss/scale", "inaccuracy", "lossless",
    "entropy",
)  # fmt: skip
GIVEN: list[tuple[Any, Mode]] = [
    ("min", Mode.MIN), ("max", Mode.MAX), (Mode.MIN, Mode.MIN), (Mode.MAX, Mode.MAX)
]  # fmt: skip


def mode_of_stopping(metric: Any, **options: Any) -> str:
    found = re.search(r"mode=(\S+)\)", repr(EarlyStoppingHook(metric, 3, **options)))
    assert found is not None
    return found[1]


def saver_hook(path: Path, metric: Any, **options: Any) -> CheckpointSaverHook:
    saver = StateDictSaver(w={"w": np.zeros(1)})
    retention = Retention(keep_best=1, **options)
    return CheckpointSaverHook(path, save_steps=1, saver=saver, metric=metric, retention=retention)


def evaluation_of(key: str) -> Any:
    return EvaluationHook(lambda session, step: {key: 1.0}, every_n_steps=1).metric(key)


def function_of(name: str) -> Callable[[], float]:
    def metric() -> float:
        return 1.0

    metric.__name__ = name
    return metric


@pytest.mark.parametrize("kind", [str, evaluation_of, function_of])
@pytest.mark.parametrize(
    ("names", "mode"), [(SMALLER, "Mode.MIN"), (LARGER, "Mode.MAX")], ids=["smaller", "larger"]
)
def test_a_plain_name_says_which_is_better(names: Any, mode: str, kind: Any) -> None:
    assert {name: mode_of_stopping(kind(name)) for name in names} == dict.fromkeys(names, mode)


@pytest.mark.parametrize("kind", [str, evaluation_of, function_of])
@pytest.mark.parametrize("name", ASK)
def test_where_the_name_does_not_say_which_is_better_it_is_asked_for(
    tmp_path: Path, kind: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for mode in Mode:
        assert mode_of_stopping(kind(name), mode=mode) == str(mode)
        saver_hook(tmp_path, kind(name), mode=mode)
    assert asked(caplog) == []

    assert mode_of_stopping(kind(name)) == "Mode.MIN"
    saver_hook(tmp_path, kind(name))
    stopping, saving = asked(caplog)
    assert stopping == saving
    assert (
        "the smaller one is taken for the better one. Say it on the metric: Metric(..., mode="
        in (stopping)
    )
    assert not list(tmp_path.iterdir())


def asked(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "does not say whether smaller" in each]


class Measures:
    """A metric that is an object, without a name."""

    def __call__(self) -> float:
        return 1.0

    def loss(self) -> float:
        return 1.0


@pytest.mark.parametrize("metric", [lambda: 1.0, Measures(), partial(float, 1)])
def test_a_function_without_a_plain_name_is_asked_for_its_mode(
    metric: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert mode_of_stopping(metric, mode="max") == "Mode.MAX"
    assert asked(caplog) == []
    assert mode_of_stopping(metric) == "Mode.MIN"
    assert len(asked(caplog)) == 1


def test_a_method_with_a_plain_name_needs_none() -> None:
    assert mode_of_stopping(Measures().loss) == "Mode.MIN"


@pytest.mark.parametrize(("given", "mode"), GIVEN)
def test_what_is_given_goes_before_the_name_also_as_text(given: Any, mode: Mode) -> None:
    for metric in ("loss", "accuracy"):
        assert mode_of_stopping(metric, mode=given) == str(mode)
    assert Retention(mode=given) == Retention(mode=mode)
    assert Retention(mode=given).mode is mode


@pytest.mark.parametrize("kind", [str, evaluation_of, function_of])
def test_a_metric_says_it_once_for_all_hooks(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric = Metric(kind("value"), "max") if kind is not evaluation_of else with_mode("value")
    assert mode_of_stopping(metric) == "Mode.MAX"
    assert mode_of_stopping(metric, mode="max") == "Mode.MAX"
    saver_hook(tmp_path, metric)
    saver_hook(tmp_path, metric, mode=Mode.MAX)
    assert asked(caplog) == []
    unsaid = Metric(kind("value")) if kind is not evaluation_of else evaluation_of("value")
    mode_of_stopping(unsaid)
    saver_hook(tmp_path, unsaid)
    assert len(asked(caplog)) == 1


def with_mode(key: str) -> Metric:
    evaluation = EvaluationHook(lambda session, step: {key: 1.0}, every_n_steps=1)
    return evaluation.metric(key, mode="max")


def test_a_mode_beside_a_metric_that_says_the_other_one_is_refused(tmp_path: Path) -> None:
    said = (
        r"got mode=Mode.MIN, and Metric\('value', mode=Mode.MAX\), which says Mode.MAX; say it once"
    )
    with pytest.raises(ValueError, match=f"^EarlyStoppingHook {said}"):
        EarlyStoppingHook(Metric("value", "max"), 3, mode="min")
    with pytest.raises(ValueError, match=rf"^Retention\(.*\) {said}"):
        saver_hook(tmp_path, Metric("value", "max"), mode="min")


@pytest.mark.parametrize(
    ("wrong", "error"), [("auto", ValueError), ("", ValueError), (1, TypeError)]
)
def test_what_is_no_mode_is_refused(wrong: Any, error: type[Exception]) -> None:
    message = re.escape(f"mode is {wrong!r}; give Mode.MIN or Mode.MAX, or the text")
    for make in (lambda: EarlyStoppingHook("loss", 3, mode=wrong), lambda: Retention(mode=wrong)):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "values", "best", "text"),
    [
        ("accuracy", [0.1, 0.9, 0.8, 0.2, 0.1], 2, "(Mode.MAX: larger is better)"),
        ("val_loss", [0.9, 0.1, 0.2, 0.8, 0.9], 2, "(Mode.MIN: smaller is better)"),
    ],
)
async def test_stopping_and_keeping_the_best_go_by_the_name(
    tmp_path: Path, name: str, values: list[float], best: int, text: str
) -> None:
    weights = {"w": np.zeros(1)}

    def step() -> dict[str, Any]:
        weights["w"] += 1
        return {}

    def evaluate(session: Any, global_step: int) -> dict[str, float]:
        return {name: values[global_step - 1]}

    evaluation = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE)
    stopping = EarlyStoppingHook(evaluation.metric(name), 3, restore_best=True)
    saver = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=StateDictSaver(w=weights), metric=evaluation.metric(name),
        retention=Retention(max_to_keep=1, keep_best=1),
    )  # fmt: skip
    hooks = [evaluation, stopping, saver]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run([])
    assert str(session.stop_reason).endswith(f"of step {best} for 3 looks {text}")
    assert (weights["w"][0], stopping.best_step) == (best, best)
    found = CheckpointDirectory(tmp_path).best()  # it need not be told again
    assert found is not None
    assert (found.step, found.metric) == (best, values[best - 1])
