"""PooledOrAlone: which steps leave TensorFlow's pool of threads for the calling one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asynchooks._engine.current import use_engine
from asynchooks.tf.graph._callables import NUM_TIMED, TRIED_SECS, PooledOrAlone, compiled
from asynchooks.tf.graph._session import GraphSession

from ..support.virtual_kernel import Trampoline

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
data_flow_ops = pytest.importorskip("tensorflow.python.ops.data_flow_ops")
pytestmark = pytest.mark.tensorflow

POOL, ALONE = 0, -1


class Fakes:
    """Makes callables that take a time of their own on the virtual clock, and echo their values.

    Args:
        secs: seconds that a callable's n-th call takes, by its pool.
    """

    def __init__(self, secs: Callable[[int, int], float]) -> None:
        self.clock = Trampoline()
        self.secs = secs
        self.made: list[int] = []
        self.calls: list[int] = []
        self.errors: dict[int, Exception] = {}  # by the number of the call, counted from 1

    def make(self, pool: int) -> Callable[..., Any]:
        self.made.append(pool)

        def call(*values: Any) -> Any:
            self.calls.append(pool)
            self.clock.time += self.secs(pool, self.calls.count(pool))
            if len(self.calls) in self.errors:
                raise self.errors[len(self.calls)]
            return values

        return call

    def settled(self, num_calls: int = NUM_TIMED) -> PooledOrAlone:
        """One that has been called so often, and gave the right outputs."""
        step = PooledOrAlone(self.make, [])
        with use_engine(self.clock):
            for number in range(num_calls):
                assert step.call(number, "x") == (number, "x")
        return step

    def kept(self, step: PooledOrAlone) -> int:
        """Where it runs from now on."""
        del self.calls[:]
        call = step.call
        with use_engine(self.clock):
            for _ in range(20):
                step.call()
        assert step.call == call != step._time  # settled
        assert len(set(self.calls)) == 1
        return self.calls[0]


@pytest.mark.parametrize(
    ("in_pool", "kept"), [(1e-5, ALONE), (TRIED_SECS, ALONE), (1.1 * TRIED_SECS, POOL)]
)
def test_a_small_step_leaves_the_pool_and_a_large_one_stays(in_pool: float, kept: int) -> None:
    fakes = Fakes(lambda pool, number: in_pool)
    step = fakes.settled()
    assert fakes.calls == [POOL] * NUM_TIMED
    assert fakes.kept(step) == kept
    assert fakes.made == [POOL, ALONE][: 1 - kept]


@pytest.mark.parametrize("held_up", [(1, 2, 4), (1, 3, 5), (2, 3, 4, 5)])
def test_calls_that_were_held_up_do_not_decide(held_up: tuple[int, ...]) -> None:
    fakes = Fakes(lambda pool, number: 1.0 if number in held_up else 5e-5)
    assert fakes.kept(fakes.settled()) == ALONE


@pytest.mark.parametrize("number", range(1, NUM_TIMED + 2))
def test_an_error_out_of_a_trial_leaves_it_usable(number: int) -> None:
    fakes = Fakes(lambda pool, number: 5e-5)
    error = fakes.errors[number] = ValueError("of the step")
    step = fakes.settled(number - 1)
    with use_engine(fakes.clock), pytest.raises(ValueError, match="of the step") as raised:
        step.call()
    assert raised.value is error
    fakes.errors.clear()
    with use_engine(fakes.clock):
        assert [step.call(n) for n in range(20)] == [(n,) for n in range(20)]
    assert fakes.made == [POOL, ALONE]
    fakes.kept(step)


def _queue() -> Any:
    queue = v1.FIFOQueue(10, [tf.int32], shapes=[[]])
    with tf.control_dependencies([queue.enqueue(7)]):
        return queue.dequeue()


def _python() -> Any:
    return tf.numpy_function(lambda: np.int32(7), [], tf.int32)


def _staged(*, at_once: bool) -> Any:
    """At once: whichever op runs first in one thread waits for the other one."""
    stage = data_flow_ops.StagingArea([tf.int32], shapes=[[]], capacity=1)
    put = stage.put([tf.constant(7)])
    with tf.control_dependencies([] if at_once else [put]):
        got = stage.get()
    with tf.control_dependencies([put]):
        return tf.identity(got)


def _behind_other_ops() -> Any:
    with tf.control_dependencies([tf.identity(_python()).op]):
        return tf.constant(3) + 4


MAY_WAIT: dict[str, Callable[[], Any]] = {
    "a queue": _queue,
    "an iterator": lambda: v1.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(7).repeat()
    ).get_next(),
    "a function of Python": _python,
    "an eager function": lambda: tf.py_function(lambda: 7, [], tf.int32),
    "a staging area": lambda: _staged(at_once=False),
    "a staging area, put and got at once": lambda: _staged(at_once=True),
    "behind other ops": _behind_other_ops,
}


def _variable(*, use_resource: bool = True) -> Any:
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
    value = v1.random.uniform([])
    with tf.control_dependencies([tf.raw_ops.Assert(condition=value < 1, data=[value])]):
        return tf.identity(value)


NEVER_WAIT: dict[str, Callable[[], Any]] = {
    "constants": lambda: tf.constant([[2.0]]) @ [[3.0]],
    "a variable": _variable,
    "a variable of the old kind": lambda: _variable(use_resource=False),
    "a scattered variable": _scattered,
    "old descent": lambda: _trained(v1.train.GradientDescentOptimizer(0.1), use_resource=False),
    "momentum": lambda: _trained(v1.train.MomentumOptimizer(0.1, 0.9)),
    "Adam": lambda: _trained(v1.train.AdamOptimizer(0.1)),
    "uniform": lambda: v1.random.uniform([3], seed=1),
    "normal": lambda: v1.random.normal([3], seed=1),
    "truncated normal": lambda: v1.random.truncated_normal([3], seed=1),
    "stateless": lambda: tf.random.stateless_uniform([3], [1, 2]),
    "an assertion": _asserted,
}


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


@pytest.mark.parametrize("kind", MAY_WAIT)
def test_what_may_wait_for_another_op_is_never_run_alone(kind: str) -> None:
    recorded = Recorded(MAY_WAIT[kind])
    outputs: list[int] = []

    def run() -> None:
        with use_engine(Trampoline()):  # no time passes: every step is small
            outputs.extend(recorded.step.call()[0] for _ in range(50))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()  # it hangs
    assert outputs == [7] * 50
    assert recorded.made == [POOL]


@pytest.mark.parametrize("kind", NEVER_WAIT)
def test_what_never_waits_is_run_alone(kind: str) -> None:
    recorded = Recorded(NEVER_WAIT[kind])
    with use_engine(Trampoline()):
        outputs = [recorded.step.call()[0] for _ in range(NUM_TIMED)]
    assert recorded.made == [POOL, ALONE]
    assert np.all(np.isfinite(outputs))


@pytest.mark.parametrize("kind", ["a variable", "a variable of the old kind", "Adam", "momentum"])
def test_results_are_those_of_session_run_whichever_way_it_takes(kind: str) -> None:
    plain, recorded = Recorded(NEVER_WAIT[kind]), Recorded(NEVER_WAIT[kind])
    expected = [plain.session.run(plain.fetch) for _ in range(40)]
    assert [recorded.step.call()[0] for _ in range(40)] == expected


def test_random_values_differ_from_call_to_call() -> None:
    recorded = Recorded(NEVER_WAIT["uniform"])
    values = np.concatenate([recorded.step.call()[0] for _ in range(40)])
    assert np.all((values >= 0) & (values < 1))
    assert len(np.unique(values)) > 100


def test_many_threads_at_once_get_a_result_each() -> None:
    with tf.Graph().as_default() as graph:
        count = _variable()
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())
    raw = GraphSession(session)
    results: list[list[int]] = []
    begin = threading.Barrier(8)

    def run() -> None:
        begin.wait()
        results.append([raw.run([count])[0] for _ in range(50)])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raw.run(count) == 402
    assert max(map(max, results)) == 401
    for each in results:  # what others did may be in it, too
        assert len(each) == 50
        assert each == sorted(set(each))
    raw.close()
