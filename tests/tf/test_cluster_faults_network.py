"""The network between one process of a cluster and its ps: cut, healed, and counted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .cluster_processes import Cluster, TaskLauncher, free_cluster
from .proxy import Proxy
from .training_processes import Cast, read_step
from .training_roles import NOTICED_SECS

pytest.importorskip("tensorflow")
# most of it is waiting for TensorFlow, on a busy machine
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]


class Divided:
    """A cluster in which worker 0 and the ps know each other through proxies alone.

    Each is told another cluster, so that the worker must not compare its own with the ps's.
    """

    def __init__(self, launcher: TaskLauncher) -> None:
        real = free_cluster(ps=1, chief=1, worker=1)
        self.to_ps, self.to_worker = Proxy(real["ps"][0]), Proxy(real["worker"][0])
        self.cast = Cast(launcher, real, "asyncio")
        self.of_worker: Cluster = {**real, "ps": [self.to_ps.address]}
        self.of_ps: Cluster = {**real, "worker": [self.to_worker.address]}
        self.cast.ps(self.of_ps)

    def proxies(self) -> list[Proxy]:
        return [self.to_ps, self.to_worker]

    def close(self) -> None:
        self.cast.end()
        for each in self.proxies():
            each.close()


@pytest.fixture
def divided(training_launcher: TaskLauncher) -> Iterator[Divided]:
    divided = Divided(training_launcher)
    try:
        yield divided
    finally:
        divided.close()


@pytest.mark.parametrize("hangs_up", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_worker_that_was_cut_off_trains_again_and_others_go_on(
    hangs_up: bool, divided: Divided
) -> None:
    cast = divided.cast
    # slow, so that the other one has something to do in the end
    chief = cast.trains("chief:0", 800, pace=0.05, is_checked=False)
    options = {"workers": 4, "pace": 0.02, "is_checked": False}
    worker = cast.start("working", "worker:0", divided.of_worker, last_step=800, **options)
    chief.hear_step(40)
    worker.hear_step(40)
    num_heard = len(worker.lines)
    for each in divided.proxies():
        each.cut()
        if hangs_up:
            each.hang_up()
    worker.hear("source LOST", NOTICED_SECS, after=num_heard)
    chief.hear_step(chief.steps(chief.epoch)[-1] + 30)
    num_heard = len(worker.lines)
    for each in divided.proxies():
        each.heal()
    worker.hear("source LIVE", after=num_heard)
    worker.hear("step ", after=num_heard)
    assert (chief.done().value, worker.done().value) == (800, 800)
    assert (chief.ended(), worker.ended()) == (0, 0)
    assert read_step({"ps": cast.cluster["ps"]}) == 800


def settled(proxy: Proxy) -> int:
    """How many bytes have been passed on, once a second has gone by without one."""
    before = -1
    while before != proxy.num_bytes:
        before = proxy.num_bytes
        time.sleep(1)
    return before


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_while_its_workers_wait_nothing_leaves_a_process(workers: int, divided: Divided) -> None:
    cast = divided.cast
    chief = cast.trains("chief:0", 400, pace=0.02, is_checked=False)
    options = {"workers": workers, "waits": [300] * workers, "is_checked": False, "heartbeat": 60}
    waiting = cast.start("working", "worker:0", divided.of_worker, last_step=400, **options)
    chief.hear_step(1)
    chief.stop()
    waiting.hear(f"opened {workers - 1}")
    waiting.hear("source LIVE")
    before = settled(divided.to_ps)
    chief.go_on()
    chief.hear_step(150, after=len(chief.lines))
    assert divided.to_ps.num_bytes == before
    assert len(waiting.started) == 0
    waiting.hear(f"started {workers - 1}")
    assert min(waiting.started.values()) >= 300
    assert divided.to_ps.num_bytes > before
    assert (chief.done().value, waiting.done().value) == (400, 400)
