"""What ends a session on a graph: stops, and the end of real queues and datasets; run_step_fn."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    Coordinator,
    EarlyStoppingHook,
    EvaluationHook,
    FinalOpsHook,
    MonitoredSession,
    SessionCreator,
    StepContext,
    StopTraining,
)
from asynchooks.testing import RecordingHook

from ..session.test_end_of_input_elsewhere import creator
from ..session.test_failure_matrix_savers import IN_A_RUN, hook_of
from ..support.faults import Fault, Kind
from ..support.stop_requests import AT, ERROR, WAYS, Asks, Training
from .models import Created, Moments, aborted, counting_model, monitored, raising, shared

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
SingularMonitoredSession = asynchooks.SingularMonitoredSession
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*QueueRunner.*:DeprecationWarning"),
]


@pytest.mark.parametrize(("num_workers", "all_workers"), [(1, False), (3, True)])
@pytest.mark.parametrize("way", WAYS)
async def test_the_run_after_a_stop_ends_the_block(
    way: type[Asks], num_workers: int, all_workers: bool
) -> None:
    model = counting_model()
    final = FinalOpsHook(model.step)

    def make(hooks: Iterable[Any], creator: SessionCreator) -> MonitoredSession:
        is_first = not training.sessions
        return monitored(model.graph, [*hooks, *([final] if is_first else [])], creator)

    training = Training(way, num_workers, all_workers=all_workers)
    await training.run(make, shared(model.graph), model.train_op)
    training.check()
    step = int(final.final_ops_values)
    assert step >= AT if all_workers else step == AT


@pytest.mark.parametrize("of_tensorflow", [False, True])
async def test_a_loop_that_never_looks_ends_by_a_hook_of_tensorflow(of_tensorflow: bool) -> None:
    """Its StopAtStepHook asks in after_run; ours sets a limit. Both stop at the same step."""
    model = counting_model()
    kind = v1.train.StopAtStepHook if of_tensorflow else asynchooks.StopAtStepHook
    num_runs = 0
    async with monitored(model.graph, [kind(last_step=5)]) as session:
        for _ in range(1000):
            await session.run(model.train_op)
            num_runs += 1
    assert num_runs == 5


@pytest.mark.parametrize("error", [None, ERROR], ids=repr)
async def test_a_singular_session_ends_by_the_run_after_a_stop(error: Any) -> None:
    model = counting_model()
    hook, log = Created(), RecordingHook("a")
    with model.graph.as_default():
        session = SingularMonitoredSession([hook, log])
    left: list[BaseException] = []
    try:
        async with session:
            await session.run(model.train_op)
            hook.coords[0].request_stop(error)
            with pytest.raises(StopTraining, match="no run begins after a stop"):
                await session.run(model.train_op)
            assert session.raw_session().run(model.step) == 1
            await session.run(model.train_op)
            raise AssertionError("it ran")
    except OSError as raised:
        left.append(raised)
    assert left == ([] if error is None else [error])
    assert ("a", "end") in log.log


async def test_what_looks_at_the_model_at_the_end_works_after_a_stop() -> None:
    model = counting_model()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"step": session.run(model.step)}

    final = FinalOpsHook(model.step)
    evaluation = EvaluationHook(evaluate, every_n_steps=100)
    hooks = [final, evaluation, EarlyStoppingHook(lambda: 1.0, patience=3, mode="min")]
    async with monitored(model.graph, hooks) as session:
        for _ in range(1000):
            await session.run(model.train_op)
    assert final.final_ops_values == 4
    assert evaluation.latest == {"step": 4}


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
async def test_a_sync_step_fn_runs_where_steps_run_and_the_raw_session_without_hooks(
    runner: str,
) -> None:
    model, hook = counting_model(), RecordingHook("a")

    def step_fn(step_context: StepContext) -> tuple[int, Any, Any]:
        output = step_context.session.run(model.train_op)
        return threading.get_ident(), v1.get_default_graph(), output

    async with monitored(model.graph, [hook], step_runner=runner) as session:
        thread, graph, output = await session.run_step_fn(step_fn)
    assert (thread == threading.get_ident()) is (runner == "inline")
    assert graph is model.graph
    assert output == 1
    assert ("a", "before_run") not in hook.log


async def test_the_end_of_a_dataset_in_a_step_fn_is_a_clean_end() -> None:
    source, hook, elements = dataset_input(), RecordingHook("a"), []
    async with monitored(source.graph, [hook]) as session:
        while not session.should_stop():
            await session.run_step_fn(
                lambda step_context: elements.append(step_context.session.run(source.element))
            )
    assert elements == [0, 1, 2]
    assert hook.log[-1] == ("a", "end")


class Input(NamedTuple):
    graph: Any
    element: Any


def dataset_input() -> Input:
    graph = tf.Graph()
    with graph.as_default():
        v1.train.get_or_create_global_step()
        iterator = v1.data.make_one_shot_iterator(tf.data.Dataset.range(3))
        return Input(graph, iterator.get_next())


def iterator_input() -> Input:
    """What ends is an iterator of Python, in an op."""
    graph, rest = tf.Graph(), iter(range(3))
    with graph.as_default():
        return Input(graph, tf.numpy_function(lambda: next(rest), [], tf.int64))


def queue_input(num_threads: int = 2, close_after: int | None = 3) -> Input:
    """A queue that runners fill; they end after `close_after` elements, or never."""
    graph = tf.Graph()
    with graph.as_default():
        v1.train.get_or_create_global_step()
        source = tf.data.Dataset.range(3 if close_after is None else close_after)
        if close_after is None:
            source = source.repeat()
        element = v1.data.make_one_shot_iterator(source).get_next()
        queue = v1.FIFOQueue(2, tf.int64, shapes=[[]])
        runner = v1.train.QueueRunner(queue, [queue.enqueue(element)] * num_threads)
        v1.train.add_queue_runner(runner)
        return Input(graph, queue.dequeue())


async def consumed(session: MonitoredSession, element: Any) -> list[int]:
    elements: list[int] = []
    async with session:
        while not session.should_stop():
            elements.append(int(await session.run(element)))
    return sorted(elements)


@pytest.mark.parametrize("make", [dataset_input, queue_input, iterator_input])
async def test_the_end_of_a_real_input_is_a_clean_end(make: Any) -> None:
    source = make()
    hook = RecordingHook("a")
    session = monitored(source.graph, [hook])
    assert await consumed(session, source.element) == [0, 1, 2]
    assert [moment for _, moment in hook.log] == [
        "begin",
        "after_create_session",
        *["before_run", "after_run"] * 3,
        "before_run",
        "end",
    ]


async def test_an_end_that_is_caught_leaves_the_session_usable() -> None:
    source = dataset_input()
    with source.graph.as_default():
        seven = tf.constant(7)
    async with monitored(source.graph) as session:
        for _ in range(3):
            await session.run(source.element)
        with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
            await session.run(source.element)
        assert not session.should_stop()
        assert await session.run(seven) == 7


@pytest.mark.parametrize("error", [None, ZeroDivisionError("body")])
async def test_queue_runners_run_before_after_create_session_and_are_joined_at_the_end(
    error: Exception | None,
) -> None:
    source = queue_input(num_threads=2, close_after=None)
    before = set(threading.enumerate())
    runners: list[threading.Thread] = []
    coords: list[Coordinator] = []

    def created(session: Any, coord: Coordinator) -> None:
        coords.append(coord)
        new = set(threading.enumerate()) - before
        runners.extend(each for each in new if each.name.startswith("QueueRunnerThread"))

    with nullcontext() if error is None else pytest.raises(ZeroDivisionError, match="body"):
        async with monitored(source.graph, [Moments(created=created)]) as session:
            for _ in range(5):
                await session.run(source.element)
            assert len(runners) == 3, "two that enqueue, and one that closes the queue"
            assert all(thread.is_alive() for thread in runners)
            raising(error)()
    assert coords[0].joined
    assert not any(thread.is_alive() for thread in runners)


async def test_queue_runners_are_started_again_for_a_recreated_session() -> None:
    source = queue_input(num_threads=1, close_after=None)
    failing = Moments(before_run=raising(None, aborted()))
    async with monitored(source.graph, [failing]) as session:
        for _ in range(4):
            await session.run(source.element)


async def test_an_error_in_a_queue_runner_stops_training_and_leaves_at_the_end() -> None:
    graph = tf.Graph()
    with graph.as_default():

        def broken() -> int:
            raise ValueError("the file is broken")

        queue = v1.FIFOQueue(2, tf.int64, shapes=[[]])
        element = tf.numpy_function(broken, [], tf.int64)
        element.set_shape([])
        v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(element)]))
        dequeue = queue.dequeue()
    with pytest.raises(tf.errors.InvalidArgumentError, match="the file is broken"):
        await consumed(monitored(graph), dequeue)


async def test_the_coordinator_is_one_of_tensorflows_and_its_looper_threads_end_the_block() -> None:
    model, created, ticks = counting_model(), Created(), []
    with anyio.fail_after(60):
        async with monitored(model.graph, [created]) as session:
            [coord] = created.coords
            assert isinstance(coord, v1.train.Coordinator)

            def tick() -> None:
                ticks.append(1)
                coord.request_stop()

            thread = v1.train.LooperThread.loop(coord, None, tick)
            coord.register_thread(thread)
            while True:
                await session.run(model.train_op)
                await anyio.lowlevel.checkpoint()
    assert coord.wait_for_stop(0)
    assert ticks == [1]
    assert not thread.is_alive()
    assert str(session.stop_reason).startswith("the coordinator in the thread")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["snapshot", "write", "listener's after_save"])
async def test_an_out_of_range_error_in_a_save_is_no_clean_end(
    place: str, background: bool, tmp_path: pathlib.Path
) -> None:
    fault = Fault(place, Kind.ERROR, -1, IN_A_RUN)
    fault.error = tf.errors.OutOfRangeError(None, None, "End of sequence")
    hook = hook_of(tmp_path, fault, background=background)
    with pytest.raises(Exception, match="End of sequence|OutOfRangeError"):
        async with MonitoredSession([hook], creator()) as session:
            for _ in range(4):
                await session.run("loss")
                await hook.checkpointer.wait_idle()
    assert fault.num_played == 1
