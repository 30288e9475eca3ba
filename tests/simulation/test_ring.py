"""A ring all-reduce: its closed form, links that differ, and workers that crash or leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import Asynchronous, Protocol, Synchronous
from asynchooks.simulation import (
    Checkpoints,
    Constant,
    Crashes,
    Exponential,
    Network,
    Partition,
    PerWorker,
    Preemption,
    RingAllReduce,
    ServerCrashes,
    Uniform,
    Worker,
)

from .clusters import bare, check_mean, check_report, new_cluster, secs_per_update, speeds, spent
from .engines import BACKENDS

MB = 1 << 20


def ring_of(workers: int, backend: Any = "turbo", **options: Any) -> Any:
    options = {"compute": Constant(1.0), "protocol": Synchronous(), **options}
    return new_cluster(workers, backend, **options)


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_a_reduction_takes_2_rounds_less_one_of_a_chunk_for_each_worker(
    num: int, backend: Any
) -> None:
    ring = RingAllReduce(0.125, 4 * MB, gradient_bytes=MB)
    report = ring_of(num, backend, network=ring).run(updates=3)
    secs = 2 * (num - 1) * (0.125 + 1 / (4 * num))
    assert report.secs == 3 * (1.0 + secs)
    assert report.bytes_moved == 3 * 2 * (num - 1) * MB
    expected = {"computed": 3.0, "pushed": 3 * secs} if secs else {"computed": 3.0}
    assert spent(report.workers[0]) == expected
    assert set(report.staleness) == {0}


def test_the_slowest_worker_and_the_slowest_link_decide(backend: Any) -> None:
    ring = RingAllReduce(speeds(0.5, 0.25, 0.25, 0.25), [MB, MB / 4, MB, MB], gradient_bytes=MB)
    report = ring_of(4, backend, network=ring, compute=speeds(1.0, 2.0, 3.0, 4.0)).run(updates=2)
    assert report.secs == 2 * (4.0 + 6 * (0.25 + 1.0))
    assert [each.secs_waited for each in report.workers] == [6.0, 4.0, 2.0, 0.0]


def test_random_latencies_take_longer_than_one_link_and_less_than_rounds_in_step() -> None:
    cluster = ring_of(4, network=RingAllReduce(Exponential(1.0)), compute=Constant(0.0),
                      keep_timeline=True)  # fmt: skip
    cluster.run(updates=2_000)
    secs = secs_per_update(cluster)
    mean = float(np.mean(secs))
    assert 6 * 1.0 < mean < 6 * (1 + 1 / 2 + 1 / 3 + 1 / 4)


def test_two_workers_wait_for_the_slower_of_two_links_in_each_round() -> None:
    cluster = ring_of(2, network=RingAllReduce(Exponential(1.0)), compute=Constant(0.0),
                      keep_timeline=True)  # fmt: skip
    cluster.run(updates=4_000)
    check_mean(secs_per_update(cluster), 2 * 1.5)


def test_a_ring_beats_the_link_of_one_server() -> None:
    """The traffic of a server grows with the workers, that of a ring does not."""
    num = 16
    ring = ring_of(num, network=RingAllReduce(0.0, MB, gradient_bytes=MB)).run(updates=2)
    network = Network(0.0, MB, MB, parameter_bytes=MB)
    server = ring_of(num, network=network).run(updates=2)
    assert ring.secs == 2 * (1 + 2 * 15 / 16)
    assert server.secs == 2 * (1 + 2 * 16)


def test_gradients_are_averaged_over_the_ring(backend: Any) -> None:
    cluster = ring_of(4, backend, parameters=np.zeros(2), learning_rate=1.0,
                      network=RingAllReduce(0.25, 64.0))  # fmt: skip
    report = cluster.run(gradient=lambda _, worker: np.full(2, worker.index), updates=2)
    assert cluster.server.parameters.tolist() == [-3.0, -3.0]
    assert report.secs == 2 * (1 + 6 * (0.25 + 4 / 64))  # 16 bytes in chunks of 4


def test_a_crash_ends_the_reduction_and_all_reduce_again(backend: Any) -> None:
    failures = [Preemption(at=1.5, secs=1.0, workers=[1])]
    cluster = ring_of(3, backend, network=RingAllReduce(0.25), failures=failures)
    report = cluster.run(updates=1)
    # ready at 1, broken at 1.5, back at 2.5, ready at 3.5, four rounds
    assert report.secs == 4.5
    assert spent(report.workers[0]) == {"computed": 1.0, "pushed": 1.5, "waited": 2.0}
    assert spent(report.workers[1]) == {
        "computed": 2.0, "pushed": 1.5, "down": 1.0
    }  # fmt: skip
    assert report.applied == 3


def test_a_worker_that_crashes_while_it_waits_is_waited_for(backend: Any) -> None:
    failures = [Preemption(at=1.5, secs=3.0, workers=[0])]
    cluster = ring_of(3, backend, network=RingAllReduce(0.25), failures=failures,
                      compute=speeds(1.0, 3.0, 3.0))  # fmt: skip
    assert cluster.run(updates=1).secs == 5.5 + 1.0


def test_a_crash_at_the_moment_at_which_the_last_is_ready(backend: Any) -> None:
    failures = [Preemption(at=5.0, secs=1.0, workers=[0])]
    cluster = ring_of(3, backend, network=RingAllReduce(0.25), failures=failures,
                      compute=speeds(1.0, 1.0, 2.0))  # fmt: skip
    # reduces 2-3, would again at 5; worker 0 is back at 6, and ready at 7
    assert cluster.run(updates=2).secs == 8.0


@pytest.mark.parametrize("at", [0.5, 1.5])
def test_a_worker_that_leaves_makes_the_ring_smaller(backend: Any, at: float) -> None:
    failures = [Preemption(at=at, workers=[1])]
    cluster = ring_of(3, backend, network=RingAllReduce(0.25, MB, gradient_bytes=3 * MB),
                      failures=failures)  # fmt: skip
    begins = max(1.0, at)
    assert cluster.run(updates=1).secs == begins + 2 * (0.25 + 1.5)


def test_a_program_that_ends_makes_the_ring_smaller(backend: Any) -> None:
    cluster = ring_of(2, backend, network=RingAllReduce(0.25))

    async def program(worker: Worker) -> None:
        for _ in range(1 + worker.index):
            await worker.pull()
            await worker.compute()
            await worker.push(np.zeros(1))

    report = cluster.run(program)
    assert (report.updates, report.secs) == (2, 2.5)


def test_a_cut_link_holds_the_reduction_back(backend: Any) -> None:
    cluster = ring_of(4, backend, network=RingAllReduce(0.25), failures=[
        Partition(2.0, 5.0, workers=[2])
    ])  # fmt: skip
    assert cluster.run(updates=2).secs == 7.0 + 1.0 + 1.5


def test_all_backends_agree_on_a_ring_with_failures() -> None:
    reports = []
    for backend in BACKENDS:
        cluster = ring_of(
            4, backend, compute=Exponential(1.0),
            network=RingAllReduce(Uniform(0.0, 0.25), 64.0),
            checkpoints=Checkpoints(every_updates=5, save=Constant(0.5)),
            failures=[Crashes(Exponential(12.0), Exponential(1.0))],
        )  # fmt: skip
        reports.append(cluster.run(bare, updates=60))
    check_report(reports[0])
    assert reports[0].num_saves == 11
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize(
    ("protocol", "options", "message"),
    [
        (Asynchronous(), {}, r"got protocol Asynchronous\(\); give protocol=Synchronous\(\)"),
        (Synchronous(), {"num_servers": 2}, "got num_servers, but RingAllReduce has no server"),
        (Synchronous(), {"service": Constant(1.0)}, "got service, but RingAllReduce has no server"),
        (Synchronous(), {"failures": [ServerCrashes(Constant(9.0), Constant(1.0))]},
         "got failures with ServerCrashes"),
        (Synchronous(), {"pull": Constant(1.0)}, r"got pull=Constant\(secs=1.0\) and a network"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_ring_is_refused(
    protocol: Protocol, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        new_cluster(3, protocol=protocol, network=RingAllReduce(), **options)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth is -1; give bytes per second"):
        RingAllReduce(bandwidth=-1)
    with pytest.raises(ValueError, match="bandwidth of the network has 1 values for 2 workers"):
        new_cluster(2, protocol=Synchronous(), network=RingAllReduce(bandwidth=[1.0]))
    with pytest.raises(ValueError, match="there is no delay for worker 1"):
        ring_of(2, network=RingAllReduce(PerWorker([Constant(1.0)])))
