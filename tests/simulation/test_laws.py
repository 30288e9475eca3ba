"""Published laws come out of simulated clusters, within four standard errors at fixed seeds.

Each has its closed form, or a small chain that is solved beside it. The standard error is that of
the means of consecutive batches, which outlasts correlations. `-m slow`: large numbers.
"""

import itertools
import math
from typing import Any

import numpy as np
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
    Crashes,
    Delay,
    Exponential,
    PerWorker,
    Simulation,
    Worker,
)

from .clusters import P, check_mean, new_cluster, secs_per_update, trained
from .laws import EACH_LAW, Cdf


def mean_of_kth(cdf: Cdf, k: int, n: int) -> float:
    """The mean of the k-th smallest of n draws: the integral of the chance that it is longer."""
    step, num = 1e-3, 150_000
    f = np.clip(cdf(np.linspace(step / 2, (num - 0.5) * step, num)), 0.0, 1.0)
    return float(np.sum([math.comb(n, j) * f**j * (1 - f) ** (n - j) for j in range(k)])) * step


def rate_of_stale_synchronous(num_workers: int, staleness: int) -> float:
    """Updates per second with exponential times of mean 1, by the chain of the clocks' distances.

    A worker whose clock is more than `staleness` ahead of the slowest stands still.
    """
    distances = itertools.product(range(staleness + 2), repeat=num_workers)
    states = [each for each in distances if min(each) == 0]
    number = {state: i for i, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    moves = np.zeros(len(states))
    for state, i in number.items():
        for worker, distance in enumerate(state):
            if distance <= staleness:
                after = [*state[:worker], distance + 1, *state[worker + 1 :]]
                to = number[tuple(each - min(after) for each in after)]
                rates[i, to] += 1.0
                rates[i, i] -= 1.0
                moves[i] += 1.0
    equations = np.vstack([rates.T, np.ones(len(states))])
    right = np.zeros(len(states) + 1)
    right[-1] = 1.0
    shares = np.linalg.lstsq(equations, right, rcond=None)[0]
    return float(shares @ moves)


pytestmark = pytest.mark.exhaustive


# the k-th smallest of P draws, or the mean, for each update; and how many of these
LAWS_OF_PROTOCOLS = [
    (Synchronous(), P, 1), (KSync(6), 6, 1), (KBatchSync(1), 1, 1), (StaleSynchronous(0), P, 1 / P),
    (KBatchAsync(6), 0, 6 / P), (Asynchronous(), 0, 1 / P),
]  # fmt: skip


@pytest.mark.parametrize(("delay", "cdf"), EACH_LAW[:-1])  # whatever the time
@pytest.mark.parametrize(("protocol", "k", "share"), LAWS_OF_PROTOCOLS, ids=str)
@pytest.mark.parametrize(
    ("backend", "updates", "first"),
    [
        ("turbo", 1200, 160),
        pytest.param("turbo", 40_000, 800, marks=pytest.mark.slow),
        pytest.param("asyncio", 8_000, 800, marks=pytest.mark.slow),
        pytest.param("trio", 8_000, 800, marks=pytest.mark.slow),
    ],
)
def test_seconds_of_an_update_follow_the_order_statistics(
    backend: Any,
    updates: int,
    first: int,
    protocol: Protocol,
    k: int,
    share: float,
    delay: Delay,
    cdf: Cdf,
) -> None:
    cluster = trained(backend, protocol, updates, compute=delay)
    expected = share * (mean_of_kth(cdf, k, P) if k else delay.mean)
    check_mean(secs_per_update(cluster)[first:], expected)


@pytest.mark.parametrize(
    ("num_workers", "staleness", "updates"),
    [
        *((num, bound, 1200) for num, bound in [(2, 1), (3, 0), (3, 1), (3, 2), (4, 1)]),
        *(
            pytest.param(num, bound, 200_000, marks=pytest.mark.slow)
            for num, bound in [(3, 2), (4, 3), (5, 2)]
        ),
    ],
)
def test_stale_synchronous_runs_at_the_rate_of_its_markov_chain(
    num_workers: int, staleness: int, updates: int
) -> None:
    cluster = trained("turbo", StaleSynchronous(staleness), updates, num_workers)
    expected = 1 / rate_of_stale_synchronous(num_workers, staleness)
    check_mean(secs_per_update(cluster)[40:], expected)


@pytest.mark.parametrize("rates", [[1.0, 2.0, 5.0], [1.0] * 8], ids=["unequal", "equal"])
def test_workers_have_shares_and_staleness_by_their_rates(rates: list[float]) -> None:
    """Those of equal workers are geometric (Mitliagkas et al. 2016): 1 / P of them are fresh."""
    compute = PerWorker([Exponential(1 / rate) for rate in rates])
    cluster = trained("turbo", Asynchronous(), 6000, len(rates), compute=compute)
    pushes = cluster.timeline.pushes[200:]
    for worker, rate in enumerate(rates):
        check_mean([float(each.worker == worker) for each in pushes], rate / sum(rates))
        own = [float(each.staleness) for each in pushes if each.worker == worker]
        # the others' updates while it computes
        check_mean(own, (sum(rates) - rate) / rate)
        check_mean([float(each == 0) for each in own], rate / sum(rates))
        # all together is exactly what the others did meanwhile
        counts = cluster.report().workers[worker].staleness
        last = max(each.version for each in cluster.timeline.pushes if each.worker == worker)
        assert sum(each * num for each, num in counts.items()) == last - sum(counts.values())


def times_in_queue(service: Delay, num_servers: int, load: float, customers: int) -> list[float]:
    """Seconds in the system, where customers come at random times."""
    simulation = Simulation(3, "turbo")
    times: list[float] = []

    async def main() -> None:
        queue = simulation.queue(service, num_servers=num_servers)
        gaps = simulation.streams.delays(0, "arrivals", Exponential(1 / load))

        async def customer() -> None:
            times.append(await queue.serve())

        for _ in range(customers):
            await simulation.sleep(gaps.next())
            simulation.start(customer)
        await simulation.quiescence()

    simulation.run(main)
    return times


@pytest.mark.parametrize(
    ("service", "servers", "load", "waiting"),
    [
        (Exponential(1.0), 1, 0.8, 4.0),
        (Exponential(1.0), 2, 1.4, 0.7**2 / (1 - 0.7**2)),  # Erlang's second formula
        (Constant(1.0), 1, 0.8, 2.0),  # Pollaczek and Khinchine: half of that
    ],
    ids=["M/M/1", "M/M/2", "M/D/1"],
)
def test_waiting_for_servers_is_that_of_queueing_theory(
    service: Delay, servers: int, load: float, waiting: float
) -> None:
    check_mean(times_in_queue(service, servers, load, 8000)[200:], 1.0 + waiting)


@pytest.mark.parametrize("service", [0.05, 0.5])
def test_workers_on_one_server_are_a_closed_queue(service: float) -> None:
    """The machine repair model: weights P! / (P - n)! (service / compute)^n of n in the queue."""
    cluster = trained("turbo", Asynchronous(), 8000, service=Exponential(service))
    weights = [math.perm(P, n) * service**n for n in range(P + 1)]
    busy = 1 - weights[0] / sum(weights)
    check_mean(secs_per_update(cluster)[80:], service / busy)
    (server,) = cluster.report().servers
    waiting = sum((n - 1) * weight for n, weight in enumerate(weights) if n) / sum(weights)
    assert server.busy_share == pytest.approx(busy, rel=0.03)
    assert server.mean_queue == pytest.approx(waiting, rel=0.1)


@pytest.mark.parametrize(
    ("mtbf", "work", "loses_work", "expected"),
    [
        (10.0, Exponential(1.0), True, 1.2),  # work begins anew, and its law has no memory
        (10.0, Exponential(1.0), False, 1.2),
        (2.0, Constant(1.5), True, 4.0 * math.expm1(1.5 / 2.0)),
    ],
)
def test_crashes_take_their_share_of_the_time_and_repeat_the_work(
    mtbf: float, work: Delay, loses_work: bool, expected: float
) -> None:
    crashes = Crashes(Exponential(mtbf), Exponential(2.0), loses_work=loses_work)
    cluster = trained("turbo", Asynchronous(), 6000, compute=work, failures=[crashes])
    check_mean(secs_per_update(cluster), expected / P)


def secs_of_segments(
    work: float, save: float, restart: float, mtbf: float, num: int
) -> list[float]:
    """How long each took, of a program that saves after each, and resumes from what it saved."""
    cluster = new_cluster(1, seed=5, failures=[Crashes(Exponential(mtbf), Constant(0.0))])
    ends = [0.0]
    restarts = itertools.chain([0.0], itertools.repeat(restart))

    async def program(worker: Worker) -> None:
        await worker.compute(next(restarts))
        while len(ends) <= num:
            await worker.compute(work + save)
            ends.append(worker.cluster.simulation.now)

    cluster.run(program)
    return np.diff(ends).tolist()


def daly(work: float, save: float, restart: float, mtbf: float) -> float:
    """Daly 2006: expected seconds of a segment, also where failures hit the restart."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf)


@pytest.mark.parametrize(
    ("mtbf", "best"), [(24 * 60.0, 116.690), (6 * 60.0, 56.713), (15.0, 9.141)], ids=str
)
def test_the_best_checkpoint_interval_is_the_published_one(mtbf: float, best: float) -> None:
    """Minutes, 5 of them for a save. The same failures hit all intervals.

    Steps of the logarithm of the interval; a parabola through the costs has its vertex at the best.
    """
    steps = np.log([0.6, 0.8, 1.0, 1.25, 1.6])
    costs = []
    for step in steps:
        work = best * math.exp(step)
        num = int(1500 * mtbf / daly(work, 5.0, 0.0, mtbf))
        secs = secs_of_segments(work, 5.0, 0.0, mtbf, num)
        check_mean(secs, daly(work, 5.0, 0.0, mtbf))
        costs.append(float(np.mean(secs)) / work)
    square, slope, _ = np.polyfit(steps, costs, 2)
    assert square > 0
    assert abs(slope / (2 * square)) < 0.15  # the vertex, in steps of the logarithm
    check_mean(secs_of_segments(0.5, 0.25, 0.5, 3.0, 3000), daly(0.5, 0.25, 0.5, 3.0))


def pulled_noise(num_workers: int, rate: float) -> float:
    """The mean square in the steady state, where any worker alike makes the next update.

    The pulled x have the variance A of x, and the covariance B with it, where
    B (P rate + 1) = A (1 + rate); and A (2 (1 + rate) / (1 + P rate) - rate) = rate.
    """
    return rate / (2 * (1 + rate) / (1 + num_workers * rate) - rate)


@pytest.mark.parametrize(
    ("protocol", "num_workers", "rate", "expected"),
    [
        (Synchronous(), 4, 0.2, 0.2 / (2 - 0.2) / 4),
        *((Asynchronous(), *each, pulled_noise(*each)) for each in [(1, 0.2), (4, 0.1), (8, 0.05)]),
    ],
    ids=str,
)
def test_noise_of_gradients_falls_with_their_number_and_grows_with_their_staleness(
    protocol: Protocol, num_workers: int, rate: float, expected: float
) -> None:
    """Of noisy gradients of x^2 / 2, in many coordinates."""
    num = 500
    cluster = new_cluster(
        num_workers, seed=8, protocol=protocol, parameters=np.zeros(num), learning_rate=rate
    )
    cluster.run(
        gradient=lambda x, worker: x + worker.rng.normal(size=num),
        loss=lambda x: float(np.mean(x**2)),
        updates=2000,
    )
    check_mean([loss for _, _, loss in cluster.losses][600:], expected)
