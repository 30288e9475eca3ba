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
    EvaluationHook,
    Metric,
    Mode,
    Retention,
    StateDictSaver,
)

SMALLER = (
    "loss", "valLoss", "loss:0", "train/total_loss", "loss_mean", "error_rate",
    "mean_squared_error", "rmse", "mae", "val perplexity", "nll", "cross_entropy", "accuracy/loss",
)  # fmt: skip
LARGER = (
    "accuracy", "valid_acc", "top-1-accuracy", "acc@1", "roc_auc", "F1", "val_f1",
    "episode_reward_mean", "score", "precision", "return", "R2", "bleu4", "mAP", "loss/accuracy",
)  # fmt: skip
ASK = (
    "value", "", "learning_rate", "grad_norm", "1-accuracy", "eval/1-accuracy", "1/accuracy",
    "100-acc", "1_accuracy", "-loss", "neg_mean_squared_error", "one_minus_accuracy",
    "inverse_loss", "accuracy_loss", "error_score", "accuracy_drop", "rewards", "loss_scale",
    "inaccuracy", "lossless",
)  # fmt: skip


def mode_of(metric: Any, **options: Any) -> str:
    found = re.search(r"mode=(\S+)\)", repr(EarlyStoppingHook(metric, 3, **options)))
    assert found is not None
    return found[1]


def saver_hook(path: Path, metric: Any, **options: Any) -> CheckpointSaverHook:
    saver, retention = StateDictSaver(w={"w": np.zeros(1)}), Retention(keep_best=1, **options)
    return CheckpointSaverHook(path, save_steps=1, saver=saver, metric=metric, retention=retention)


def evaluation_of(key: str, mode: Any = None) -> Metric:
    hook = EvaluationHook(lambda session, step: {key: 1.0}, every_n_steps=1)
    return hook.metric(key, mode=mode)


def function_of(name: str, mode: Any = None) -> Metric:
    def metric() -> float:
        return 1.0

    metric.__name__ = name
    return Metric(metric, mode)


every_kind = pytest.mark.parametrize("kind", [Metric, evaluation_of, function_of])


@every_kind
@pytest.mark.parametrize(("names", "mode"), [(SMALLER, "Mode.MIN"), (LARGER, "Mode.MAX")])
def test_a_plain_name_says_which_is_better(names: Any, mode: str, kind: Any) -> None:
    assert {name: mode_of(kind(name)) for name in names} == dict.fromkeys(names, mode)


def asked(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "does not say whether smaller" in each]


class Measures:
    """A metric that is an object, without a name."""

    def __call__(self) -> float:
        return 1.0

    def loss(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    "make",
    [
        *(partial(kind, name) for kind in (Metric, evaluation_of, function_of) for name in ASK),
        lambda: lambda: 1.0, Measures, lambda: partial(float, 1),
    ],
)  # fmt: skip
def test_where_the_name_does_not_say_which_is_better_it_is_asked_for(
    tmp_path: Path, make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for mode in Mode:
        assert mode_of(make(), mode=mode) == str(mode)
        saver_hook(tmp_path, make(), mode=mode)
    assert asked(caplog) == []
    assert mode_of(make()) == "Mode.MIN"
    saver_hook(tmp_path, make())
    assert len(asked(caplog)) == 2
    assert all("Say it on the metric: Metric(..., mode=" in each for each in asked(caplog))


def test_a_method_with_a_plain_name_needs_none() -> None:
    assert mode_of(Measures().loss) == "Mode.MIN"


@pytest.mark.parametrize("mode", Mode)
def test_what_is_given_goes_before_the_name_also_as_text(mode: Mode) -> None:
    for given in (mode, mode.value):
        assert mode_of("loss", mode=given) == mode_of("accuracy", mode=given) == str(mode)
        assert Retention(mode=given).mode is mode


@every_kind
def test_a_metric_says_it_once_for_all_hooks_and_is_asked_once(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric, unsaid = kind("value", "max"), kind("value")
    assert mode_of(metric) == mode_of(metric, mode="max") == "Mode.MAX"
    saver_hook(tmp_path, metric)
    saver_hook(tmp_path, metric, mode=Mode.MAX)
    assert asked(caplog) == []
    mode_of(unsaid)
    saver_hook(tmp_path, unsaid)
    assert len(asked(caplog)) == 1


def test_a_mode_beside_a_metric_that_says_the_other_one_is_refused(tmp_path: Path) -> None:
    said = r"got mode=Mode.MIN, and Metric\('value', mode=Mode.MAX\), .*; say it once"
    for make in (partial(EarlyStoppingHook, patience=3), partial(saver_hook, tmp_path)):
        with pytest.raises(ValueError, match=said):
            make(metric=Metric("value", "max"), mode="min")
