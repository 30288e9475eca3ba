"""What newcomers write on a graph, and what they are told; functions: tests/session."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from asynchooks import EvaluationHook, FeedHook, SessionRunHook, StopAtStepHook
from asynchooks.data import prefetch, repeat

from .models import counting_model, monitored
from .test_feed_graph import fed_model

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Reads(SessionRunHook):
    async def after_run(self, run_context: Any, run_values: Any) -> None:
        run_values.results["loss"]


class Stops(SessionRunHook):
    async def after_run(self, run_context: Any, run_values: Any) -> None:
        run_context.session.request_stop()


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Reads(), "its before_run asked for nothing"),
        (Stops(), "request_stop is a method of run_context"),
    ],
)
async def test_an_error_of_a_hook_says_what_to_write(hook: SessionRunHook, said: str) -> None:
    model = counting_model()
    with pytest.raises((TypeError, AttributeError)) as raised:
        async with monitored(model.graph, [hook]) as session:
            await session.run(model.train_op)
    assert any(said in note for note in raised.value.__notes__)


async def test_the_step_is_a_number_in_the_loop() -> None:
    model = counting_model()
    async with monitored(model.graph, [StopAtStepHook(last_step=9)]) as session:
        while session.global_step < 4:
            await session.run(model.train_op)
        assert f"{session.global_step:03d}" == "004"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_run_that_is_not_awaited_is_an_error_at_the_next() -> None:
    model = counting_model()
    async with monitored(model.graph, []) as session:
        run = session.run(model.train_op)
        with pytest.raises(RuntimeError, match="is to be awaited"):
            await session.run(model.train_op)
        assert inspect.getcoroutinestate(run) == inspect.CORO_CREATED
        assert await run == 1


async def test_it_evaluates_behind_each_epoch() -> None:
    model, steps = fed_model(), []

    def evaluate(session: Any, step: int) -> dict[str, float]:
        steps.append(step)
        return {"doubled": 2 * session.global_step.value}

    hook = EvaluationHook(evaluate, every_n_epochs=1, at_end=False)
    feed = FeedHook(prefetch(repeat([1, 2, 3], 2), 2), "a:0")
    async with monitored(model.graph, [feed, hook]) as session:
        while not session.should_stop():
            await session.run(model.train_op)
    assert steps == [3, 6]
    assert hook.latest == {"doubled": 12.0}
