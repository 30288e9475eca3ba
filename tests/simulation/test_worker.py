"""What a worker's program acts through; queues; programs and sessions that crash and resume."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import CheckpointSaverHook, StateDictSaver
from asynchooks.protocols import KAsync, KSync, Protocol, StaleSynchronous, Synchronous
from asynchooks.simulation import (
    Constant,
    Crashes,
    Exponential,
    Network,
    Preemption,
    Simulation,
    Uniform,
    Worker,
)

from ..support.moments import at
from .clusters import check_report, new_cluster, speeds, spent, with_session
from .engines import simulated


def test_pull_compute_push_in_order(backend: Any) -> None:
    cluster = new_cluster(1, backend, parameters=np.ones(2), compute=Constant(1.0),
                          pull=Constant(0.5), push=Constant(0.25), learning_rate=1.0)  # fmt: skip
    log: list[Any] = []

    async def program(worker: Worker) -> None:
        parameters, version = await worker.pull()
        log.append((cluster.simulation.now, version))
        log.append((cluster.simulation.now, await worker.compute()))
        log.append((cluster.simulation.now, (await worker.push(parameters)).is_applied))
        await worker.compute(2.5)  # in place of a draw

    assert cluster.run(program).secs == 4.25
    assert log == [(0.5, 0), (0.5, True), (1.5, True)]
    assert cluster.server.parameters.tolist() == [0.0, 0.0]


def test_a_snapshot_is_that_of_the_moment_at_which_it_leaves_the_server() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 10.0), pull=speeds(0.0, 5.5))
    report = cluster.run(updates=20)
    first = [each.staleness for each in report.workers][1]
    assert max(first) >= 15  # all that came while it was under way, and computed on


def test_random_numbers_of_a_worker_are_its_own_and_the_seeds() -> None:
    def drawn(seed: int) -> list[float]:
        cluster = new_cluster(2, seed=seed)
        cluster.run(updates=1)
        return [number for each in cluster.workers for number in each.rng.random(2)]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 8


def test_a_session_gives_the_outcome_of_its_step_which_an_update_may_make_useless(
    backend: Any,
) -> None:
    cluster = new_cluster(2, backend, protocol=KSync(1), compute=speeds(1.0, 5.0))
    found: list[Any] = []

    async def program(worker: Worker) -> None:
        async with worker.session() as session:
            while not session.should_stop():
                outputs = await session.run(["computed", "staleness", "outcome", "global_step"])
                found.append((cluster.simulation.now, worker.index, *outputs))

    cluster.run(program, updates=2)
    assert found == [
        (1.0, 0, True, 0, "applied", 1), (1.0, 1, False, None, None, 1),
        (2.0, 0, True, 0, "applied", 2), (2.0, 1, False, None, None, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_servers", "arrivals", "ends", "queued"),
    [(1, [0.0, 0.0, 0.5, 5.0], [1.0, 2.0, 3.0, 6.0], 1.0 + 1.5),
     (2, [0.0, 0.0, 0.5, 0.75], [1.0, 1.0, 2.0, 2.0], 0.5 + 0.25)],
)  # fmt: skip
@simulated
async def test_requests_are_served_in_order_of_arrival(
    simulation: Simulation, num_servers: int, arrivals: list[float], ends: list[float],
    queued: float, log: list[float],
) -> None:  # fmt: skip
    queue = simulation.queue(Constant(1.0), num_servers=num_servers)

    async def customer(arrives: float) -> None:
        await simulation.sleep(arrives)
        took = await queue.serve()
        assert took == simulation.now - arrives
        log.append(simulation.now)

    for task in [simulation.start(customer, each) for each in arrivals]:
        await task.wait()
    assert log == ends
    assert (queue.num_served, queue.secs_busy, queue.secs_queued) == (4, 4.0, queued)


@simulated
async def test_each_queue_draws_its_own_service_times(simulation: Simulation) -> None:
    first, other = (simulation.queue(Exponential(1.0)) for _ in range(2))
    assert await first.serve() != await other.serve()


# Crashes


def test_a_preemption_that_was_over_before_training_began_changes_nothing() -> None:
    failures = [Preemption(5.0, secs=20.0, workers=[0]), Preemption(5.0, secs=2.0, workers=[1])]
    cluster = new_cluster(2, compute=Constant(1.0), failures=failures)

    async def main() -> None:
        await cluster.simulation.sleep(10.0)
        await cluster.train(updates=20)

    cluster.simulation.run(main)
    down = [spent(each).get("down") for each in cluster.report().workers]
    assert down == [15.0, None]  # the first had begun before: until 25


MOMENTS = ("begin", "after_create_session", "before_run", "after_run", "end")


def saver_of(worker: Worker, path: Path, **options: Any) -> CheckpointSaverHook:
    saver = StateDictSaver(server=worker.cluster.server)
    return CheckpointSaverHook(path, saver=saver, **options)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_crash_within_a_hook_notifies_all_hooks_and_breaks_no_count(
    backend: Any, moment: str
) -> None:
    at_secs = dict.fromkeys(MOMENTS, 0.5) | {"after_run": 1.5, "end": 3.5}
    cluster = new_cluster(
        1, backend, compute=Constant(1.0), failures=[Preemption(at_secs[moment], secs=2.0)]
    )
    simulation, log = cluster.simulation, list[Any]()

    async def spend(*_: object) -> None:
        await simulation.sleep(1.0)

    slow: dict[str, Any] = {
        moment: spend, "on_error": lambda _, error: log.append((simulation.now, type(error)))
    }  # fmt: skip
    report = cluster.run(lambda worker: with_session(worker, at(**slow)), updates=3)
    assert report.updates == 3
    ((secs, error),) = log
    assert secs == at_secs[moment]
    assert error.__name__ in {"CancelledError", "Cancelled"}
    # at the end all is done; a crash then loses nothing but the end of the session
    assert spent(report.workers[0]).get("down", 0.0) == (0.0 if moment == "end" else 2.0)
    check_report(report)


def test_no_program_begins_again_after_the_last_update(tmp_path: Path) -> None:
    """It would restore the server as it was before, and nothing would train it any more."""
    away = Preemption(3.5, secs=2.0, workers=[0])
    cluster = new_cluster(2, compute=Constant(1.0), failures=[away])
    begins: list[float] = []

    async def program(worker: Worker) -> None:
        begins.append(cluster.simulation.now)
        if worker.index == 1:
            await with_session(worker, at(end=lambda _: cluster.simulation.sleep(10.0)))
        else:
            await with_session(worker, saver_of(worker, tmp_path, save_steps=2))

    report = cluster.run(program, updates=6)
    assert begins == [0.0, 0.0]
    assert (report.updates, report.secs) == (6, 5.0)


@pytest.mark.parametrize("is_background", [False, True])
def test_a_worker_that_crashed_resumes_from_its_checkpoint(
    backend: Any, is_background: bool, tmp_path: Path
) -> None:
    cluster = new_cluster(1, backend, parameters=np.ones(2), compute=Constant(1.0),
                          learning_rate=0.5, failures=[Preemption(7.5, secs=1.0)])  # fmt: skip
    begins: list[tuple[float, int]] = []

    async def program(worker: Worker) -> None:
        saver = saver_of(worker, tmp_path, save_steps=5, background=is_background)
        async with worker.session([saver], gradient=lambda p, _: p) as session:
            begins.append((cluster.simulation.now, worker.cluster.server.version))
            while not session.should_stop():
                await session.run("computed")

    report = cluster.run(program, updates=10)
    assert begins == [(0.0, 0), (8.5, 5)]
    assert report.secs == 13.5  # five updates more
    assert report.updates == report.applied == 10
    assert cluster.server.parameters == pytest.approx(0.5**10)


@pytest.mark.parametrize(
    "protocol", [Synchronous(), KSync(2), KAsync(2), StaleSynchronous(0), StaleSynchronous(2)],
    ids=str,
)  # fmt: skip
def test_the_server_is_restored_under_workers_that_train(
    backend: Any, protocol: Protocol, tmp_path: Path
) -> None:
    cluster = new_cluster(
        4, backend, protocol=protocol, compute=Uniform(0.5, 1.5), network=Network(0.125),
        failures=[Crashes(Exponential(12.0), Exponential(1.0))],
    )  # fmt: skip
    server, bound = cluster.server, getattr(protocol, "staleness", math.inf)
    num_restored = num_pushed = 0

    async def program(worker: Worker) -> None:
        async def step() -> dict[str, Any]:
            nonlocal num_pushed
            await worker.pull()
            here = [server.clock(each.index) for each in cluster.workers if not each.is_finished]
            ahead = server.clock(worker.index) - min(here)
            if await worker.compute():
                assert ahead <= bound  # as it began
                await worker.push(np.zeros(1))
                num_pushed += 1
            return {"done": True}

        nonlocal num_restored
        savers = [saver_of(worker, tmp_path, save_steps=8)] if worker.index == 0 else []
        before = server.version
        async with worker.session(savers, step=step) as session:
            num_restored += before > server.version
            while not session.should_stop():
                await session.run("done")

    report = cluster.run(program, updates=60)
    assert report.updates == 60
    assert num_restored
    # only what was not undone counts in the server; gradients in flight come to nothing
    assert sum(report.staleness.values()) == report.applied
    num_left = report.applied + report.discarded + server.num_collected
    assert report.undone == num_pushed - num_left > 0
    assert report.summary_row()["undone"] == report.undone
