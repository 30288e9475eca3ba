"""Clusters: when training ends, what was asked for, what is refused; properties under failures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.protocols import (
    KSync,
    Synchronous,
)
from asynchooks.simulation import (
    Cluster,
    Constant,
    Crashes,
    Exponential,
    Partition,
    PerWorker,
    Preemption,
    Simulation,
    SimulationError,
    Slowdown,
    Uniform,
    Worker,
)

from ..protocols.worlds import ALL
from .clusters import bare, check_report, new_cluster, speeds, spent, with_session
from .engines import BACKENDS


@pytest.mark.parametrize(
    ("end", "options", "secs", "updates", "expected"),
    [
        (
            {"updates": 3}, {"compute": speeds(1.0, 10.0), "push": Constant(0.25)}, 3.75, 3,
            [{"computed": 3.0, "pushed": 0.75}, {"lost": 3.75}],
        ),
        (  # by one that leaves
            {"updates": 1},
            {"protocol": Synchronous(), "compute": speeds(1.0, 1e6),
             "failures": [Preemption(5.0, workers=[1])]},
            5.0, 1, [{"computed": 1.0, "waited": 4.0}, {"lost": 5.0}],
        ),
        (
            {"until": 2.5}, {"compute": speeds(1.0, 2.0)}, 2.5, 3,
            [{"computed": 2.0, "lost": 0.5}, {"computed": 2.0, "lost": 0.5}],
        ),
    ],
    ids=["updates", "one that leaves", "time"],
)  # fmt: skip
def test_training_ends_when_it_was_asked_to(
    backend: Any,
    end: dict[str, Any],
    options: dict[str, Any],
    secs: float,
    updates: int,
    expected: list[dict[str, float]],
) -> None:
    report = new_cluster(2, backend, **options).run(**end)
    assert (report.secs, report.updates) == (secs, updates)
    assert [spent(each) for each in report.workers] == expected
    check_report(report)


def test_without_a_number_training_lasts_until_the_end_of_all_programs() -> None:
    async def program(worker: Worker) -> None:
        await worker.pull()
        await worker.compute(1.0 + worker.index)

    report = new_cluster(3).run(program)
    assert (report.updates, report.secs) == (0, 3.0)
    assert spent(report.workers[0]) == {"computed": 1.0, "idle": 2.0}


def test_the_number_of_updates_holds_for_workers_without_a_session_beside_others() -> None:
    async def program(worker: Worker) -> None:
        await (with_session if worker.index == 0 else bare)(worker)

    away = Preemption(3.0, secs=1e6, workers=[0])  # the only session closes
    assert new_cluster(2, failures=[away]).run(program, updates=20, until=1e9).updates == 20


def test_losses_are_recorded_with_their_times() -> None:
    cluster = new_cluster(1, parameters=np.ones(1), compute=Constant(1.0), learning_rate=0.5)
    report = cluster.run(
        gradient=lambda p, _: p, loss=lambda p: p[0], loss_every=2, until=3.5, updates=9
    )
    assert report.losses == [(0.0, 0, 1.0), (2.0, 2, 0.25), (3.5, 3, 1 / 8)]
    assert cluster.report() == report, "nothing is recorded twice"


def test_an_error_of_a_program_leaves_as_itself_and_names_the_worker() -> None:
    async def program(worker: Worker) -> None:
        await worker.pull()
        if worker.index == 1:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full") as caught:
        new_cluster(2).run(program)
    assert caught.value.__notes__ == ["in the program of worker 1"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "would run for ever; give updates, until, or a program that ends"),
        ({"updates": 0}, "updates is 0; give an integer >= 1"),
        ({"loss_every": 0, "updates": 1}, "loss_every is 0; give an integer >= 1"),
        ({"program": with_session, "gradient": lambda p, w: p}, "a gradient, which would not be"),
        ({"updates": 5, "target_loss": 1.0}, "no loss is recorded; give loss"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], match: str
) -> None:
    cluster = new_cluster(2)
    with pytest.raises((TypeError, ValueError), match=match):
        cluster.run(**arguments)
    assert cluster.run(updates=2).updates == 2  # nothing has run before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"push": PerWorker([Constant(1.0)])}, "no delay for worker 1: .* has 1"),
        ({"protocol": KSync(3)}, r"KSync\(k=3\) for 2 workers; give k from 1 to 2"),
        ({"protocol": "sync"}, "'sync'; give one, .* or parse_protocol"),
        ({"failures": ["crash"]}, "failures hold 'crash'; give Crashes, Preemption"),
    ],
)
def test_a_cluster_of_wrong_parts_is_refused_and_draws_nothing(
    options: dict[str, Any], match: str
) -> None:
    simulation = Simulation(1, "turbo")
    with pytest.raises((TypeError, ValueError), match=match):
        simulation.cluster(**{"num_workers": 2, **options})
    assert simulation.cluster(2).run(updates=9) == new_cluster(2).run(updates=9)


def test_a_cluster_trains_once_and_in_its_own_simulation() -> None:
    async def main(clusters: list[Cluster]) -> None:
        for each in clusters:
            await each.train(updates=1)

    simulation = Simulation(backend="turbo")
    clusters = [simulation.cluster(1)] * 2
    with pytest.raises(SimulationError, match="this cluster has trained; make another one"):
        simulation.run(main, clusters)
    with pytest.raises(SimulationError, match="has run; make another one"):
        clusters[0].run(updates=1)
    with pytest.raises(SimulationError, match="the simulation is over; call this in"):
        Simulation(backend="turbo").run(main, clusters)


def test_clusters_of_one_simulation_draw_numbers_of_their_own() -> None:
    simulation = Simulation(seed=1, backend="turbo")
    clusters = [simulation.cluster(2) for _ in range(2)]

    async def main() -> None:
        for each in clusters:
            await each.train(updates=10)

    simulation.run(main)
    first, second = (each.report().secs for each in clusters)
    assert first != second
    assert first == new_cluster(2).run(updates=10).secs, "the first one draws as the only one does"


P = 3
WORKERS = st.one_of(st.none(), st.sets(st.integers(0, P - 1), min_size=1, max_size=P))
TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25])
FAILURES = st.one_of(
    st.builds(
        Crashes,
        st.sampled_from([Exponential(6.0), Constant(4.0)]),
        st.sampled_from([Exponential(1.0), Constant(0.0), Constant(1.5)]),
        loses_work=st.booleans(),
        workers=WORKERS,
    ),
    st.builds(Preemption, TIMES, TIMES, workers=WORKERS),
    st.builds(Preemption, TIMES, workers=st.sampled_from([{0}, {1}])),
    st.builds(Slowdown, TIMES, TIMES, st.sampled_from([1.0, 3.0, math.inf]), workers=WORKERS),
    st.builds(Partition, TIMES, TIMES, workers=WORKERS),
)
LINKS = st.sampled_from([None, Constant(0.25), Exponential(0.5)])
OPTIONS = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from(ALL),
        "compute": st.sampled_from([Constant(1.0), Exponential(1.0), Uniform(0.5, 1.5)]),
        "pull": LINKS,
        "push": LINKS,
        "service": LINKS,
        "failures": st.lists(FAILURES, max_size=3),
    }
)


class Watched:
    """A cluster whose programs are counted, on one engine."""

    def __init__(self, backend: Any, seed: int, in_session: bool, options: dict[str, Any]) -> None:
        self.simulation = Simulation(seed, backend, keep_trace=True)
        self.cluster = self.simulation.cluster(P, keep_timeline=True, **options)
        self.in_session = in_session
        self.running = [0] * P

    async def program(self, worker: Worker) -> None:
        self.running[worker.index] += 1
        assert self.running[worker.index] == 1
        try:
            await (with_session if self.in_session else bare)(worker)
        finally:
            self.running[worker.index] -= 1

    def run(self, **arguments: Any) -> tuple[Any, bytes]:
        report = self.cluster.run(self.program, **arguments)
        check_report(report)
        assert self.running == [0] * P
        events = [event.time for event in self.simulation.trace.events]
        assert events == sorted(events)
        self.check_timeline(report)
        return report, self.simulation.trace.to_bytes()

    def check_timeline(self, report: Any) -> None:
        """The spans of a worker overlap nowhere, and add up to what the report says."""
        for worker in range(P):
            spans = [each for each in self.cluster.timeline.spans if each.worker == worker]
            spans.sort(key=lambda each: each.begin)
            ends = [0.0, *(each.end for each in spans)]
            assert all(each.begin >= end for each, end in zip(spans, ends, strict=False))
            busy = report.secs - report.workers[worker].secs_idle
            assert math.isclose(sum(each.end - each.begin for each in spans), busy, abs_tol=1e-9)


@pytest.mark.parametrize("is_until", [False, True], ids=["updates", "until"])
@settings(max_examples=25, deadline=None)
@given(OPTIONS, st.integers(0, 99), st.booleans(), st.sampled_from([0.0, 0.5, 4.0, 7.3]))
def test_training_ends_exactly_where_it_shall_and_all_engines_agree(
    is_until: bool, options: dict[str, Any], seed: int, in_session: bool, until: float
) -> None:
    end: dict[str, Any] = {"until": until} if is_until else {"updates": 12}
    found = [Watched(each, seed, in_session, options).run(**end) for each in BACKENDS]
    assert found[0] == found[1] == found[2]
    report = found[0][0]
    assert (report.secs if is_until else report.updates) == (until if is_until else 12)
