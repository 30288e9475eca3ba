"""Graphs: which one a session runs, initialised and finalized, the default one across awaits."""

import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    GlobalStepWaiterHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook
from asynchooks.tf import Scaffold, in_graph

from ..support.moments import at
from .models import (
    ChiefSessionCreator,
    Model,
    checkpoint_of,
    chief,
    counting_model,
    graph_stack_height,
    let_others_run,
    monitored,
    raising,
    results,
    shared,
    tf,
    v1,
)


async def test_the_graph_is_finalized_after_begin_and_until_the_last_session_ends() -> None:
    model, seen = counting_model(), []  # type: tuple[Model, list[bool]]
    look = lambda *_: seen.append(model.graph.finalized)  # noqa: E731
    creator = chief(model.graph)
    one = monitored(model.graph, [at(begin=look, after_create_session=look, end=look)], creator)
    two = monitored(model.graph, None, creator)
    async with two:
        async with one:
            assert [await one.run(model.train_op) for _ in range(2)] == [1, 2]
            assert await two.run(model.train_op) == 1, "each counts for itself"
            assert (one.global_step.value, two.global_step.value) == (2, 1)
        assert model.graph.finalized
    assert not model.graph.finalized
    assert seen == [True] * 3
    with model.graph.as_default():
        seven = tf.constant(7)
    num_ops = len(model.graph.get_operations())
    async with monitored(model.graph, [at(begin=look)]) as session:
        assert await session.run(seven) == 7
        assert len(model.graph.get_operations()) == num_ops
    assert seen[3:] == [False]


async def test_a_graph_that_was_finalized_stays_so_and_must_hold_all_that_is_needed() -> None:
    model = counting_model()
    model.graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized"):
        await monitored(model.graph).open()
    model = counting_model()
    with model.graph.as_default():
        Scaffold().finalize()
    model.graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized"):
        await monitored(model.graph, [at(begin=lambda: tf.constant(1))]).open()
    for error in (None, ZeroDivisionError()):
        session = await monitored(model.graph).open()
        assert await session.run(model.train_op) == 1
        await session.__aexit__(type(error) if error else None, error, None)
        assert model.graph.finalized


def variable_added(name: str) -> SessionRunHook:
    return at(begin=lambda: v1.get_variable(name, initializer=1.0))


def fail() -> None:
    raise ZeroDivisionError("of the late one")


LATE: dict[str, tuple[SessionRunHook, type[Exception], str]] = {
    "variable": (variable_added("late"), RuntimeError, "Graph is finalized and cannot be modified"),
    "error": (at(begin=fail), ZeroDivisionError, "of the late one"),
}


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("case", LATE)
async def test_only_the_first_worker_adds_to_the_graph_and_it_goes_on_where_a_late_begin_fails(
    case: str, is_shared: bool
) -> None:
    model, recorder = counting_model(), RecordingHook("a")
    creator = shared(model.graph) if is_shared else None
    late, error, message = LATE[case]
    async with monitored(model.graph, [variable_added("early")], creator) as first:
        session = monitored(model.graph, [recorder, late], creator)
        with pytest.raises(error, match=message) as caught:
            await session.open()
        notes = " ".join(getattr(caught.value, "__notes__", []))
        assert ("another session runs this graph already" in notes) == (error is RuntimeError)
        assert session.raw_session() is None
        assert model.graph.finalized
        assert await first.run(model.train_op) == 1
        variable = model.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)[1]
        assert await first.run(variable) == 1.0
    assert recorder.log == [("a", "begin"), ("a", "on_error")]


async def test_hooks_that_need_a_global_step_say_so_unless_an_earlier_one_makes_it() -> None:
    graph = tf.Graph()
    for hook in (StopAtStepHook(last_step=1), GlobalStepWaiterHook(1), StepCounterHook()):
        name = type(hook).__name__
        with pytest.raises(RuntimeError, match=rf"should be created to use {name}\."):
            await monitored(graph, [hook], shared(graph)).open()
        assert not graph.finalized
    with graph.as_default():
        session = MonitoredSession([at(begin=build), StopAtStepHook(last_step=3)])
    async with session:  # it needs no creator, either
        assert len(await results(session, "up")) == 3


def build() -> None:
    tf.identity(v1.assign_add(v1.train.get_or_create_global_step(), 1), name="up")


