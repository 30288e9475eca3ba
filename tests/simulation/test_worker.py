"""What a worker's program acts through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks import StopTraining
from asynchooks.protocols import KSync, Snapshot
from asynchooks.simulation import Constant, Phases, Worker

from .clusters import new_cluster, speeds, spent, with_session


def test_pull_compute_push_in_order(backend: Any) -> None:
    cluster = new_cluster(1, backend, parameters=np.ones(2), compute=Constant(1.0),
                          pull=Constant(0.5), push=Constant(0.25), learning_rate=1.0)  # fmt: skip
    log: list[tuple[float, Any]] = []

    async def program(worker: Worker) -> None:
        snapshot = await worker.pull()
        assert isinstance(snapshot, Snapshot)
        log.append((cluster.simulation.now, snapshot.version))
        log.append((await worker.compute(), cluster.simulation.now))
        pushed = await worker.push(snapshot.parameters)
        log.append((cluster.simulation.now, pushed.is_applied))

    cluster.run(program)
    assert log == [(0.5, 0), (True, 1.5), (1.75, True)]
    assert cluster.server.parameters.tolist() == [0.0, 0.0]


def test_a_snapshot_is_that_of_the_moment_at_which_it_leaves_the_server() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 10.0), pull=speeds(0.0, 5.5))
    report = cluster.run(updates=20)
    first = [each.staleness for each in report.workers][1]
    assert max(first) >= 15  # all that came while it was under way, and computed on


def test_compute_takes_what_is_asked_for_in_place_of_a_draw() -> None:
    async def program(worker: Worker) -> None:
        await worker.compute(2.5)
        await worker.compute()

    phases = Phases(Constant(1.0), [(1.0, 1.0), (100.0, 2.0)])
    assert new_cluster(1, compute=phases).run(program).secs == 1.0 + 3.0 + 2.0


@pytest.mark.parametrize(
    ("secs", "error", "match"),
    [
        (-1.0, ValueError, r"secs is -1\.0; give seconds, >= 0"),
        (float("nan"), ValueError, "secs is nan; give seconds"),
        ("long", TypeError, "secs is 'long'; give seconds"),
    ],
)
def test_compute_refuses_what_is_no_time(secs: Any, error: type[Exception], match: str) -> None:
    async def program(worker: Worker) -> None:
        await worker.compute(secs)

    with pytest.raises(error, match=match):
        new_cluster(1).run(program)


def test_what_an_update_makes_useless_is_given_up_at_once(backend: Any) -> None:
    cluster = new_cluster(3, backend, protocol=KSync(1), compute=speeds(1.0, 5.0, 9.0))
    found: list[tuple[int, bool, float]] = []

    async def program(worker: Worker) -> None:
        await worker.pull()
        is_done = await worker.compute()
        found.append((worker.index, is_done, cluster.simulation.now))
        if is_done:
            await worker.push(np.zeros(1))

    report = cluster.run(program, updates=1)
    assert found == [(0, True, 1.0), (1, False, 1.0), (2, False, 1.0)]
    assert [spent(each) for each in report.workers] == [{"computed": 1.0}] + [{"lost": 1.0}] * 2


def test_random_numbers_of_a_worker_are_its_own_and_the_seeds() -> None:
    def drawn(seed: int) -> list[float]:
        numbers = []

        async def program(worker: Worker) -> None:
            numbers.append(worker.rng.random())
            numbers.append(worker.rng.random())

        new_cluster(2, seed=seed).run(program)
        return numbers

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 8


def test_a_session_gives_the_outcome_of_its_step(backend: Any) -> None:
    cluster = new_cluster(2, backend, protocol=KSync(1), compute=speeds(1.0, 5.0))
    found: list[Any] = []

    async def program(worker: Worker) -> None:
        async with worker.session() as session:
            while not session.should_stop():
                outputs = ["computed", "staleness", "outcome", "global_step"]
                found.append((worker.index, *await session.run(outputs)))

    cluster.run(program, updates=2)
    assert found == [
        (0, True, 0, "applied", 1), (1, False, None, None, 1),
        (0, True, 0, "applied", 2), (1, False, None, None, 2),
    ]  # fmt: skip


def test_a_session_may_have_a_step_of_its_own() -> None:
    cluster = new_cluster(1, parameters=np.ones(1), compute=Constant(1.0), learning_rate=0.5)

    async def program(worker: Worker) -> None:
        async def step() -> dict[str, Any]:
            parameters, _ = await worker.pull()
            await worker.compute(3.0)
            await worker.push(parameters)
            return {"loss": float(parameters[0])}

        async with worker.session(step=step) as session:
            losses = [await session.run("loss") for _ in range(2)]
        assert losses == [1.0, 0.5]

    assert cluster.run(program).secs == 6.0


def test_training_that_is_over_ends_a_program_by_stop_training() -> None:
    ends: list[type[BaseException]] = []

    async def program(worker: Worker) -> None:
        try:
            while True:
                await worker.pull()
                await worker.compute()
                await worker.push(np.zeros(1))
        except BaseException as error:
            ends.append(type(error))
            raise

    assert new_cluster(2, compute=Constant(1.0)).run(program, updates=2).updates == 2
    assert ends == [StopTraining] * 2


def test_the_repr_of_a_worker_has_its_number() -> None:
    async def program(worker: Worker) -> None:
        assert repr(worker) == f"<worker {worker.index} of 3>"

    new_cluster(3).run(program)
    cluster = new_cluster(1)
    cluster.run(with_session, updates=1)
    assert cluster.workers[0].num_computed == 1
