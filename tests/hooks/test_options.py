"""The names of hooks' options: one for each, and TensorFlow's where the hook is TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

saver = partial(CheckpointSaverHook, "never written")
summaries = partial(SummarySaverHook, summary_op="loss")
evaluation = partial(EvaluationHook, lambda session, step: {})
metrics = partial(MetricsHook, lambda step, values: None, "loss")
waits = partial(DataWaitHook, prefetch([1], 1))
logs = partial(LoggingTensorHook, ["a"])
stops = partial(EarlyStoppingHook, patience=3)


@pytest.mark.parametrize("make", [saver, summaries])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("every_n_steps", "save_steps"), ("every_n_secs", "save_secs")]
)
def test_both_spellings_are_one_option(make: Callable[..., Any], ours: str, theirs: str) -> None:
    assert repr(make(**{ours: 7})) == repr(make(**{theirs: 7}))
    with pytest.raises(
        ValueError, match=f"^got ({ours}=7 and {theirs}=8|{theirs}=8 and {ours}=7); "
    ):
        make(**{ours: 7, theirs: 8})


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (evaluation, "every_n_iter", "EvaluationHook got .*; write every_n_steps"),
    (metrics, "save_steps", "MetricsHook got .*; write every_n_steps"),
    (HistoryHook, "every_secs", "HistoryHook got .*; write every_n_secs"),
    (waits, "every_steps", "DataWaitHook got .*; write every_n_steps"),
    (StepCounterHook, "every_n_step", "StepCounterHook got .*; write every_n_steps"),
    (logs, "save_steps", "LoggingTensorHook got .*; write every_n_steps"),
    (stops, "monitor", "EarlyStoppingHook got .*; write metric"),
    (saver, "save_best_only", "CheckpointSaverHook got .*; write retention"),
    (saver, "every_n_epochs", r"CheckpointSaverHook got every_n_epochs; repeat\(source, 5\) "),
    (saver, "save_step", "CheckpointSaverHook got .*; write save_steps"),
    (summaries, "every_n_iter", "SummarySaverHook got .*; write every_n_steps"),
    (partial(repeat, [1]), "epochs", "repeat got .*; write num_epochs"),
    (ProgressHook, "save_secs", "ProgressHook got .*; write every_n_secs"),
    (StopAtStepHook, "max_epochs", r"StopAtStepHook got max_epochs; repeat\(source, 5\) around "),
    (StopAtStepHook, "max_steps", "StopAtStepHook got .*; write last_step"),
    (StopAtStepHook, "x", "StopAtStepHook got .*; write num_steps, last_step"),
]


@pytest.mark.parametrize(("make", "wrong", "said"), WRONG)
def test_a_name_of_another_library_is_answered_with_the_right_one(
    make: Callable[..., Any], wrong: str, said: str
) -> None:
    with pytest.raises(TypeError, match=f"^{said}"):
        make(**{wrong: 5})
