"""Processes of a cluster that die, fall silent, lose their network and come again."""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from ..support.proxy import Proxy
from .processes import RunningCluster, TaskLauncher, TaskProcess, free_cluster, read_step
from .roles import NOTICED_SECS, Cluster

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


on_trio = pytest.mark.parametrize("cluster", ["trio"], indirect=True)


@pytest.fixture
def cluster(launcher: TaskLauncher, request: pytest.FixtureRequest) -> RunningCluster:
    """A cluster with one ps, a chief and two workers."""
    backend = getattr(request, "param", "asyncio")
    return RunningCluster(launcher, free_cluster(ps=1, chief=1, worker=2), backend)


def pair_of(cluster: RunningCluster, last_step: int, directory: Path) -> list[TaskProcess]:
    """The chief, which saves every 20 steps, and a worker process, with two workers each."""
    options = {"workers": 2, "pace": 0.02, "directory": str(directory)}
    return [cluster.trains(name, last_step, **options) for name in ("chief:0", "worker:0")]


def check_end(cluster: RunningCluster, processes: list[TaskProcess], last_step: int) -> None:
    """All have trained up to the last step exactly, and have ended cleanly."""
    for each in processes:
        assert each.done().value == last_step
        assert each.ended() == 0
    assert read_step(cluster.addresses) == last_step


