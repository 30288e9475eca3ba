"""Whoever holds a default graph across an await is named, and the stack is clean afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import (
    Coordinator,
    GraphStackError,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
)

from .models import counting_model, graph_stack_height, let_others_run, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Holding(SessionRunHook):
    """Holds a graph across an await, at one moment."""

    def __init__(self, moment: str, graph: Any) -> None:
        self._moment = moment
        self._graph = graph

    async def _hold(self, moment: str) -> None:
        if moment == self._moment:
            with self._graph.as_default():
                await let_others_run()

    async def begin(self) -> None:
        await self._hold("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self._hold("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        await self._hold("before_run")
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._hold("after_run")

    async def end(self, session: Any) -> None:
        await self._hold("end")


@pytest.mark.parametrize("is_own_graph", [False, True])
@pytest.mark.parametrize(
    "moment", ["begin", "after_create_session", "before_run", "after_run", "end"]
)
async def test_a_hook_that_holds_a_graph_across_an_await_is_named_and_the_stack_is_clean(
    moment: str, is_own_graph: bool
) -> None:
    model = counting_model()
    graph = model.graph if is_own_graph else tf.Graph()
    before = graph_stack_height()
    with pytest.raises(GraphStackError, match=rf"^{moment} of Holding held a default graph"):
        async with monitored(model.graph, [Holding(moment, graph)]) as session:
            await session.run(model.train_op)
    assert graph_stack_height() == before
    assert tf.executing_eagerly()
    with graph.as_default():
        assert v1.get_default_graph() is graph


async def test_a_step_fn_that_holds_a_graph_across_an_await_is_named() -> None:
    model = counting_model()

    async def holding(step_context: StepContext) -> None:
        with tf.Graph().as_default():
            await step_context.run_with_hooks(model.train_op)
            await let_others_run()

    async with monitored(model.graph, step_runner="inline") as session:
        with pytest.raises(GraphStackError, match=r"the step_fn <function .*holding"):
            await session.run_step_fn(holding)
        assert await session.run(model.train_op) > 0
    assert tf.executing_eagerly()


async def test_a_side_task_that_holds_a_graph_across_an_await_leaves_as_the_error() -> None:
    model = counting_model()

    async def hold() -> None:
        with tf.Graph().as_default():
            await let_others_run()

    class Starting(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(hold)

    with pytest.raises(GraphStackError, match="a side task held a default graph"):
        async with monitored(model.graph, [Starting()]) as session:
            while not session.should_stop():
                await session.run(model.train_op)
                await let_others_run()
    assert tf.executing_eagerly()
