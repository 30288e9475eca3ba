"""The names of hooks' options: one for each, and TensorFlow's where the hook is TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EarlyStoppingHook,
    EvaluationHook,
    HistoryHook,
    LoggingTensorHook,
    MetricsHook,
    ProgressHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from asynchooks.data import prefetch, repeat


def saver(**options: Any) -> CheckpointSaverHook:
    return CheckpointSaverHook(**{"checkpoint_dir": "never written", **options})


def summaries(**options: Any) -> SummarySaverHook:
    return SummarySaverHook(summary_op="loss", **options)


def evaluation(**options: Any) -> EvaluationHook:
    return EvaluationHook(lambda session, step: {}, **options)


def metrics(**options: Any) -> MetricsHook:
    return MetricsHook(lambda step, values: None, "loss", **options)


def history(**options: Any) -> HistoryHook:
    return HistoryHook("loss", **options)


def logging(**options: Any) -> LoggingTensorHook:
    return LoggingTensorHook(["loss"], **options)


def data_wait(**options: Any) -> DataWaitHook:
    return DataWaitHook(prefetch([1], 1), **options)


def early_stopping(**options: Any) -> EarlyStoppingHook:
    return EarlyStoppingHook(**{"patience": 3, **options})


OF_TENSORFLOW = [saver, summaries]


@pytest.mark.parametrize("make", OF_TENSORFLOW)
@pytest.mark.parametrize(
    ("ours", "theirs"), [("every_n_steps", "save_steps"), ("every_n_secs", "save_secs")]
)
def test_both_spellings_are_one_option(make: Callable[..., Any], ours: str, theirs: str) -> None:
    assert repr(make(**{ours: 7})) == repr(make(**{theirs: 7}))
    with pytest.raises(
        ValueError, match=f"^got ({ours}=7 and {theirs}=8|{theirs}=8 and {ours}=7); "
    ):
        make(**{ours: 7, theirs: 8})
    with pytest.raises(ValueError, match="give exactly one of them"):
        make(every_n_steps=7, save_secs=8)
    with pytest.raises(ValueError, match="give exactly one of them"):
        make()


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (evaluation, "every_n_iter", "EvaluationHook got every_n_iter; write every_n_steps"),
    (evaluation, "save_secs", "EvaluationHook got save_secs; write every_n_secs"),
    (metrics, "save_steps", "MetricsHook got save_steps; write every_n_steps"),
    (history, "every_secs", "HistoryHook got every_secs; write every_n_secs"),
    (data_wait, "every_steps", "DataWaitHook got every_steps; write every_n_steps"),
    (StepCounterHook, "every_n_step", "StepCounterHook got every_n_step; write every_n_steps"),
    (logging, "save_steps", "LoggingTensorHook got save_steps; write every_n_steps"),
    (early_stopping, "monitor", "EarlyStoppingHook got monitor; write metric"),
    (saver, "save_best_only", "CheckpointSaverHook got save_best_only; write retention"),
    (
        saver,
        "every_n_epochs",
        r"CheckpointSaverHook got every_n_epochs; repeat\(source, 5\) .*EvaluationHook\(every_n_ep",
    ),
    (StopAtStepHook, "max_epochs", r"StopAtStepHook got max_epochs; repeat\(source, 5\) around "),
    (lambda **options: repeat([1], **options), "epochs", "repeat got epochs; write num_epochs"),
    (saver, "save_step", "CheckpointSaverHook got save_step; write save_steps"),
    (summaries, "every_n_iter", "SummarySaverHook got every_n_iter; write every_n_steps"),
    (ProgressHook, "save_secs", "ProgressHook got save_secs; write every_n_secs"),
    (StopAtStepHook, "max_steps", "StopAtStepHook got max_steps; write last_step"),
    (StopAtStepHook, "x", "StopAtStepHook got x; write num_steps, last_step"),
]


@pytest.mark.parametrize(("make", "wrong", "said"), WRONG)
def test_a_name_of_another_library_is_answered_with_the_right_one(
    make: Callable[..., Any], wrong: str, said: str
) -> None:
    with pytest.raises(TypeError, match=f"^{said}"):
        make(**{wrong: 5})


def test_our_names_save_as_tensorflows_do(tmp_path: Path) -> None:
    hook = saver(every_n_steps=3, checkpoint_dir=tmp_path)
    assert repr(hook).startswith(
        f"CheckpointSaverHook(checkpoint_dir={str(tmp_path)!r}, save_steps=3"
    )
