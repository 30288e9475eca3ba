"""Results of evaluations: the newest, a metric by name, and the state that a checkpoint holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MetricError,
    MonitoredSession,
    PreemptionError,
)
from asynchooks._engine.base import Engine
from asynchooks.hooks._metrics import Results
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator, counting_step, settle
from .evaluations import Gated, Notes, run_to
from .virtual_time import on_trampoline, quarter_step

modes = st.sampled_from(Evaluate)


@given(steps=st.lists(st.integers(0, 20)))
def test_the_newest_by_step_stays_whatever_the_order(steps: list[int]) -> None:
    results = Results("eval")
    for place, step in enumerate(steps):
        results.add(step, {"place": place})
        newest = max(steps[: place + 1])
        assert results.latest_step == newest
        assert results.latest == {"place": max(i for i in range(place + 1) if steps[i] == newest)}


@pytest.mark.anyio
async def test_an_evaluation_that_is_overtaken_is_not_the_newest() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, max_at_once=2, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 4)
        gated.let(4)
        await settle()
        gated.let(2)
        await settle()
        assert gated.ended == [4, 2]
        assert (hook.latest, hook.latest_step) == ({"step": 4.0}, 4)


@pytest.mark.anyio
async def test_the_results_cannot_be_changed_from_outside() -> None:
    hook = EvaluationHook(Notes(), every_n_steps=1)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 1)
    with pytest.raises(TypeError, match="does not support item assignment"):
        hook.latest["step"] = 3  # type: ignore[index]


@pytest.mark.anyio
async def test_a_metric_is_the_newest_value_with_its_step() -> None:
    hook = EvaluationHook(Notes(), every_n_steps=2, name="test")
    step, other = hook.metric("step"), hook.metric("loss")
    assert step() is None
    assert step.newest() is None
    assert hook.latest is None
    assert hook.latest_step is None
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 2)
        await settle()
        assert step() == 2.0
        assert step.newest() == (2, 2.0)
        await run_to(session, 4)
    assert step() == 4.0
    with pytest.raises(MetricError, match="'test' gave no 'loss' at step 4, but 'step'; ask"):
        other()


def train(hook: EvaluationHook, first: int, last: int, state: str | None = None) -> str:
    """In virtual time, steps of a quarter of a second; from a state of the hook to its state."""
    states = []

    async def main(engine: Engine) -> None:
        if state is not None:
            hook.load_state_dict(json.loads(state))
        creator = FunctionSessionCreator(quarter_step, initial_step=first)
        async with MonitoredSession([hook], creator) as session:
            await run_to(session, last)
            states.append(json.dumps(hook.state_dict()))

    on_trampoline(main)
    return states[0]


@given(
    every=st.integers(1, 9), cut=st.integers(0, 30), more=st.integers(0, 30), mode=modes,
    is_by_secs=st.booleans(),
)  # fmt: skip
def test_a_resumed_training_evaluates_at_the_same_steps_as_one_that_was_not_interrupted(
    every: int, cut: int, more: int, mode: Evaluate, is_by_secs: bool
) -> None:
    def make(notes: Notes, at_end: bool) -> EvaluationHook:
        secs, steps = (every / 4, None) if is_by_secs else (None, every)
        return EvaluationHook(notes, steps, secs, mode=mode, at_end=at_end)

    whole, parts = Notes(), Notes()
    train(make(whole, True), 0, cut + more)
    before, after = make(parts, False), make(parts, True)
    train(after, cut, cut + more, train(before, 0, cut))
    assert parts.steps == whole.steps


@pytest.mark.anyio
async def test_a_state_from_before_the_first_session_changes_nothing() -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=3, at_end=False)
    hook.load_state_dict(EvaluationHook(notes, every_n_steps=3).state_dict())
    creator = FunctionSessionCreator(counting_step()[0], initial_step=2)
    async with MonitoredSession([hook], creator) as session:
        await run_to(session, 6)
    assert notes.steps == [5]


@pytest.mark.anyio
async def test_a_recovery_after_a_resumption_restarts_the_count() -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=5, at_end=False)
    timer = {"last_step": -2, "secs_since_last": 0.0}
    hook.load_state_dict({"timer": timer, "latest": {"step": 9.0}, "latest_step": 9})
    lost = ScriptedSession([{}] * 4 + [PreemptionError("lost")])
    creator = ScriptedSessionCreator([lost, ScriptedSession()])
    async with MonitoredSession([hook], creator) as session:
        await run_to(session, 4)
        await session.run([])
        await run_to(session, 6)
    assert notes.steps == [3, 5]
    assert hook.latest_step == 5


def test_the_state_keeps_nan() -> None:
    hook = EvaluationHook(Notes(), every_n_steps=3)
    hook._results.add(3, {"loss": math.nan, "accuracy": 0.1})
    state: dict[str, Any] = json.loads(json.dumps(hook.state_dict()))
    other = EvaluationHook(Notes(), every_n_steps=3)
    other.load_state_dict(state)
    assert math.isnan(other.metric("loss")() or 0.0)
    assert other.metric("accuracy")() == 0.1
