"""Metrics by which hooks decide, and the results of evaluations: the newest, and their state."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    Metric,
    MetricError,
    MonitoredSession,
)
from asynchooks._engine.base import Engine

from ..support.helpers import counting_creator, settle
from .evaluations import Notes
from .training import run_to
from .virtual_time import on_trampoline, quarter_step

pytestmark = pytest.mark.anyio


def test_a_call_gives_the_newest_value_and_of_fetches_none() -> None:
    assert Metric(lambda: 2.0)() == 2.0
    assert Metric("loss")() is None


def test_a_metric_of_nothing_or_without_a_mode_is_refused() -> None:
    with pytest.raises(TypeError, match='metric is None; give fetches, such as "loss"'):
        Metric(None)
    with pytest.raises(ValueError, match="mode is 'best'; give Mode.MIN or Mode.MAX"):
        Metric("loss", "best")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((each, "is .*; give one number") for each in ("0.5", b"0.5", [0.5], 1 + 2j, 10**400)),
        (None, "is None; give one number"),
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


def train(hook: EvaluationHook, first: int, last: int, state: Any = None) -> Any:
    """In virtual time, steps of a quarter of a second; from a state of the hook to its state."""
    states = []

    async def main(engine: Engine) -> None:
        if state is not None:
            hook.load_state_dict(state)
        creator = FunctionSessionCreator(quarter_step, initial_step=first)
        async with MonitoredSession([hook], creator) as session:
            await run_to(session, last)
            states.append(json.loads(json.dumps(hook.state_dict())))

    on_trampoline(main)
    return states[0]


@settings(max_examples=50)
@given(
    every=st.integers(1, 9), cut=st.integers(0, 30), more=st.integers(0, 30),
    mode=st.sampled_from(Evaluate), is_by_secs=st.booleans(),
)  # fmt: skip
def test_a_resumed_training_evaluates_at_the_same_steps_as_one_that_was_not_interrupted(
    every: int, cut: int, more: int, mode: Evaluate, is_by_secs: bool
) -> None:
    def make(notes: Notes, at_end: bool) -> EvaluationHook:
        secs, steps = (every / 4, None) if is_by_secs else (None, every)
        return EvaluationHook(notes, steps, secs, mode=mode, at_end=at_end)

    whole, parts = Notes(), Notes()
    train(make(whole, True), 0, cut + more)
    train(make(parts, True), cut, cut + more, train(make(parts, False), 0, cut))
    assert parts.steps == whole.steps
