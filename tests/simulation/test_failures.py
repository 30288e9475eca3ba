"""Crashes, preemptions, slowdowns and partitions; sessions that crash and resume."""

from __future__ import annotations

import math
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
    StopTraining,
)
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import (
    Constant,
    Crashes,
    Exponential,
    Failure,
    Partition,
    Preemption,
    Slowdown,
    Uniform,
    Worker,
)

from .clusters import bare, check_report, new_cluster, speeds, spent, with_session


@pytest.mark.parametrize(
    ("failures", "options", "end", "secs", "expected"),
    [
        (
            [Crashes(mtbf=Constant(2.5), repair=Constant(0.5))], {"compute": Constant(1.0)},
            {"updates": 4}, 5.0, {"computed": 4.0, "lost": 0.5, "down": 0.5},
        ),
        (  # pulls 0-1 | down | pulls 2-4, computes 4-5, pushes 5-6 | down | 7-9, 9-10, 10-14
            [Preemption(1.0, 1.0), Preemption(6.0, 1.0)],
            {"compute": Constant(1.0), "pull": Constant(2.0), "push": Constant(4.0)},
            {"updates": 1}, 14.0, {"pulled": 5.0, "computed": 2.0, "pushed": 5.0, "down": 2.0},
        ),
        (  # the repair is under way at the end
            [Preemption(1.0, 100.0)], {"compute": Constant(2.0)},
            {"until": 11.0}, 11.0, {"lost": 1.0, "down": 10.0},
        ),
        (  # at equal times; what was computed by 2 met the cut, and was lost with the crash
            [Preemption(2.0, 3.0), Preemption(2.0, 5.0), Slowdown(2.0, 3.0, 2.0),
             Partition(2.0, 3.0)],
            {"compute": Constant(1.0)}, {"updates": 4}, 10.0, {"computed": 5.0, "down": 5.0},
        ),
        (  # pulls 0-2, computes 2-5, sent within the cut; pulls 6.5-8.5, 8.5-11.5, 11.5-12.5
            [Partition(4.5, 2.0)],
            {"compute": Constant(3.0), "pull": Constant(2.0), "push": Constant(1.0)},
            {"updates": 2}, 12.5, {"pulled": 4.0, "computed": 6.0, "pushed": 2.5},
        ),
        (  # 0-3, 3-6, and what is sent at 6 arrives at 6.5
            [Partition(4.5, 2.0)], {"compute": Constant(3.0)},
            {"updates": 2}, 6.5, {"computed": 6.0, "pushed": 0.5},
        ),
    ],
    ids=["crash", "messages", "repair at the end", "equal times", "links cut", "no links cut"],
)  # fmt: skip
def test_seconds_of_a_worker_that_meets_failures(
    backend: Any,
    failures: list[Failure],
    options: dict[str, Any],
    end: dict[str, Any],
    secs: float,
    expected: dict[str, float],
) -> None:
    report = new_cluster(1, backend, failures=failures, **options).run(**end)
    assert report.secs == secs
    assert spent(report.workers[0]) == expected
    check_report(report)


def test_a_crash_that_loses_no_work_only_costs_the_repair(backend: Any) -> None:
    crash = Crashes(mtbf=Constant(2.5), repair=Constant(0.5), loses_work=False)
    cluster = new_cluster(1, backend, compute=Constant(1.0), failures=[crash], keep_timeline=True)
    report = cluster.run(updates=4)
    assert report.secs == 4.5
    assert spent(report.workers[0]) == {"computed": 4.0, "down": 0.5}
    spans = [(span.kind, span.begin, span.end) for span in cluster.timeline.spans][2:5]
    assert spans == [("down", 2.5, 3.0), ("compute", 2.0, 2.5), ("compute", 3.0, 3.5)]


def test_several_failures_of_one_worker_leave_it_with_one_program() -> None:
    failures = [Crashes(Constant(3.0), Constant(5.0)), Crashes(Constant(4.0), Constant(7.0))]
    cluster = new_cluster(1, compute=Constant(1.0), failures=failures)
    running = 0

    async def program(worker: Worker) -> None:
        nonlocal running
        running += 1
        try:
            assert running == 1
            await bare(worker)
        finally:
            running -= 1

    report = cluster.run(program, updates=4)
    # down from 3 to 8 and from 4 to 11, from 11 to 16, from 15 to 22, from 19 to 24, ...
    assert report.updates == 4
    assert spent(report.workers[0])["computed"] == 4.0
    check_report(report)


