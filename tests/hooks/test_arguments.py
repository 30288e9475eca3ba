"""Wrong arguments of hooks, and what the errors say."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from types import SimpleNamespace
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
    GlobalStepWaiterHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    NanTensorHook,
    OnFailure,
    PreemptionHook,
    StallHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
)
from asynchooks.data import prefetch

SAVES = ("save_secs", "save_steps")
EVERY = ("every_n_secs", "every_n_steps")
TIMED = [
    (lambda **times: CheckpointSaverHook("model", **times), SAVES),
    (lambda **times: SummarySaverHook(summary_op="summary", **times), SAVES),
    (lambda **times: EvaluationHook(lambda session, step: {}, **times), EVERY),
    (lambda **times: StepCounterHook(**{"every_n_steps": None, **times}), EVERY),
    (lambda **times: DataWaitHook(prefetch([], 1), **{"every_n_steps": None, **times}), EVERY),
]


@pytest.mark.parametrize(("hook", "names"), TIMED)
def test_a_wrong_interval_is_named_as_the_hook_s_own_argument(
    hook: Callable[..., Any], names: tuple[str, str]
) -> None:
    secs, steps = names
    with pytest.raises(ValueError, match=f"^got {steps}=None and {secs}=None; give exactly one"):
        hook()
    with pytest.raises(ValueError, match=f"^got {steps}=1 and {secs}=2.0; give exactly one"):
        hook(**{steps: 1, secs: 2.0})
    for name in names:
        with pytest.raises(ValueError, match=f"^{name} is -1; give a number >= 0$"):
            hook(**{name: -1})
        with pytest.raises(TypeError, match=f"^{name} is 'often'; give a number >= 0$"):
            hook(**{name: "often"})
    with pytest.raises(ValueError, match=rf"^{steps} is 2\.5; give a whole number >= 0$"):
        hook(**{steps: 2.5})


EVALUATE: dict[str, Any] = {"evaluate": lambda session, step: {}, "every_n_steps": 1}
STOPPING: dict[str, Any] = {"metric": "loss", "patience": 1}
BOTH: dict[str, Any] = {"every_n_iter": 1, "every_n_secs": 1.0}
TEXT = SimpleNamespace(summary_op="a")
GUARDS = [(TimeLimitHook, "secs"), (StallHook, "secs"), (LoopLagHook, "max_lag_secs")]
NO_TIMES = [
    *((each, TypeError) for each in ("1", None, True, 1j, [1.0])),
    *((each, ValueError) for each in (0, -1.0, math.nan, math.inf)),
]
WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    *((CheckpointSaverHook, {"checkpoint_dir": each, "save_steps": 1}, TypeError,
       f"^checkpoint_dir is {each!r}; give the path of a direct") for each in (None, 3, b"model")),
    (EarlyStoppingHook, {**STOPPING, "metric": None}, TypeError, "metric is None"),
    (EarlyStoppingHook, {**STOPPING, "patience": 0}, ValueError, "patience is 0; give an integer"),
    (EarlyStoppingHook, {**STOPPING, "patience": 1.5}, TypeError, "patience is 1.5; give an int"),
    (EarlyStoppingHook, {**STOPPING, "min_delta": -1}, ValueError, "min_delta is -1"),
    (EarlyStoppingHook, {**STOPPING, "min_delta": math.nan}, ValueError, "min_delta is nan"),
    (EarlyStoppingHook, {**STOPPING, "mode": 1}, TypeError, "mode is 1; give Mode.MIN or Mode.MAX"),
    (EarlyStoppingHook, {**STOPPING, "mode": "auto"}, ValueError, "mode is 'auto'; give Mode.MIN"),
    (EvaluationHook, {**EVALUATE, "mode": "x"}, TypeError, "give Evaluate.CONCURRENT or Eval"),
    (EvaluationHook, {**EVALUATE, "on_failure": "log"}, TypeError, "give OnFailure.STOP, "),
    (EvaluationHook, {**EVALUATE, "evaluate": 3}, TypeError, "evaluate is 3"),
    (EvaluationHook, {**EVALUATE, "evaluate": None}, TypeError,
     "evaluate is None; give a function of the session"),
    (EvaluationHook, {**EVALUATE, "on_failure": OnFailure.LOG}, ValueError,
     r"the default for a plain function\) leaves .*mode=Evaluate.C"),
    (EvaluationHook, {**EVALUATE, "on_failure": OnFailure.LOG, "mode": Evaluate.EXCLUSIVE},
     ValueError, "an exclusive evaluation leaves the run; leave it out, or give mode=Eval"),
    *((FeedFnHook, {"feed_fn": each}, TypeError, "give a function that returns a feed_dict")
      for each in (None, {"rate": 1}, 7)),
    *((FeedHook, {"source": each, "names": "x"}, TypeError, "give a stage, an iterable or async")
      for each in (5, "text", {"a": 1}, None)),
    (GlobalStepWaiterHook, {"wait_until_step": 1.5}, TypeError, r"wait_until_step is 1\.5"),
    *((LoggingTensorHook, {"tensors": ["a"], **each}, ValueError, "give at_end and/or exactly one")
      for each in ({}, BOTH, {**BOTH, "at_end": True})),
    *((LoggingTensorHook, {"tensors": ["a"], "every_n_iter": each}, ValueError,
       f"every_n_iter is {each}; give a number of runs > 0") for each in (0, -1)),
    (LoggingTensorHook, {"tensors": ["a"], "every_n_iter": 2.5}, ValueError,
     r"^every_n_iter is 2\.5; give a whole number >= 0$"),
    (LoggingTensorHook, {"tensors": ["a"], "every_n_secs": -1}, ValueError, "every_n_secs is -1"),
    (LoggingTensorHook, {"tensors": "loss", "every_n_iter": 1}, TypeError,
     r"give a list of names: \['loss'\]"),
    *((NanTensorHook, {"loss_tensor": "loss", "max_rollbacks": value}, kind,
       "max_rollbacks is .*; give an integer >= 0")
      for value, kind in ((-1, ValueError), (1.5, TypeError), (None, TypeError))),
    *((PreemptionHook, {"deadline_secs": each}, ValueError,
       "deadline_secs is .*; give seconds > 0") for each in (0, -1, math.nan)),
    (PreemptionHook, {"deadline_secs": "5"}, TypeError, "deadline_secs is '5'"),
    *((PreemptionHook, {"same_signal_secs": each}, ValueError,
       "same_signal_secs is .*; give seconds >= 0") for each in (-1, math.nan, -math.inf)),
    *((PreemptionHook, {"same_signal_secs": each}, TypeError, "same_signal_secs is ")
      for each in ("1", None, True)),
    *((PreemptionHook, {"signals": [each]}, TypeError,
       "signals holds .*; give signals, such as signal.SIGTERM")
      for each in ("SIGTERM", None, 999, 1.5)),
    *((PreemptionHook, {"signals": each}, TypeError, "give several: .signal.SIGTERM.")
      for each in (15, "SIGTERM", None)),
    (PreemptionHook, {"signals": [signal.SIGKILL]}, ValueError, "SIGKILL"),
    *((kind, {"source": each}, TypeError, f"{kind.__name__} got .*; give the stage that the sess")
      for kind in (DataWaitHook, InputPositionHook) for each in (range(5), [1], iter(()), None)),
    *((kind, {**source, "every_n_secs": 1.0}, ValueError, "got every_n_steps=100 and every_n_secs")
      for kind, source in ((StepCounterHook, {}), (DataWaitHook, {"source": prefetch([], 1)}))),
    *((StallHook, {"secs": 1, "on_stall": each}, TypeError,
       r"on_stall is .*; give OnStall\.STOP or OnStall\.LOG") for each in ("STOP", None, int)),
    *((StopAtStepHook, each, ValueError, "give exactly one")
      for each in ({}, {"num_steps": 1, "last_step": 1})),
    *((StopAtStepHook, each, TypeError, "give an integer number of steps")
      for each in ({"num_steps": 1.5}, {"last_step": "10"})),
    *((hook, {name: secs}, kind, f"^{name} is .*; give finite seconds > 0")
      for hook, name in GUARDS for secs, kind in NO_TIMES),
    *((SummarySaverHook, each, ValueError, "give exactly one")
      for each in ({"save_steps": 1}, {"save_steps": 1, "summary_op": "a", "scaffold": TEXT})),
]  # fmt: skip


@pytest.mark.parametrize(("hook", "arguments", "kind", "message"), WRONG)
def test_a_wrong_argument_is_refused(
    hook: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        hook(**arguments)


def test_a_failure_of_a_concurrent_evaluation_may_be_logged() -> None:
    EvaluationHook(**EVALUATE, on_failure=OnFailure.LOG, mode=Evaluate.CONCURRENT)
