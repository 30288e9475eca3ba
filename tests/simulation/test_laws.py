"""Published laws come out of simulated clusters, within four standard errors at fixed seeds.

Each has its closed form, or a small chain that is solved beside it. The standard error is that of
the means of consecutive batches, which outlasts correlations. `-m slow`: large numbers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from asynchooks import GlobalStepWaiterHook
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
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
    Stragglers,
    Worker,
)

from .clusters import (
    NUM_BATCHES,
    P,
    check_mean,
    new_cluster,
    secs_per_update,
    trained,
    with_session,
)
from .laws import LAWS, Cdf

DRAWN = LAWS[:-1]  # whatever the time


def mean_of_kth(cdf: Cdf, k: int, n: int) -> float:
    """The mean of the k-th smallest of n draws: the integral of the chance that it is longer."""
    step, num = 1e-3, 150_000
    f = np.clip(cdf(np.linspace(step / 2, (num - 0.5) * step, num)), 0.0, 1.0)
    return float(np.sum([math.comb(n, j) * f**j * (1 - f) ** (n - j) for j in range(k)])) * step


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


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


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (Synchronous(), harmonic(P)),
        (KSync(6), harmonic(P) - harmonic(P - 6)),
        (KBatchSync(6), 6 / P),
        (KAsync(6), harmonic(P) - harmonic(P - 6)),
        (KBatchAsync(6), 6 / P),
        (Asynchronous(), 1 / P),
        (StaleSynchronous(0), harmonic(P) / P),
    ],
    ids=str,
)
def test_seconds_of_an_update(backend: Any, protocol: Protocol, expected: float) -> None:
    """Dutta et al. 2018; for stale synchronous parallel Ho et al. 2013."""
    check_mean(secs_per_update(trained(backend, protocol, 3000)), expected)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rate_of_two_workers_with_bounded_staleness(backend: Any, staleness: int) -> None:
    cluster = trained(backend, StaleSynchronous(staleness), 6000, num_workers=2)
    rate_of_one = (2 * staleness + 2) / (2 * staleness + 3)
    check_mean(secs_per_update(cluster), 1 / (2 * rate_of_one))


def test_staleness_of_asynchronous_updates_is_geometric(backend: Any) -> None:
    """Mitliagkas et al. 2016: mean P - 1, variance P (P - 1), and 1 / P of them are fresh."""
    cluster = trained(backend, Asynchronous(), 12_000)
    found = [float(each.staleness) for each in cluster.timeline.pushes][200:]
    check_mean(found, P - 1)
    check_mean([(each - (P - 1)) ** 2 for each in found], P * (P - 1))
    check_mean([float(each == 0) for each in found], 1 / P)


@pytest.mark.parametrize("loses_work", [True, False])
def test_crashes_cost_their_share_of_the_updates(backend: Any, loses_work: bool) -> None:
    crashes = Crashes(Exponential(10.0), Exponential(2.0), loses_work=loses_work)
    cluster = trained(backend, Asynchronous(), 12_000, failures=[crashes])
    check_mean(secs_per_update(cluster), (1 / 10 + 1 / 2) / (P * 1 / 2))


@pytest.mark.parametrize(("gradients", "secs"), [(1, 1.0), (5, 3.0), (10, 6.0), (20, 10.0)])
def test_fixed_speeds_bring_gradients_at_exactly_their_times(
    backend: Any, gradients: int, secs: float
) -> None:
    speeds = PerWorker([Constant(each) for each in (1.0, 2.0, 3.0, 4.0)])
    cluster = trained(backend, Asynchronous(), gradients, num_workers=4, compute=speeds)
    assert cluster.report().secs == secs


@pytest.mark.parametrize(
    ("delay", "largest"), [(1, 1.0), (3, 0.445042), (7, 0.209057)], ids=["1", "3", "7"]
)
def test_largest_learning_rate_that_is_stable_with_a_constant_delay(
    backend: Any, delay: int, largest: float
) -> None:
    """2 sin(pi / (2 (2 d + 1))), for a quadratic of curvature 1."""

    def distance(rate: float) -> float:
        cluster = Simulation(backend=backend).cluster(
            delay + 1, parameters=np.ones(1), compute=Constant(1.0), learning_rate=rate
        )
        cluster.run(gradient=lambda parameters, _: parameters, updates=2000)
        return abs(float(cluster.server.parameters[0]))

    assert distance(0.97 * largest) < 1e-2
    assert distance(1.03 * largest) > 1e2


def test_gradual_start_by_the_logarithm_of_the_worker(backend: Any) -> None:
    """Worker i waits for int(100 log(i + 1)): it starts after sum (thr_j - thr_j-1) / j."""
    thresholds = [int(100 * math.log(index + 1)) for index in range(P)]
    assert thresholds == [0, 69, 109, 138, 160, 179, 194, 207]
    expected = sum((thresholds[j] - thresholds[j - 1]) / j for j in range(1, P))
    starts = []
    for seed in range(NUM_BATCHES * 2):
        cluster = Simulation(seed, backend).cluster(P)

        async def program(worker: Any) -> None:
            waiter = GlobalStepWaiterHook(wait_until_step=thresholds[worker.index])
            await with_session(worker, waiter)

        simulation = cluster.simulation
        cluster.run(program, until=lambda: cluster.server.version >= thresholds[-1])  # noqa: B023
        starts.append(simulation.now)
    check_mean(starts, expected)


def expected_secs(protocol: Protocol, delay: Delay, cdf: Cdf) -> float:
    """Of an update, in the long run."""
    match protocol:
        case Synchronous():
            return mean_of_kth(cdf, P, P)
        case KSync(k) | KBatchSync(k):
            return mean_of_kth(cdf, k, P)
        case StaleSynchronous(0):
            return mean_of_kth(cdf, P, P) / P
        case KBatchAsync(k):
            return k * delay.mean / P
        case _:
            return delay.mean / P


PROTOCOLS = [
    Synchronous(), KSync(6), KBatchSync(1), StaleSynchronous(0), KBatchAsync(6), Asynchronous(),
]  # fmt: skip


@pytest.mark.parametrize(("delay", "cdf"), DRAWN, ids=[str(delay) for delay, _ in DRAWN])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
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
    backend: Any, updates: int, first: int, protocol: Protocol, delay: Delay, cdf: Cdf
) -> None:
    cluster = trained(backend, protocol, updates, compute=delay)
    check_mean(secs_per_update(cluster)[first:], expected_secs(protocol, delay, cdf))


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


def test_unequal_workers_have_shares_and_staleness_by_their_rates(backend: Any) -> None:
    rates = [1.0, 2.0, 5.0]
    compute = PerWorker([Exponential(1 / rate) for rate in rates])
    cluster = trained(backend, Asynchronous(), 2000, 3, compute=compute)
    pushes = cluster.timeline.pushes
    for worker, rate in enumerate(rates):
        check_mean([float(each.worker == worker) for each in pushes], rate / 8)
        own = [float(each.staleness) for each in pushes if each.worker == worker]
        check_mean(own[10:], (8 - rate) / rate)  # the others' updates while it computes


@pytest.mark.parametrize("delay", [delay for delay, _ in LAWS], ids=str)
def test_all_staleness_of_a_worker_is_what_the_others_did_meanwhile(delay: Delay) -> None:
    cluster = trained("turbo", Asynchronous(), 1000, compute=delay)
    last = {each.worker: each.version for each in cluster.timeline.pushes}
    for worker, counts in enumerate(each.staleness for each in cluster.report().workers):
        total = sum(staleness * count for staleness, count in counts.items())
        assert total == last[worker] - sum(counts.values())  # exactly


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_stragglers_hold_up_all_that_wait(probability: float) -> None:
    compute = Stragglers(Constant(1.0), probability, 10.0)
    asynchronous = trained("turbo", Asynchronous(), 4000, compute=compute)
    check_mean(secs_per_update(asynchronous)[80:], (1 + 9 * probability) / P)
    together = trained("turbo", Synchronous(), 1000, compute=compute)
    check_mean(secs_per_update(together), 1 + 9 * (1 - (1 - probability) ** P))


def test_links_add_to_the_time_of_a_step() -> None:
    links: dict[str, Any] = {
        "pull": Constant(0.25),
        "push": Constant(0.5),
        "service": Constant(0.125),
    }
    report = new_cluster(1, compute=Constant(1.0), **links).run(updates=40)
    assert report.secs == 40 * 1.875
    assert report.workers[0].secs_pushed == 40 * 0.625


def times_in_queue(
    service: Delay, num_servers: int, load: float, customers: int, backend: Any = "turbo"
) -> list[float]:
    """Seconds in the system, where customers come at random times."""
    simulation = Simulation(3, backend)
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


def erlang_wait(servers: int, load: float) -> float:
    """Mean seconds of waiting with services of 1 s, by Erlang's second formula."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    first = sum(load**n / math.factorial(n) for n in range(servers))
    return last / (first + last) / (servers - load)


