"""Which metric is better: its name says so where that is plain, else it is asked for."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asynchooks import EarlyStoppingHook, EvaluationHook, Metric, Mode, Retention

from .preemptions import Counter, saving

SMALLER = (
    "loss", "valLoss", "loss:0", "train/total_loss", "error_rate", "mean_squared_error", "rmse",
    "mae", "val perplexity", "cross_entropy", "accuracy/loss",
)  # fmt: skip
LARGER = (
    "accuracy", "valid_acc", "top-1-accuracy", "acc@1", "roc_auc", "val_f1", "episode_reward_mean",
    "return", "R2", "bleu4", "mAP", "loss/accuracy",
)  # fmt: skip
ASK = (
    "value", "", "learning_rate", "eval/1-accuracy", "100-acc", "-loss", "one_minus_accuracy",
    "inverse_loss", "accuracy_loss", "accuracy_drop", "rewards", "loss_scale", "inaccuracy",
)  # fmt: skip


def mode_of(metric: Any, **options: Any) -> str:
    found = re.search(r"mode=(\S+)\)", repr(EarlyStoppingHook(metric, 3, **options)))
    assert found is not None
    return found[1]


def saver_hook(path: Path, metric: Any, **options: Any) -> Any:
    return saving(path, Counter(), metric=metric, retention=Retention(keep_best=1, **options))


def evaluation_of(key: str, mode: Any = None) -> Metric:
    return EvaluationHook(lambda session, step: {}, every_n_steps=1).metric(key, mode=mode)


def function_of(name: str, mode: Any = None) -> Metric:
    def metric() -> float:
        return 1.0

    metric.__name__ = name
    return Metric(metric, mode)


KINDS = [Metric, evaluation_of, function_of]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize(("names", "mode"), [(SMALLER, "Mode.MIN"), (LARGER, "Mode.MAX")])
def test_a_plain_name_says_which_is_better(names: Any, mode: str, kind: Any) -> None:
    assert {name: mode_of(kind(name)) for name in names} == dict.fromkeys(names, mode)


def asked(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "does not say whether smaller" in each]


@pytest.mark.parametrize(
    "make",
    [*(partial(kind, name) for kind in KINDS for name in ASK), lambda: partial(float, 1)],
)
def test_where_the_name_does_not_say_which_is_better_it_is_asked_for_once_unless_it_is_said(
    tmp_path: Path, make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for mode in Mode:
        assert mode_of(make(), mode=mode) == mode_of(make(), mode=mode.value) == str(mode)
        saver_hook(tmp_path, make(), mode=mode)
    assert asked(caplog) == []
    unsaid = make()
    assert mode_of(unsaid) == "Mode.MIN"
    saver_hook(tmp_path, unsaid)
    saver_hook(tmp_path, make())
    # what is no Metric does not know that it was asked for
    assert len(asked(caplog)) == (2 if isinstance(unsaid, Metric) else 3)
    assert all("Say it on the metric: Metric(..., mode=" in each for each in asked(caplog))


@every_kind
def test_a_metric_says_it_for_all_hooks_and_goes_before_its_name(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric = kind("loss", "max")
    assert mode_of(metric) == mode_of(metric, mode="max") == "Mode.MAX"
    saver_hook(tmp_path, metric)
    saver_hook(tmp_path, metric, mode=Mode.MAX)
    assert asked(caplog) == []


def test_a_mode_beside_a_metric_that_says_the_other_one_is_refused(tmp_path: Path) -> None:
    said = r"got mode=Mode.MIN, and Metric\('value', mode=Mode.MAX\), .*; say it once"
    for make in (partial(EarlyStoppingHook, patience=3), partial(saver_hook, tmp_path)):
        with pytest.raises(ValueError, match=said):
            make(metric=Metric("value", "max"), mode="min")