def test_crashes_of_equal_laws_come_at_times_of_their_own() -> None:
    crashes = [Crashes(Exponential(10.0), Constant(0.0), workers=[0]) for _ in range(2)]
    cluster = new_cluster(1, compute=Constant(0.001), failures=crashes, keep_timeline=True)
    begun: list[float] = []

    async def program(worker: Worker) -> None:
        begun.append(cluster.simulation.now)
        await worker.compute(1e9)

    cluster.run(program, until=1000.0)
    assert len(set(begun)) == len(begun)
    assert 140 < len(begun) < 260  # twice as many as of one


def test_a_worker_that_is_preempted_for_good_while_down_stays_away(backend: Any) -> None:
    failures = [Crashes(Constant(3.0), Constant(5.0), workers=[0]), Preemption(4.0, workers=[0])]
    cluster = new_cluster(2, backend, compute=Constant(1.0), failures=failures)
    starts = [0, 0]

    async def program(worker: Worker) -> None:
        starts[worker.index] += 1
        await with_session(worker)

    report = cluster.run(program, updates=20)
    assert starts == [1, 1]
    assert report.updates == 20
    assert spent(report.workers[0])["down"] == 1.0
    check_report(report)


@pytest.mark.parametrize("program", [None, with_session])
def test_all_but_one_may_leave_for_good(backend: Any, program: Any) -> None:
    gone = [Preemption(float(index), workers=[index]) for index in range(1, 4)]
    cluster = new_cluster(4, backend, protocol=Synchronous(), compute=Constant(1.0), failures=gone)
    report = cluster.run(program, updates=10)
    assert (report.updates, report.secs) == (10, 10.0)
    check_report(report)


def test_training_ends_when_all_have_left() -> None:
    report = new_cluster(3, compute=Constant(1.0), failures=[Preemption(4.5)]).run(updates=500)
    assert (report.updates, report.secs) == (12, 4.5)


def test_k_sync_goes_on_without_one_that_crashed_and_synchronous_waits_for_it() -> None:
    away = [Preemption(0.5, secs=10.0, workers=[2])]

    def secs(protocol: Any) -> float:
        cluster = new_cluster(3, protocol=protocol, compute=Constant(1.0), failures=away)
        return cluster.run(updates=5).secs

    assert secs(KSync(2)) == 5.0
    assert secs(KSync(3)) == secs(Synchronous()) == 15.5
    assert secs(StaleSynchronous(2)) == 3.0  # three steps ahead, two updates each time
    assert secs(StaleSynchronous(1)) == 11.5


def test_a_preemption_that_was_over_before_training_began_changes_nothing(backend: Any) -> None:
    failures = [Preemption(5.0, secs=20.0, workers=[0]), Preemption(5.0, secs=2.0, workers=[1])]
    cluster = new_cluster(2, backend, compute=Constant(1.0), failures=failures)
    simulation = cluster.simulation

    async def main() -> None:
        await simulation.sleep(10.0)
        await cluster.train(updates=20)

    simulation.run(main)
    report = cluster.report()
    assert spent(report.workers[0])["down"] == 15.0  # it had begun before: until 25
    assert "down" not in spent(report.workers[1])
    assert report.updates == 20


def test_a_worker_that_has_finished_does_not_crash() -> None:
    async def program(worker: Worker) -> None:
        await worker.compute(1.0 if worker.index == 0 else 100.0)

    crash = Crashes(Constant(10.0), Constant(1.0), workers=[0])
    report = new_cluster(2, failures=[crash]).run(program)
    assert spent(report.workers[0]) == {"computed": 1.0, "idle": 99.0}


def test_one_that_finishes_while_it_is_stopped_is_not_started_again(backend: Any) -> None:
    starts = 0

    async def program(worker: Worker) -> None:
        nonlocal starts
        starts += worker.index == 0
        try:
            await worker.compute(10.0)
        finally:
            if worker.index == 0:
                raise StopTraining("it had finished anyway")

    gone = Preemption(2.0, secs=3.0, workers=[0])
    report = new_cluster(2, backend, failures=[gone]).run(program)
    assert starts == 1
    assert spent(report.workers[0]) == {"lost": 2.0, "idle": 8.0}


