"""The graph: which one a session runs, finalized meanwhile, shared, changed by late workers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import (
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    LateVariableError,
    LoggingTensorHook,
    MonitoredSession,
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook
from asynchooks.tf import CheckpointSaverHook, ProfilerHook

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


WITHOUT_EAGER = """
import logging, sys
import anyio
import tensorflow as tf
import asynchooks as ah

v1 = tf.compat.v1
v1.disable_eager_execution()
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("asynchooks").setLevel(logging.INFO)

with tf.Graph().as_default() as graph:
    train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    creator = ah.ChiefSessionCreator()


async def main():
    async with ah.MonitoredSession([ah.StopAtStepHook(last_step=3)], creator) as session:
        assert session.graph is graph
        while not session.should_stop():
            print(await session.run(train_op))
    step = ah.FunctionSessionCreator(lambda: {"loss": 1})
    hook = ah.LoggingTensorHook(["loss"], every_n_iter=1)
    async with ah.MonitoredSession([hook], step) as session:
        await session.run([])


anyio.run(main)
step = v1.assign_add(v1.train.get_or_create_global_step(), 1)


async def in_the_default_graph():
    async with ah.MonitoredSession([ah.StopAtStepHook(last_step=1)]) as session:
        print(await session.run(step))


anyio.run(in_the_default_graph)
"""


@pytest.mark.faults
def test_without_eager_execution_the_graphs_are_the_same_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EAGER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", "2", "3", "loss = 1", "1"]


async def test_inside_a_graph_a_step_function_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": 1})
    with counting_model().graph.as_default():
        with caplog.at_level("INFO", "asynchooks"):
            hook = LoggingTensorHook(["loss"], every_n_iter=1)
            async with MonitoredSession([hook], creator) as session:
                await session.run([])
        for needy in (
            CheckpointSaverHook(str(tmp_path), save_steps=1),
            ProfilerHook(save_steps=1, output_dir=str(tmp_path)),
        ):
            with pytest.raises(RuntimeError, match="Hook (needs a session|on a step function)"):
                async with MonitoredSession([needy], creator):
                    pass
    assert "loss = 1" in [r.getMessage() for r in caplog.records]


async def test_a_session_made_outside_of_its_graph_is_an_error() -> None:
    counting_model()
    with tf.Graph().as_default():
        session = MonitoredSession([asynchooks.StopAtStepHook(last_step=3)])
    with pytest.raises(RuntimeError, match="build it first and make the session inside"):
        async with session:
            pass


async def test_what_a_failing_creation_leaves_is_freed_off_the_event_loop() -> None:
    """A TensorFlow session that is collected closes, which may block on a dead server."""
    freed: list[int] = []

    class Tracked:
        def __del__(self) -> None:
            freed.append(threading.get_ident())

    class Failing(ChiefSessionCreator):
        def create_session(self) -> Any:
            session = Tracked()
            raise ZeroDivisionError(str(session))

    model = counting_model()
    with model.graph.as_default():
        creator = Failing()
    with pytest.raises(ZeroDivisionError):
        async with monitored(model.graph, [SessionRunHook()], creator):
            pass
    assert len(freed) == 1
    assert freed[0] != threading.get_ident()


async def test_the_wrong_with_is_an_error() -> None:
    with pytest.raises(TypeError, match="opened by `async with session:`"):
        with MonitoredSession([], FunctionSessionCreator(dict)):
            pass


def test_an_address_without_its_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match='give the protocol, too: "grpc://localhost:2222"'):
        ChiefSessionCreator(master="localhost:2222")


async def test_a_feed_of_another_graph_names_the_hook_and_the_moment() -> None:
    model = counting_model()
    with tf.Graph().as_default():
        other = v1.placeholder(tf.float32, [])
    hook = asynchooks.FeedFnHook(lambda: {other: 1.0})
    async with monitored(model.graph, [hook]) as session:
        with pytest.raises(ValueError, match="no element of the session's graph") as caught:
            await session.run(model.train_op)
    assert "in before_run of FeedFnHook" in caught.value.__notes__


async def test_a_worker_that_opens_on_a_graph_in_use_has_it_for_itself_in_begin() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = asynchooks.SharedSessionCreator(ChiefSessionCreator())
    is_alone: list[bool] = []

    class Looks(SessionRunHook):
        async def begin(self) -> None:
            is_alone.append(first.global_step.statistics().is_exclusive)

    async with monitored(model.graph, None, creator) as first:
        async with monitored(model.graph, [Looks()], creator):
            assert not first.global_step.statistics().is_exclusive
    assert is_alone == [True]


FORGETFUL: dict[str, Callable[[], list[Any]]] = {
    "no hooks": list,
    "a hook that needs a step": lambda: [asynchooks.StopAtStepHook(last_step=3)],
    "a hook with a name": lambda: [LoggingTensorHook(["loss"], every_n_iter=1)],
    "a hook that fetches": lambda: [asynchooks.NanTensorHook("loss")],
}


@pytest.mark.parametrize("hooks", FORGETFUL)
async def test_a_forgotten_creator_is_reported_before_missing_parts_of_the_graph(
    hooks: str,
) -> None:
    with tf.Graph().as_default():
        session = MonitoredSession(FORGETFUL[hooks]())
    with pytest.raises(RuntimeError) as caught:
        async with session:
            await session.run("loss")
    assert str(caught.value).startswith(
        "MonitoredSession got no session_creator. To train a step function, give it one: "
        "MonitoredSession(hooks, FunctionSessionCreator(step_fn))."
    )


async def test_a_graph_that_a_hook_builds_needs_no_creator() -> None:
    class Build(SessionRunHook):
        async def begin(self) -> None:
            self.one = tf.constant(1, name="one")

    with tf.Graph().as_default():
        session = MonitoredSession([Build()])
    async with session:
        assert await session.run("one:0") == 1


async def test_other_errors_of_begin_stay_what_they_are() -> None:
    class Fails(SessionRunHook):
        async def begin(self) -> None:
            raise ZeroDivisionError

    with tf.Graph().as_default():
        session = MonitoredSession([Fails()])
    with pytest.raises(ZeroDivisionError):
        async with session:
            raise AssertionError("it was opened")
