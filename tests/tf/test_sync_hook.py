"""sync_hook: coroutine hooks under TensorFlow's own MonitoredSession."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest

import asynchooks
from asynchooks import (
    GlobalStepWaiterHook,
    SessionRunArgs,
    SessionRunHook,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook

from .models import Model, counting_model

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
EventAccumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator"
).EventAccumulator
sync_hook = asynchooks.sync_hook
pytestmark = pytest.mark.tensorflow


def train(model: Model, hooks: list[Any], runs: int = 100) -> list[int]:
    """The steps that the runs returned, under TensorFlow's own session."""
    steps: list[int] = []
    with model.graph.as_default(), v1.train.MonitoredSession(hooks=hooks) as session:
        while not session.should_stop() and len(steps) < runs:
            steps.append(session.run(model.train_op))
    return steps


def hook_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asynchooks-hooks"]


@pytest.fixture(autouse=True)
def event_loops_end_with_their_hooks() -> Iterator[None]:
    """TensorFlow calls no `end` after an error: then the event loop ends with the hook."""
    yield
    if hook_threads():
        gc.collect()
    for thread in hook_threads():
        thread.join(10)


class Awaiting(SessionRunHook):
    """Suspends at every moment, and looks at what surrounds it afterwards."""

    def __init__(self, model: Model, fetches: Any = None) -> None:
        self.model, self.fetches = model, fetches
        self.log: list[str] = []
        self.results: list[Any] = []
        self.steps: list[int] = []

    async def note(self, moment: str) -> None:
        await anyio.lowlevel.checkpoint()
        assert v1.get_default_graph() is self.model.graph
        self.log.append(moment)

    async def begin(self) -> None:
        await self.note("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        assert session.global_step.value == session.run(self.model.step)
        await self.note("after_create_session")

    async def before_run(self, run_context: Any) -> SessionRunArgs | None:
        await self.note("before_run")
        return None if self.fetches is None else SessionRunArgs(self.fetches)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.note("after_run")
        self.results.append(run_values.results)
        self.steps.append(run_context.global_step.value)

    async def end(self, session: Any) -> None:
        assert session.run(self.model.step) == self.steps[-1]
        await self.note("end")


@pytest.mark.parametrize("backend", ["own", "asyncio", "trio"])
def test_every_moment_is_awaited_in_the_session_s_graph(backend: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        constant = tf.constant(7.0)
    hook = Awaiting(model, {"x": [constant]})
    if backend == "own":
        assert train(model, [sync_hook(hook)], runs=2) == [1, 2]
    else:
        with anyio.from_thread.start_blocking_portal(backend) as portal:
            assert train(model, [sync_hook(hook, portal=portal)], runs=2) == [1, 2]
    runs = ["before_run", "after_run"] * 2
    assert hook.log == ["begin", "after_create_session", *runs, "end"]
    assert hook.results == [{"x": [7.0]}] * 2
    assert hook.steps == [1, 2]
    assert not hook_threads(), "the event loop has ended with `end`"


def test_a_stop_at_step_hook_stops_tensorflow_s_session() -> None:
    model, other = counting_model(), RecordingHook("other")
    assert train(model, [sync_hook(StopAtStepHook(last_step=5)), sync_hook(other)])[-1] == 5
    assert other.log.count(("other", "before_run")) == 5, "no run was begun in vain"


def test_a_stop_that_the_hook_asks_for_is_passed_on() -> None:
    class Stop(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.request_stop()

    assert train(counting_model(), [sync_hook(Stop())]) == [1]


def test_checkpoints_are_saved(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        saver = v1.train.Saver(max_to_keep=None)
    saved: list[int] = []

    class Listener(asynchooks.CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            saved.append(global_step_value)

    hook = asynchooks.CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver, listeners=[Listener()]
    )
    train(model, [sync_hook(hook)], runs=5)
    assert saved == [0, 2, 4, 5]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-5")


def test_a_waiter_sees_steps_that_others_make() -> None:
    """Two of TensorFlow's sessions in two threads, on one in-process server."""
    server = v1.train.Server.create_local_server()
    model = counting_model()
    started: list[int] = []

    def waiting_worker() -> None:
        with model.graph.as_default():
            creator = v1.train.ChiefSessionCreator(master=server.target)
            hooks = [sync_hook(GlobalStepWaiterHook(3))]
            with v1.train.MonitoredSession(creator, hooks) as session:
                started.append(session.run(model.step))

    with model.graph.as_default(), v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        thread = threading.Thread(target=waiting_worker)
        thread.start()
        while not started and thread.is_alive():
            session.run(model.train_op)
        thread.join()
    assert started
    assert started[0] >= 3


def test_the_end_of_input_ends_training_cleanly() -> None:
    class Input(SessionRunHook):
        def __init__(self) -> None:
            self.batches = iter([1, 2])

        async def before_run(self, run_context: Any) -> None:
            next(self.batches)

    other = RecordingHook("other")
    steps = train(counting_model(), [sync_hook(Input()), sync_hook(other)])
    assert steps == [1, 2]
    assert other.log[-1] == ("other", "end")


def test_an_error_leaves_as_itself_with_a_note() -> None:
    class Faulty(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            raise ZeroDivisionError("bad")

    with pytest.raises(ZeroDivisionError, match="bad") as caught:
        train(counting_model(), [sync_hook(Faulty())])
    assert "in after_run of Faulty" in caught.value.__notes__


def test_side_tasks_run_beside_training_and_end_with_it() -> None:
    log: list[str] = []

    class Sides(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.wait, coord)

        async def wait(self, coord: Any) -> None:
            log.append("started")
            await coord.wait_stopped()
            log.append("stopped")

        async def end(self, session: Any) -> None:
            log.append("end")

    train(counting_model(), [sync_hook(Sides())], runs=2)
    assert log == ["started", "end", "stopped"]


def test_an_error_of_a_side_task_stops_tensorflow_s_session_and_leaves() -> None:
    class Sides(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.fail)

        async def fail(self) -> None:
            raise ZeroDivisionError("in a side task")

        async def before_run(self, run_context: Any) -> None:
            await anyio.wait_all_tasks_blocked()

    with pytest.raises(ZeroDivisionError, match="in a side task"):
        train(counting_model(), [sync_hook(Sides())])


def test_a_wait_ends_when_tensorflow_s_coordinator_is_stopped() -> None:
    model = counting_model()
    stopped: list[type] = []

    class Waits(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            try:
                await run_context.global_step.wait_for(1000)
            except StopTraining:
                stopped.append(StopTraining)
                raise

    class StopFirst(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
        def after_create_session(self, session: Any, coord: Any) -> None:
            coord.request_stop()

    hooks = [StopFirst(), sync_hook(Waits())]
    with model.graph.as_default(), v1.train.MonitoredSession(hooks=hooks) as session:
        session.run(model.train_op)
    assert stopped == [StopTraining]


def test_the_hook_may_be_used_again() -> None:
    model = counting_model()
    hook = Awaiting(model)
    theirs = sync_hook(hook)
    train(model, [theirs], runs=1)
    train(model, [theirs], runs=1)
    assert hook.log == ["begin", "after_create_session", "before_run", "after_run", "end"] * 2


def test_without_a_global_step_a_hook_that_needs_one_says_so() -> None:
    graph = tf.Graph()
    with graph.as_default():
        model = Model(graph, None, tf.no_op())
    with pytest.raises(RuntimeError, match="should be created to use StopAtStepHook"):
        train(model, [sync_hook(StopAtStepHook(last_step=5))])


@pytest.mark.parametrize("wrong", [None, StopAtStepHook, v1.train.StopAtStepHook(last_step=3)])
def test_what_is_no_hook_of_ours_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="give an instance of asynchooks.SessionRunHook"):
        sync_hook(wrong)


def test_a_portal_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="start_blocking_portal"):
        sync_hook(StopAtStepHook(last_step=3), portal="trio")  # type: ignore[arg-type]


def test_a_feed_fn_may_be_async() -> None:
    graph = tf.Graph()
    with graph.as_default():
        fed = v1.placeholder(tf.int64, [])
        step = v1.train.get_or_create_global_step()
        model = Model(graph, step, v1.assign_add(step, fed))

    async def feed() -> dict[Any, int]:
        await anyio.lowlevel.checkpoint()
        return {fed: 5}

    assert train(model, [sync_hook(asynchooks.FeedFnHook(feed))], runs=3) == [5, 10, 15]


def test_a_stop_while_a_hook_waits_in_after_run_ends_cleanly() -> None:
    class Waits(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.coord = coord

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            self.coord.request_stop()
            await self.coord.or_stop(anyio.sleep_forever)

    other = RecordingHook("other")
    assert train(counting_model(), [sync_hook(Waits()), sync_hook(other)]) == [1]
    assert other.log[-1] == ("other", "end")


def test_an_interruption_cancels_the_coroutine_that_is_waited_for() -> None:
    cancelled = threading.Event()

    class Waits(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    hook = sync_hook(Waits())
    hook._poll = interrupt
    with pytest.raises(KeyboardInterrupt):
        train(counting_model(), [hook])
    assert cancelled.wait(10)


def test_the_event_loop_ends_also_when_the_end_fails() -> None:
    class Faulty(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.fail, coord)

        async def fail(self, coord: Any) -> None:
            await coord.wait_stopped()
            raise ZeroDivisionError("in a side task, at the end")

    with pytest.raises(ZeroDivisionError, match="in a side task, at the end"):
        train(counting_model(), [sync_hook(Faulty())], runs=1)
    assert not hook_threads()


def test_the_step_counter_s_tag_has_the_name_of_the_step(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        with v1.variable_scope("training"):
            step = v1.train.create_global_step()
        train_op = v1.assign_add(step, 1)
        hook = asynchooks.StepCounterHook(1, output_dir=str(tmp_path))
        with v1.train.MonitoredSession(hooks=[sync_hook(hook)]) as session:
            for _ in range(3):
                session.run(train_op)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == [f"{step.op.name}/sec"] == ["training/global_step/sec"]
