"""Links with latency and bandwidth, and servers that hold a part of the parameters each."""

from __future__ import annotations

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
    Uniform,
)

from .clusters import bare, check_report, new_cluster, speeds, spent
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


@pytest.mark.parametrize(
    ("network", "options", "end", "secs", "num_bytes"),
    [
        (  # as large as the parameters
            Network(bandwidth=288.0),
            {"parameters": {"w": np.zeros((4, 8)), "b": np.zeros(8, np.float32)}},
            {"updates": 3}, 9.0, 6 * 288,
        ),
        (  # pulls share the link of the server
            Network(server_bandwidth=MB, parameter_bytes=MB, gradient_bytes=0),
            {"num_workers": 4, "protocol": Synchronous()}, {"updates": 3}, 3 * (4 + 1), 12 * MB,
        ),
        (  # not with pushes: 0 pulls 0-1, computes 1-2, pushes 2-3, pulls 3-4; 1 pulls 0-2
            Network(server_bandwidth=MB, parameter_bytes=MB),
            {"num_workers": 2, "compute": speeds(1.0, 3.0)}, {"until": 4.0}, 4.0, 4 * MB,
        ),
        (  # the request arrives at 0.25, the reply at the end of the cut
            Network(0.25, MB, parameter_bytes=MB), {"failures": [Partition(1.0, 2.0)]},
            {"updates": 1}, 3.0 + 1.0 + 1.25, 2 * MB,
        ),
        (  # bytes that arrive after the last update do not count
            Network(speeds(0.25, 10.0), parameter_bytes=100), {"num_workers": 2},
            {"updates": 1}, 1.75, 200,
        ),
    ],
    ids=["parameters", "server", "directions", "cut", "end"],
)  # fmt: skip
def test_links_take_their_time_for_each_byte(
    network: Network, options: dict[str, Any], end: dict[str, Any], secs: float, num_bytes: int
) -> None:
    given: dict[str, Any] = {"num_workers": 1, "compute": Constant(1.0), **options}
    report = new_cluster(network=network, **given).run(**end)
    assert (report.secs, report.bytes_moved) == (secs, num_bytes)


def test_a_message_takes_as_long_as_the_slower_of_its_two_links() -> None:
    network = Network(0.0, [MB / 4, 4 * MB, 4 * MB], MB, parameter_bytes=3 * MB)
    report = new_cluster(3, compute=Constant(100.0), network=network).run(until=50.0)
    # the server's link is free again after 3, 6 and 9 s
    assert [each.secs_pulled for each in report.workers] == [12.0, 6.0, 9.0]


def test_a_push_goes_to_all_servers_and_takes_the_slowest() -> None:
    service = speeds(0.5, 2.0, 0.25)
    report = new_cluster(1, compute=Constant(1.0), num_servers=3, service=service).run(updates=4)
    assert report.secs == 4 * 3.0
    assert [(each.server, each.requests, each.busy_share) for each in report.servers] == [
        (0, 4, 2 / 12), (1, 4, 8 / 12), (2, 4, 1 / 12),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_servers", "secs"),
    # the second download, both uploads; from 4 servers on, the links of the workers decide
    [(1, 2.5 + 3 * 2.0), (4, 2.5 + 3 * 0.5), (8, 2.5 + 2 * 0.5)],
)
def test_servers_share_the_bytes_of_a_message(num_servers: int, secs: float) -> None:
    network = Network(0.5, 4 * MB, MB, parameter_bytes=2 * MB)
    cluster = new_cluster(2, compute=Constant(1.0), network=network,
                          num_servers=num_servers, protocol=Synchronous())  # fmt: skip
    assert cluster.run(updates=1).secs == secs


@pytest.mark.parametrize(
    ("num_workers", "options", "end", "requests", "secs_busy", "secs_queued"),
    [
        (3, {"service": Constant(4.0)}, {"until": 3.0}, 3, 2.0, 4.0),
        (  # the other arrives after the last update
            2, {"service": Constant(1.0), "push": speeds(0.5, 10.0)}, {"updates": 1}, 1, 1.0, 0.0,
        ),
    ],
)  # fmt: skip
def test_what_is_to_come_does_not_count_as_use_of_a_server(
    num_workers: int,
    options: dict[str, Any],
    end: dict[str, Any],
    requests: int,
    secs_busy: float,
    secs_queued: float,
) -> None:
    (server,) = new_cluster(num_workers, compute=Constant(1.0), **options).run(**end).servers
    found = (server.requests, server.secs_busy, server.secs_queued)
    assert found == (requests, secs_busy, secs_queued)


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
    ("make", "message"),
    [
        (lambda: Network(bandwidth=[1.0, -1.0]), r"bandwidth\[1\] is -1.0; give bytes per second"),
        (lambda: Network(parameter_bytes=-1), "parameter_bytes is -1; give an integer >= 0"),
        (lambda: new_cluster(3, network=Network(bandwidth=[1.0, 2.0])), "2 values for 3 workers"),
        (lambda: new_cluster(3, network=Network(), push=Constant(1.0)), "got push=.* and a netw"),
    ],
)
def test_wrong_links_are_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
