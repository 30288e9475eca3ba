"""Wrong arguments of hooks, and what the errors say."""

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    HistoryHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    Metric,
    MetricsHook,
    NanTensorHook,
    OnFailure,
    PreemptionHook,
    ProgressHook,
    RankStopHook,
    Retention,
    StallHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks.data import prefetch, repeat
from asynchooks.metrics import CsvSink, histogram, mean

SAVES = ("save_secs", "save_steps")
EVERY = ("every_n_secs", "every_n_steps")
TIMED = [
    (lambda **times: CheckpointSaverHook("model", **times), SAVES),
    (lambda **times: SummarySaverHook(summary_op="summary", **times), SAVES),
    (lambda **times: evaluation(**times), EVERY),
    (lambda **times: StepCounterHook(**{"every_n_steps": None, **times}), EVERY),
    (lambda **times: DataWaitHook(prefetch([], 1), **{"every_n_steps": None, **times}), EVERY),
]


def saver(**options: Any) -> CheckpointSaverHook:
    return CheckpointSaverHook(**{"checkpoint_dir": "never made", "save_steps": 1, **options})


def evaluation(**options: Any) -> EvaluationHook:
    return EvaluationHook(lambda session, step: {}, **options)


@pytest.mark.parametrize(("hook", "names"), TIMED)
def test_a_wrong_interval_is_named_as_the_hook_s_own_argument(
    hook: Callable[..., Any], names: tuple[str, str]
) -> None:
    secs, steps = names
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, f"got {steps}=None and {secs}=None; give exactly one"),
        ({steps: 1, secs: 2.0}, f"got {steps}=1 and {secs}=2.0; give exactly one"),
        *(({name: -1}, f"{name} is -1; give a number >= 0$") for name in names),
        ({secs: "often"}, f"{secs} is 'often'; give a number >= 0$"),
        ({steps: 2.5}, rf"{steps} is 2\.5; give a whole number >= 0$"),
    ]
    for times, message in wrong:
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            hook(**times)


@pytest.mark.parametrize("hook", [each for each, names in TIMED if names == SAVES])
def test_both_spellings_are_one_option(hook: Callable[..., Any]) -> None:
    for ours, theirs in zip(EVERY, SAVES, strict=True):
        assert repr(hook(**{ours: 7})) == repr(hook(**{theirs: 7}))
        said = f"^got ({ours}=7 and {theirs}=8|{theirs}=8 and {ours}=7); "
        with pytest.raises(ValueError, match=said):
            hook(**{ours: 7, theirs: 8})


async def async_function(*_: Any) -> float:
    return 1.0