def test_waiting_for_one_server_is_that_of_m_m_1(backend: Any) -> None:
    """Load 0.8: 1 / (1 - 0.8) seconds in the system, where a service takes 1 s."""
    check_mean(times_in_queue(Exponential(1.0), 1, 0.8, 20_000, backend)[100:], 5.0)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_waiting_for_several_servers_is_that_of_m_m_c(servers: int) -> None:
    times = times_in_queue(Exponential(1.0), servers, 0.7 * servers, 8000)
    check_mean(times[200:], 1.0 + erlang_wait(servers, 0.7 * servers))


def test_waiting_with_constant_service_is_that_of_m_d_1() -> None:
    """Pollaczek and Khinchine: half the wait of exponential services."""
    times = times_in_queue(Constant(1.0), 1, 0.8, 10_000)
    check_mean(times[200:], 1.0 + 0.8 / (2 * (1 - 0.8)))


@pytest.mark.parametrize("service", [0.05, 0.5])
def test_workers_on_one_server_are_a_closed_queue(backend: Any, service: float) -> None:
    """The machine repair model: weights P! / (P - n)! (service / compute)^n of n in the queue."""
    cluster = trained(backend, Asynchronous(), 2000, service=Exponential(service))
    weights = [math.perm(P, n) * service**n for n in range(P + 1)]
    busy = 1 - weights[0] / sum(weights)
    check_mean(secs_per_update(cluster)[80:], service / busy)