PROGRAMS = """
from tests.tf import variable_programs

variable_programs.check()

import anyio
import tensorflow as tf
import asynchooks as ah
from asynchooks.tf import TensorFlowSaver

v1 = tf.compat.v1
v1.disable_v2_behavior()
variable_programs.check()
with tf.Graph().as_default() as graph:
    train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    creator = ah.ChiefSessionCreator()


async def main():
    async with ah.MonitoredSession([ah.StopAtStepHook(last_step=3)], creator) as session:
        assert session.graph is graph
        while not session.should_stop():
            print(await session.run(train_op))
    async with ah.MonitoredSession([], ah.FunctionSessionCreator(lambda: {"loss": 1})) as session:
        print(await session.run("loss"))


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
    try:
        await anyio.to_thread.run_sync(TensorFlowSaver(tf.train.Checkpoint()).save, "a")
    except RuntimeError as error:
        print("disable_eager_execution() was called" in str(error))


anyio.run(in_the_default_graph)
"""


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_without_eager_execution_all_is_as_under_tensorflow_or_refused_and_so_are_variables() -> (
    None
):
    """Variables as keys also with it; in a process, which a mistake ends."""
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAMS]
    root = Path(asynchooks.__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-5000:]
    expected = ["1", "2", "3", "1", "1", "a dataset: refused", "True"]
    assert done.stdout.splitlines()[-7:] == expected


async def test_a_forgotten_creator_is_reported_before_missing_parts_of_the_graph() -> None:
    for hooks in ([StopAtStepHook(last_step=3)], [NanTensorHook("loss")], []):
        with tf.Graph().as_default():
            session = MonitoredSession(hooks)
        with pytest.raises(RuntimeError, match="got no session_creator.*build it first and make"):
            async with session:
                await session.run("loss")
    async with monitored(tf.Graph()) as given:
        assert not given.should_stop()
    with pytest.raises(ZeroDivisionError), tf.Graph().as_default():  # others stay what they are
        await MonitoredSession([at(begin=raising(ZeroDivisionError()))]).open()


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
    with pytest.raises(ZeroDivisionError):
        await monitored(model.graph, [SessionRunHook()], Failing()).open()
    assert len(freed) == 1
    assert freed[0] != threading.get_ident()


def with_scaffold(graph: Any, checkpoint_dir: Any = None, **parts: Any) -> MonitoredSession:
    with graph.as_default():
        creator = ChiefSessionCreator(Scaffold(**parts), checkpoint_dir=checkpoint_dir)
        return MonitoredSession(None, creator)


@pytest.mark.parametrize("has_checkpoint", [False, True])
async def test_a_checkpoint_goes_before_init_op_and_init_fn_but_not_before_local_init_op(
    has_checkpoint: bool, tmp_path: Path
) -> None:
    model, called = counting_model(), []  # type: tuple[Model, list[Any]]
    if has_checkpoint:
        checkpoint_of(model, tmp_path, 42)
    with model.graph.as_default():
        key = v1.GraphKeys.LOCAL_VARIABLES
        local = v1.get_variable("local", initializer=8, collections=[key], trainable=False)
        first = v1.placeholder(tf.int64, [])
        init_op = v1.assign(model.step, first)

    def init_fn(scaffold: Any, session: Any) -> None:
        called.append(scaffold)
        session.run(model.train_op)

    parts = {"init_op": init_op, "init_feed_dict": {first: 5}, "init_fn": init_fn}
    async with with_scaffold(model.graph, str(tmp_path), **parts) as session:
        assert session.global_step.value == (42 if has_checkpoint else 6)
        assert await session.run(local) == 8
    assert len(called) == (not has_checkpoint)


async def never_awaited(scaffold: Any, session: Any) -> None:
    raise AssertionError("it was run, and nothing awaits it")


