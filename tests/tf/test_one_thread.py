"""PooledOrAlone: which steps leave TensorFlow's pool of threads for the calling one.

It is private, and nothing public shows where a step runs; a wrong choice hangs training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asynchooks._engine.current import use_engine
from asynchooks.tf.graph._callables import NUM_TIMED, TRIED_SECS, PooledOrAlone, compiled

from ..support.virtual_kernel import Trampoline
from .models import tf, v1

data_flow_ops = pytest.importorskip("tensorflow.python.ops.data_flow_ops")
pytestmark = pytest.mark.tensorflow

POOL, ALONE = 0, -1


class Fakes:
    """Makes callables that take a time of their own on the virtual clock, and echo their values.

    Args:
        secs: seconds that the n-th call in the pool takes.
        fails_at: the number of the call that fails; 0: none.
    """

    def __init__(self, secs: Callable[[int], float], fails_at: int = 0) -> None:
        self.clock, self.secs, self.fails_at = Trampoline(), secs, fails_at
        self.calls: list[int] = []
        self.step = PooledOrAlone(self.make, [])

    def make(self, pool: int) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            self.calls.append(pool)
            self.clock.time += self.secs(len(self.calls))
            if len(self.calls) == self.fails_at:
                raise ValueError("of the step")
            return values

        return call

    def run(self, num_calls: int) -> list[int]:
        """Call so often, and return where it ran."""
        before = len(self.calls)
        with use_engine(self.clock):
            for number in range(num_calls):
                assert self.step.call(number, "x") == (number, "x")
        return self.calls[before:]


@pytest.mark.parametrize(
    ("secs", "kept"),
    [
        (lambda number: 1e-5, ALONE),
        (lambda number: TRIED_SECS, ALONE),
        (lambda number: 1.1 * TRIED_SECS, POOL),
        (lambda number: 1.0 if number in (1, 2, 4) else 5e-5, ALONE),
        (lambda number: 1.0 if number > 1 else 5e-5, ALONE),
    ],
    ids=["small", "at the bound", "large", "held up thrice", "held up but once"],
)
def test_a_small_step_leaves_the_pool_and_a_large_one_stays(secs: Any, kept: int) -> None:
    fakes = Fakes(secs)
    assert fakes.run(NUM_TIMED) == [POOL] * NUM_TIMED
    assert fakes.run(20) == [kept] * 20


@pytest.mark.parametrize("number", range(1, NUM_TIMED + 2))
def test_an_error_out_of_a_trial_leaves_it_usable(number: int) -> None:
    fakes = Fakes(lambda number: 5e-5, fails_at=number)
    fakes.run(number - 1)
    with use_engine(fakes.clock), pytest.raises(ValueError, match="of the step"):
        fakes.step.call()
    assert fakes.run(20)[-1] == ALONE


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
    with tf.control_dependencies([tf.identity(_python()).op]):
        return tf.constant(3) + 4


def _iterator() -> Any:
    return v1.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(7).repeat()).get_next()


MAY_WAIT: dict[str, Callable[[], Any]] = {
    "a queue": _queue,
    "an iterator": _iterator,
    "a function of Python": _python,
    "a staging area": _staged,
    "behind other ops": _behind_other_ops,
}


def _count(*, use_resource: bool = True) -> Any:
    variable = v1.get_variable("v", initializer=1, use_resource=use_resource)
    return tf.identity(v1.assign_add(variable, 1))


def _scattered() -> Any:
    variable = v1.get_variable("v", initializer=[1, 1], use_resource=True)
    return tf.identity(v1.scatter_add(variable, [0], [1]))


def _trained(optimizer: Any, *, use_resource: bool = True) -> Any:
    weight = v1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)
    loss = tf.reduce_sum(weight**2)
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return tf.identity(loss)


def _asserted() -> Any:
    with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=[1])]):
        return tf.constant(1.0)


NEVER_WAIT: dict[str, Callable[[], Any]] = {
    "constants": lambda: tf.constant([[2.0]]) @ [[3.0]],
    "a variable": _count,
    "a variable of the old kind": lambda: _count(use_resource=False),
    "a scattered variable": _scattered,
    "old descent": lambda: _trained(v1.train.GradientDescentOptimizer(0.1), use_resource=False),
    "momentum": lambda: _trained(v1.train.MomentumOptimizer(0.1, 0.9)),
    "Adam": lambda: _trained(v1.train.AdamOptimizer(0.1)),
    "stateless": lambda: tf.random.stateless_uniform([3], [1, 2]),
    "an assertion": _asserted,
    "uniform": lambda: v1.random.uniform([3]),
    "normal": lambda: v1.random.normal([3]),
    "truncated normal": lambda: v1.random.truncated_normal([3]),
}
RANDOM = list(NEVER_WAIT)[-3:]


class Recorded:
    """A session on a graph, and `PooledOrAlone` over its real callables."""

    def __init__(self, build: Callable[[], Any]) -> None:
        with tf.Graph().as_default() as graph:
            self.fetch = build()
            self.session = v1.Session(graph=graph)
            self.session.run(v1.global_variables_initializer())
        self.made: list[int] = []
        self.step = PooledOrAlone(self.make, [self.fetch.op])

    def make(self, pool: int) -> Callable[..., Any]:
        self.made.append(pool)
        return compiled(self.session, [self.fetch], pool=pool)

    def run(self, num_calls: int) -> list[Any]:
        with use_engine(Trampoline()):  # no time passes: every step is small
            return [self.step.call()[0] for _ in range(num_calls)]


@pytest.mark.parametrize("kind", MAY_WAIT)
def test_what_may_wait_for_another_op_is_never_run_alone(kind: str) -> None:
    recorded = Recorded(MAY_WAIT[kind])
    outputs: list[int] = []
    thread = threading.Thread(target=lambda: outputs.extend(recorded.run(50)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert outputs == [7] * 50
    assert recorded.made == [POOL]


@pytest.mark.parametrize("kind", NEVER_WAIT)
def test_what_never_waits_is_run_alone_with_the_results_of_session_run(kind: str) -> None:
    plain, recorded = Recorded(NEVER_WAIT[kind]), Recorded(NEVER_WAIT[kind])
    outputs = recorded.run(20)
    assert recorded.made == [POOL, ALONE]
    if kind in RANDOM:
        assert len(np.unique(outputs)) == 60, "they differ from call to call"
    else:
        np.testing.assert_array_equal(
            outputs, [plain.session.run(plain.fetch) for _ in range(20)], strict=True
        )
