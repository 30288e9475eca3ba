"""Graphs: which one a session runs, finalized meanwhile, shared, the default one across awaits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook
from asynchooks.tf import CheckpointSaverHook, ProfilerHook

from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    chief,
    counting_model,
    graph_stack_height,
    let_others_run,
    monitored,
    raising,
    shared,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


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


async def test_a_second_session_adds_nothing_and_runs_ops_that_were_added_before_it() -> None:
    model = counting_model()
    async with monitored(model.graph) as session:
        await session.run(model.train_op)
    with model.graph.as_default():
        seven = tf.constant(7)
    num_ops = len(model.graph.get_operations())
    async with monitored(model.graph) as session:
        assert await session.run(seven) == 7
        assert session.global_step.value == 0
        assert len(model.graph.get_operations()) == num_ops


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


@pytest.mark.parametrize("missing", ["ops of the Scaffold", "ops of begin"])
async def test_a_graph_finalized_before_without_the_ops_needed_is_an_error(missing: str) -> None:
    model, hooks = counting_model(), []
    if missing == "ops of begin":
        async with monitored(model.graph):
            pass
        hooks.append(Moments(begin=lambda: tf.constant(1)))
    model.graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized and cannot be modified"):
        await monitored(model.graph, hooks).__aenter__()
    assert model.graph.finalized


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


def variable_added(name: str) -> Moments:
    return Moments(begin=lambda: v1.get_variable(name, initializer=1.0))


LATE: dict[str, tuple[Callable[[], Moments], type[Exception], str]] = {
    "op": (
        lambda: Moments(begin=lambda: tf.constant(2.0)),
        RuntimeError,
        "Graph is finalized and cannot be modified",
    ),
    "variable": (lambda: variable_added("late"), RuntimeError, "Graph is finalized"),
    "error": (
        lambda: Moments(begin=raising(ZeroDivisionError("of the late one"))),
        ZeroDivisionError,
        "of the late one",
    ),
}


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("case", LATE)
async def test_only_the_first_worker_adds_to_the_graph_and_it_goes_on_where_a_late_begin_fails(
    case: str, is_shared: bool
) -> None:
    model = counting_model()
    creator = shared(model.graph) if is_shared else None
    make, error, message = LATE[case]
    recorder = RecordingHook("a")
    async with monitored(model.graph, [variable_added("early")], creator) as first:
        variable = model.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)[-1]
        assert await first.run(variable) == 1.0
        session = monitored(model.graph, [recorder, make()], creator)
        with pytest.raises(error, match=message) as caught:
            await session.__aenter__()
        notes = " ".join(getattr(caught.value, "__notes__", []))
        assert ("another session runs this graph already" in notes) == (error is RuntimeError)
        assert session.raw_session() is None
        assert model.graph.finalized
        assert await first.run(model.train_op) == 1
    assert recorder.log == [("a", "begin"), ("a", "on_error")]
    assert not model.graph.finalized


@pytest.mark.parametrize("is_shared", [False, True])
async def test_missing_global_step_is_named_in_begin(is_shared: bool) -> None:
    graph = tf.Graph()
    creator = shared(graph) if is_shared else chief(graph)
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
    hook = ah.FeedHook(tf.data.Dataset.range(5), "x")
    try:
        async with ah.MonitoredSession([hook], ah.FunctionSessionCreator(lambda x: {})) as session:
            await session.run([])
    except ah.InputError as error:
        assert "with eager execution" in str(error), error
        print("a dataset: refused")


anyio.run(in_the_default_graph)
"""


@pytest.mark.faults
def test_without_eager_execution_the_graphs_are_the_same_ones_and_datasets_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EAGER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", "2", "3", "loss = 1", "1", "a dataset: refused"]


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
        "MonitoredSession(hooks, step)."
    )
    with tf.Graph().as_default():
        session = MonitoredSession([Moments(begin=raising(ZeroDivisionError()))])
    with pytest.raises(ZeroDivisionError):  # other errors stay what they are
        await session.__aenter__()


async def test_a_graph_that_a_hook_builds_needs_no_creator() -> None:
    with tf.Graph().as_default():
        session = MonitoredSession([Moments(begin=lambda: tf.constant(1, name="one"))])
    async with session:
        assert await session.run("one:0") == 1