@pytest.mark.parametrize("init_fn", [never_awaited, lambda *args: never_awaited(*args)])
async def test_a_model_that_a_scaffold_does_not_make_ready_is_an_error(init_fn: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        nothing = tf.no_op()
    for parts, error, message in (
        ({"init_op": nothing}, RuntimeError, "Init operations did not make model ready"),
        ({"init_fn": init_fn}, TypeError, "returned .*coroutine.* after_create_session of a hook"),
    ):
        session = with_scaffold(model.graph, **parts)
        with pytest.raises(error, match=message):
            await session.open()
        assert session.raw_session() is None
        assert not model.graph.finalized


def default_graph(step_context: Any) -> Any:
    return v1.get_default_graph()


def at_each_moment(act: Callable[[str], Awaitable[None]]) -> SessionRunHook:
    """Awaits `act` with the name of the moment, at each of them, and in a side task."""

    def coroutine(moment: str) -> Any:
        async def play(*args: Any) -> None:
            await act(moment)
            if moment == "after_create_session":
                args[1].start_soon(act, "side task")

        return play

    moments = MOMENTS - {"side task", "step_fn"} | {"end", "on_error"}
    return at(**{each: coroutine(each) for each in moments})


MOMENTS = {"begin", "after_create_session", "before_run", "after_run", "side task", "step_fn"}


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_interleaved_workers_see_their_own_graph_at_every_moment(runner: str) -> None:
    """Also while a hook holds another graph across its awaits."""
    before = graph_stack_height()

    async def work(model: Model, fails: bool) -> None:
        looked: list[str] = []

        def look() -> None:
            assert v1.get_default_graph() is model.graph
            assert not tf.executing_eagerly()

        async def act(moment: str) -> None:
            looked.append(moment)
            look()
            await let_others_run()
            look()
            with tf.Graph().as_default() as held, anyio.CancelScope(shield=True):
                await in_graph(tf.Graph(), let_others_run)
                assert v1.get_default_graph() is held
                await let_others_run()
                assert v1.get_default_graph() is held
            look()
            if moment == "begin":
                assert tf.constant(1).graph is model.graph

        async def step_fn(step_context: Any) -> Any:
            await act("step_fn")
            return await step_context.run_with_hooks(model.train_op)

        async with monitored(model.graph, [at_each_moment(act)], step_runner=runner) as session:
            for count in range(1, 3):
                assert await session.run(model.train_op) == 2 * count - 1
                assert await session.run_step_fn(step_fn) == 2 * count
            assert await session.run_step_fn(default_graph) is model.graph
            while "side task" not in looked:
                await let_others_run()
            if fails:
                raise ZeroDivisionError
        assert {*looked} == MOMENTS | {"on_error" if fails else "end"}

    async def work_and_fail() -> None:
        with pytest.raises(ZeroDivisionError):
            await work(counting_model(), True)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(work, counting_model(), False)
            group.start_soon(work_and_fail)
        for _ in range(200):
            assert graph_stack_height() == before, "none is the default one outside of sessions"
            await anyio.lowlevel.checkpoint()
    assert graph_stack_height() == before
    assert tf.executing_eagerly()


async def test_in_graph_keeps_the_graph_across_awaits_errors_and_cancellations() -> None:
    before, wrong = graph_stack_height(), []  # type: tuple[int, list[int]]

    async def look(graph: Any, number: int) -> int:
        if number == 6:
            tf.Graph().as_default().__enter__()  # what it never leaves ends with it
        for _ in range(10):
            if v1.get_default_graph() is not graph and number != 6:
                wrong.append(number)
            await anyio.lowlevel.checkpoint()
        if number == 5:
            raise ZeroDivisionError
        return number

    async def wait(graph: Any) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            assert v1.get_default_graph() is graph
            wrong.append(-1)

    async def call(number: int) -> None:
        graph = tf.Graph()
        with pytest.raises(ZeroDivisionError) if number == 5 else nullcontext():
            assert await in_graph(graph, look, graph, number) == number
        assert await in_graph(graph, v1.get_default_graph) is graph, "a plain function"
        with anyio.move_on_after(0) as scope:
            await in_graph(graph, wait, graph)
        assert scope.cancelled_caught

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(call, number)
    assert wrong == [-1] * 8
    assert graph_stack_height() == before
    assert tf.executing_eagerly()


async def test_sessions_run_the_graph_in_which_they_or_their_creators_were_made() -> None:
    models = [counting_model() for _ in range(2)]
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    sessions = [MonitoredSession(None, chief(models[0].graph, config=config))]
    with models[1].graph.as_default():
        sessions.append(MonitoredSession())
    with tf.Graph().as_default() as foreign:
        for model, session in zip(models, sessions, strict=True):
            async with session:
                assert session.graph is model.graph
                assert await session.run(model.train_op) == 1
                assert v1.get_default_graph() is foreign
                if model is models[0]:
                    raw: Any = session.raw_session()
                    assert raw._config.intra_op_parallelism_threads == 1
    assert foreign.get_operations() == []
