"""Sessions of simulated workers crash and resume, with real files in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    GlobalStepWaiterHook,
    SessionRunHook,
    StateDictSaver,
    StepUnreachableError,
)
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import Constant, Crashes, Exponential, Preemption, Uniform, Worker

from .clusters import check_report, new_cluster, speeds, spent

MOMENTS = ("begin", "after_create_session", "before_run", "after_run", "end")


class SlowHook(SessionRunHook):
    """Takes a second of virtual time at one moment, and logs errors."""

    def __init__(self, worker: Worker, moment: str, log: list[tuple[float, str]]) -> None:
        self.worker, self.moment, self.log = worker, moment, log

    async def _spend(self, moment: str) -> None:
        if moment == self.moment:
            await self.worker.cluster.simulation.sleep(1.0)

    async def begin(self) -> None:
        await self._spend("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        await self._spend("after_create_session")

    async def before_run(self, run_context: Any) -> None:
        await self._spend("before_run")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self._spend("after_run")

    async def end(self, session: Any) -> None:
        await self._spend("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.log.append((self.worker.cluster.simulation.now, type(exception).__name__))


def saver_of(worker: Worker, path: Path, **options: Any) -> CheckpointSaverHook:
    saver = StateDictSaver(server=worker.cluster.server)
    return CheckpointSaverHook(path, saver=saver, **options)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_crash_within_a_hook_notifies_all_hooks_and_breaks_no_count(
    backend: Any, moment: str
) -> None:
    at = dict.fromkeys(MOMENTS, 0.5) | {"after_run": 1.5, "end": 3.5}
    log: list[tuple[float, str]] = []
    failures = [Preemption(at[moment], secs=2.0)]
    cluster = new_cluster(1, backend, compute=Constant(1.0), failures=failures)
    runs = 0

    async def program(worker: Worker) -> None:
        nonlocal runs
        async with worker.session([SlowHook(worker, moment, log)]) as session:
            while not session.should_stop():
                await session.run("computed")
                runs += 1

    report = cluster.run(program, updates=3)
    assert report.updates == 3
    assert [time for time, _ in log] == [at[moment]]
    assert {name for _, name in log} <= {"CancelledError", "Cancelled"}
    # at the end all is done; a crash then loses nothing but the end of the session
    assert spent(report.workers[0]).get("down", 0.0) == (0.0 if moment == "end" else 2.0)
    check_report(report)


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
    "protocol",
    [Asynchronous(), Synchronous(), KSync(2), KAsync(2), StaleSynchronous(0), StaleSynchronous(2)],
    ids=str,
)
def test_the_server_is_restored_under_workers_that_train(
    backend: Any, protocol: Protocol, tmp_path: Path
) -> None:
    crashes = Crashes(Exponential(12.0), Exponential(1.0))
    cluster = new_cluster(4, backend, protocol=protocol, compute=Uniform(0.5, 1.5),
                          push=Constant(0.125), failures=[crashes])  # fmt: skip
    server, bound = cluster.server, getattr(protocol, "staleness", None)
    restored: list[int] = []

    def check_bound(worker: Worker, clocks: list[int]) -> None:
        if bound is not None:
            assert clocks[worker.index] - min(clocks) <= bound

    num_pushed = 0

    async def program(worker: Worker) -> None:
        async def step() -> dict[str, Any]:
            nonlocal num_pushed
            await worker.pull()
            clocks = [server.clock(each) for each in range(4)]
            if await worker.compute():
                check_bound(worker, clocks)  # of the moment at which it began
                await worker.push(np.zeros(1))
                num_pushed += 1
            return {"done": True}

        savers = []
        if worker.index == 0:
            savers = [saver_of(worker, tmp_path, save_steps=8)]
        before = server.version
        async with worker.session(savers, step=step) as session:
            restored.extend([before - server.version] * (before > server.version))
            while not session.should_stop():
                await session.run("done")

    report = cluster.run(program, updates=60)
    assert report.updates == 60
    assert restored
    # only what was not undone counts in the server; gradients in flight come to nothing
    assert sum(report.staleness.values()) == report.applied
    num_left = report.applied + report.discarded + server.num_collected
    assert report.undone == num_pushed - num_left > 0
    assert report.summary_row()["undone"] == report.undone


def test_a_step_that_a_crashed_worker_will_bring_is_waited_for(backend: Any) -> None:
    cluster = new_cluster(2, backend, compute=Constant(1.0),
                          failures=[Preemption(3.5, secs=10.0, workers=[0])])  # fmt: skip
    begun: list[float] = []

    async def program(worker: Worker) -> None:
        late = [GlobalStepWaiterHook(wait_until_step=6)] if worker.index == 1 else []
        async with worker.session(late) as session:
            while not session.should_stop():
                await session.run("computed")
                if worker.index == 1:
                    begun.append(cluster.simulation.now - 1.0)

    assert cluster.run(program, updates=10).updates == 10
    assert begun[0] == 16.5  # three steps before the crash, and three after the repair


def test_an_unreachable_step_ends_its_wait_also_where_workers_crash(backend: Any) -> None:
    crashes = Crashes(Constant(50.0), Constant(1.0))
    cluster = new_cluster(2, backend, compute=speeds(1.0, 1.0), failures=[crashes])

    async def program(worker: Worker) -> None:
        late = [GlobalStepWaiterHook(wait_until_step=1000)] if worker.index == 1 else []
        async with worker.session(late) as session:
            for _ in range(3):
                await session.run("computed")

    with pytest.raises(StepUnreachableError, match="global_step 1000 can no longer come"):
        cluster.run(program, until=1e6)
    assert cluster.simulation.now == 3.0
