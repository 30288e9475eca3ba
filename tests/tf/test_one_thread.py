"""Small steps leave TensorFlow's pool of threads for the calling one, but for those that may wait.

Nothing public shows where a step runs, but a wrong choice hangs training.
"""

import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from .models import monitored, tf, v1

data_flow_ops = pytest.importorskip("tensorflow.python.ops.data_flow_ops")


def _queue() -> Any:
    queue = v1.FIFOQueue(10, [tf.int32], shapes=[[]])
    with tf.control_dependencies([queue.enqueue(7)]):
        return queue.dequeue()


def _python() -> Any:
    return tf.numpy_function(lambda: np.int32(7), [], tf.int32)


def _staged() -> Any:
    """Put and got at once: whichever op runs first in one thread waits for the other one."""
    stage = data_flow_ops.StagingArea([tf.int32], shapes=[[]], capacity=1)
    put, got = stage.put([tf.constant(7)]), stage.get()
    with tf.control_dependencies([put]):
        return tf.identity(got)


def _behind_other_ops() -> Any:
    with tf.control_dependencies([tf.identity(_staged()).op]):
        return tf.constant(3) + 4


def _count() -> Any:
    variable = v1.get_variable("v", initializer=1, use_resource=True)
    return tf.identity(v1.assign_add(variable, 1))


def _trained(optimizer: Any, *, use_resource: bool = True) -> Any:
    weight = v1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)
    loss = tf.reduce_sum(weight**2)
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return tf.identity(loss)


STEPS: dict[str, Callable[[], Any]] = {
    "a queue": _queue,
    "a function of Python": _python,
    "a staging area": _staged,
    "behind other ops": _behind_other_ops,
    "constants": lambda: tf.constant([[2.0]]) @ [[3.0]],
    "a variable": _count,
    "old descent": lambda: _trained(v1.train.GradientDescentOptimizer(0.1), use_resource=False),
    "Adam": lambda: _trained(v1.train.AdamOptimizer(0.1)),
}


def built(build: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of its own, and what is to be fetched from it."""
    with tf.Graph().as_default() as graph:
        v1.train.get_or_create_global_step()
        return graph, build()


def outputs_of(build: Callable[[], Any], num: int) -> list[Any]:
    """What so many runs of a session give, on an event loop of its own."""
    (graph, fetch), outputs = built(build), list[Any]()

    async def main() -> None:
        async with monitored(graph, step_runner="inline") as session:
            for _ in range(num):
                outputs.append(await session.run(fetch))

    anyio.run(main)
    return outputs


@pytest.mark.parametrize("kind", STEPS)
def test_any_step_gives_what_session_run_gives_and_none_hangs(kind: str) -> None:
    outputs: list[Any] = []
    thread = threading.Thread(
        target=lambda: outputs.extend(outputs_of(STEPS[kind], 30)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    graph, same = built(STEPS[kind])
    with graph.as_default(), v1.train.SingularMonitoredSession() as session:
        expected = [session.run(same) for _ in range(30)]
    np.testing.assert_array_equal(outputs, expected, strict=True)


def test_random_numbers_differ_from_run_to_run() -> None:
    assert len(np.unique(outputs_of(lambda: v1.random.normal([3]), 20))) == 60
