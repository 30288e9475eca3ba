"""Mistakes that nothing would tell of by itself: each is answered by what to write instead."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    Coordinator,
    EarlyStoppingHook,
    EvaluationHook,
    FetchError,
    MonitoredSession,
    StepFunctionError,
    StopAtStepHook,
    TimeLimitHook,
)

pytestmark = pytest.mark.anyio


def step() -> dict[str, Any]:
    return {"loss": 0.5}


async def test_should_stop_without_a_call_is_refused_as_a_condition() -> None:
    async with MonitoredSession([StopAtStepHook(last_step=2)], step) as session:
        with pytest.raises(TypeError, match=r"call it: should_stop\(\)"):
            while not session.should_stop:  # type: ignore[truthy-function]
                await session.run([])
        while not session.should_stop():
            await session.run([])
        assert session.global_step.value == 2
    with pytest.raises(TypeError, match=r"call it: should_stop\(\)"):
        bool(Coordinator().should_stop)


async def test_a_step_that_names_one_global_step_for_ever_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MonitoredSession([], lambda: {"global_step": 7}) as session:
        with caplog.at_level(logging.WARNING, logger="asynchooks"):
            for _ in range(1000):
                await session.run([])
            assert not caplog.messages
            for _ in range(2000):
                await session.run([])
    [told] = caplog.messages
    assert "has been 7 in 1000 runs" in told
    assert "Return the step after the run" in told


async def test_what_a_generator_function_returned_is_shown_as_that() -> None:
    def generates() -> Any:
        yield {"loss": 1.0}

    with pytest.raises(StepFunctionError, match="returned <generator object"):
        async with MonitoredSession([], generates) as session:
            await session.run([])


async def test_a_metric_that_no_step_returns_is_perhaps_that_of_an_evaluation() -> None:
    with pytest.raises(FetchError, match="val_loss") as caught:
        async with MonitoredSession([EarlyStoppingHook("val_loss", patience=1)], step) as session:
            await session.run([])
    assert any("evaluation.metric(name)" in note for note in caught.value.__notes__)


async def evaluate(session: Any, global_step: int) -> dict[str, float]:
    return {"accuracy": 1.0}


def test_an_evaluation_that_was_called_already_is_refused() -> None:
    called: Any = evaluate(None, 1)
    with pytest.raises(TypeError, match="give the function: evaluate in place of evaluate"):
        EvaluationHook(called, every_n_steps=1)


def test_a_unit_that_an_option_has_not_is_answered_with_the_option() -> None:
    options: Any = {"minutes": 5}
    with pytest.raises(TypeError, match="TimeLimitHook got minutes; write secs"):
        TimeLimitHook(**options)


async def steps() -> dict[str, Any]:
    return {"loss": 0.5}


@pytest.mark.parametrize(
    ("called", "mend"),
    [
        (step, "that is what a step returns; give the step function without a call"),
        (steps, "give the function: steps in place of steps"),
    ],
)
def test_a_step_function_that_was_called_already_is_refused(called: Any, mend: str) -> None:
    with pytest.raises(TypeError, match=mend):
        MonitoredSession([], called())


@pytest.mark.parametrize(
    ("option", "mend"),
    [("keep_best", "write retention"), ("every_n_epochs", r"save_steps .* such as len\(loader\)")],
)
def test_an_option_of_another_library_is_answered_with_ours(option: str, mend: str) -> None:
    options: Any = {option: 1}
    with pytest.raises(TypeError, match=mend):
        CheckpointSaverHook("model", **options)