def test_after_a_ps_was_killed_all_go_on_from_the_checkpoint(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    ps = cluster.ps()
    processes = pair_of(cluster, 250, tmp_path)
    for each in processes:
        each.expect_step(70)
    epochs = [each.epoch for each in processes]
    ps.kill()
    saved = max(int(each.stem.split("-")[-1]) for each in tmp_path.glob("*.index"))
    cluster.ps()
    check_end(cluster, processes, 250)
    for each, before in zip(processes, epochs, strict=True):
        assert each.done().epoch > before
        assert min(each.steps(each.epoch)) > saved, "the last checkpoint was restored"
    assert len(list(tmp_path.glob("*-250.index"))) == 1


def test_a_chief_that_comes_again_restores_and_all_go_on(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    cluster.ps()
    chief = cluster.trains("chief:0", 400, workers=2, pace=0.02, directory=str(tmp_path))
    worker = cluster.trains("worker:0", 400, pace=0.05)  # too slow to end without a chief
    for each in (chief, worker):
        each.expect_step(50)
    chief.kill()
    epoch = worker.epoch
    chief = cluster.trains("chief:0", 400, workers=4, directory=str(tmp_path))
    check_end(cluster, [chief, worker], 400)
    assert worker.done().epoch == epoch + 1
    assert min(worker.steps(epoch + 1)) >= 40, "a checkpoint was restored"


@on_trio
def test_what_the_dead_had_reserved_is_left_to_the_others_and_a_worker_joins_again(
    cluster: RunningCluster,
) -> None:
    """Also where the chief is among them."""
    cluster.ps()
    survivor = cluster.trains("worker:1", 2000, workers=4, pace=0.01)
    chief = cluster.trains("chief:0", 2000, workers=2, pace=0.02)
    victim = cluster.trains("worker:0", 2000, workers=8, pace=0.02)
    for each in (survivor, victim):
        each.expect_step(50)
    victim.kill()
    again = cluster.trains("worker:0", 2000, workers=8, pace=0.02)
    assert again.expect_step(1) > 50, "it has joined again"
    epoch = survivor.epoch
    for each in (chief, again):
        each.kill()
    check_end(cluster, [survivor], 2000)
    assert survivor.done().epoch == epoch


def test_what_a_stopped_worker_has_under_way_does_not_come_on_top(cluster: RunningCluster) -> None:
    cluster.ps()
    chief = cluster.trains("chief:0", 600, workers=2, pace=0.01)  # 200 steps a second
    victim = cluster.trains("worker:0", 600, workers=8)
    victim.expect_step(50)
    victim.stop()
    chief.expect("log worker:0 is silent, and keeps the")
    victim.go_on()
    check_end(cluster, [chief, victim], 600)


@on_trio
def test_while_the_ps_is_silent_waits_can_be_cancelled_and_raise_and_training_goes_on_afterwards(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    ps = cluster.ps()
    chief = cluster.trains("chief:0", 150, pace=0.02, fails_on_loss=True, directory=str(tmp_path))
    worker = cluster.trains("worker:0", 150, workers=2, pace=0.02)
    for each in (chief, worker):
        each.expect("source LIVE")
        each.expect_step(20)
    ps.stop()
    assert "no news of other processes arrives" in chief.expect("lost: ", NOTICED_SECS)
    assert chief.expect("cancelled") == "cancelled True"
    assert "has not answered for" in chief.expect("log The source of global_step is lost")
    for each in (chief, worker):
        each.expect("source LOST", NOTICED_SECS)
        assert each.is_running
    num_before = len(chief.lines)
    ps.go_on()
    chief.expect("source LIVE", after=num_before)
    chief.expect("log The source of global_step is live", after=num_before)
    check_end(cluster, [chief, worker], 150)


NAMES = ["chief:0", "worker:0", "worker:1"]

Round = list[dict[str, Any]]
"""What each process does in one training; those that are left out take no part."""


def check(cluster: RunningCluster, rounds: list[Round]) -> None:
    """Train on one cluster again and again; each process stops where it should."""
    cluster.ps()
    of_each = zip_longest(*rounds)  # what each process does in each round
    processes = [
        cluster.start("several", name, rounds=each)
        for name, each in zip(NAMES, of_each, strict=False)
    ]
    for number, wanted in enumerate(rounds):
        done = [each.done(after_dones=number) for each in processes[: len(wanted)]]
        limit, stride = wanted[0]["last_step"], wanted[0].get("stride", 1)
        step = read_step(cluster.addresses, f"round{number}")
        assert limit <= step < limit + stride, (wanted, done)
        assert {each.value for each in done} == {step}, (wanted, done)
        assert sum(each.runs for each in done) * stride == step, (wanted, done)


def test_training_stops_exactly_at_its_limit_in_all_processes(cluster: RunningCluster) -> None:
    slow = {"pace": 0.03}
    waits = {"workers": 4, "waits": [58] * 4}
    check(
        cluster,
        [
            [{"last_step": 1, "workers": 8}, {"last_step": 1}],
            [{"last_step": 60, "workers": 3}, {"last_step": 60, "workers": 8}],
            [{"last_step": 50, "stride": 3, "workers": 2}, {"last_step": 50, "stride": 3} | slow],
            [{"last_step": 60, **slow}, {"last_step": 60, **waits}],
        ],
    )


@on_trio
def test_workers_start_gradually_across_processes_and_long_before_their_chief(
    cluster: RunningCluster,
) -> None:
    cluster.ps()
    waits = {"worker:0": [40, 10, 70], "worker:1": [60, 20, 50]}
    processes = [
        cluster.trains(name, 120, workers=3, waits=each, pace=0.02) for name, each in waits.items()
    ]
    for each in processes:
        each.expect("log Waiting for model to be ready")
    chief = cluster.trains("chief:0", 120, workers=2, waits=[0, 30], pace=0.02)
    assert [each.done().value for each in (chief, *processes)] == [120] * 3
    assert chief.started[0] == 0
    assert chief.started[1] >= 30
    for process, steps in zip(processes, waits.values(), strict=True):
        assert all(process.started[worker] >= step for worker, step in enumerate(steps))
        assert list(process.started) == sorted(range(3), key=steps.__getitem__)
    assert [each.ended() for each in (chief, *processes)] == [0, 0, 0]


class Divided:
    """A cluster in which worker 0 and the ps know each other through proxies alone.

    Each is given another cluster, so that the worker must not compare its own with the ps's.
    """

    def __init__(self, launcher: TaskLauncher) -> None:
        real = free_cluster(ps=1, chief=1, worker=1)
        self.to_ps, self.to_worker = Proxy(real["ps"][0]), Proxy(real["worker"][0])
        self.cluster = RunningCluster(launcher, real, "asyncio")
        self.of_worker: Cluster = {**real, "ps": [self.to_ps.address]}
        self.proxies = [self.to_ps, self.to_worker]
        self.cluster.ps({**real, "worker": [self.to_worker.address]})


@pytest.fixture
def divided(launcher: TaskLauncher) -> Iterator[Divided]:
    divided = Divided(launcher)
    yield divided
    for each in divided.proxies:
        each.close()


def test_a_worker_that_was_cut_off_trains_again_and_others_go_on(divided: Divided) -> None:
    cluster = divided.cluster
    # slow, so that the other one has something to do in the end
    chief = cluster.trains("chief:0", 800, pace=0.05, is_checked=False)
    options = {"workers": 4, "pace": 0.02, "is_checked": False}
    worker = cluster.start("working", "worker:0", divided.of_worker, last_step=800, **options)
    chief.expect_step(40)
    worker.expect_step(40)
    num_before = len(worker.lines)
    for each in divided.proxies:
        each.cut()
    worker.expect("source LOST", NOTICED_SECS, after=num_before)
    chief.expect_step(chief.steps(chief.epoch)[-1] + 30)
    num_before = len(worker.lines)
    for each in divided.proxies:
        each.heal()
    worker.expect("source LIVE", after=num_before)
    worker.expect("step ", after=num_before)
    assert (chief.done().value, worker.done().value) == (800, 800)
    assert (chief.ended(), worker.ended()) == (0, 0)
    assert read_step(cluster.addresses) == 800


def test_while_its_workers_wait_nothing_leaves_a_process(divided: Divided) -> None:
    cluster, workers = divided.cluster, 8
    chief = cluster.trains("chief:0", 800, pace=0.02, is_checked=False)
    options = {"workers": workers, "waits": [700] * workers, "is_checked": False, "heartbeat": 60}
    waiting = cluster.start("working", "worker:0", divided.of_worker, last_step=800, **options)
    step = chief.expect_step(1)
    chief.stop()
    waiting.expect(f"opened {workers - 1}")
    waiting.expect("source LIVE")
    chief.go_on()
    # On a busy machine some seconds may lie between two of the first requests of a membership; what
    # a wait sent would leave again and again.
    num_sent: list[int] = []
    while len(num_sent) < 3 and 0 not in num_sent:
        before = divided.to_ps.num_bytes
        step = chief.expect_step(step + 150, after=len(chief.lines))
        num_sent.append(divided.to_ps.num_bytes - before)
    assert num_sent[-1] == 0, f"bytes that left while 150 steps were made, each time: {num_sent}"
    assert len(waiting.started) == 0
    before = divided.to_ps.num_bytes
    waiting.expect(f"started {workers - 1}")
    assert min(waiting.started.values()) >= 700
    assert divided.to_ps.num_bytes > before
    assert (chief.done().value, waiting.done().value) == (800, 800)