def test_crashes_make_a_task_as_long_as_its_work_has_to_be_repeated() -> None:
    task, mtbf, repair = 1.5, 2.0, 0.5
    cluster = trained("turbo", Asynchronous(), 6000, compute=Constant(task),
                      failures=[Crashes(Exponential(mtbf), Exponential(repair))])  # fmt: skip
    num_failures = math.expm1(task / mtbf)
    check_mean(secs_per_update(cluster), (mtbf + repair) * num_failures / P)


def secs_of_segments(
    work: float, save: float, restart: float, mtbf: float, num: int
) -> list[float]:
    """How long each took, of a program that saves after each, and resumes from what it saved."""
    failures = [Crashes(Exponential(mtbf), Constant(0.0))]
    cluster = new_cluster(1, seed=5, failures=failures)
    ends = [0.0]
    num_starts = 0

    async def program(worker: Worker) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 1:
            await worker.compute(restart)
        while len(ends) <= num:
            await worker.compute(work + save)
            ends.append(worker.cluster.simulation.now)

    cluster.run(program)
    return np.diff(ends).tolist()


def daly(work: float, save: float, restart: float, mtbf: float) -> float:
    """Daly 2006: expected seconds of a segment, also where failures hit the restart."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf)


@pytest.mark.parametrize("work", [0.5, 2.0])
def test_checkpointing_takes_the_time_of_daly_s_formula(work: float) -> None:
    check_mean(secs_of_segments(work, 0.25, 0.5, 3.0, 4000), daly(work, 0.25, 0.5, 3.0))


@pytest.mark.parametrize(
    ("mtbf", "best"), [(24 * 60.0, 116.690), (6 * 60.0, 56.713), (15.0, 9.141)], ids=str
)
def test_the_best_checkpoint_interval_is_the_published_one(mtbf: float, best: float) -> None:
    """Minutes, 5 of them for a save. The same failures hit all intervals.

    Steps of the logarithm of the interval; a parabola through the costs has its vertex at the best.
    """
    num_failures = 1500
    steps = np.log([0.6, 0.8, 1.0, 1.25, 1.6])
    costs = []
    for step in steps:
        work = best * math.exp(step)
        num = int(num_failures * mtbf / daly(work, 5.0, 0.0, mtbf))
        costs.append(float(np.mean(secs_of_segments(work, 5.0, 0.0, mtbf, num))) / work)
    square, slope, _ = np.polyfit(steps, costs, 2)
    assert square > 0
    assert abs(slope / (2 * square)) < 0.15  # the vertex, in steps of the logarithm


def squares_of(protocol: Protocol, num_workers: int, rate: float) -> list[float]:
    """The mean square of many coordinates after each update, of noisy gradients of x^2 / 2."""
    num_coordinates = 500
    cluster = new_cluster(
        num_workers, seed=8, protocol=protocol, parameters=np.zeros(num_coordinates),
        learning_rate=rate,
    )  # fmt: skip
    cluster.run(
        gradient=lambda x, worker: x + worker.rng.normal(size=num_coordinates),
        loss=lambda x: float(np.mean(x**2)),
        updates=2000,
    )
    return [loss for _, _, loss in cluster.losses][600:]


@pytest.mark.parametrize("num_workers", [1, 4])
def test_synchronous_gradients_divide_the_noise_by_the_workers(num_workers: int) -> None:
    rate = 0.2
    check_mean(squares_of(Synchronous(), num_workers, rate), rate / (2 - rate) / num_workers)


@pytest.mark.parametrize(("num_workers", "rate"), [(1, 0.2), (4, 0.1), (8, 0.05)])
def test_noise_of_asynchronous_gradients_grows_with_their_staleness(
    num_workers: int, rate: float
) -> None:
    """Each update is by any worker alike, with the gradient of where that had pulled.

    In the steady state the pulled x have the variance A of x, and the covariance B with it, where
    B (P rate + 1) = A (1 + rate); and A (2 (1 + rate) / (1 + P rate) - rate) = rate.
    """
    expected = rate / (2 * (1 + rate) / (1 + num_workers * rate) - rate)
    check_mean(squares_of(Asynchronous(), num_workers, rate), expected)
