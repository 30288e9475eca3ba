"""Laws beyond the published ones: other delays, unequal workers, bounded staleness, stragglers.

Each with its closed form, or a small chain that is solved beside it. `-m slow`: large numbers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from asynchooks.protocols import (
    Asynchronous,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import (
    Constant,
    Delay,
    Exponential,
    PerWorker,
    Phases,
    Stragglers,
)

from .clusters import BACKENDS, P, check_mean, new_cluster, secs_per_update, trained
from .order_statistics import LAWS, mean_of_kth, mean_of_largest, rate_of_stale_synchronous


def expected_secs(protocol: Protocol, delay: Delay) -> float:
    """Of an update, in the long run."""
    match protocol:
        case Synchronous():
            return mean_of_largest(delay, P)
        case KSync(k):
            return mean_of_kth(delay, k, P)
        case KBatchSync(1):
            return mean_of_kth(delay, 1, P)
        case StaleSynchronous(0):
            return mean_of_largest(delay, P) / P
        case KBatchAsync(k):
            return k * delay.mean / P
        case _:
            return delay.mean / P


PROTOCOLS = [
    Synchronous(), KSync(6), KBatchSync(1), StaleSynchronous(0), KBatchAsync(6), Asynchronous(),
]  # fmt: skip


@pytest.mark.parametrize("delay", LAWS, ids=str)
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_seconds_of_an_update_follow_the_order_statistics(protocol: Protocol, delay: Delay) -> None:
    cluster = trained("turbo", protocol, 1200, compute=delay)
    check_mean(secs_per_update(cluster)[160:], expected_secs(protocol, delay))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("delay", LAWS, ids=str)
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_seconds_of_an_update_in_large_numbers(
    backend: Any, protocol: Protocol, delay: Delay
) -> None:
    updates = 40_000 if backend == "turbo" else 8_000
    cluster = trained(backend, protocol, updates, compute=delay)
    check_mean(secs_per_update(cluster)[800:], expected_secs(protocol, delay))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_workers", "staleness"), [(3, 0), (3, 1), (3, 2), (4, 1)])
def test_stale_synchronous_runs_at_the_rate_of_its_markov_chain(
    backend: Any, num_workers: int, staleness: int
) -> None:
    cluster = trained(backend, StaleSynchronous(staleness), 1200, num_workers)
    expected = 1 / rate_of_stale_synchronous(num_workers, staleness)
    check_mean(secs_per_update(cluster)[40:], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "staleness"), [(3, 2), (4, 1), (4, 3), (5, 2)])
def test_stale_synchronous_in_large_numbers(num_workers: int, staleness: int) -> None:
    cluster = trained("turbo", StaleSynchronous(staleness), 200_000, num_workers)
    expected = 1 / rate_of_stale_synchronous(num_workers, staleness)
    check_mean(secs_per_update(cluster)[400:], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unequal_workers_have_shares_and_staleness_by_their_rates(backend: Any) -> None:
    rates = [1.0, 2.0, 5.0]
    compute = PerWorker([Exponential(1 / rate) for rate in rates])
    cluster = trained(backend, Asynchronous(), 2000, 3, compute=compute)
    pushes = cluster.timeline.pushes
    for worker, rate in enumerate(rates):
        check_mean([float(each.worker == worker) for each in pushes], rate / 8)
        own = [float(each.staleness) for each in pushes if each.worker == worker]
        check_mean(own[10:], (8 - rate) / rate)  # the others' updates while it computes


@pytest.mark.parametrize("delay", LAWS, ids=str)
def test_all_staleness_of_a_worker_is_what_the_others_did_meanwhile(delay: Delay) -> None:
    cluster = trained("turbo", Asynchronous(), 1000, compute=delay)
    last = {each.worker: each.version for each in cluster.timeline.pushes}
    for worker, counts in enumerate(each.staleness for each in cluster.report().workers):
        total = sum(staleness * count for staleness, count in counts.items())
        assert total == last[worker] - sum(counts.values())  # exactly


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_stragglers_hold_up_everybody_who_waits(probability: float) -> None:
    compute = Stragglers(Constant(1.0), probability, 10.0)
    asynchronous = trained("turbo", Asynchronous(), 4000, compute=compute)
    check_mean(secs_per_update(asynchronous)[80:], (1 + 9 * probability) / P)
    together = trained("turbo", Synchronous(), 1000, compute=compute)
    check_mean(secs_per_update(together), 1 + 9 * (1 - (1 - probability) ** P))


def test_phases_slow_all_workers_by_their_share() -> None:
    compute = Phases(Exponential(0.25), [(1.0, 1.0), (2.0, 4.0), (1.0, math.inf)])
    cluster = trained("turbo", Asynchronous(), 12_000, compute=compute)
    work_per_second = (1.0 + 2.0 / 4) / 4.0
    check_mean(secs_per_update(cluster), 0.25 / work_per_second / P)


def test_links_add_to_the_time_of_a_step() -> None:
    links: dict[str, Any] = {
        "pull": Constant(0.25),
        "push": Constant(0.5),
        "service": Constant(0.125),
    }
    report = new_cluster(1, compute=Constant(1.0), **links).run(updates=40)
    assert report.secs == 40 * 1.875
    assert report.workers[0].secs_pushed == 40 * 0.625
