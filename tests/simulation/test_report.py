"""Reports and timelines: rows, shares of a whole, what counts when, and what a worker did when."""

from __future__ import annotations

import numpy as np
import pytest

from asynchooks.protocols import DiscardStale, KBatchAsync, Synchronous
from asynchooks.simulation import (
    Constant,
    Exponential,
    Report,
    WorkerReport,
)

from ..support.moments import at
from .clusters import KINDS, check_report, new_cluster, speeds, with_session


def test_rows_are_flat_and_hold_all_of_a_report() -> None:
    cluster = new_cluster(
        3, protocol=DiscardStale(KBatchAsync(2), 1), parameters=np.ones(1),
        compute=speeds(1.0, 2.0, 5.0), pull=Constant(0.25), push=Exponential(0.25),
    )  # fmt: skip
    report = cluster.run(gradient=lambda p, _: p, updates=20, loss=lambda p: float(p[0]))
    check_report(report)
    workers, counts, losses = report.worker_rows(), report.staleness_rows(), report.loss_rows()
    for rows in (workers, counts, losses):
        assert all(row.keys() == rows[0].keys() for row in rows)
        assert all(isinstance(cell, str | int | float) for row in rows for cell in row.values())
    assert [row["worker"] for row in workers] == [0, 1, 2]
    for row in workers:
        assert sum(row[f"secs_{kind}"] for kind in KINDS) == pytest.approx(report.secs)
    assert sum(row["count"] for row in counts) == report.applied == 40
    mean = sum(row["count"] * row["staleness"] for row in counts) / 40
    assert report.mean_staleness == pytest.approx(mean)
    row = report.summary_row()
    assert [each["updates"] for each in losses] == list(range(21))
    first, *_, last = ((each["secs"], each["loss"]) for each in losses)
    assert (first, last) == ((0.0, 1.0), (report.secs, row["loss"]))
    assert row["protocol"] == "DiscardStale(protocol=KBatchAsync(k=2), bound=1)"
    assert row["updates_per_second"] == report.updates / report.secs
    assert row["max_staleness"] <= 1
    assert row["discarded"] == report.discarded > 0


def test_sums_of_a_report_are_exact_on_every_version_of_python() -> None:
    """Added up one by one, as `sum` did until Python 3.11, each of these differs by one bit."""
    workers = [WorkerReport(i, 1, {}, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9) for i in range(10)]
    row = Report("any", 10, 1.0, 10, 10, 0, {0: 10}, workers, []).summary_row()
    assert (row["share_computed"], row["share_idle"]) == (0.1, 0.9)


def test_a_report_may_be_made_while_training_goes_on() -> None:
    cluster = new_cluster(2, protocol=Synchronous(), compute=speeds(1.0, 2.0))
    reports: list[Report] = []

    looks = at(before_run=lambda _: reports.append(cluster.report()))
    final = cluster.run(lambda worker: with_session(worker, looks), updates=3)
    assert [each.updates for each in reports] == [0, 0, 1, 1, 2, 2]
    assert [each.secs for each in reports] == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    for each in [*reports, final]:
        check_report(each)