SINK = CsvSink("never made")
LOG, EXCLUSIVE = OnFailure.LOG, Evaluate.EXCLUSIVE
# the last ones are names of other libraries, or nearly right
WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (saver, {"retention": 3}, r"retention is 3; give Retention\(max_to_keep=3\)"),
    (saver, {"retention": Retention(keep_best=1)}, 'needs a metric; give metric="loss"'),
    (saver, {"when_busy": "skip"}, "when_busy is 'skip'; give WhenBusy.WAIT or SKIP"),
    (saver, {"checkpoint_dir": "s4://b/run"}, "'s4://b/run' is no address.*plain path"),
    (Metric, {"source": None}, 'metric is None; give fetches, such as "loss"'),
    (EarlyStoppingHook, {"metric": "loss", "patience": 0}, "patience is 0; give an integer"),
    (EarlyStoppingHook, {"metric": "loss", "patience": 1, "min_delta": -1}, "min_delta is -1"),
    (EarlyStoppingHook, {"metric": "loss", "patience": 1, "mode": "auto"}, "give Mode.MIN or Mode"),
    (evaluation, {"every_n_steps": 1, "mode": "x"}, "give Evaluate.CONCURRENT or Eval"),
    (evaluation, {"every_n_steps": 1, "on_failure": LOG}, "default for a plain function. leaves"),
    (evaluation, {"every_n_steps": 1, "on_failure": LOG, "mode": EXCLUSIVE}, "leave it out, or"),
    (evaluation, {"every_n_epochs": 0}, "every_n_epochs is 0"),
    (FeedFnHook, {"feed_fn": {"rate": 1}}, "give a function that returns a feed_dict"),
    *((FeedHook, {"source": each, "names": "x"}, "give a stage, an iterable or async")
      for each in (5, "text", {"a": 1})),
    (FeedHook, {"source": [1], "after_epoch": 3}, "give a function of the session and"),
    (HistoryHook, {"values": {"step": "loss"}}, "a value is called 'step'"),
    (HistoryHook, {"values": histogram("loss")}, "keeps numbers, not histogram"),
    (HistoryHook, {"values": "loss", "every_n_steps": "mae"}, r"as a list: \['loss', 'mae'\]"),
    (HistoryHook, {"max_rows": 1}, "max_rows is 1"),
    (LoggingTensorHook, {"tensors": ["a"]}, "give at_end and/or exactly one"),
    (LoggingTensorHook, {"tensors": ["a"], "every_n_iter": 0}, "give a number of runs > 0"),
    (LoggingTensorHook, {"tensors": "loss", "every_n_iter": 1}, r"a list of names: \['loss'\]"),
    (MetricsHook, {"sink": None}, "sink is None; give a sink of asynchooks.metrics"),
    (MetricsHook, {"sink": async_function}, "a sink is the async function .*; give a plain one"),
    (MetricsHook, {"sink": [SINK, SINK]}, "is there twice; give each sink once"),
    (MetricsHook, {"sink": []}, "give at least one sink"),
    *((MetricsHook, {"sink": print, "values": each}, message)
      for each, message in (
          ({"x": async_function}, "the value 'x' is the async function"),
          ([lambda: 1.0], "has no name; give it one"),
          (["loss", mean("loss")], "two values called 'loss'"))),
    (MetricsHook, {"sink": print, "every_n_steps": 1, "every_n_secs": 5.0}, "at most one of them"),
    *((NanTensorHook, {"loss_tensor": "loss", "max_rollbacks": each}, "give an integer >= 0")
      for each in (-1, 1.5)),
    *((PreemptionHook, {"deadline_secs": each}, "give seconds > 0") for each in (0, math.nan, "5")),
    (ProgressHook, {"values": histogram("gradients")}, r"values are histogram.*; a histogram can"),
    (ProgressHook, {"file": "log.txt"}, "file is 'log.txt'; give a text stream"),
    *((PreemptionHook, {"same_signal_secs": each}, "give seconds >= 0") for each in (-1, None)),
    (PreemptionHook, {"signals": ["SIGTERM"]}, "give signals, such as signal.SIGTERM"),
    (PreemptionHook, {"signals": 15}, "give several: .signal.SIGTERM."),
    (PreemptionHook, {"signals": [signal.SIGKILL]}, "SIGKILL, which no program can handle"),
    *((hook, {"source": [1]}, f"{hook.__name__} got .*; give the stage that the sess")
      for hook in (DataWaitHook, InputPositionHook)),
    (RankStopHook, {"every_n_steps": 0}, "every_n_steps is 0; give an integer >= 1"),
    (RankStopHook, {"timeout_secs": 0}, "timeout_secs is 0"),
    (StepCounterHook, {"every_n_secs": 1.0}, "got every_n_steps=100 and every_n_secs"),
    (StallHook, {"secs": 1, "on_stall": "STOP"}, r"give OnStall\.STOP or OnStall\.LOG"),
    *((StopAtStepHook, each, "give exactly one")
      for each in ({}, {"num_steps": 1, "last_step": 1})),
    *((hook, {name: secs}, f"^{name} is .*; give finite seconds > 0")
      for hook, name in (
          (TimeLimitHook, "secs"), (StallHook, "secs"), (LoopLagHook, "max_lag_secs"))
      for secs in (0, math.nan, math.inf, "1", True)),
    *((SummarySaverHook, {"save_steps": 1, **each}, "give exactly one")
      for each in ({}, {"summary_op": "a", "scaffold": object()})),
    (TraceHook, {}, "neither a path nor a tracer"),
    (TraceHook, {"path": "a", "least_secs": -1}, "seconds >= 0"),
    (TraceHook, {"path": "a", "flush_secs": 0}, "seconds > 0"),
    (TraceHook, {"tracer": "mine"}, "get_tracer"),
    (TraceHook, {"path": "a", "tracer": "mine"}, "list both hooks"),
    *((hook, {wrong: 5}, f"^{hook.__name__} got .*; write {right}")
      for hook, wrong, right in (
          (EvaluationHook, "every_n_iter", "every_n_steps"), (MetricsHook, "save_steps", "every_n"),
          (HistoryHook, "every_secs", "every_n_secs"), (DataWaitHook, "every_steps", "every_n_ste"),
          (StepCounterHook, "every_n_step", "every_n_steps"), (repeat, "epochs", "num_epochs"),
          (LoggingTensorHook, "save_steps", "every_n_steps"), (ProgressHook, "save_secs", "every"),
          (EarlyStoppingHook, "monitor", "metric"), (SummarySaverHook, "every_n_iter", "every_n"),
          (CheckpointSaverHook, "save_best_only", "retention"),
          (StopAtStepHook, "max_steps", "last_step"), (StopAtStepHook, "x", "num_steps, last_st"))),
    (StopAtStepHook, {"max_epochs": 5}, r"StopAtStepHook got max_epochs; repeat\(source, 5\) arou"),
]  # fmt: skip


@pytest.mark.parametrize(("hook", "arguments", "message"), WRONG)
def test_a_wrong_argument_is_refused(
    hook: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        hook(**arguments)
