"""Reports and timelines: rows, shares of a whole, what counts when, and what a worker did when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest

from asynchooks import SessionRunHook
from asynchooks.protocols import DiscardStale, KBatchAsync, Synchronous
from asynchooks.simulation import (
    Constant,
    Exponential,
    Network,
    Partition,
    Report,
    Slowdown,
    WorkerReport,
)

from .clusters import KINDS, check_report, new_cluster, speeds, with_session


@pytest.fixture
def report() -> Report:
    cluster = new_cluster(
        3, protocol=DiscardStale(KBatchAsync(2), 1), parameters=np.ones(1),
        compute=speeds(1.0, 2.0, 5.0), pull=Constant(0.25), push=Exponential(0.25),
    )  # fmt: skip
    return cluster.run(gradient=lambda p, _: p, updates=20, loss=lambda p: float(p[0]))


def test_rows_are_flat_and_hold_all_of_a_report(report: Report) -> None:
    check_report(report)
    for rows in (report.worker_rows(), report.staleness_rows(), report.loss_rows()):
        assert rows
        assert all(row.keys() == rows[0].keys() for row in rows)
        cells = [cell for row in rows for cell in row.values()]
        assert all(isinstance(cell, (str, int, float)) for cell in cells)
    for row, worker in zip(report.worker_rows(), report.workers, strict=True):
        assert row["worker"] == worker.worker
        assert sum(row[f"secs_{kind}"] for kind in KINDS) == pytest.approx(report.secs)
    rows = report.staleness_rows()
    assert sum(row["count"] for row in rows) == report.applied == 40
    assert max(row["staleness"] for row in rows) <= 1
    mean = sum(row["count"] * row["staleness"] for row in rows) / 40
    assert report.mean_staleness == pytest.approx(mean)


def test_losses_and_the_summary_end_with_training(report: Report) -> None:
    rows, row = report.loss_rows(), report.summary_row()
    assert [each["updates"] for each in rows] == list(range(21))
    assert [rows[0][name] for name in ("secs", "loss")] == [0.0, 1.0]
    assert [rows[-1][name] for name in ("secs", "loss")] == [report.secs, row["loss"]]
    assert row["protocol"] == "DiscardStale(protocol=KBatchAsync(k=2), bound=1)"
    assert row["updates_per_second"] == report.updates / report.secs
    assert row["discarded"] == report.discarded > 0


def test_sums_of_a_report_are_exact_on_every_version_of_python() -> None:
    """Added up one by one, as `sum` did until Python 3.11, each of these differs by one bit."""
    worker = WorkerReport(0, 1, {}, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9)
    workers = [replace(worker, worker=index) for index in range(10)]
    report = Report("any", 10, 1.0, 10, 10, 0, {0: 3, 1: 2, 2: 5}, workers, [])
    assert reduce(add, [each.secs_computed for each in workers]) == 0.9999999999999999
    assert report.summary_row()["share_computed"] == 0.1
    assert report.summary_row()["share_idle"] == 0.9


def test_a_report_may_be_made_while_training_goes_on() -> None:
    cluster = new_cluster(2, protocol=Synchronous(), compute=speeds(1.0, 2.0))
    reports: list[Report] = []

    class Looks(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            reports.append(cluster.report())

    final = cluster.run(lambda worker: with_session(worker, Looks()), updates=3)
    assert [each.updates for each in reports] == [0, 0, 1, 1, 2, 2]
    assert [each.secs for each in reports] == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    for each in [*reports, final]:
        check_report(each)


def test_numbers_of_numpy_leave_no_trace_in_a_report() -> None:
    def run(real: Callable[[float], Any]) -> Report:
        cluster = new_cluster(
            2,
            protocol=Synchronous(),
            compute=Constant(real(1.0)),
            network=Network(real(0.25), real(64.0), real(48.0)),
            failures=[Slowdown(real(3.0), real(2.0), real(4.0)), Partition(real(7.0), real(0.5))],
        )
        return cluster.run(updates=20, loss=lambda _: 1.0)

    assert repr(asdict(run(np.float64))) == repr(asdict(run(float)))