@pytest.mark.parametrize("in_session", [False, True])
def test_one_that_stands_still_while_it_waits_pulls_after_its_repair(
    backend: Any, in_session: bool
) -> None:
    pause = Crashes(Constant(2.0), Constant(10.0), loses_work=False, workers=[0])
    cluster = new_cluster(
        2, backend, protocol=StaleSynchronous(0), compute=speeds(1.0, 3.0), failures=[pause]
    )
    report = cluster.run(with_session if in_session else None, updates=4)
    # it waits from 1, stands still from 2; worker 1 makes an update at 3 and at 6
    assert report.secs == 13.0
    assert spent(report.workers[0]) == {"computed": 2.0, "waited": 1.0, "down": 10.0}
    assert report.workers[0].staleness == {0: 2}


@pytest.mark.parametrize("at", [0.5, 1.5, 2.5, 3.25, 4.5])
def test_a_crash_at_any_moment_of_a_step_costs_that_step(backend: Any, at: float) -> None:
    """While it pulls, computes, pushes, is served, and waits for the other one."""
    cluster = new_cluster(
        2, backend, protocol=Synchronous(), compute=speeds(1.0, 3.0), pull=Constant(1.0),
        push=Constant(1.0), service=Constant(0.5), failures=[Preemption(at, 0.25, workers=[0])],
    )  # fmt: skip
    report = cluster.run(updates=3)
    assert report.updates == 3
    assert report.applied == 6
    check_report(report)
    assert spent(report.workers[0])["down"] == 0.25


def test_one_that_stands_still_neither_pulls_nor_sends(backend: Any) -> None:
    pause = Crashes(Constant(1.5), Constant(10.0), loses_work=False, workers=[0])
    cluster = new_cluster(
        2, backend, compute=speeds(1.0, 1.0), pull=Constant(1.0), failures=[pause]
    )
    pulls: list[tuple[float, int]] = []

    async def program(worker: Worker) -> None:
        while True:
            version = (await worker.pull()).version
            pulls.append((worker.cluster.simulation.now, worker.index))
            if await worker.compute():
                await worker.push(np.zeros(1), version)

    report = cluster.run(program, updates=8)
    assert [time for time, index in pulls if index == 0] == [1.0, 13.0]
    check_report(report)


def test_asynchronous_training_goes_on_while_one_is_down() -> None:
    away = Preemption(1.5, 10.0, workers=[0])
    cluster = new_cluster(2, protocol=Asynchronous(), compute=Constant(1.0), failures=[away])
    assert cluster.run(until=11.0).updates == 1 + 11


def test_crashes_given_twice_are_two_with_times_of_their_own() -> None:
    def crashes() -> Crashes:
        return Crashes(Exponential(10.0), Constant(2.0))

    given = crashes()
    same, equal = (
        new_cluster(8, compute=Constant(1.0), failures=each).run(until=500.0)
        for each in ([given, given], [crashes(), crashes()])
    )
    assert same == equal


PAUSE = Slowdown(1.0, 9.0, math.inf)


def repaired(mtbf: float) -> Crashes:
    """Down for 100 s; the work goes on where it was."""
    return Crashes(Constant(mtbf), Constant(100.0), loses_work=False)


@pytest.mark.parametrize(
    ("compute", "failures", "secs"),
    [
        # 1 s of work at once, 0.5 in [1, 2), 2/6 in [2, 4), 0.5 in [4, 5), the rest at once
        (Constant(3.0), [Slowdown(1.0, 4.0, 2.0), Slowdown(2.0, 2.0, 3.0)], 8.0 - (2.0 + 2 / 6)),
        (Constant(3.0), [Slowdown(5.0, 10.0, 2.0), repaired(2.0)], 103.0),
        # one second of work until 1, one until 5; the other two after the repair, at full speed
        (Constant(4.0), [Slowdown(1.0, 10.0, 4.0), repaired(5.0)], 107.0),
        (Constant(3.0), [PAUSE], 12.0),
        (Constant(1.0), [PAUSE], 1.0),
    ],
    ids=["overlap", "repair before", "repair within", "pause", "before a pause"],
)
def test_work_is_slower_while_slowdowns_last(
    compute: Any, failures: list[Failure], secs: float
) -> None:
    report = new_cluster(1, compute=compute, failures=failures).run(updates=1)
    assert report.secs == pytest.approx(secs, rel=1e-12)


