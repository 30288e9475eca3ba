"""The exact stop and the gradual start across processes, with slow, late and failing processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from .cluster_processes import TaskLauncher, free_cluster
from .training_processes import Cast, Done, Heard, read_step

pytest.importorskip("tensorflow")
# most of it is waiting for TensorFlow, on a busy machine
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

NAMES = ["chief:0", "worker:0", "worker:1"]
Round = list[dict[str, Any]]
"""What each process does in one training; those that are left out take no part."""


@pytest.fixture(params=["asyncio"])
def cast(training_launcher: TaskLauncher, request: pytest.FixtureRequest) -> Iterator[Cast]:
    """A cluster with one ps, a chief and two workers; its processes end with the test."""
    cast = Cast(training_launcher, free_cluster(ps=1, chief=1, worker=2), request.param)
    try:
        yield cast
    finally:
        cast.end()


def trained(cast: Cast, rounds: list[Round]) -> list[list[Done]]:
    """Train on one cluster again and again; for each round what each process has done."""
    cast.ps()
    processes = [
        cast.start(
            "several",
            name,
            rounds=[each[number] if number < len(each) else None for each in rounds],
        )
        for number, name in enumerate(NAMES)
        if any(number < len(each) for each in rounds)
    ]
    ends = [iter(_ends(each)) for each in processes]
    return [[next(end) for end in ends[: len(each)]] for each in rounds]


def _ends(heard: Heard) -> Iterator[Done]:
    at = 0
    while True:
        line = heard.hear_one(
            lambda line: line.startswith(("done", "raised")), "the end", 60, after=at
        )
        at = heard.lines.index(line, at) + 1
        yield Done.of(line) if line.startswith("done") else Done(-1, 0, 0, 0)


def _is_end(line: str) -> bool:
    return line.startswith(("done", "raised"))


def check(cast: Cast, rounds: list[Round]) -> None:
    """Each of them has stopped where it should have."""
    for number, (wanted, done) in enumerate(zip(rounds, trained(cast, rounds), strict=True)):
        limit, stride = wanted[0]["last_step"], wanted[0].get("stride", 1)
        step = read_step(cast.cluster, f"round{number}")
        assert limit <= step < limit + stride, (wanted, done)
        assert {each.value for each in done} <= {step, -1}, (wanted, done)
        if -1 not in {each.value for each in done}:
            assert sum(each.runs for each in done) * stride == step, (wanted, done)


def test_training_stops_exactly_at_its_limit_in_all_processes(cast: Cast) -> None:
    slow = {"pace": 0.03}
    waits = {"workers": 4, "waits": [58] * 4}
    check(
        cast,
        [
            [{"last_step": 1, "workers": 8}, {"last_step": 1}],
            [{"last_step": 60, "workers": 3}, {"last_step": 60, "workers": 8}],
            [{"last_step": 50, "stride": 3, "workers": 2}, {"last_step": 50, "stride": 3} | slow],
            [{"last_step": 60, **slow}, {"last_step": 60, **waits}],
            [{"last_step": 90, "workers": 2}, {"last_step": 90, "workers": 2, "raises_at": 30}],
        ],
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_training_stops_exactly_at_any_limit(cast: Cast, seed: int) -> None:
    random_ = random.Random(seed)
    rounds = []
    for _ in range(20):
        limit = random_.choice([1, 2, 7, 50, 101, 300])
        common = {"last_step": limit, "stride": random_.choice([1, 1, 2, 3])}
        a_round = [
            {
                **common,
                "workers": random_.randint(1, 8),
                "pace": random_.choice([0, 0, 0.001, 0.02]),
                "waits": random_.choice([[], [], [1, min(3, limit)], [max(0, limit - 2)] * 8])
                if part
                else [],
            }
            for part in range(random_.randint(1, 3))
        ]
        rounds.append(a_round)
    check(cast, rounds)


@pytest.mark.parametrize("cast", ["trio"], indirect=True)
def test_workers_start_gradually_across_processes_and_long_before_their_chief(cast: Cast) -> None:
    cast.ps()
    waits = {"worker:0": [40, 10, 70], "worker:1": [60, 20, 50]}
    processes = [
        cast.trains(name, 120, workers=3, waits=each, pace=0.02) for name, each in waits.items()
    ]
    for each in processes:
        each.hear("log Waiting for model to be ready")
    chief = cast.trains("chief:0", 120, workers=2, waits=[0, 30], pace=0.02)
    assert [each.done().value for each in (chief, *processes)] == [120] * 3
    assert chief.started[0] == 0
    assert chief.started[1] >= 30
    for process, steps in zip(processes, waits.values(), strict=True):
        assert all(process.started[worker] >= step for worker, step in enumerate(steps))
        assert list(process.started) == sorted(range(3), key=steps.__getitem__)
    assert [each.ended() for each in (chief, *processes)] == [0, 0, 0]
