"""Processes of a cluster that die, fall silent and come again, while the others train."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster_processes import TaskLauncher, free_cluster
from .training_processes import Cast, Heard, read_step
from .training_roles import BEAT, NOTICED_SECS

pytest.importorskip("tensorflow")
# most of it is waiting for TensorFlow, on a busy machine
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

on_trio = pytest.mark.parametrize("cast", ["trio"], indirect=True)


@pytest.fixture
def cast(training_launcher: TaskLauncher, request: pytest.FixtureRequest) -> Iterator[Cast]:
    """A cluster with one ps, a chief and two workers; its processes end with the test."""
    backend = getattr(request, "param", "asyncio")
    cast = Cast(training_launcher, free_cluster(ps=1, chief=1, worker=2), backend)
    try:
        yield cast
    finally:
        cast.end()


def pair_of(cast: Cast, last_step: int, directory: Path) -> list[Heard]:
    """The chief, which saves every 20 steps, and a worker process, with two workers each."""
    options = {"workers": 2, "pace": 0.02, "directory": str(directory)}
    return [cast.trains(name, last_step, **options) for name in ("chief:0", "worker:0")]


def check_end(cast: Cast, processes: list[Heard], last_step: int) -> None:
    """All have trained up to the last step exactly, and have ended cleanly."""
    for each in processes:
        assert each.done().value == last_step
        assert each.ended() == 0
    assert read_step(cast.cluster) == last_step


def test_after_a_ps_was_killed_all_go_on_from_the_checkpoint(cast: Cast, tmp_path: Path) -> None:
    ps = cast.ps()
    processes = pair_of(cast, 400, tmp_path)
    for each in processes:
        each.hear_step(70)
    epochs = [each.epoch for each in processes]
    ps.kill()
    saved = max(int(each.stem.split("-")[-1]) for each in tmp_path.glob("*.index"))
    cast.ps()
    check_end(cast, processes, 400)
    for each, before in zip(processes, epochs, strict=True):
        assert each.done().epoch > before
        assert min(each.steps(each.epoch)) > saved, "the last checkpoint was restored"
    assert len(list(tmp_path.glob("*-400.index"))) == 1


def stop_for(secs: float, cast: Cast, directory: Path) -> None:
    ps = cast.ps()
    processes = pair_of(cast, 300, directory)
    for each in processes:
        each.hear_step(60)
    ps.stop()
    for each in processes:
        each.hear("source LOST", NOTICED_SECS)
    time.sleep(secs)  # what is tested is that nothing ends meanwhile
    assert not any(line.startswith("done") for each in processes for line in each.lines)
    ps.go_on()
    check_end(cast, processes, 300)


def test_after_a_ps_was_stopped_for_three_seconds_training_goes_on(
    cast: Cast, tmp_path: Path
) -> None:
    stop_for(3, cast, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cast", ["asyncio", "trio"], indirect=True)
def test_after_a_ps_was_stopped_for_20_seconds_training_goes_on(cast: Cast, tmp_path: Path) -> None:
    stop_for(20, cast, tmp_path)


@on_trio
def test_without_their_chief_workers_train_on_to_the_limit(cast: Cast, tmp_path: Path) -> None:
    cast.ps()
    processes = chief, *workers = pair_of(cast, 200, tmp_path)
    for each in processes:
        each.hear_step(60)
    chief.kill()
    epochs = [each.epoch for each in workers]
    check_end(cast, workers, 200)
    assert [each.done().epoch for each in workers] == epochs


def test_a_chief_that_comes_again_restores_and_all_go_on(cast: Cast, tmp_path: Path) -> None:
    cast.ps()
    chief = cast.trains("chief:0", 700, workers=2, pace=0.02, directory=str(tmp_path))
    worker = cast.trains("worker:0", 700, pace=0.05)  # too slow to end without a chief
    for each in (chief, worker):
        each.hear_step(70)
    chief.kill()
    epoch = worker.epoch
    chief = cast.trains("chief:0", 700, workers=4, directory=str(tmp_path))
    check_end(cast, [chief, worker], 700)
    assert worker.done().epoch == epoch + 1
    assert min(worker.steps(epoch + 1)) >= 60, "a checkpoint was restored"


def test_a_worker_that_dies_with_tickets_leaves_them_to_the_others(cast: Cast) -> None:
    cast.ps()
    chief = cast.trains("chief:0", 1000, workers=2, pace=0.05)  # 40 steps a second
    victim = cast.trains("worker:0", 1000, workers=8)
    chief.hear("started 0")
    victim.hear_step(100)
    victim.kill()
    again = cast.trains("worker:0", 1000, workers=8)
    assert again.hear_step(1) > 100, "it has joined again"
    assert "are given to others" in again.hear("log worker:0 has restarted")
    again.hear_step(800)
    again.kill()
    begun = time.monotonic()
    assert chief.done().value == 1000
    assert time.monotonic() - begun < 200 / 40 + 2 * BEAT + 5
    check_end(cast, [chief], 1000)


def test_what_a_stopped_worker_has_under_way_does_not_come_on_top(cast: Cast) -> None:
    cast.ps()
    chief = cast.trains("chief:0", 1000, workers=2, pace=0.01)  # 200 steps a second
    victim = cast.trains("worker:0", 1000, workers=8)
    victim.hear_step(100)
    victim.stop()
    assert "it keeps the" in chief.hear("log worker:0 has sent no heartbeat")
    victim.go_on()
    check_end(cast, [chief, victim], 1000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_workers_that_die_at_any_moment_never_keep_the_end(training_launcher: TaskLauncher) -> None:
    random_ = random.Random(7)
    late = []
    for cycle in range(20):
        cast = Cast(training_launcher, free_cluster(ps=1, chief=1, worker=2), "asyncio")
        try:
            cast.ps()
            chief = cast.trains("chief:0", 300, workers=2)
            victims = [cast.trains(f"worker:{each}", 300, workers=4) for each in range(2)]
            for each in victims:
                each.hear_step(1)
                time.sleep(random_.uniform(0, 0.4))
                each.kill()
            begun = time.monotonic()
            assert chief.done().value == 300, cycle
            late.append(time.monotonic() - begun)
            check_end(cast, [chief], 300)
        finally:
            cast.end()
    print(f"seconds from the last kill to the end: {sorted(late)}")
    assert max(late) < 2 * BEAT + 5


@on_trio
def test_while_the_ps_is_silent_waits_can_be_cancelled_and_raise_on_request(
    cast: Cast, tmp_path: Path
) -> None:
    ps = cast.ps()
    chief = cast.trains("chief:0", 100, pace=0.02, fails_on_loss=True, directory=str(tmp_path))
    chief.hear("source LIVE")
    chief.hear_step(20)
    ps.stop()
    begun = time.monotonic()
    assert "no news of other processes arrives" in chief.hear("told ")
    assert time.monotonic() - begun < NOTICED_SECS
    assert float(chief.hear("left after").split()[-1]) < 0.1
    assert chief.hear("cancelled") == "cancelled True"
    assert "no answer for" in chief.hear("log The source of global_step is lost")
    chief.hear("source LOST")
    num_heard = len(chief.lines)
    ps.go_on()
    chief.hear("source LIVE", after=num_heard)
    chief.hear("log The source of global_step is live", after=num_heard)
    check_end(cast, [chief], 100)
