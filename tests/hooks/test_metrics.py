"""Metrics by which hooks decide, and the results of evaluations: the newest, and their state."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    Metric,
    MetricError,
    MonitoredSession,
    StopAtStepHook,
)

from ..support.helpers import counting_creator, settle
from .evaluations import Notes
from .preemptions import Counter, saving
from .training import run_session, run_to


def test_a_call_gives_the_newest_value_and_of_fetches_none() -> None:
    assert Metric(lambda: 2.0)() == 2.0
    assert Metric("loss")() is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((each, "is .*; give one number") for each in ("0.5", [0.5], 1 + 2j, 10**400)),
        (np.zeros((4, 2)), r"is an array of shape \(4, 2\) and float64; give one number"),
        ({"a": "x" * 300}, r"is {'a': 'x{190}\.\.\.; give one number"),
        *((each, "is NaN, which is neither better") for each in (math.nan, np.array(np.nan))),
    ],
)
def test_what_is_no_number_is_an_error_that_describes_it_in_a_line(value: Any, said: str) -> None:
    with pytest.raises(MetricError, match=f"the metric 'loss' {said}"):
        Metric("loss").read(value, 3)


async def test_a_metric_is_the_newest_value_with_its_step() -> None:
    hook = EvaluationHook(Notes(), every_n_steps=2, name="test")
    step, other = hook.metric("step"), hook.metric("loss")
    assert (step(), hook.latest, hook.latest_step) == (None,) * 3
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 2)
        await settle()
        assert (step(), hook.latest_step) == (2.0, 2)
        await run_to(session, 4)
    assert step() == 4.0
    with pytest.raises(MetricError, match="'test' gave no 'loss' at step 4, but 'step'; ask"):
        other()
    with pytest.raises(TypeError, match="does not support item assignment"):
        hook.latest["step"] = 3  # type: ignore[index]


@pytest.mark.parametrize("mode", Evaluate)
async def test_a_resumed_training_evaluates_at_the_steps_of_one_that_was_not_interrupted(
    mode: Evaluate, tmp_path: Path
) -> None:
    notes = Notes()
    for last_step in (5, 10):
        model, hook = Counter(), EvaluationHook(notes, 3, mode=mode, at_end=False)
        hooks = [hook, saving(tmp_path, model), StopAtStepHook(last_step=last_step)]
        await run_session(hooks, model.step)
    assert notes.steps == [3, 6, 9]
