"""Trainings in which nothing happens but failures, or nothing that makes an update: errors.

What is no standstill must not be taken for one: random trainings among many failures show it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import GlobalStepWaiterHook, StepUnreachableError
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    ParameterServer,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import (
    Cluster,
    Constant,
    Crashes,
    DeadlockError,
    Exponential,
    Failure,
    LivelockError,
    Preemption,
    Simulation,
    Worker,
    at_step,
)
from asynchooks.simulation.cluster._standstill import Standstill

from ..support.markers import exhaustive
from .clusters import bare, new_cluster, with_session
from .engines import on_event_loops, simulated

CRASHES = Crashes(Exponential(100.0), Exponential(5.0))
PAUSES = Crashes(Exponential(100.0), Exponential(5.0), loses_work=False)


class Never(Protocol):
    """No number of gradients makes an update; no worker waits."""

    def num_gradients(self, server: ParameterServer) -> int:
        return 1_000_000


class ForOthers(Protocol):
    """Every worker waits for an update that takes one gradient more than there are workers."""

    def num_gradients(self, server: ParameterServer) -> int:
        return server.num_workers + 1

    async def begin_step(self, server: ParameterServer, worker: int) -> None:
        await server.wait_for_update(worker)


def waits_for_step(step: int) -> Callable[[Worker], Awaitable[None]]:
    async def program(worker: Worker) -> None:
        await worker.cluster.global_step.wait_for(step)

    return program


@pytest.mark.parametrize("failures", [[CRASHES], [PAUSES], [CRASHES, PAUSES]])
def test_workers_that_wait_for_each_other_are_a_deadlock_though_they_crash(
    backend: Any, failures: list[Failure]
) -> None:
    cluster = new_cluster(4, backend, failures=failures)
    with pytest.raises(DeadlockError, match="nothing happens but failures") as caught:
        cluster.run(waits_for_step(10))
    text = str(caught.value)
    assert "worker 2" in text
    assert ": global_step 10 at " in text
    assert "main: the end of training" in text
    assert "Crashes" not in text
    assert cluster.simulation.now < 3000


def test_a_protocol_that_lets_all_wait_is_a_deadlock_though_they_crash(backend: Any) -> None:
    cluster = new_cluster(4, backend, protocol=ForOthers(), failures=[CRASHES])
    with pytest.raises(DeadlockError, match="an update with the gradient of worker 3"):
        cluster.run(updates=10)


def test_the_error_is_the_same_on_every_engine(backend: Any) -> None:
    errors = []
    for each in ("turbo", backend):
        with pytest.raises(DeadlockError) as caught:
            new_cluster(3, each, failures=[CRASHES]).run(waits_for_step(3))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_workers_that_are_down_are_named() -> None:
    crashes = Crashes(Constant(3.0), Constant(2.0), workers=[0])
    others = Crashes(Constant(5.0), Constant(4.0), workers=[1])
    with pytest.raises(DeadlockError, match=r"Down now: worker 0\. "):
        new_cluster(2, failures=[crashes, others]).run(waits_for_step(3))


def test_workers_that_are_never_all_there_are_a_deadlock_too() -> None:
    cluster = new_cluster(200, failures=[CRASHES])
    with pytest.raises(DeadlockError, match=r"and 1\d\d more: global_step 10 at "):
        cluster.run(waits_for_step(10))


def test_a_condition_on_a_step_does_not_hide_it(backend: Any) -> None:
    cluster = new_cluster(2, backend, failures=[CRASHES])
    with pytest.raises(DeadlockError, match="nothing happens but failures"):
        cluster.run(waits_for_step(10), until=at_step(cluster.global_step, 5))


def test_another_condition_may_be_one_on_time() -> None:
    simulation = Simulation()
    cluster = simulation.cluster(2, failures=[CRASHES])
    cluster.run(waits_for_step(10), until=lambda: simulation.now > 1e5)
    assert 1e5 < simulation.now < 2e5


@simulated
async def test_a_task_that_sleeps_may_end_the_wait(simulation: Simulation) -> None:
    cluster = simulation.cluster(2, failures=[CRASHES])
    training = simulation.start(cluster.train, waits_for_step(3))
    await simulation.sleep(1e4)
    for version in range(3):
        cluster.server.push(0, np.zeros(1), version)
    await training.wait()
    assert simulation.now == 1e4


@on_event_loops
def test_another_librarys_timer_may_end_the_wait(backend: Any) -> None:
    cluster = new_cluster(2, backend, failures=[CRASHES])

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(cluster.train, waits_for_step(1))
            await anyio.sleep(1e4)
            cluster.server.push(0, np.zeros(1), 0)

    cluster.simulation.run(main)
    assert cluster.simulation.now == 1e4


def test_a_program_that_draws_random_numbers_may_go_on_after_a_crash(backend: Any) -> None:
    async def program(worker: Worker) -> None:
        if worker.rng.random() < 0.95:
            await worker.cluster.global_step.wait_for(1)
        await worker.push(np.zeros(1), 0)

    cluster = new_cluster(2, backend, failures=[CRASHES])
    assert cluster.run(program).updates == 2
    assert cluster.simulation.now > 100


@on_event_loops
def test_a_wait_of_another_library_may_end_once_all_are_there(backend: Any) -> None:
    """A barrier that each leaves when it crashes, of more workers than are up at most times."""
    cluster = new_cluster(12, backend, failures=[Crashes(Exponential(1.0), Exponential(0.3))])
    here: set[int] = set()
    events: list[anyio.Event] = []

    async def program(worker: Worker) -> None:
        event = events[0] if events else anyio.Event()
        events[:] = [event]
        here.add(worker.index)
        try:
            if len(here) == 9:
                event.set()
            await event.wait()
        finally:
            here.discard(worker.index)

    cluster.run(program)


def test_sessions_that_all_wait_end_by_their_own_error(backend: Any) -> None:
    """The step says so as soon as all sessions are open together."""
    cluster = new_cluster(3, backend, failures=[Crashes(Exponential(10.0), Exponential(5.0))])
    errors = []

    async def program(worker: Worker) -> None:
        try:
            async with worker.session([GlobalStepWaiterHook(100)]) as session:
                await session.run("computed")
        except StepUnreachableError as error:
            errors.append(str(error))

    cluster.run(program)
    assert errors


@pytest.mark.parametrize(
    ("options", "error", "how"),
    [
        ({"protocol": Never()}, LivelockError, "go on"),
        ({"protocol": ForOthers()}, DeadlockError, "wait"),
        (
            {"compute": Constant(10.0), "failures": [Crashes(Constant(3.0), Constant(1.0))]},
            LivelockError, "go on",
        ),
    ],
)  # fmt: skip
def test_training_that_makes_no_update_for_long_is_an_error(
    backend: Any, options: dict[str, Any], error: type[Exception], how: str
) -> None:
    cluster = new_cluster(3, backend, **options)
    with pytest.raises(error, match="no update came from virtual time 0.0 to 50.0") as caught:
        cluster.run(updates=10, max_secs_without_update=50.0)
    assert f"while the tasks {how}:\n" in str(caught.value)
    assert "worker 2" in str(caught.value)
    assert cluster.simulation.now == 50.0


def test_the_seconds_count_from_the_last_update(backend: Any) -> None:
    async def program(worker: Worker) -> None:
        for version in range(20):
            await worker.compute(4.0)
            await worker.push(np.zeros(1), version)
        while True:
            await worker.compute(4.0)

    with pytest.raises(LivelockError, match="from virtual time 80.0 to 85.0, for "):
        new_cluster(1, backend).run(program, max_secs_without_update=5.0)


@pytest.mark.parametrize("secs", [0, -1.0, math.nan, math.inf, "5", True])
def test_other_seconds_than_that_are_refused(secs: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_secs_without_update is "):
        new_cluster(2).run(updates=1, max_secs_without_update=secs)


def test_training_that_is_watched_does_the_same() -> None:
    reports = [
        new_cluster(8, protocol=KSync(5), failures=[CRASHES]).run(
            updates=300, max_secs_without_update=secs
        )
        for secs in (None, 100.0)
    ]
    assert reports[0] == reports[1]


def test_a_program_that_goes_on_after_its_last_update_is_no_standstill() -> None:
    async def program(worker: Worker) -> None:
        await worker.push(np.zeros(1), 0)
        await worker.cluster.simulation.sleep(1e3)

    report = new_cluster(1).run(program, updates=1, max_secs_without_update=5.0)
    assert report.updates == 1


def _random_program(random: Random) -> Any:
    """Programs that wait, more or less, for what others do."""
    ahead, chance = random.randint(0, 6), random.random()

    async def gradual(worker: Worker) -> None:
        await worker.cluster.global_step.wait_for(worker.index * ahead)
        await bare(worker)

    async def dawdles(worker: Worker) -> None:
        while True:
            if worker.rng.random() < chance:
                await worker.cluster.simulation.sleep(worker.rng.random())
            await worker.pull()
            if await worker.compute():
                await worker.push(np.zeros(1))
            if worker.index and worker.rng.random() < chance:
                await worker.cluster.global_step.wait_for(worker.version + ahead)

    async def in_turns(worker: Worker) -> None:
        num = worker.cluster.num_workers
        while True:
            step = worker.cluster.global_step
            turn = step.value + (worker.index - step.value) % num
            await step.wait_for(turn)
            snapshot = await worker.pull()
            if snapshot.version % num == worker.index and await worker.compute():
                await worker.push(np.zeros(1), snapshot.version)
            else:
                await worker.cluster.simulation.sleep(0.1)

    return random.choice([None, with_session, gradual, bare, dawdles, in_turns])


def _random_cluster(seed: int) -> tuple[Cluster, Any]:
    random = Random(seed)
    num = random.randint(1, 7)
    k = random.randint(1, num)
    protocols = [
        Asynchronous(), Synchronous(), KSync(k), KAsync(k), KBatchSync(k), KBatchAsync(k),
        StaleSynchronous(random.randint(0, 3)),
    ]  # fmt: skip
    failures: list[Failure] = []
    for _ in range(random.randint(1, 3)):
        secs = [random.choice([0.1, 0.5, 1.0, 3.0, 10.0]) for _ in range(2)]
        workers = random.choice([None, random.sample(range(num), random.randint(1, num))])
        law = random.choice([Exponential, Constant])
        loses_work = random.random() < 0.7
        failures.append(Crashes(law(secs[0]), law(secs[1]), loses_work, workers))
    if random.random() < 0.3:
        failures.append(Preemption(random.random() * 9, random.choice([1.0, 30.0, math.inf]), [0]))
    law = random.choice([Exponential, Constant])
    compute = law(random.choice([0.2, 1.0, 2.0]))
    pull = random.choice([None, Constant(0.1)])
    cluster = Simulation(seed, random.choice(["turbo", "turbo", "asyncio", "trio"])).cluster(
        num, protocol=random.choice(protocols), compute=compute, pull=pull, failures=failures
    )
    return cluster, _random_program(random)


@pytest.mark.parametrize("seed", [*range(10), *exhaustive(*range(10, 40))])
def test_no_training_that_goes_on_is_taken_for_a_standstill(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would call a standstill is let go on, and makes no update afterwards."""
    found: list[tuple[float, int, int]] = []
    check = Standstill.check

    def note(self: Standstill, worker: Worker) -> None:
        try:
            check(self, worker)
        except DeadlockError:
            found.append((cluster.simulation.now, cluster.server.version, cluster.num_active))

    monkeypatch.setattr(Standstill, "check", note)
    cluster, program = _random_cluster(seed)
    try:
        report = cluster.run(program, until=150.0)
    except (DeadlockError, StepUnreachableError):
        assert not found
        return
    if found:
        assert report.updates == found[0][1], found
