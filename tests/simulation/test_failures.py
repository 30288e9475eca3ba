"""Crashes, preemptions, slowdowns and partitions; sessions that crash and resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    SessionRunHook,
    StateDictSaver,
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
    Simulation,
    Slowdown,
    Uniform,
    Worker,
)

from .clusters import check_report, new_cluster, speeds, spent, with_session


@pytest.mark.parametrize(
    ("failures", "options", "end", "secs", "expected"),
    [
        (
            [Crashes(mtbf=Constant(2.5), repair=Constant(0.5))], {"compute": Constant(1.0)},
            {"updates": 4}, 5.0, {"computed": 4.0, "lost": 0.5, "down": 0.5},
        ),
        (
            [Crashes(mtbf=Constant(2.5), repair=Constant(0.5), loses_work=False)],
            {"compute": Constant(1.0)}, {"updates": 4}, 4.5, {"computed": 4.0, "down": 0.5},
        ),
        (  # pulls 0-1 | down | pulls 2-4, computes 4-5, pushes 5-6 | down | 7-9, 9-10, 10-14
            [Preemption(1.0, 1.0), Preemption(6.0, 1.0)],
            {"compute": Constant(1.0), "pull": Constant(2.0), "push": Constant(4.0)},
            {"updates": 1}, 14.0, {"pulled": 5.0, "computed": 2.0, "pushed": 5.0, "down": 2.0},
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
    ],
    ids=["crash", "pause", "messages", "equal times", "links cut"],
)  # fmt: skip
def test_seconds_of_a_worker_that_meets_failures(
    failures: list[Failure],
    options: dict[str, Any],
    end: dict[str, Any],
    secs: float,
    expected: dict[str, float],
) -> None:
    report = new_cluster(1, failures=failures, **options).run(**end)
    assert report.secs == secs
    assert spent(report.workers[0]) == expected
    check_report(report)


@pytest.mark.parametrize(("last", "updates"), [(math.inf, 10), (4.5, 4)])
def test_all_but_one_may_leave_for_good_and_training_ends_with_the_last(
    last: float, updates: int
) -> None:
    gone = [Preemption(at, workers=[i]) for i, at in enumerate([last, 1.0, 2.0]) if at < math.inf]
    cluster = new_cluster(3, protocol=Synchronous(), compute=Constant(1.0), failures=gone)
    report = cluster.run(updates=10)
    assert (report.updates, report.secs) == (updates, min(last, 10.0))
    check_report(report)


@pytest.mark.parametrize(
    ("protocol", "secs"),
    [
        (Asynchronous(), 3.0), (KSync(2), 5.0), (KSync(3), 15.5), (Synchronous(), 15.5),
        (StaleSynchronous(2), 3.0),  # three steps ahead, two updates each time
        (StaleSynchronous(1), 11.5),
    ],
    ids=str,
)  # fmt: skip
def test_the_protocol_says_who_waits_for_one_that_crashed(protocol: Protocol, secs: float) -> None:
    away = [Preemption(0.5, secs=10.0, workers=[2])]
    cluster = new_cluster(3, protocol=protocol, compute=Constant(1.0), failures=away)
    assert cluster.run(updates=5).secs == secs


@pytest.mark.parametrize(
    ("at", "expected"),
    [(2.0, {"lost": 2.0, "idle": 18.0}), (15.0, {"computed": 10.0, "idle": 10.0})],
    ids=["while it is stopped", "before"],
)
def test_one_that_has_finished_neither_crashes_nor_begins_again(
    at: float, expected: dict[str, float]
) -> None:
    starts = [0, 0]

    async def program(worker: Worker) -> None:
        starts[worker.index] += 1
        try:
            await worker.compute(10.0 + 10.0 * worker.index)
        finally:
            raise StopTraining("it had finished anyway")

    report = new_cluster(2, failures=[Preemption(at, 3.0, workers=[0])]).run(program)
    assert starts == [1, 1]
    assert spent(report.workers[0]) == expected


@pytest.mark.parametrize("program", [None, with_session])
def test_one_that_stands_still_while_it_waits_pulls_after_its_repair(program: Any) -> None:
    pause = Crashes(Constant(2.0), Constant(10.0), loses_work=False, workers=[0])
    cluster = new_cluster(
        2, protocol=StaleSynchronous(0), compute=speeds(1.0, 3.0), failures=[pause]
    )
    report = cluster.run(program, updates=4)
    # it waits from 1, stands still from 2; worker 1 makes an update at 3 and at 6
    assert report.secs == 13.0
    assert spent(report.workers[0]) == {"computed": 2.0, "waited": 1.0, "down": 10.0}
    assert report.workers[0].staleness == {0: 2}


def test_a_preemption_that_was_over_before_training_began_changes_nothing() -> None:
    failures = [Preemption(5.0, secs=20.0, workers=[0]), Preemption(5.0, secs=2.0, workers=[1])]
    cluster = new_cluster(2, compute=Constant(1.0), failures=failures)

    async def main() -> None:
        await cluster.simulation.sleep(10.0)
        await cluster.train(updates=20)

    cluster.simulation.run(main)
    down = [spent(each).get("down") for each in cluster.report().workers]
    assert down == [15.0, None]  # the first had begun before: until 25


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
    ],
    ids=["overlap", "repair before", "repair within", "pause"],
)
def test_work_is_slower_while_slowdowns_last(
    compute: Any, failures: list[Failure], secs: float
) -> None:
    report = new_cluster(1, compute=compute, failures=failures).run(updates=1)
    assert report.secs == pytest.approx(secs, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Preemption(-1.0), r"at is -1\.0; give seconds, >= 0"),
        (lambda: Slowdown(1.0, 1.0, 0.5), r"factor is 0\.5; give a number >= 1"),
        (lambda: Slowdown(1.0, math.inf, math.inf), "never ends is a Preemption"),
        (lambda: Crashes(Constant(0.0), Constant(1.0)), "with which it never works"),
        (lambda: new_cluster(2, failures=[Preemption(1.0, workers=[2])]), "give numbers from 0 to"),
    ],
)
def test_failures_refuse_what_cannot_happen(make: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make()


MOMENTS = ("begin", "after_create_session", "before_run", "after_run", "end")


def slow_at(
    simulation: Simulation, moment: str, log: list[tuple[float, str]], secs: float = 1.0
) -> SessionRunHook:
    """A hook that takes virtual time at one moment, and logs errors."""

    async def spend(hook: SessionRunHook, *_: object) -> None:
        await simulation.sleep(secs)

    async def on_error(hook: SessionRunHook, session: Any, exception: BaseException) -> None:
        log.append((simulation.now, type(exception).__name__))

    hook: SessionRunHook = type("Slow", (SessionRunHook,), {moment: spend, "on_error": on_error})()
    return hook


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

    async def program(worker: Worker) -> None:
        await with_session(worker, slow_at(cluster.simulation, moment, log))

    report = cluster.run(program, updates=3)
    assert report.updates == 3
    assert [time for time, _ in log] == [at[moment]]
    assert {name for _, name in log} <= {"CancelledError", "Cancelled"}
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
            await with_session(worker, slow_at(cluster.simulation, "end", [], secs=10.0))
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
    "protocol",
    [Asynchronous(), Synchronous(), KSync(2), KAsync(2), StaleSynchronous(0), StaleSynchronous(2)],
    ids=str,
)
def test_the_server_is_restored_under_workers_that_train(
    backend: Any, protocol: Protocol, tmp_path: Path
) -> None:
    cluster = new_cluster(
        4, backend, protocol=protocol, compute=Uniform(0.5, 1.5), push=Constant(0.125),
        failures=[Crashes(Exponential(12.0), Exponential(1.0))],
    )  # fmt: skip
    server, bound = cluster.server, getattr(protocol, "staleness", math.inf)
    num_restored = num_pushed = 0

    async def program(worker: Worker) -> None:
        async def step() -> dict[str, Any]:
            nonlocal num_pushed
            await worker.pull()
            clocks = [server.clock(each) for each in range(4)]
            if await worker.compute():
                assert clocks[worker.index] - min(clocks) <= bound  # of when it began
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
