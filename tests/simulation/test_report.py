"""Reports and timelines: rows, shares of a whole, what counts when, and what a worker did when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import Asynchronous, DiscardStale, KBatchAsync, Synchronous
from asynchooks.simulation import (
    Constant,
    Exponential,
    Network,
    Partition,
    Preemption,
    Report,
    Simulation,
    Slowdown,
    Worker,
    WorkerReport,
)

from .clusters import KINDS, check_report, check_row, new_cluster, speeds, with_session


@pytest.fixture
def report() -> Report:
    cluster = new_cluster(
        3, protocol=DiscardStale(KBatchAsync(2), 1), parameters=np.ones(1),
        compute=speeds(1.0, 2.0, 5.0), pull=Constant(0.25), push=Exponential(0.25),
    )  # fmt: skip
    return cluster.run(gradient=lambda p, _: p, updates=20, loss=lambda p: float(p[0]))


def test_rows_are_flat_and_have_the_same_columns(report: Report) -> None:
    for rows in (report.worker_rows(), report.staleness_rows(), report.loss_rows()):
        assert rows
        assert all(row.keys() == rows[0].keys() for row in rows)
        cells = [cell for row in rows for cell in row.values()]
        assert all(isinstance(cell, (str, int, float)) for cell in cells)


def test_rows_of_workers_hold_all_their_seconds(report: Report) -> None:
    check_report(report)
    for row, worker in zip(report.worker_rows(), report.workers, strict=True):
        assert row["worker"] == worker.worker
        assert sum(row[f"secs_{kind}"] for kind in KINDS) == pytest.approx(report.secs)


def test_rows_of_staleness_add_up_to_the_gradients_that_made_updates(report: Report) -> None:
    assert sum(row["count"] for row in report.staleness_rows()) == report.applied == 40
    assert max(row["staleness"] for row in report.staleness_rows()) <= 1


def test_rows_of_losses_begin_before_training_and_end_with_it(report: Report) -> None:
    rows = report.loss_rows()
    assert [rows[0][name] for name in ("secs", "updates", "loss")] == [0.0, 0, 1.0]
    assert [rows[-1][name] for name in ("secs", "updates")] == [report.secs, 20]
    assert [row["updates"] for row in rows] == list(range(21))


def test_the_summary_is_one_row_to_compare_protocols_by(report: Report) -> None:
    row = report.summary_row()
    check_row(row)
    assert row["protocol"] == "DiscardStale(protocol=KBatchAsync(k=2), bound=1)"
    assert row["updates_per_second"] == report.updates / report.secs
    assert row["discarded"] == report.discarded > 0
    assert row["loss"] == report.losses[-1][2]


def test_mean_and_variance_of_staleness_are_those_of_all_gradients() -> None:
    report = new_cluster(4, compute=Exponential(1.0)).run(updates=500)
    every = [value for value, count in report.staleness.items() for _ in range(count)]
    assert report.mean_staleness == pytest.approx(np.mean(every))


def test_sums_of_a_report_are_exact_on_every_version_of_python() -> None:
    """Added up one by one, as `sum` did until Python 3.11, each of these differs by one bit."""
    worker = WorkerReport(0, 1, {}, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9)
    workers = [replace(worker, worker=index) for index in range(10)]
    report = Report("any", 10, 1.0, 10, 10, 0, {0: 3, 1: 2, 2: 5}, workers, [])
    assert reduce(add, [each.secs_computed for each in workers]) == 0.9999999999999999
    assert report.summary_row()["share_computed"] == 0.1
    assert report.summary_row()["share_idle"] == 0.9


def test_a_worker_that_is_never_idle_is_not_reported_as_idle() -> None:
    """Added up one by one, its seconds would differ from the whole by a few bits."""
    cluster = new_cluster(1, pull=Constant(0.1), compute=Constant(0.5), push=Constant(0.8))
    (worker,) = cluster.run(updates=7).workers
    secs = [worker.secs_computed, worker.secs_pulled, worker.secs_pushed]
    assert worker.secs_idle == 0.0
    assert reduce(add, secs) != math.fsum(secs)


def test_learning_rates_of_an_update_are_averaged_exactly() -> None:
    """The mean of ten equal rates is that rate; added up one by one it would be another."""
    cluster = new_cluster(10, protocol=Synchronous(), parameters=np.zeros(1),
                          learning_rate=lambda _: 0.1)  # fmt: skip
    assert cluster.run(gradient=lambda *_: np.ones(1), updates=1).updates == 1
    assert cluster.server.parameters == -0.1


def test_nothing_has_happened_before_training() -> None:
    report = new_cluster(2).report()
    assert (report.secs, report.updates, report.workers) == (0.0, 0, [])
    assert (report.updates_per_second, report.mean_staleness) == (0.0, 0.0)
    assert report.summary_row()["loss"] is None
    assert report.summary_row()["max_staleness"] == 0


def test_a_report_may_be_made_while_training_goes_on() -> None:
    cluster = new_cluster(2, protocol=Synchronous(), compute=speeds(1.0, 2.0))
    reports: list[Report] = []

    async def program(worker: Worker) -> None:
        while True:
            await worker.pull()
            reports.append(cluster.report())
            if await worker.compute():
                await worker.push(np.zeros(1))

    final = cluster.run(program, updates=3)
    assert [each.updates for each in reports] == [0, 0, 1, 1, 2, 2]
    assert [each.secs for each in reports] == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    for each in [*reports, final]:
        check_report(each)


def test_the_seconds_of_sessions_are_counted_as_those_of_bare_workers() -> None:
    def of(program: object) -> Report:
        cluster = new_cluster(
            4, seed=3, protocol=KBatchAsync(2), pull=Exponential(0.5), push=Exponential(0.25)
        )
        return cluster.run(program, updates=30)  # type: ignore[arg-type]

    assert of(None) == of(with_session)


@pytest.mark.parametrize("protocol", [Asynchronous(), Synchronous()])
def test_numbers_of_numpy_leave_no_trace_in_a_report(protocol: Any) -> None:
    def run(real: Callable[[float], Any]) -> Report:
        cluster = Simulation(seed=3, backend="turbo").cluster(
            2,
            protocol=protocol,
            compute=Constant(real(1.0)),
            network=Network(real(0.25), real(64.0), real(48.0)),
            failures=[
                Slowdown(real(3.0), real(2.0), real(4.0)),
                Partition(real(7.0), real(0.5)),
                Preemption(real(9.0), real(1.5), workers=[0]),
            ],
        )
        return cluster.run(updates=20, loss=lambda _: 1.0)

    assert repr(asdict(run(np.float64))) == repr(asdict(run(float)))


def test_a_report_has_no_addresses_in_memory() -> None:
    class Plain(Asynchronous):
        __repr__ = object.__repr__

    def run() -> Report:
        rate = partial(lambda factor, staleness: factor, 0.1)
        cluster = Simulation(backend="turbo").cluster(1, protocol=Plain(), learning_rate=rate)
        return cluster.run(updates=3)

    report = run()
    assert report == run()
    assert " at 0x" not in repr(report)
    assert "Plain object" in report.protocol
