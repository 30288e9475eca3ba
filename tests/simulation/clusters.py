"""Clusters of a few workers, and what holds for every report."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import pytest

from asynchooks import SessionRunHook
from asynchooks.protocols import Protocol
from asynchooks.simulation import (
    Cluster,
    Constant,
    Delay,
    PerWorker,
    Report,
    Simulation,
    Worker,
    WorkerReport,
)

NUM_BATCHES = 40
P = 8
KINDS = ("computed", "lost", "waited", "pulled", "pushed", "down", "idle")


def new_cluster(num_workers: int, backend: Any = "turbo", seed: int = 1, **options: Any) -> Cluster:
    return Simulation(seed, backend).cluster(num_workers, **options)


def speeds(*secs: float) -> Delay:
    """Each worker takes always as long."""
    return PerWorker([Constant(each) for each in secs])


def spent(worker: WorkerReport) -> dict[str, float]:
    """A worker's seconds by kind, without those that are 0."""
    secs = {kind: getattr(worker, f"secs_{kind}") for kind in KINDS}
    return {kind: value for kind, value in secs.items() if value}


async def bare(worker: Worker) -> None:
    """A program without a session: pull, compute and push until training is over."""
    while True:
        snapshot = await worker.pull()
        if await worker.compute():
            await worker.push(np.zeros(1), snapshot.version)


async def with_session(worker: Worker, *hooks: SessionRunHook) -> None:
    """A program: one session until training is over."""
    async with worker.session(hooks) as session:
        while not session.should_stop():
            await session.run("computed")


def check_report(report: Report) -> None:
    """The seconds of each worker add up to the whole, and the counts fit together."""
    for each in report.workers:
        secs = spent(each)
        assert min(secs.values(), default=0.0) >= 0
        assert sum(secs.values()) == pytest.approx(report.secs, rel=1e-9, abs=1e-9)
    assert sum(report.staleness.values()) == report.applied
    assert sum(sum(each.staleness.values()) for each in report.workers) == report.applied
    num_computed = sum(each.gradients for each in report.workers)
    num_pushed = report.applied + report.discarded + report.undone
    assert num_computed >= num_pushed or not num_computed
    assert "np." not in repr(report), "numbers of NumPy leave a trace"
    row = report.summary_row()
    assert not report.secs or sum(row[f"share_{kind}"] for kind in KINDS) == pytest.approx(1.0)


def check_mean(values: Sequence[float], expected: float) -> None:
    """The mean of the values, in order of time, is as expected, within four standard errors.

    The standard error is that of the means of consecutive batches, which outlasts correlations.
    """
    size = len(values) // NUM_BATCHES
    assert size >= 2
    means = [float(np.mean(values[i * size : (i + 1) * size])) for i in range(NUM_BATCHES)]
    error = float(np.std(means, ddof=1)) / sqrt(NUM_BATCHES)
    is_near = abs(np.mean(means) - expected) <= 4 * error + 1e-9 * expected
    assert is_near, (np.mean(means), expected, error)


def trained(
    backend: Any,
    protocol: Protocol,
    updates: int,
    num_workers: int = P,
    seed: int = 20,
    **options: Any,
) -> Cluster:
    cluster = new_cluster(
        num_workers, backend, seed, protocol=protocol, keep_timeline=True, **options
    )
    cluster.run(updates=updates)
    return cluster


def times_of_updates(cluster: Cluster) -> list[float]:
    return [each.time for each in cluster.timeline.pushes if each.outcome == "applied"]


def secs_per_update(cluster: Cluster) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times_of_updates(cluster)])]
