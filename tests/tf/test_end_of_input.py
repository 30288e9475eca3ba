"""OutOfRangeError from real queues and datasets, and from places that read no input."""

from __future__ import annotations

import pathlib
import threading
from typing import Any, NamedTuple

import pytest

from asynchooks import Coordinator, MonitoredSession
from asynchooks.testing import RecordingHook

from ..session.test_end_of_input_elsewhere import creator
from ..session.test_failure_matrix_savers import IN_A_RUN, hook_of
from ..support.faults import Fault, Kind
from .models import Moments, aborted, monitored, out_of_range, raising

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*QueueRunner.*:DeprecationWarning"),
]


class Input(NamedTuple):
    graph: Any
    element: Any


def dataset_input() -> Input:
    graph = tf.Graph()
    with graph.as_default():
        v1.train.get_or_create_global_step()
        iterator = v1.data.make_one_shot_iterator(tf.data.Dataset.range(3))
        return Input(graph, iterator.get_next())


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


@pytest.mark.parametrize("make", [dataset_input, queue_input])
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


async def test_out_of_range_in_end_leaves_and_closes_the_session() -> None:
    source = dataset_input()
    last = RecordingHook("last")
    session = monitored(source.graph, [Moments(end=raising(out_of_range())), last])
    with pytest.raises(tf.errors.OutOfRangeError, match="the queue is empty"):
        async with session:
            await session.run(source.element)
    assert ("last", "end") in last.log
    assert session.raw_session() is None


async def test_a_sync_iterator_that_ends_in_an_op_is_out_of_range() -> None:
    graph = tf.Graph()
    rest = iter([1, 2])
    with graph.as_default():
        element = tf.numpy_function(lambda: next(rest), [], tf.int64)
    hook = RecordingHook("a")
    assert await consumed(monitored(graph, [hook]), element) == [1, 2]
    assert hook.log[-1] == ("a", "end")


async def test_queue_runners_run_before_after_create_session_and_are_joined_at_the_end() -> None:
    source = queue_input(num_threads=2, close_after=None)
    before = set(threading.enumerate())
    runners: list[threading.Thread] = []
    coords: list[Coordinator] = []

    def created(session: Any, coord: Coordinator) -> None:
        coords.append(coord)
        runners.extend(
            t for t in set(threading.enumerate()) - before if t.name.startswith("QueueRunnerThread")
        )

    async with monitored(source.graph, [Moments(created=created)]) as session:
        for _ in range(5):
            await session.run(source.element)
        assert len(runners) == 3, "two that enqueue, and one that closes the queue"
        assert all(thread.is_alive() for thread in runners)
    assert coords[0].joined
    assert not any(thread.is_alive() for thread in runners)


async def test_queue_runners_are_joined_after_a_failed_body_too() -> None:
    source = queue_input(num_threads=1, close_after=None)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError, match="body"):
        async with monitored(source.graph):
            raise ZeroDivisionError("body")
    left = set(threading.enumerate()) - before
    assert [t.name for t in left if t.name.startswith("QueueRunnerThread")] == []


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


async def test_the_coordinator_is_an_instance_of_tensorflows() -> None:
    source = dataset_input()
    coords: list[Coordinator] = []
    hook = Moments(created=lambda session, coord: coords.append(coord))
    async with monitored(source.graph, [hook]):
        assert isinstance(coords[0], v1.train.Coordinator)
        assert isinstance(coords[0], Coordinator)
        ticks: list[int] = []

        def tick() -> None:
            ticks.append(1)
            coords[0].request_stop()

        thread = v1.train.LooperThread.loop(coords[0], None, tick)
        coords[0].register_thread(thread)
        assert coords[0].wait_for_stop(60)
    assert ticks == [1]
    assert not thread.is_alive()


async def test_out_of_range_reported_to_a_sessions_coordinator_leaves_as_an_error() -> None:
    source = dataset_input()
    coords: list[Coordinator] = []
    hook = Moments(created=lambda session, coord: coords.append(coord))
    session = monitored(source.graph, [hook])
    await session.__aenter__()
    coords[0].request_stop(out_of_range())
    with pytest.raises(tf.errors.OutOfRangeError, match="the queue is empty"):
        await session.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["snapshot", "write", "listener's after_save"])
async def test_an_out_of_range_error_in_a_save_is_no_clean_end(
    place: str, background: bool, tmp_path: pathlib.Path
) -> None:
    from asynchooks import MonitoredSession

    fault = Fault(place, Kind.ERROR, -1, IN_A_RUN)
    fault.error = tf.errors.OutOfRangeError(None, None, "End of sequence")
    hook = hook_of(tmp_path, fault, background=background)
    with pytest.raises(Exception, match="End of sequence|OutOfRangeError"):
        async with MonitoredSession([hook], creator()) as session:
            for _ in range(4):
                await session.run("loss")
                await hook.checkpointer.writer.wait_idle()
    assert fault.num_played == 1
