"""The graph: finalized while it is run, shared by several sessions, changed by late workers."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import (
    GlobalStepWaiterHook,
    LateVariableError,
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from .models import ChiefSessionCreator, Model, Moments, counting_model, monitored, raising

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Doubling(SessionRunHook):
    """Adds an op in its begin and fetches it in each run."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.results: list[int] = []
        self.doubled: Any = None

    async def begin(self) -> None:
        assert v1.get_default_graph() is self._model.graph
        self.doubled = self._model.step.read_value() * 2 + 1

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self.doubled)

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        self.results.append(run_values.results)


def add_variable() -> None:
    v1.get_variable("late", initializer=1.0)


def shared(model: Model) -> SharedSessionCreator:
    with model.graph.as_default():
        return SharedSessionCreator(ChiefSessionCreator())


async def test_the_graph_is_finalized_after_begin_and_unfinalized_at_the_end() -> None:
    model = counting_model()
    seen: list[bool] = []
    hook = Moments(
        begin=lambda: seen.append(model.graph.finalized),
        created=lambda session, coord: seen.append(model.graph.finalized),
        end=lambda session: seen.append(model.graph.finalized),
    )
    async with monitored(model.graph, [hook]):
        with model.graph.as_default(), pytest.raises(RuntimeError, match="Graph is finalized"):
            tf.constant(1)
    assert seen == [False, True, True]
    assert not model.graph.finalized


async def test_ops_added_between_two_sessions_are_run_by_the_second() -> None:
    model = counting_model()
    async with monitored(model.graph) as session:
        await session.run(model.train_op)
    with model.graph.as_default():
        seven = tf.constant(7)
    async with monitored(model.graph) as session:
        assert await session.run(seven) == 7
        assert session.global_step.value == 0


@pytest.mark.parametrize("error", [None, ZeroDivisionError("body")])
async def test_a_graph_that_was_finalized_before_stays_so(error: Exception | None) -> None:
    model = counting_model()
    async with monitored(model.graph):
        pass  # its scaffold leaves the ops behind that the next one needs
    model.graph.finalize()
    session = monitored(model.graph)
    await session.__aenter__()
    assert await session.run(model.train_op) == 1
    await session.__aexit__(type(error) if error else None, error, None)
    assert model.graph.finalized


async def test_a_graph_finalized_before_without_the_ops_needed_is_an_error() -> None:
    model = counting_model()
    model.graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized and cannot be modified"):
        await monitored(model.graph).__aenter__()
    assert model.graph.finalized


async def test_begin_that_adds_ops_to_a_graph_finalized_before_is_an_error() -> None:
    model = counting_model()
    async with monitored(model.graph):
        pass
    model.graph.finalize()
    hook = Moments(begin=lambda: tf.constant(1))
    with pytest.raises(RuntimeError, match="Graph is finalized and cannot be modified"):
        await monitored(model.graph, [hook]).__aenter__()
    assert model.graph.finalized


async def test_a_second_session_on_the_graph_adds_nothing_to_it() -> None:
    model = counting_model()
    async with monitored(model.graph):
        count = len(model.graph.get_operations())
    async with monitored(model.graph):
        assert len(model.graph.get_operations()) == count


async def test_two_sessions_of_their_own_on_one_graph_count_apart_and_the_last_unfinalizes() -> (
    None
):
    model = counting_model()
    one, two = monitored(model.graph), monitored(model.graph)
    await one.__aenter__()
    await two.__aenter__()
    assert await one.run(model.train_op) == 1
    assert await one.run(model.train_op) == 2
    assert await two.run(model.train_op) == 1
    assert (one.global_step.value, two.global_step.value) == (2, 1)
    await one.close()
    assert model.graph.finalized
    await two.close()
    assert not model.graph.finalized


async def test_a_late_worker_may_add_ops_in_begin_and_the_first_goes_on() -> None:
    model = counting_model()
    creator = shared(model)
    async with monitored(model.graph, None, creator) as first:
        assert await first.run(model.train_op) == 1
        hook = Doubling(model)
        async with monitored(model.graph, [hook], creator) as late:
            assert model.graph.finalized
            await late.run([])
            assert await first.run(model.train_op) == 2
            await late.run([])
        assert await first.run(model.train_op) == 3
        assert model.graph.finalized
    assert hook.results == [3, 5]
    assert not model.graph.finalized


async def test_a_late_session_of_its_own_may_add_ops_in_begin() -> None:
    model = counting_model()
    async with monitored(model.graph) as first:
        hook = Doubling(model)
        async with monitored(model.graph, [hook]) as late:
            await late.run([])
            assert await first.run(model.train_op) == 1
    assert hook.results == [1]


async def test_a_late_worker_that_adds_variables_is_an_error_and_the_first_goes_on() -> None:
    model = counting_model()
    creator = shared(model)
    recorder = RecordingHook("a")
    async with monitored(model.graph, None, creator) as first:
        late = monitored(model.graph, [recorder, Moments(begin=add_variable)], creator)
        with pytest.raises(LateVariableError, match=r"added late:0 to a graph that is being run"):
            await late.__aenter__()
        assert late.raw_session() is None
        assert model.graph.finalized
        assert await first.run(model.train_op) == 1
    assert recorder.log == [("a", "begin"), ("a", "on_error")]
    assert not model.graph.finalized


async def test_the_first_worker_may_add_variables_in_begin() -> None:
    model = counting_model()
    hook = Moments(begin=add_variable)
    async with monitored(model.graph, [hook], shared(model)) as session:
        variable = model.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)[-1]
        assert await session.run(variable) == 1.0


async def test_a_late_begin_that_fails_leaves_the_graph_finalized_and_runs_possible() -> None:
    model = counting_model()
    creator = shared(model)
    async with monitored(model.graph, None, creator) as first:
        hook = Moments(begin=raising(ZeroDivisionError("late")))
        with pytest.raises(ZeroDivisionError, match="late"):
            await monitored(model.graph, [hook], creator).__aenter__()
        assert model.graph.finalized
        assert await first.run(model.train_op) == 1


@pytest.mark.parametrize("is_shared", [False, True])
async def test_missing_global_step_is_named_in_begin(is_shared: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        chief: SessionCreator = ChiefSessionCreator()
        creator = SharedSessionCreator(chief) if is_shared else chief
    for hook in (StopAtStepHook(last_step=1), GlobalStepWaiterHook(1), StepCounterHook()):
        name = type(hook).__name__
        with pytest.raises(RuntimeError, match=rf"Global step should be created to use {name}\."):
            await monitored(graph, [hook], creator).__aenter__()
        assert not graph.finalized


async def test_a_hook_may_create_the_global_step_for_the_hooks_after_it() -> None:
    graph = tf.Graph()
    made: list[Any] = []
    creating = Moments(
        begin=lambda: made.append(v1.assign_add(v1.train.get_or_create_global_step(), 1))
    )
    async with monitored(graph, [creating, StopAtStepHook(last_step=3)]) as session:
        while not session.should_stop():
            await session.run(made[0])
        assert session.global_step.value == 3
