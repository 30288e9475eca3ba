"""What ends a session on a graph: stops, and the end of real queues and datasets; run_step_fn."""

import threading
from contextlib import nullcontext
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    EarlyStoppingHook,
    EvaluationHook,
    FinalOpsHook,
)
from asynchooks.testing import RecordingHook

from ..support.moments import at
from .models import (
    Created,
    aborted,
    counting_model,
    monitored,
    raising,
    tf,
    v1,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*QueueRunner.*:DeprecationWarning")


@pytest.mark.parametrize("train", [asynchooks, v1.train])
async def test_a_loop_that_never_looks_ends_and_hooks_look_at_the_model_then(train: Any) -> None:
    """TensorFlow's StopAtStepHook asks in after_run; ours sets a limit. Both stop at one step."""
    model, num_runs = counting_model(), 0
    evaluation = EvaluationHook(lambda raw, step: {"step": raw.run(model.step)}, every_n_steps=99)
    final = FinalOpsHook(model.step)
    early = EarlyStoppingHook(lambda: 1.0, patience=5, mode="min")
    hooks = [final, evaluation, early, train.StopAtStepHook(last_step=5)]
    async with monitored(model.graph, hooks) as session:
        for _ in range(1000):
            await session.run(model.train_op)
            num_runs += 1
    assert (num_runs, final.final_ops_values, evaluation.latest) == (5, 5, {"step": 5})


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_step_fn_runs_raw_and_with_hooks_and_a_plain_one_where_steps_run(
    runner: Any,
) -> None:
    model, hook = counting_model(), RecordingHook("a")

    async def mixed(step_context: Any) -> Any:
        raw = step_context.session.run(model.train_op)
        return raw, await step_context.run_with_hooks(model.train_op)

    def plain(step_context: Any) -> tuple[bool, Any, int]:
        is_here = threading.get_ident() == here
        return is_here, v1.get_default_graph(), step_context.session.run(model.train_op)

    here = threading.get_ident()
    async with monitored(model.graph, [hook], step_runner=runner) as session:
        assert await session.run_step_fn(mixed) == (1, 2)
        assert await session.run_step_fn(plain) == (runner == "inline", model.graph, 3)
        assert session.global_step.value == 3
    assert hook.log.count(("a", "after_run")) == 1


def dataset() -> Any:
    v1.train.get_or_create_global_step()
    return v1.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()


def iterator() -> Any:
    """What ends is an iterator of Python, in an op."""
    rest = iter(range(3))
    return tf.numpy_function(lambda: next(rest), [], tf.int64)


def queue(element: Any = None, num_threads: int = 2) -> Any:
    """A queue that runners fill."""
    fifo = v1.FIFOQueue(2, tf.int64, shapes=[[]])
    element = dataset() if element is None else element
    v1.train.add_queue_runner(v1.train.QueueRunner(fifo, [fifo.enqueue(element)] * num_threads))
    return fifo.dequeue()


def raw(fetches: Any) -> Any:
    """A step_fn that runs it without hooks."""
    return lambda step_context: step_context.session.run(fetches)


@pytest.mark.parametrize("in_step_fn", [True, False])
@pytest.mark.parametrize("make", [dataset, queue, iterator])
async def test_the_end_of_a_real_input_is_a_clean_end_unless_it_is_caught(
    make: Any, in_step_fn: bool
) -> None:
    for is_caught in (False, True):
        with tf.Graph().as_default() as graph:
            element, seven = make(), tf.constant(7)
        hook, elements = RecordingHook("a"), []
        async with monitored(graph, [hook]) as session:
            for _ in range(9):
                run = session.run_step_fn(raw(element)) if in_step_fn else session.run(element)
                try:
                    elements.append(await run)
                except tf.errors.OutOfRangeError:
                    if not is_caught:
                        raise
                    break
            assert not session.should_stop()
            assert await session.run(seven) == 7
        assert sorted(elements) == [0, 1, 2]
        assert hook.log[-1] == ("a", "end")
        assert str(session.stop_reason).startswith("the block") or is_caught


@pytest.mark.parametrize("error", [None, ZeroDivisionError("body")])
async def test_queue_runners_run_for_each_raw_session_and_are_joined_at_its_end(
    error: Exception | None,
) -> None:
    with tf.Graph().as_default() as graph:
        v1.train.get_or_create_global_step()
        element = queue(tf.constant(1, tf.int64))
    before, runners = {*threading.enumerate()}, []  # type: tuple[set[Any], list[threading.Thread]]

    def created(session: Any, coord: Any) -> None:
        new = {*threading.enumerate()} - before
        runners.extend(each for each in new if each.name.startswith("QueueRunnerThread"))
        before.update(new)

    loses = at(after_create_session=created, before_run=raising(None, aborted()))
    with nullcontext() if error is None else pytest.raises(ZeroDivisionError, match="body"):
        async with monitored(graph, [loses]) as session:
            for _ in range(4):
                assert await session.run(element) == 1
            assert len(runners) == 6, "for each session two that enqueue, and one that closes"
            raising(error)()
    assert not any(thread.is_alive() for thread in runners)


async def test_an_error_in_a_queue_runner_stops_training_and_leaves_at_the_end() -> None:
    with tf.Graph().as_default() as graph:
        element = tf.numpy_function(raising(ValueError("the file is broken")), [], tf.int64)
        element.set_shape([])
        dequeue = queue(element, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the file is broken"):
        async with monitored(graph) as session:
            while True:
                await session.run(dequeue)


async def test_the_coordinator_is_one_of_tensorflows_and_its_looper_threads_end_the_block() -> None:
    model, created = counting_model(), Created()
    for stop, error in ((lambda coord: coord.request_stop(), None), (raising(OSError()), OSError)):
        with pytest.raises(error) if error else nullcontext():
            async with monitored(model.graph, [created]) as session:
                coord = created.coords[-1]
                assert isinstance(coord, v1.train.Coordinator)
                thread = v1.train.LooperThread.loop(coord, None, stop, [coord])
                coord.register_thread(thread)
                while True:
                    await session.run(model.train_op)
                    await anyio.lowlevel.checkpoint()
        assert not thread.is_alive()
        assert error or str(session.stop_reason).startswith("the coordinator in the thread")


@pytest.mark.parametrize("kind", [tf.errors.CancelledError, tf.errors.OutOfRangeError])
def test_what_a_stop_causes_in_queue_runners_is_no_error(kind: Any) -> None:
    coord = asynchooks.tf.GraphCoordinator()
    coord.request_stop()
    for _ in range(2):  # also once its session was lost
        coord.request_stop(kind(None, None, "the queue is closed"))
        coord.join()
    coord.raise_requested_exception()
