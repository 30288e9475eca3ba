"""Workers with different graphs never see each other's default graph; errors name who does."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    Coordinator,
    GraphStackError,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
)

from .models import Model, counting_model, graph_stack_height, let_others_run, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Looking(SessionRunHook):
    """Notes where the default graph is not the session's, before and after each await."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.wrong: list[str] = []
        self.looks = 0

    async def look(self, moment: str) -> None:
        for when in ("before", "after"):
            self.looks += 1
            if v1.get_default_graph() is not self._graph or tf.executing_eagerly():
                self.wrong.append(f"{moment}, {when} the await")
            await let_others_run()

    async def begin(self) -> None:
        await self.look("begin")
        assert tf.constant(1).graph is self._graph

    async def side_task(self) -> None:
        for _ in range(5):
            await self.look("side task")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self.look("after_create_session")
        coord.start_soon(self.side_task)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        await self.look("before_run")
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self.look("after_run")

    async def end(self, session: Any) -> None:
        await self.look("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self.look("on_error")


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_interleaved_workers_see_their_own_graph_at_every_moment(runner: str) -> None:
    hooks: list[Looking] = []
    before = graph_stack_height()

    async def work(model: Model, fails: bool) -> None:
        hook = Looking(model.graph)
        hooks.append(hook)
        session = monitored(model.graph, [hook], step_runner=runner)

        async def step_fn(step_context: StepContext) -> Any:
            await hook.look("step_fn")
            return await step_context.run_with_hooks(model.train_op)

        def sync_step_fn(step_context: StepContext) -> Any:
            return v1.get_default_graph()

        async with session:
            for count in range(1, 4):
                assert await session.run(model.train_op) == 2 * count - 1
                assert await session.run_step_fn(step_fn) == 2 * count
            assert await session.run_step_fn(sync_step_fn) is model.graph
            if fails:
                raise ZeroDivisionError("body")

    async def work_and_fail(model: Model) -> None:
        with pytest.raises(ZeroDivisionError, match="body"):
            await work(model, True)

    async def look_outside() -> None:
        for _ in range(200):
            assert graph_stack_height() == before, "no graph is the default one outside of sessions"
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(look_outside)
        for _ in range(4):
            group.start_soon(work, counting_model(), False)
            group.start_soon(work_and_fail, counting_model())
    assert [hook.wrong for hook in hooks] == [[]] * 8
    assert all(hook.looks > 30 for hook in hooks)
    assert graph_stack_height() == before


async def test_in_graph_keeps_the_graph_across_awaits_and_from_other_tasks() -> None:
    wrong: list[str] = []
    before = graph_stack_height()

    async def use(graph: Any, number: int) -> int:
        for _ in range(10):
            if v1.get_default_graph() is not graph:
                wrong.append(f"{number}")
            await anyio.lowlevel.checkpoint()
        assert tf.constant(number).graph is graph
        return number

    async def call(number: int) -> None:
        graph = tf.Graph()
        assert await asynchooks.tf.in_graph(graph, use, graph, number) == number
        assert len(graph.get_operations()) == 1

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(call, number)
    assert wrong == []
    assert graph_stack_height() == before


async def test_in_graph_calls_a_plain_function_too_and_passes_its_error() -> None:
    graph = tf.Graph()
    assert await asynchooks.tf.in_graph(graph, v1.get_default_graph) is graph

    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise ZeroDivisionError("in fn")

    with pytest.raises(ZeroDivisionError, match="in fn"):
        await asynchooks.tf.in_graph(graph, fail)
    assert tf.executing_eagerly()


async def test_in_graph_passes_a_cancellation_through() -> None:
    graph = tf.Graph()
    seen: list[Any] = []

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            seen.append(v1.get_default_graph())

    with anyio.move_on_after(0) as scope:
        await asynchooks.tf.in_graph(graph, wait)
    assert scope.cancelled_caught
    assert seen == [graph]
    assert tf.executing_eagerly()


async def test_sessions_opened_while_another_graph_is_the_default_keep_their_own() -> None:
    one, two = counting_model(), counting_model()
    sessions: list[MonitoredSession] = [monitored(m.graph) for m in (one, two)]
    with tf.Graph().as_default() as foreign:
        for session in sessions:
            await session.__aenter__()
        assert await sessions[0].run(one.train_op) == 1
        assert await sessions[1].run(two.train_op) == 1
        assert v1.get_default_graph() is foreign
        for session in sessions:
            await session.close()
    assert foreign.get_operations() == []


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

    with pytest.raises(GraphStackError, match=r"the side task .*hold' held a default graph"):
        async with monitored(model.graph, [Starting()]) as session:
            while not session.should_stop():
                await session.run(model.train_op)
                await let_others_run()
    assert tf.executing_eagerly()
