"""What takes a simulated worker how long: delays, messages, servers, waits, failures and ends."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from asynchooks import StopTraining
from asynchooks.protocols import Asynchronous, KSync, StaleSynchronous, Synchronous
from asynchooks.simulation import (
    Constant,
    Crashes,
    Network,
    Partition,
    PerWorker,
    Preemption,
    Slowdown,
    Worker,
)

from .clusters import check_report, new_cluster, speeds, spent, with_session

MB = 1_000_000
TWO = np.float64(2.0)
SLOW_ONE = speeds(1.0, 3.0)
"""The second worker takes three times as long."""
STANDS_STILL = Crashes(Constant(2.0), Constant(10.0), loses_work=False, workers=[0])
AWAY = [Preemption(0.5, secs=10.0, workers=[2])]


def fact(name: str, secs: Any, *workers: dict[str, float], **given: Any) -> Any:
    """A training takes so long, of which the first workers spend so much on what.

    `given` are options of a cluster, whose computations take 1 s by default, and of its run; and
    further figures of its report, and the staleness of the first worker's gradients.
    """
    return pytest.param(secs, workers, {"compute": Constant(1.0), "num": 1, **given}, id=name)


async def to_the_end(worker: Worker) -> None:
    """A program that ends of itself, also where it is cancelled."""
    try:
        await worker.compute(10.0 + 10.0 * worker.index)
    finally:
        raise StopTraining("it had finished anyway")


def used(server: int, requests: int, busy: float, queued: float, secs: float) -> dict[str, Any]:
    return {
        "server": server, "requests": requests, "secs_busy": busy, "secs_queued": queued,
        "busy_share": busy / secs, "mean_queue": queued / secs,
    }  # fmt: skip


def repaired(mtbf: float) -> Crashes:
    """Down for 100 s; the work goes on where it was."""
    return Crashes(Constant(mtbf), Constant(100.0), loses_work=False)


def compute_slowly(secs: float, last: float, *failures: Any, name: str) -> Any:
    return fact(name, pytest.approx(last, rel=1e-12), compute=Constant(secs), failures=failures,
                updates=1)  # fmt: skip


def waits_for_one_away(secs: float, protocol: Any) -> Any:
    return fact(f"{protocol} and one that crashed", secs, protocol=protocol, num=3, failures=AWAY,
                updates=5)  # fmt: skip


def shared_by(num_servers: int, secs: float) -> Any:
    return fact(
        f"{num_servers} servers share the bytes of a message", secs, num_servers=num_servers,
        network=Network(0.5, 4 * MB, MB, parameter_bytes=2 * MB), num=2, protocol=Synchronous(),
        updates=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("secs", "workers", "given"),
    [
        fact(
            "the last of the updates ends training", 3.75, {"computed": 3.0, "pushed": 0.75},
            {"lost": 3.75}, num=2, compute=speeds(1.0, 10.0), push=Constant(0.25), updates=3,
        ),
        fact(
            "one that leaves makes the last update", 5.0, {"computed": 1.0, "waited": 4.0},
            {"lost": 5.0}, num=2, protocol=Synchronous(), compute=speeds(1.0, 1e6), updates=1,
            failures=[Preemption(5.0, workers=[1])],
        ),
        fact(
            "a time ends training", 2.5, {"computed": 2.0, "lost": 0.5},
            {"computed": 2.0, "lost": 0.5}, num=2, compute=speeds(1.0, 2.0), until=2.5,
            updates_per_second=3 / 2.5,
        ),
        fact(
            "a crash loses the work under way", 5.0, {"computed": 4.0, "lost": 0.5, "down": 0.5},
            failures=[Crashes(mtbf=Constant(2.5), repair=Constant(0.5))], updates=4,
        ),
        fact(
            "a pause loses none", 4.5, {"computed": 4.0, "down": 0.5}, updates=4,
            failures=[Crashes(mtbf=Constant(2.5), repair=Constant(0.5), loses_work=False)],
        ),
        # pulls 0-1 | down | pulls 2-4, computes 4-5, pushes 5-6 | down | 7-9, 9-10, 10-14
        fact(
            "crashes lose messages", 14.0,
            {"pulled": 5.0, "computed": 2.0, "pushed": 5.0, "down": 2.0}, pull=Constant(2.0),
            push=Constant(4.0), failures=[Preemption(1.0, 1.0), Preemption(6.0, 1.0)], updates=1,
        ),
        # what was computed by 2 met the cut, and was lost with the crash
        fact(
            "failures that overlap", 10.0, {"computed": 5.0, "down": 5.0}, updates=4,
            failures=[Preemption(TWO, 3.0), Preemption(3.0, 4.0), Slowdown(TWO, 3.0, TWO),
                      Partition(TWO, 3.0)],
        ),
        # pulls 0-2, computes 2-5, sent within the cut; pulls 6.5-8.5, 8.5-11.5, 11.5-12.5
        fact(
            "messages wait for the end of a cut", 12.5,
            {"pulled": 4.0, "computed": 6.0, "pushed": 2.5}, compute=Constant(3.0),
            pull=Constant(2.0), push=Constant(1.0), failures=[Partition(4.5, 2.0)], updates=2,
        ),
        # it waits from 1, stands still from 2; worker 1 makes an update at 3 and at 6
        *(fact(
            "one that stands still while it waits pulls after its repair", 13.0,
            {"computed": 2.0, "waited": 1.0, "down": 10.0}, num=2, compute=SLOW_ONE, updates=4,
            protocol=StaleSynchronous(0), failures=[STANDS_STILL], program=program,
            first={0: 2},
        ) for program in (None, with_session)),
        fact(
            "all but one leave for good", 10.0, num=3, protocol=Synchronous(), updates=10,
            failures=[Preemption(1.0, workers=[1]), Preemption(2.0, workers=[2])],
        ),
        fact(
            "training ends with the last that leaves", 4.5, num=2, protocol=Synchronous(),
            failures=[Preemption(4.5, workers=[0]), Preemption(1.0, workers=[1])], updates=10,
            updates_per_second=4 / 4.5,
        ),
        waits_for_one_away(3.0, Asynchronous()), waits_for_one_away(5.0, KSync(2)),
        waits_for_one_away(15.5, KSync(3)), waits_for_one_away(15.5, Synchronous()),
        # three steps ahead, two updates each time
        waits_for_one_away(3.0, StaleSynchronous(2)),
        waits_for_one_away(11.5, StaleSynchronous(1)),
        fact(
            "programs that end end training", 20.0, {"computed": 10.0, "idle": 10.0}, num=2,
            program=to_the_end, updates_per_second=0.0,
        ),
        fact(
            "one that has finished does not crash", 20.0, {"computed": 10.0, "idle": 10.0}, num=2,
            program=to_the_end, failures=[Preemption(15.0, 3.0, workers=[0])],
        ),
        fact(
            "one that finishes as it is stopped does not begin again", 20.0,
            {"lost": 2.0, "idle": 18.0}, num=2, program=to_the_end,
            failures=[Preemption(2.0, 3.0, workers=[0])],
        ),
        # 1 s of work at once, 0.5 in [1, 2), 2/6 in [2, 4), 0.5 in [4, 5), the rest at once
        compute_slowly(3.0, 8.0 - (2.0 + 2 / 6), Slowdown(1.0, 4.0, 2.0), Slowdown(2.0, 2.0, 3.0),
                       name="slowdowns that overlap"),
        compute_slowly(3.0, 103.0, Slowdown(5.0, 10.0, 2.0), repaired(2.0),
                       name="a repair before a slowdown"),
        # one second of work until 1, one until 5; the other two after the repair, at full speed
        compute_slowly(4.0, 107.0, Slowdown(1.0, 10.0, 4.0), repaired(5.0),
                       name="a repair within a slowdown"),
        compute_slowly(3.0, 12.0, Slowdown(1.0, 9.0, math.inf), name="a pause at a time"),
        fact(
            "a message takes its bytes and then the latency", 2 * (1.25 + 1.0 + 0.625),
            {"pulled": 2 * (0.25 + 0.5 + 0.25), "computed": 2.0, "pushed": 2 * (0.25 + 0.25),
             "waited": 2 * 0.375},
            {"pulled": 2 * (0.5 + 0.25 + 0.5), "computed": 2.0, "pushed": 2 * (0.125 + 0.5)},
            network=Network(PerWorker([Constant(0.25), Constant(0.5)]), [MB, 2 * MB],
                            parameter_bytes=MB // 2, gradient_bytes=MB // 4),
            num=2, protocol=Synchronous(), updates=2, bytes_moved=2 * 2 * (MB // 2 + MB // 4),
        ),
        fact(
            "gradients are as large as the parameters", 9.0, network=Network(bandwidth=288.0),
            parameters={"w": np.zeros((4, 8)), "b": np.zeros(8, np.float32)}, updates=3,
            bytes_moved=6 * 288,
        ),
        fact(
            "pulls share the link of the server", 3 * (4 + 1), bytes_moved=12 * MB, num=4,
            network=Network(server_bandwidth=MB, parameter_bytes=MB, gradient_bytes=0),
            protocol=Synchronous(), updates=3,
        ),
        # 0 pulls 0-1, computes 1-2, pushes 2-3, pulls 3-4; 1 pulls 0-2
        fact(
            "pulls share no link with pushes", 4.0, bytes_moved=4 * MB, num=2, compute=SLOW_ONE,
            network=Network(server_bandwidth=MB, parameter_bytes=MB), until=4.0,
        ),
        # the request arrives at 0.25, the reply at the end of the cut
        fact(
            "a reply waits for the end of a cut", 3.0 + 1.0 + 1.25, bytes_moved=2 * MB, updates=1,
            network=Network(TWO / 8, TWO * MB / 2, parameter_bytes=MB), compute=Constant(TWO / 2),
            failures=[Partition(1.0, TWO)],
        ),
        fact(
            "bytes that arrive after the last update do not count", 1.75, bytes_moved=200, num=2,
            network=Network(speeds(0.25, 10.0), parameter_bytes=100), updates=1,
        ),
        # the server's link is free again after 3, 6 and 9 s
        fact(
            "a message takes as long as the slower of its links", 50.0,
            {"pulled": 12.0, "lost": 38.0}, {"pulled": 6.0, "lost": 44.0},
            {"pulled": 9.0, "lost": 41.0}, num=3, compute=Constant(100.0), until=50.0,
            network=Network(0.0, [MB / 4, 4 * MB, 4 * MB], MB, parameter_bytes=3 * MB),
        ),
        # the second download, both uploads; from 4 servers on, the links of the workers decide
        shared_by(1, 2.5 + 3 * 2.0), shared_by(4, 2.5 + 3 * 0.5), shared_by(8, 2.5 + 2 * 0.5),
        fact(
            "a push goes to all servers and takes the slowest", 4 * 3.0, num_servers=3,
            service=speeds(0.5, 2.0, 0.25), updates=4,
            servers=[used(0, 4, 2.0, 0.0, 12), used(1, 4, 8.0, 0.0, 12), used(2, 4, 1.0, 0.0, 12)],
        ),
        fact(
            "service that is to come does not count as use", 3.0, num=3, service=Constant(4.0),
            until=3.0, servers=[used(0, 3, 2.0, 4.0, 3)],
        ),
        fact(  # the other arrives after the last update
            "nor does a request that is to come", 2.5, num=2, service=Constant(1.0), updates=1,
            push=speeds(0.5, 10.0), servers=[used(0, 1, 1.0, 0.0, 2.5)],
        ),
    ],
)  # fmt: skip
def test_trainings_take(secs: float, workers: Any, given: dict[str, Any]) -> None:
    figures = {
        name: given.pop(name)
        for name in ("updates_per_second", "first", "bytes_moved", "servers")
        if name in given
    }
    run = {name: given.pop(name) for name in ("program", "updates", "until") if name in given}
    report = new_cluster(given.pop("num"), **given).run(**run)
    assert report.secs == secs
    assert [spent(each) for each in report.workers[: len(workers)]] == [*workers]
    found = asdict(report) | {
        "updates_per_second": report.updates_per_second, "first": report.workers[0].staleness
    }  # fmt: skip
    for name, figure in figures.items():
        assert found[name] == figure
    check_report(report)