def test_a_pause_holds_up_no_work_that_takes_no_time() -> None:
    async def program(worker: Worker) -> None:
        await worker.cluster.simulation.sleep(2.0)
        await worker.compute(0.0)

    assert new_cluster(1, failures=[PAUSE]).run(program).secs == 2.0


def test_what_is_pulled_during_a_partition_is_as_it_is_at_its_end() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 1.0), failures=[Partition(0.0, 3.5, workers=[1])])
    report = cluster.run(updates=5)  # at 1, 2, 3, 4 by worker 0, at 4.5 by worker 1
    assert report.secs == 4.5
    assert report.workers[1].staleness == {1: 1}


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Preemption(-1.0), ValueError, r"at is -1\.0; give seconds, >= 0"),
        (lambda: Preemption(math.nan), ValueError, "at is nan; give seconds"),
        (lambda: Preemption("soon"), TypeError, "at is 'soon'; give seconds"),  # type: ignore[arg-type]
        (lambda: Preemption(1.0, -1.0), ValueError, r"secs is -1\.0; give seconds"),
        (lambda: Slowdown(1.0, 1.0, 0.5), ValueError, r"factor is 0\.5; give a number >= 1"),
        (lambda: Slowdown(1.0, 1.0, math.nan), ValueError, "factor is nan; give a number >= 1"),
        (lambda: Slowdown(1.0, 1.0, "x"), TypeError, "factor is 'x'; give a number >= 1"),  # type: ignore[arg-type]
        (lambda: Slowdown(1.0, math.inf, math.inf), ValueError, "never ends is a Preemption"),
        (lambda: Partition(1.0, math.inf), ValueError, "never ends is a Preemption"),
        (lambda: Crashes(3.0, Constant(1.0)), TypeError, r"mtbf is 3\.0; give a delay"),  # type: ignore[arg-type]
        (lambda: Crashes(Constant(0.0), Constant(1.0)), ValueError, "with which it never works"),
        (lambda: Crashes(Constant(1.0), None), TypeError, "repair is None; give a delay"),  # type: ignore[arg-type]
    ],
)
def test_failures_refuse_what_cannot_happen(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("workers", "error", "match"),
    [
        ([2], ValueError, r"is for worker 2; give numbers from 0 to 1, as in workers=\[0\]"),
        ([-1], ValueError, "is for worker -1; give numbers from 0 to 1"),
        ([0.5], TypeError, r"is for worker 0\.5; give numbers from 0 to 1"),
        ("01", TypeError, "is '01'; give numbers from 0 to 1"),
        (1, TypeError, "is 1; give numbers from 0 to 1"),
    ],
)
def test_failures_of_workers_that_are_not_there_are_refused(
    workers: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        new_cluster(2, failures=[Preemption(1.0, workers=workers)])


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


def test_no_program_begins_again_after_the_last_update(backend: Any, tmp_path: Path) -> None:
    """It would restore the server as it was before, and nothing would train it any more."""
    cluster = new_cluster(2, backend, compute=Constant(1.0),
                          failures=[Preemption(3.5, secs=2.0, workers=[0])])  # fmt: skip
    begins: list[float] = []

    async def program(worker: Worker) -> None:
        begins.append(cluster.simulation.now)
        hooks: list[SessionRunHook] = [saver_of(worker, tmp_path, save_steps=2)]
        if worker.index == 1:
            hooks = [LastingHook(cluster.simulation)]
        await with_session(worker, *hooks)

    report = cluster.run(program, updates=6)
    assert begins == [0.0, 0.0]
    assert (report.updates, report.secs) == (6, 5.0)
    check_report(report)


class LastingHook(SessionRunHook):
    """Takes ten seconds at the end."""

    def __init__(self, simulation: Any) -> None:
        self.simulation = simulation

    async def end(self, session: Any) -> None:
        await self.simulation.sleep(10.0)


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
