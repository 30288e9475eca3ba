"""Checkpoints and crashes of the parameter server: what they cost, and what they undo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KBatchSync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import (
    Checkpoints,
    Constant,
    Crashes,
    DeadlockError,
    Exponential,
    LivelockError,
    Report,
    ServerCrashes,
    Uniform,
    Worker,
)

from .clusters import bare, check_report, new_cluster, spent, with_session


def run(backend: Any, updates: int = 10, *, workers: int = 1, **options: Any) -> Report:
    options = {"compute": Constant(1.0), **options}
    return new_cluster(workers, backend, **options).run(updates=updates)


def test_seconds_of_a_server_that_saves_and_crashes(backend: Any) -> None:
    # saves 2-2.5, update 3 at 3.5, down 3.75-4.5, updates 3 and 4 at 5.5 and 6.5, saves 6.5-7,
    # update 5 at 8, down 8.25-9, updates 5 and 6 at 10 and 11
    report = run(
        backend, 6,
        checkpoints=Checkpoints(every_updates=2, save=Constant(0.5), restore=Constant(0.25)),
        failures=[ServerCrashes(Constant(3.75), Constant(0.5))],
    )  # fmt: skip
    assert report.secs == 11.0
    assert (report.num_saves, report.secs_saving) == (2, 1.0)
    assert (report.num_server_crashes, report.secs_server_down) == (2, 1.5)
    assert (report.undone_updates, report.undone, report.secs_undone) == (2, 2, 2.5)
    assert report.secs == report.updates + 1.0 + 1.5 + 2.5
    assert spent(report.workers[0]) == {"computed": 8.0, "lost": 0.5, "waited": 2.5}
    row = report.summary_row()
    assert (row["undone_updates"], row["secs_undone"]) == (2, 2.5)


def test_a_save_in_the_background_takes_no_time_and_is_durable_at_its_end(backend: Any) -> None:
    plan = Checkpoints(every_updates=2, save=Constant(1.75), blocks=False)
    # saves update 2 at 2-3.75, and update 4 from 4 on, since update 3 came too early for it
    report = run(backend, 5, checkpoints=plan)
    assert (report.secs, report.num_saves, report.secs_saving) == (5.0, 1, 2.75)
    # a crash at 4.5 loses the save under way, and all after 2.0; one at 3.5 loses all
    late = run(backend, 5, checkpoints=plan, failures=[ServerCrashes(Constant(4.5), Constant(0))])
    assert (late.undone_updates, late.secs_undone, late.secs) == (2, 2.5, 7.5)
    early = new_cluster(1, backend, compute=Constant(1.0), checkpoints=plan,
                        failures=[ServerCrashes(Constant(3.5), Constant(0))])  # fmt: skip
    report = early.run(until=5.0)
    assert (report.updates, report.undone_updates, report.secs_undone) == (1, 3, 3.5)


def test_a_save_that_comes_due_during_another_begins_at_its_end(backend: Any) -> None:
    plan = Checkpoints(every_updates=1, save=Constant(2.5), blocks=False)
    cluster = new_cluster(1, backend, compute=Constant(1.0), checkpoints=plan, keep_timeline=True)
    cluster.run(updates=8)
    # the last began at 6
    assert cluster.timeline.server == [("save", 1.0, 3.5), ("save", 3.5, 6.0)]


def test_saves_by_time_wait_for_something_new(backend: Any) -> None:
    plan = Checkpoints(every_secs=1.5, save=Constant(0.5))
    cluster = new_cluster(1, backend, compute=Constant(4.0), checkpoints=plan, keep_timeline=True)
    report = cluster.run(updates=3)
    assert cluster.timeline.server == [("save", 4.0, 4.5), ("save", 8.5, 9.0)]
    assert (report.secs, report.num_saves) == (13.0, 2)


def test_a_crash_brings_the_parameters_back(backend: Any) -> None:
    cluster = new_cluster(
        3, backend, parameters=np.ones(2), compute=Uniform(0.5, 1.5), learning_rate=0.5,
        protocol=Synchronous(), checkpoints=Checkpoints(every_updates=3),
        failures=[ServerCrashes(Exponential(8.0), Uniform(0.0, 2.0))],
    )  # fmt: skip
    report = cluster.run(
        gradient=lambda p, _: p, updates=30, loss=lambda p: float(p[0]), loss_every=1
    )
    assert report.undone_updates > 0
    assert report.undone >= 3 * report.undone_updates
    assert cluster.server.parameters == pytest.approx(0.5**30)
    assert all(loss == 0.5**updates for _, updates, loss in report.losses)


@pytest.mark.parametrize(
    "protocol",
    [Asynchronous(), Synchronous(), KSync(3), KBatchSync(3), KAsync(2), StaleSynchronous(1)],
    ids=str,
)
@pytest.mark.parametrize("program", [bare, with_session])
def test_any_protocol_goes_on_after_crashes_and_all_backends_agree(
    protocol: Protocol, program: Any
) -> None:
    reports = []
    for backend in ("asyncio", "trio", "turbo"):
        cluster = new_cluster(
            4, backend, protocol=protocol, compute=Exponential(1.0), service=Exponential(0.1),
            num_servers=2, push=Constant(0.125),
            checkpoints=Checkpoints(
                every_secs=3.0, save=Exponential(0.2), restore=Exponential(0.5)
            ),
            failures=[ServerCrashes(Exponential(9.0), Exponential(1.0)),
                      Crashes(Exponential(20.0), Exponential(2.0), workers=[0, 1])],
        )  # fmt: skip
        reports.append(cluster.run(program, updates=40))
    report = reports[0]
    assert report.updates == 40
    assert report.undone_updates > 0
    assert report.num_server_crashes > 0
    check_report(report)
    assert reports[1] == report == reports[2]


def test_nothing_of_a_life_before_a_crash_counts_after_it(backend: Any) -> None:
    """Two versions of one number, of before and after a crash, are not the same."""
    failures = [ServerCrashes(Constant(2.5), Constant(0.0))]
    cluster = new_cluster(2, backend, compute=Constant(1.0), failures=failures)
    pushed: list[tuple[float, int, bool]] = []

    async def program(worker: Worker) -> None:
        if worker.index == 1:
            await cluster.simulation.sleep(1.5)
        _, version = await worker.pull()
        # worker 1 waits without a computation, so that the crash cannot end it
        await cluster.simulation.sleep(1.0 if worker.index == 0 else 2.5)
        outcome = await worker.push(np.zeros(1), version)
        pushed.append((cluster.simulation.now, version, outcome.is_applied))
        if worker.index == 0:
            await cluster.simulation.sleep(1.6)  # after the crash
            await worker.pull()
            await worker.push(np.zeros(1))

    cluster.run(program)
    assert pushed == [(1.0, 0, True), (4.0, 1, False)]


def test_what_is_under_way_is_lost_with_a_crash_that_undoes_nothing(backend: Any) -> None:
    crash = ServerCrashes(Constant(2.5), Constant(0.0))
    each = Checkpoints(every_updates=1)
    report = run(backend, 3, failures=[crash], checkpoints=each)
    assert (report.undone_updates, report.discarded, report.secs_undone) == (0, 0, 0.5)
    assert spent(report.workers[0]) == {"computed": 3.0, "lost": 0.5}
    # a worker that is paused until 4 pulls again then
    pauses = Crashes(Constant(2.0), Constant(2.0), loses_work=False)
    crash = ServerCrashes(Constant(3.0), Constant(0.0))
    report = run(backend, 2, compute=Constant(1.5), checkpoints=each, failures=[crash, pauses])
    assert (report.secs, report.discarded) == (5.5, 0)
    # parameters on their way at the crash are of no use
    early = ServerCrashes(Constant(1.25), Constant(0.0))
    cluster = new_cluster(1, backend, compute=Constant(0.125), pull=Constant(1.0),
                          checkpoints=each, failures=[early])  # fmt: skip
    report = cluster.run(until=2.25)
    assert (report.updates, report.discarded, report.workers[0].gradients) == (1, 0, 1)


def test_a_save_that_a_crash_ends_is_made_again_at_its_update(backend: Any) -> None:
    # saves 2-3 and from 5 on, down 5.5-6, updates 3 and 4 at 7 and 8, saves 8-9
    report = run(
        backend, 5, checkpoints=Checkpoints(every_updates=2, save=Constant(1.0)),
        failures=[ServerCrashes(Constant(5.5), Constant(0.5))],
    )  # fmt: skip
    assert (report.secs, report.num_saves, report.secs_saving) == (10.0, 2, 2.5)
    assert (report.undone_updates, report.secs_undone) == (2, 2.0)


def test_a_restart_begins_the_time_to_the_next_save(backend: Any) -> None:
    cluster = new_cluster(
        1, backend, compute=Constant(0.75), keep_timeline=True,
        checkpoints=Checkpoints(every_secs=2.0, save=Constant(0.5)),
        failures=[ServerCrashes(Constant(6.0), Constant(1.0))],
    )  # fmt: skip
    cluster.run(until=9.75)
    assert cluster.timeline.server == [
        ("save", 2.0, 2.5), ("save", 4.5, 5.0), ("down", 6.0, 7.0), ("save", 9.0, 9.5)
    ]  # fmt: skip


def test_a_crash_drops_what_waits_in_the_queue(backend: Any) -> None:
    failures = [ServerCrashes(Constant(2.5), Constant(0.5))]
    cluster = new_cluster(
        3, backend, compute=Constant(1.0), service=Constant(1.0), failures=failures,
        keep_timeline=True,
    )  # fmt: skip
    report = cluster.run(until=4.0)
    # served 1-2 and 2-2.5; all is undone; the two left ask again at 3 and are served 3-4 and 4-5
    assert [each[1:3] for each in cluster.timeline.pushes] == [(2.0, "applied"), (4.0, "discarded")]
    (server,) = report.servers
    assert server.secs_busy == 1.5 + 1.0
    assert server.busy_share == 2.5 / 4.0
    # waiting: one 1-2, and two to 2.5 of which one had begun; then one from 3 on
    assert server.secs_queued == 1.0 + 1.5 + 1.0


def test_the_cost_of_an_interval_is_as_daly_says() -> None:
    """And least near the square root of 2 x save x MTBF (Young 1974)."""
    save, mtbf, repair, step = 0.5, 25.0, 1.0, 1 / 8
    young = math.sqrt(2 * save * mtbf)  # 5 s, 40 updates
    costs = {}
    for factor in (0.2, 1, 5):
        every = round(young * factor / step)
        num_segments = 12_000 // every
        report = new_cluster(
            1, "turbo", 3, compute=Constant(step),
            checkpoints=Checkpoints(every_updates=every, save=Constant(save)),
            failures=[ServerCrashes(Exponential(mtbf), Constant(repair))],
        ).run(updates=every * num_segments + 1)  # fmt: skip
        work = every * step
        assert report.secs == pytest.approx(
            report.updates * step + report.secs_saving + report.secs_undone
            + report.secs_server_down
        )  # fmt: skip
        costs[factor] = report.secs / (report.updates * step)
        # each crash costs its part, and the next attempt begins anew
        mean = (mtbf + repair) * math.expm1((work + save) / mtbf)
        # the attempts of a segment are geometric: the standard error is below that many crashes'
        error = (work + save + repair) / math.sqrt(num_segments) * math.expm1(work / mtbf) ** 0.5
        assert report.secs / num_segments == pytest.approx(mean, abs=5 * error + 0.01 * mean)
    assert min(costs, key=costs.__getitem__) == 1


@pytest.mark.exhaustive
def test_the_least_cost_of_checkpoints_is_where_daly_says() -> None:
    save, mtbf, step = 0.5, 25.0, 1 / 8
    best = math.sqrt(2 * save * mtbf) * (
        1 + math.sqrt(save / (2 * mtbf)) / 3 + save / (2 * mtbf) / 9
    ) - save  # fmt: skip
    intervals = [best * 2 ** (i / 2) for i in range(-4, 5)]
    secs = []
    for interval in intervals:
        every = round(interval / step)
        report = new_cluster(
            1, "turbo", 5, compute=Constant(step),
            checkpoints=Checkpoints(every_updates=every, save=Constant(save)),
            failures=[ServerCrashes(Exponential(mtbf), Constant(1.0))],
        ).run(updates=100_000)  # fmt: skip
        secs.append(report.secs)
    least = secs.index(min(secs))
    assert abs(least - 4) <= 1
    assert secs[0] > secs[2] > secs[4] < secs[6] < secs[8]


@pytest.mark.parametrize(
    "options",
    [
        {"failures": [ServerCrashes(Exponential(5.0), Exponential(1.0))]},
        {"checkpoints": Checkpoints(every_secs=1.0, save=Constant(0.5))},
        {"failures": [ServerCrashes(Exponential(5.0), Exponential(1.0)),
                      Crashes(Exponential(9.0), Exponential(1.0))],
         "checkpoints": Checkpoints(every_updates=1, save=Constant(0.5))},
    ],
    ids=["crashes", "checkpoints", "all"],
)  # fmt: skip
def test_workers_that_wait_for_ever_are_found(backend: Any, options: dict[str, Any]) -> None:
    cluster = new_cluster(2, backend, compute=Constant(1.0), **options)

    async def program(worker: Worker) -> None:
        await worker.pull()
        await worker.compute()
        if worker.index == 0:
            await worker.push(np.zeros(1))
        await cluster.global_step.wait_for(5)

    with pytest.raises(DeadlockError, match=r"worker 0|worker 1"):
        cluster.run(program)


def test_a_long_repair_of_the_server_is_no_standstill(backend: Any) -> None:
    failures = [ServerCrashes(Constant(2.5), Constant(100.0)),
                Crashes(Constant(4.0), Constant(1.0))]  # fmt: skip
    report = run(backend, 5, workers=2, failures=failures, checkpoints=Checkpoints(every_updates=1))
    assert report.secs_server_down == 100.0
    others = [ServerCrashes(Constant(1.0), Constant(1.0)),  # and it crashes on, meanwhile
              Crashes(Constant(110.5), Constant(100.0))]  # fmt: skip
    for updates, failure in ((9, failures[0]), (500, others[1])):
        report = run(backend, updates, failures=[others[0], failure], compute=Constant(0.25),
                     checkpoints=Checkpoints(every_updates=1))  # fmt: skip
        assert report.secs > 100
    with pytest.raises(LivelockError, match="max_secs_without_update=50"):
        new_cluster(1, backend, compute=Constant(1.0), failures=failures[:1]).run(
            updates=9, max_secs_without_update=50.0
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"got neither of every_updates and every_secs; give one, as in Checkpoints\("),
        ({"every_updates": 3, "every_secs": 1.0}, "got both"),
        ({"every_updates": 0}, "every_updates is 0; give an integer >= 1"),
        ({"every_secs": 0.0}, "every_secs is 0.0; give seconds, > 0"),
    ],
)
def test_wrong_intervals_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoints(**arguments)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="save is 1.0; give a delay"):
        Checkpoints(every_updates=1, save=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"restore is 'x'; give a delay"):
        Checkpoints(every_updates=1, restore="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mtbf is Constant"):
        ServerCrashes(Constant(0.0), Constant(1.0))
    with pytest.raises(TypeError, match="repair is 1; give a delay"):
        ServerCrashes(Constant(1.0), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"checkpoints is 100; give one, as in checkpoints="):
        new_cluster(1, checkpoints=100)
    with pytest.raises(ValueError, match="num_servers is 0; give an integer >= 1"):
        new_cluster(1, num_servers=0)
