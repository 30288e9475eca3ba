"""Links with latency and bandwidth, and servers that hold a part of the parameters each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import Asynchronous, Synchronous
from asynchooks.simulation import (
    Constant,
    Crashes,
    Exponential,
    Network,
    Partition,
    PerWorker,
    Preemption,
    Uniform,
)

from .clusters import bare, check_mean, check_report, new_cluster, secs_per_update, speeds, spent
from .engines import BACKENDS

MB = 1_000_000


def test_a_message_takes_its_bytes_and_then_the_latency(backend: Any) -> None:
    network = Network(
        PerWorker([Constant(0.25), Constant(0.5)]), [MB, 2 * MB],
        parameter_bytes=MB // 2, gradient_bytes=MB // 4,
    )  # fmt: skip
    cluster = new_cluster(2, backend, compute=Constant(1.0), network=network,
                          protocol=Synchronous())  # fmt: skip
    report = cluster.run(updates=2)
    assert spent(report.workers[0]) == {
        "pulled": 2 * (0.25 + 0.5 + 0.25), "computed": 2.0, "pushed": 2 * (0.25 + 0.25),
        "waited": 2 * 0.375,
    }  # fmt: skip
    assert spent(report.workers[1]) == {
        "pulled": 2 * (0.5 + 0.25 + 0.5), "computed": 2.0, "pushed": 2 * (0.125 + 0.5),
    }  # fmt: skip
    assert report.secs == 2 * (1.25 + 1.0 + 0.625)
    assert report.bytes_moved == 2 * 2 * (MB // 2 + MB // 4)
    assert report.summary_row()["bytes_moved"] == report.bytes_moved


def test_messages_are_as_large_as_the_parameters(backend: Any) -> None:
    parameters = {"w": np.zeros((4, 8)), "b": np.zeros(8, np.float32)}  # 256 + 32 bytes
    cluster = new_cluster(1, backend, compute=Constant(1.0), parameters=parameters,
                          network=Network(bandwidth=288.0))  # fmt: skip
    report = cluster.run(updates=3)
    assert (report.secs, report.bytes_moved) == (9.0, 6 * 288)


def test_pulls_share_the_link_of_the_server(backend: Any) -> None:
    network = Network(server_bandwidth=MB, parameter_bytes=MB, gradient_bytes=0)
    cluster = new_cluster(4, backend, compute=Constant(1.0), network=network,
                          protocol=Synchronous())  # fmt: skip
    assert cluster.run(updates=3).secs == 3 * (4 + 1)


def test_a_message_takes_as_long_as_the_slower_of_its_two_links(backend: Any) -> None:
    network = Network(0.0, [MB / 4, 4 * MB, 4 * MB], MB, parameter_bytes=3 * MB)
    cluster = new_cluster(3, backend, compute=Constant(100.0), network=network)
    report = cluster.run(until=50.0)
    # the server's link is free again after 3, 6 and 9 s
    assert [each.secs_pulled for each in report.workers] == [12.0, 6.0, 9.0]


def test_both_directions_are_separate(backend: Any) -> None:
    network = Network(server_bandwidth=MB, parameter_bytes=MB)
    cluster = new_cluster(2, backend, compute=speeds(1.0, 3.0), network=network)
    report = cluster.run(until=4.0)
    # worker 0 pulls 0-1, computes 1-2, pushes 2-3, pulls 3-4; worker 1 pulls 0-2, computes 2-5
    assert spent(report.workers[0]) == {"pulled": 2.0, "computed": 1.0, "pushed": 1.0}
    assert spent(report.workers[1])["pulled"] == 2.0


def test_a_message_under_way_takes_its_time_on_the_link_though_its_worker_crashes(
    backend: Any,
) -> None:
    network = Network(server_bandwidth=MB, parameter_bytes=2 * MB)
    failures = [Preemption(at=1.0, workers=[0])]
    cluster = new_cluster(2, backend, compute=Constant(9.0), network=network, failures=failures)
    report = cluster.run(until=5.0)
    assert report.workers[1].secs_pulled == 2.0 + 2.0
    assert report.bytes_moved == 2 * MB  # what arrived


def test_a_cut_link_holds_messages_of_a_network_back(backend: Any) -> None:
    network = Network(0.25, MB, parameter_bytes=MB)
    cluster = new_cluster(1, backend, compute=Constant(1.0), network=network,
                          failures=[Partition(1.0, 2.0)])  # fmt: skip
    # the request arrives at 0.25, the reply at the end of the cut
    assert cluster.run(updates=1).secs == 3.0 + 1.0 + 1.25


def test_a_push_goes_to_all_servers_and_takes_the_slowest(backend: Any) -> None:
    cluster = new_cluster(1, backend, compute=Constant(1.0), num_servers=3,
                          service=speeds(0.5, 2.0, 0.25))  # fmt: skip
    report = cluster.run(updates=4)
    assert report.secs == 4 * 3.0
    assert [each.busy_share for each in report.servers] == [2 / 12, 8 / 12, 1 / 12]
    assert [each.requests for each in report.servers] == [4, 4, 4]
    assert [each.server for each in report.servers] == [0, 1, 2]


def test_servers_share_the_bytes_of_a_message(backend: Any) -> None:
    def secs(num_servers: int) -> float:
        network = Network(0.5, 4 * MB, MB, parameter_bytes=2 * MB)
        cluster = new_cluster(2, backend, compute=Constant(1.0), network=network,
                              num_servers=num_servers, protocol=Synchronous())  # fmt: skip
        return cluster.run(updates=1).secs

    # the second download, both uploads; from 4 servers on, the links of the workers decide
    assert [secs(each) for each in (1, 2, 4, 8, 16)] == [
        2.5 + 3 * 2.0, 2.5 + 3 * 1.0, 2.5 + 3 * 0.5, 2.5 + 2 * 0.5, 2.5 + 2 * 0.5
    ]  # fmt: skip


def test_the_latency_of_several_servers_is_their_largest() -> None:
    cluster = new_cluster(
        1, compute=Constant(0.0), network=Network(Exponential(1.0)), num_servers=4,
        keep_timeline=True,
    )  # fmt: skip
    cluster.run(updates=4_000)
    # H_4 for the request, for the reply, and for the push
    check_mean(secs_per_update(cluster), 3 * (1 + 1 / 2 + 1 / 3 + 1 / 4))


def test_the_queue_of_a_server_is_that_of_a_closed_network() -> None:
    """Two workers, exponential compute and service of one mean: machine repair."""
    cluster = new_cluster(2, compute=Exponential(1.0), service=Exponential(1.0))
    report = cluster.run(updates=40_000)
    (server,) = report.servers
    # states 0, 1, 2 at the server: rates 2, 1 up and 1, 1 down: 1/5, 2/5, 2/5
    assert server.busy_share == pytest.approx(4 / 5, rel=0.01)
    assert server.mean_queue == pytest.approx(2 / 5, rel=0.02)
    assert report.updates_per_second == pytest.approx(4 / 5, rel=0.01)


def test_what_is_to_come_does_not_count_as_use(backend: Any) -> None:
    cluster = new_cluster(3, backend, compute=Constant(1.0), service=Constant(4.0))
    (server,) = cluster.run(until=3.0).servers
    assert (server.secs_busy, server.secs_queued) == (2.0, 4.0)
    assert (server.busy_share, server.mean_queue) == (2 / 3, 4 / 3)


def test_what_arrives_after_the_last_update_is_no_use_of_the_server(backend: Any) -> None:
    cluster = new_cluster(2, backend, compute=Constant(1.0), push=speeds(0.5, 10.0),
                          service=Constant(1.0))  # fmt: skip
    report = cluster.run(updates=1)
    assert (report.secs, cluster.simulation.now) == (2.5, 11.0)
    (server,) = report.servers
    assert (server.requests, server.secs_busy, server.secs_queued) == (1, 1.0, 0.0)


def test_bytes_that_arrive_after_the_last_update_do_not_count(backend: Any) -> None:
    network = Network(speeds(0.25, 10.0), parameter_bytes=100)
    cluster = new_cluster(2, backend, compute=Constant(1.0), network=network)
    report = cluster.run(updates=1)
    assert (report.secs, report.bytes_moved) == (1.75, 200)


def test_all_backends_agree_on_a_network_with_failures() -> None:
    reports = []
    for backend in BACKENDS:
        cluster = new_cluster(
            5, backend, compute=Exponential(1.0), protocol=Asynchronous(), num_servers=2,
            service=Exponential(0.1),
            network=Network(Uniform(0.0, 0.25), [1e3, 1e3, 2e3, 3e3, 1e9], 4e3,
                            parameter_bytes=500, gradient_bytes=100),
            failures=[Crashes(Exponential(8.0), Exponential(1.0))],
        )  # fmt: skip
        reports.append(cluster.run(bare, updates=200))
    check_report(reports[0])
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency": -1.0}, "latency is -1.0; give seconds, >= 0"),
        ({"bandwidth": 0}, "bandwidth is 0; give bytes per second, > 0, or None"),
        ({"bandwidth": [1.0, -1.0]}, r"bandwidth\[1\] is -1.0; give bytes per second"),
        ({"server_bandwidth": math.inf}, "server_bandwidth is inf; give bytes per second"),
        ({"parameter_bytes": -1}, "parameter_bytes is -1; give an integer >= 0"),
    ],
)
def test_wrong_links_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(**options)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="latency is 'fast'; give a delay"):
        Network(latency="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bandwidth is 'fast'; give bytes per second"):
        Network(bandwidth="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gradient_bytes is 0.5; give an integer >= 0"):
        Network(gradient_bytes=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"network is 1.0; give a network, as in network=Network"):
        new_cluster(2, network=1.0)


def test_a_network_that_does_not_fit_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth of the network has 2 values for 3 workers"):
        new_cluster(3, network=Network(bandwidth=[1.0, 2.0]))
    with pytest.raises(ValueError, match="there is no delay for worker 2"):
        new_cluster(3, network=Network(speeds(1.0, 2.0)))
    with pytest.raises(ValueError, match=r"got push=Constant\(secs=1.0\) and a network"):
        new_cluster(3, network=Network(), push=Constant(1.0))
