"""Slowdowns and partitions, alone and with others; and which failures are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asynchooks.simulation import (
    Constant,
    Crashes,
    Failure,
    Partition,
    Phases,
    Preemption,
    Slowdown,
    Worker,
)

from .clusters import new_cluster, speeds, spent


def test_overlapping_slowdowns_multiply() -> None:
    slow = [Slowdown(1.0, 4.0, 2.0), Slowdown(2.0, 2.0, 3.0)]
    report = new_cluster(1, compute=Constant(3.0), failures=slow).run(updates=1)
    # 1 s of work at once, 0.5 in [1, 2), 2/6 in [2, 4), 0.5 in [4, 5), the rest at once
    assert report.secs == pytest.approx(5.0 + 3.0 - (1.0 + 0.5 + 2 / 6 + 0.5))


def test_slowdowns_and_phases_hold_together() -> None:
    phases = Phases(Constant(8.0), [(10.0, 1.0), (10.0, 2.0)])
    report = new_cluster(1, compute=phases, failures=[Slowdown(0.0, 5.0, 2.0)]).run(updates=1)
    # 2.5 s of work until 5, 5 until 10, and the last half takes twice as long
    assert report.secs == pytest.approx(11.0)


def test_a_repair_resumes_the_work_that_was_left_and_not_the_time() -> None:
    crash = Crashes(Constant(2.0), Constant(100.0), loses_work=False)
    failures: list[Failure] = [Slowdown(5.0, 10.0, 2.0), crash]
    cluster = new_cluster(1, compute=Constant(3.0), failures=failures)
    assert cluster.run(updates=1).secs == pytest.approx(103.0)
    failures = [Slowdown(1.0, 10.0, 4.0), Crashes(Constant(5.0), Constant(100.0), loses_work=False)]
    cluster = new_cluster(1, compute=Constant(4.0), failures=failures)
    # one second of work until 1, one until 5; the other two after the repair, at full speed
    assert cluster.run(updates=1).secs == pytest.approx(107.0)


def test_a_pause_holds_up_what_takes_time_and_nothing_else() -> None:
    pause = Slowdown(1.0, 9.0, math.inf)
    assert new_cluster(1, compute=Constant(3.0), failures=[pause]).run(updates=1).secs == 12.0
    assert new_cluster(1, compute=Constant(1.0), failures=[pause]).run(updates=1).secs == 1.0

    async def program(worker: Worker) -> None:
        await worker.cluster.simulation.sleep(2.0)
        await worker.compute(0.0)

    assert new_cluster(1, failures=[pause]).run(program).secs == 2.0


@pytest.mark.parametrize("links", [{}, {"pull": Constant(2.0), "push": Constant(1.0)}])
def test_a_partition_holds_up_messages(links: dict[str, Any]) -> None:
    cuts = [Partition(4.5, 2.0)]
    cluster = new_cluster(1, compute=Constant(3.0), failures=cuts, **links)
    report = cluster.run(updates=2)
    if links:  # pulls 0-2, computes 2-5, sent within the cut; pulls 6.5-8.5, 8.5-11.5, 11.5-12.5
        assert report.secs == 12.5
        assert spent(report.workers[0]) == {"pulled": 4.0, "computed": 6.0, "pushed": 2.5}
    else:  # 0-3, 3-6, and what is sent at 6 arrives at 6.5
        assert report.secs == 6.5


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
