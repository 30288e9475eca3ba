"""Sessions on real TensorFlow graphs in virtual time: the same curve on every kernel."""

from typing import Any

from asynchooks import StopAtStepHook
from asynchooks.simulation import Exponential, Simulation

from ..simulation.engines import BACKENDS
from ..support.moments import at
from .models import counting_model, monitored, shared


def curve(backend: Any) -> list[tuple[float, int, int]]:
    """(Virtual time, worker, step) of each run of three workers on one graph and session."""
    found: list[tuple[float, int, int]] = []
    simulation, model = Simulation(seed=4, backend=backend), counting_model()
    creator = shared(model.graph, 3)

    async def worker(number: int) -> None:
        delays = simulation.streams.delays(number, "compute", Exponential(1.0))
        compute = at(before_run=lambda context: simulation.sleep(delays.next()))
        hooks = [compute, StopAtStepHook(last_step=30)]
        async with monitored(model.graph, hooks, creator) as session:
            while not session.should_stop():
                step = int(await session.run(model.train_op))
                found.append((simulation.now, number, step))

    async def main() -> None:
        for task in [simulation.start(worker, number) for number in range(3)]:
            await task.wait()

    simulation.run(main)
    return found


def test_workers_on_one_graph_do_the_same_on_every_kernel() -> None:
    first, *others = [curve(each) for each in BACKENDS]
    assert others == [first] * 2
    assert sorted(step for _, _, step in first) == [*range(1, 31)]
    assert {number for _, number, _ in first} == {0, 1, 2}
