"""run_step_fn on real graphs."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from asynchooks import StepContext, StopTraining
from asynchooks.testing import RecordingHook

from .models import counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_a_sync_step_fn_runs_the_raw_session_without_hooks() -> None:
    model = counting_model()
    hook = RecordingHook("a")

    def step_fn(step_context: StepContext) -> Any:
        return step_context.session.run(model.train_op)

    async with monitored(model.graph, [hook]) as session:
        assert await session.run_step_fn(step_fn) == 1
    assert ("a", "before_run") not in hook.log


async def test_an_async_step_fn_mixes_raw_runs_and_runs_with_hooks() -> None:
    model = counting_model()
    hook = RecordingHook("a", fetches=model.step)

    async def step_fn(step_context: StepContext) -> Any:
        raw = step_context.session.run(model.train_op)
        return raw, await step_context.run_with_hooks(model.train_op)

    async with monitored(model.graph, [hook]) as session:
        assert await session.run_step_fn(step_fn) == (1, 2)
        assert session.global_step.value == 2
    assert len(hook.results) == 1


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_sync_step_fn_runs_where_steps_run(runner: str) -> None:
    model = counting_model()

    def step_fn(step_context: StepContext) -> tuple[int, Any]:
        return threading.get_ident(), v1.get_default_graph()

    async with monitored(model.graph, step_runner=runner) as session:
        thread, graph = await session.run_step_fn(step_fn)
    assert (thread == threading.get_ident()) is (runner == "inline")
    assert graph is model.graph


async def test_request_stop_in_a_step_fn_leaves_the_block_cleanly() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    async with monitored(model.graph, [hook]) as session:
        await session.run_step_fn(lambda step_context: step_context.request_stop())
        pytest.fail("request_stop leaves")
    assert hook.log[-1] == ("a", "end")


async def test_request_stop_without_a_block_reaches_the_caller() -> None:
    model = counting_model()
    session = monitored(model.graph)
    await session.__aenter__()
    with pytest.raises(StopTraining, match="step_fn has requested"):
        await session.run_step_fn(lambda step_context: step_context.request_stop())
    assert not session.should_stop()
    await session.close()


async def test_the_end_of_a_dataset_in_a_step_fn_is_a_clean_end() -> None:
    graph = tf.Graph()
    with graph.as_default():
        element = v1.data.make_one_shot_iterator(tf.data.Dataset.range(2)).get_next()
    elements: list[int] = []

    def step_fn(step_context: StepContext) -> None:
        elements.append(step_context.session.run(element))

    hook = RecordingHook("a")
    async with monitored(graph, [hook]) as session:
        while not session.should_stop():
            await session.run_step_fn(step_fn)
    assert elements == [0, 1]
    assert hook.log[-1] == ("a", "end")


async def test_partials_and_methods_are_accepted_and_the_rest_is_refused_before_it_runs() -> None:
    model = counting_model()

    class Step:
        def method(self, step_context: StepContext) -> Any:
            return step_context.session.run(model.train_op)

        def __call__(self, step_context: StepContext) -> Any:
            return self.method(step_context)

    def with_op(op: Any, step_context: StepContext) -> Any:
        return step_context.session.run(op)

    async with monitored(model.graph) as session:
        assert await session.run_step_fn(Step().method) == 1
        assert await session.run_step_fn(Step()) == 2
        assert await session.run_step_fn(functools.partial(with_op, model.train_op)) == 3
        wrong: Any
        for wrong in (lambda: None, lambda context: None, lambda step_context, other: None):
            with pytest.raises(ValueError, match="it must take exactly `step_context`"):
                await session.run_step_fn(wrong)
        assert await session.run(model.step) == 3