class AtEachMoment(SessionRunHook):
    """Awaits `act` with the name of the moment, at each of them, and in a side task."""

    def __init__(self, act: Callable[[str], Awaitable[None]]) -> None:
        self._act = act

    async def begin(self) -> None:
        await self._act("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self._act("after_create_session")
        coord.start_soon(self._act, "side task")

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._act("before_run")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._act("after_run")

    async def end(self, session: Any) -> None:
        await self._act("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self._act("on_error")


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_interleaved_workers_see_their_own_graph_at_every_moment(runner: str) -> None:
    wrong: list[str] = []
    num_looks: list[int] = []
    before = graph_stack_height()

    async def work(model: Model, fails: bool) -> None:
        looked: list[str] = []

        async def look(moment: str) -> None:
            for when in ("before", "after"):
                looked.append(moment)
                if v1.get_default_graph() is not model.graph or tf.executing_eagerly():
                    wrong.append(f"{moment}, {when} the await")
                await let_others_run()
            if moment == "begin":
                assert tf.constant(1).graph is model.graph
            if moment == "side task" and looked.count(moment) < 10:
                await look(moment)

        async def step_fn(step_context: StepContext) -> Any:
            await look("step_fn")
            return await step_context.run_with_hooks(model.train_op)

        def sync_step_fn(step_context: StepContext) -> Any:
            return v1.get_default_graph()

        async with monitored(model.graph, [AtEachMoment(look)], step_runner=runner) as session:
            for count in range(1, 4):
                assert await session.run(model.train_op) == 2 * count - 1
                assert await session.run_step_fn(step_fn) == 2 * count
            assert await session.run_step_fn(sync_step_fn) is model.graph
            num_looks.append(len(looked))
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
    assert wrong == []
    assert len(num_looks) == 8
    assert min(num_looks) > 30
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


async def test_sessions_run_the_graph_that_was_the_default_one_when_they_were_made() -> None:
    models = [counting_model() for _ in range(2)]
    sessions: list[MonitoredSession] = [monitored(models[0].graph)]
    with models[1].graph.as_default():
        sessions.append(MonitoredSession())
    with tf.Graph().as_default() as foreign:
        for session in sessions:
            await session.__aenter__()
        for model, session in zip(models, sessions, strict=True):
            assert session.graph is model.graph
            assert await session.run(model.train_op) == 1
        assert v1.get_default_graph() is foreign
        for session in sessions:
            await session.close()
    assert foreign.get_operations() == []


HOOK_MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end", "side task"]


@pytest.mark.parametrize("is_own_graph", [False, True])
@pytest.mark.parametrize("moment", HOOK_MOMENTS)
async def test_a_graph_that_a_hook_holds_across_an_await_is_seen_by_it_alone(
    moment: str, is_own_graph: bool
) -> None:
    model = counting_model()
    graph = model.graph if is_own_graph else tf.Graph()
    before = graph_stack_height()
    seen: list[tuple[Any, Any]] = []
    outside: list[int] = []

    async def hold(current: str) -> None:
        if current != moment:
            return
        with graph.as_default(), anyio.CancelScope(shield=True):
            for _ in range(3):
                before_await = v1.get_default_graph()
                await in_other_graph()
                seen.append((before_await, v1.get_default_graph()))
                await let_others_run()
        assert v1.get_default_graph() is model.graph

    async def in_other_graph() -> None:
        await asynchooks.tf.in_graph(tf.Graph(), let_others_run)

    async def look_outside() -> None:
        while True:
            outside.append(graph_stack_height())
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(look_outside)
        async with monitored(model.graph, [AtEachMoment(hold)]) as session:
            await session.run(model.train_op)
            while len(seen) < 3 and moment == "side task":
                await let_others_run()
        group.cancel_scope.cancel()
    assert seen == [(graph, graph)] * 3
    assert set(outside) == {before}
    assert graph_stack_height() == before
    assert tf.executing_eagerly()


async def test_a_step_fn_may_hold_a_graph_across_its_run() -> None:
    model = counting_model()
    other = tf.Graph()

    async def holding(step_context: StepContext) -> Any:
        with other.as_default():
            result = await step_context.run_with_hooks(model.train_op)
            await let_others_run()
            assert v1.get_default_graph() is other
        return result

    async with monitored(model.graph, step_runner="inline") as session:
        assert await session.run_step_fn(holding) == 1
        assert await session.run(model.train_op) == 2
    assert tf.executing_eagerly()


async def test_a_graph_that_a_coroutine_never_leaves_ends_with_it() -> None:
    before = graph_stack_height()

    async def leak() -> None:
        tf.Graph().as_default().__enter__()
        await anyio.lowlevel.checkpoint()

    await asynchooks.tf.in_graph(tf.Graph(), leak)
    assert graph_stack_height() == before
