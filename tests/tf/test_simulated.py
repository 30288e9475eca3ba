"""Sessions on real TensorFlow graphs in virtual time: the same curve on every kernel."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from asynchooks import (
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import Constant, Exponential, Simulation
from asynchooks.simulation._simulation import Backend

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow
BACKENDS: tuple[Any, ...] = get_args(Backend)


class Computing(SessionRunHook):
    """Spends the virtual time of a step."""

    def __init__(self, simulation: Simulation, worker: int) -> None:
        self._simulation = simulation
        self._delays = simulation.streams.delays(worker, "compute", Exponential(1.0))

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._simulation.sleep(self._delays.next())


def curve_of_shared_graph(backend: Any) -> list[tuple[float, int, float]]:
    """(Virtual time, worker, loss) of each step of three workers on one graph and session."""
    v1, curve = tf.compat.v1, list[tuple[float, int, float]]()
    simulation = Simulation(seed=4, backend=backend)
    with tf.Graph().as_default() as graph:
        weight = v1.get_variable("weight", (), initializer=v1.zeros_initializer())
        loss = tf.square(weight - 3.0)
        step = v1.train.get_or_create_global_step()
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        from asynchooks import ChiefSessionCreator

        creator = SharedSessionCreator(ChiefSessionCreator(), num_workers=3)

    async def worker(number: int) -> None:
        with graph.as_default():
            hooks = [Computing(simulation, number), StopAtStepHook(last_step=30)]
            session = MonitoredSession(hooks, creator)
        async with session:
            while not session.should_stop():
                _, value = await session.run([train, loss])
                curve.append((simulation.now, number, float(value)))

    async def main() -> None:
        for task in [simulation.start(worker, number) for number in range(3)]:
            await task.wait()

    simulation.run(main)
    return curve


def test_workers_on_one_graph_do_the_same_on_every_kernel() -> None:
    curves = [curve_of_shared_graph(each) for each in BACKENDS]
    assert curves[0] == curves[1] == curves[2]
    assert len(curves[0]) == 30
    assert {number for _, number, _ in curves[0]} == {0, 1, 2}
    assert curves[0][-1][2] < 0.01 < curves[0][0][2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_graph_train_a_cluster(backend: Any) -> None:
    """Constant delays, one worker: gradient descent step by step."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        weights = v1.placeholder(tf.float64, (2,))
        loss = tf.reduce_sum(tf.square(weights - [1.0, -2.0]))
        (gradient,) = tf.gradients(loss, [weights])
    with v1.Session(graph=graph) as session:
        cluster = Simulation(backend=backend).cluster(
            1,
            parameters=np.zeros(2),
            protocol=StaleSynchronous(0),
            compute=Constant(0.5),
            learning_rate=0.25,
        )
        report = cluster.run(
            gradient=lambda parameters, _: session.run(gradient, {weights: parameters}),
            updates=20,
            loss=lambda parameters: float(session.run(loss, {weights: parameters})),
        )
    expected = np.array([1.0, -2.0]) * (1 - 0.5**20)
    np.testing.assert_allclose(cluster.server.parameters, expected, rtol=1e-12)
    assert report.secs == 10.0
    assert [secs for secs, _, _ in report.losses] == [0.5 * each for each in range(21)]
    assert [value for _, _, value in report.losses] == pytest.approx(
        [5 * 0.25**each for each in range(21)]
    )
