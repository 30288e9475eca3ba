"""Sessions on real TensorFlow graphs in virtual time: the same curve on every kernel."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from asynchooks import SessionRunContext, SessionRunHook, StopAtStepHook
from asynchooks.simulation import Exponential, Simulation
from asynchooks.simulation._simulation import Backend

from .models import monitored, shared, tf, v1

pytestmark = pytest.mark.tensorflow


def curve(backend: Any) -> list[tuple[float, int, float]]:
    """(Virtual time, worker, loss) of each step of three workers on one graph and session."""
    found: list[tuple[float, int, float]] = []
    simulation = Simulation(seed=4, backend=backend)
    with tf.Graph().as_default() as graph:
        weight = v1.get_variable("weight", (), initializer=v1.zeros_initializer())
        loss = tf.square(weight - 3.0)
        step = v1.train.get_or_create_global_step()
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
    creator = shared(graph, 3)

    async def worker(number: int) -> None:
        delays = simulation.streams.delays(number, "compute", Exponential(1.0))

        class Computes(SessionRunHook):
            async def before_run(self, run_context: SessionRunContext) -> None:
                await simulation.sleep(delays.next())

        hooks = [Computes(), StopAtStepHook(last_step=30)]
        async with monitored(graph, hooks, creator) as session:
            while not session.should_stop():
                _, value = await session.run([train, loss])
                found.append((simulation.now, number, float(value)))

    async def main() -> None:
        for task in [simulation.start(worker, number) for number in range(3)]:
            await task.wait()

    simulation.run(main)
    return found


def test_workers_on_one_graph_do_the_same_on_every_kernel() -> None:
    first, *others = [curve(each) for each in get_args(Backend)]
    assert others == [first] * 2
    assert len(first) == 30
    assert {number for _, number, _ in first} == {0, 1, 2}
    assert first[-1][2] < 0.01 < first[0][2]
