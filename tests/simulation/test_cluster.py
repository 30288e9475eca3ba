"""Clusters: when training ends, what was asked for, what is refused; properties under failures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.protocols import (
    Asynchronous,
    KSync,
    ParameterServer,
    Synchronous,
)
from asynchooks.simulation import (
    Cluster,
    Constant,
    Crashes,
    Delay,
    Exponential,
    Partition,
    PerWorker,
    Preemption,
    Simulation,
    SimulationError,
    Slowdown,
    Uniform,
    Worker,
    at_step,
    current_simulation,
)

from ..protocols.worlds import ALL
from .clusters import bare, check_report, new_cluster, speeds, spent, with_session
from .engines import BACKENDS


def test_training_ends_with_the_update_that_was_asked_for(backend: Any) -> None:
    cluster = new_cluster(2, backend, compute=speeds(1.0, 10.0), push=Constant(0.25))
    report = cluster.run(updates=3)
    assert cluster.workers[0].num_computed == 3
    assert (report.updates, report.secs) == (3, 3.75)
    assert spent(report.workers[0]) == {"computed": 3.0, "pushed": 0.75}
    assert spent(report.workers[1]) == {"lost": 3.75}


def test_what_is_still_under_way_then_counts_no_further() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 1.5), push=speeds(1.0, 40.0), keep_timeline=True)
    report = cluster.run(updates=2)
    assert report.secs == 4.0
    assert spent(report.workers[1]) == {"computed": 1.5, "pushed": 2.5}
    assert max(span.end for span in cluster.timeline.spans) == 4.0
    assert report.discarded == 1
    check_report(report)


def test_an_update_that_comes_because_a_worker_left_is_the_last_one_as_well() -> None:
    gone = Preemption(5.0, workers=[1])
    cluster = new_cluster(2, protocol=Synchronous(), compute=speeds(1.0, 1e6), failures=[gone])
    report = cluster.run(updates=1)
    assert report.secs == 5.0
    assert spent(report.workers[0]) == {"computed": 1.0, "waited": 4.0}


def test_without_a_number_training_lasts_until_the_end_of_all_programs(backend: Any) -> None:
    async def program(worker: Worker) -> None:
        await worker.pull()
        await worker.compute(1.0 + worker.index)

    report = new_cluster(3, backend).run(program)
    assert (report.updates, report.secs) == (0, 3.0)
    assert spent(report.workers[0]) == {"computed": 1.0, "idle": 2.0}


def test_until_ends_training_at_its_time(backend: Any) -> None:
    report = new_cluster(2, backend, compute=speeds(1.0, 2.0)).run(until=2.5)
    assert (report.updates, report.secs) == (3, 2.5)
    assert spent(report.workers[0]) == {"computed": 2.0, "lost": 0.5}
    check_report(report)


def test_until_may_be_a_condition() -> None:
    cluster = new_cluster(2, compute=speeds(1.0, 2.0))
    report = cluster.run(until=at_step(cluster.global_step, 4))
    assert (report.updates, report.secs) == (4, 3.0)


def test_clean_up_after_until_takes_no_time_of_the_training() -> None:
    cluster = new_cluster(1, compute=Constant(1.0))

    async def program(worker: Worker) -> None:
        try:
            await with_session(worker)
        finally:
            with cluster.kernel.shielded(100.0):
                await cluster.simulation.sleep(7.0)

    report = cluster.run(program, until=2.5)
    assert cluster.simulation.now == 9.5
    assert report.secs == 2.5


def test_a_training_that_begins_later_counts_from_its_begin() -> None:
    simulation = Simulation(backend="turbo")
    cluster = simulation.cluster(1, compute=Constant(1.0))

    async def main() -> None:
        await simulation.sleep(100.0)
        await cluster.train(updates=5)

    simulation.run(main)
    assert cluster.report().secs == 5.0
    assert cluster.report().updates_per_second == 1.0


def test_a_worker_with_a_session_waits_as_much_as_one_without() -> None:
    def waited(program: Any) -> list[dict[str, float]]:
        cluster = new_cluster(2, protocol=Synchronous(), compute=speeds(1.0, 3.0))
        return [spent(each) for each in cluster.run(program, updates=4).workers]

    assert waited(None) == waited(with_session) == [
        {"computed": 4.0, "waited": 8.0}, {"computed": 12.0},
    ]  # fmt: skip


def test_the_number_of_updates_holds_for_workers_without_a_session_beside_others(
    backend: Any,
) -> None:
    async def program(worker: Worker) -> None:
        await (with_session if worker.index == 0 else bare)(worker)

    away = Preemption(3.0, secs=1e6, workers=[0])  # the only session closes
    report = new_cluster(2, backend, failures=[away]).run(program, updates=20, until=1e9)
    assert report.updates == 20


@pytest.mark.parametrize(
    ("end", "losses"),
    [
        ({"updates": 5}, [(0.0, 0, 1.0), (2.0, 2, 0.25), (4.0, 4, 1 / 16), (5.0, 5, 1 / 32)]),
        ({"until": 3.5}, [(0.0, 0, 1.0), (2.0, 2, 0.25), (3.5, 3, 1 / 8)]),
    ],
)
def test_losses_are_recorded_with_their_times(
    backend: Any, end: dict[str, Any], losses: list[tuple[float, int, float]]
) -> None:
    cluster = new_cluster(
        1, backend, parameters=np.ones(1), compute=Constant(1.0), learning_rate=0.5
    )
    report = cluster.run(gradient=lambda p, _: p, loss=lambda p: p[0], loss_every=2, **end)
    assert report.losses == losses
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
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "would run for ever; give updates, until, or a program that ends"),
        ({"until": math.inf}, ValueError, "would run for ever; give updates, until, or a program"),
        ({"updates": 0}, ValueError, "updates is 0; give an integer >= 1"),
        ({"updates": 1.5}, TypeError, r"updates is 1\.5; give an integer"),
        ({"program": 3}, TypeError, "program is 3; give a function, or None"),
        ({"gradient": 3, "updates": 1}, TypeError, "gradient is 3; give a function, or None"),
        ({"loss": 3, "updates": 1}, TypeError, "loss is 3; give a function, or None"),
        ({"loss_every": 0, "updates": 1}, ValueError, "loss_every is 0; give an integer >= 1"),
        (
            {"program": with_session, "gradient": lambda p, w: p},
            ValueError,
            r"a program and a gradient, which would not be used; .* worker\.session\(gradient=",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    cluster = new_cluster(2)
    with pytest.raises(error, match=match):
        cluster.run(**arguments)
    assert cluster.run(updates=2).updates == 2  # nothing has run before


def test_a_program_that_is_not_async_is_refused_by_what_it_returned() -> None:
    with pytest.raises(TypeError, match="the program returned None; give an async function"):
        new_cluster(1).run(lambda worker: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_workers": 0}, ValueError, "num_workers is 0; give an integer >= 1"),
        ({"num_workers": 2.5}, TypeError, r"num_workers is 2\.5; give an integer >= 1"),
        ({"compute": 3}, TypeError, r"compute is 3; give a delay, as in compute=Exponential"),
        ({"pull": "x"}, TypeError, "pull is 'x'; give a delay"),
        ({"service": 1.0}, TypeError, r"service is 1\.0; give a delay"),
        ({"push": PerWorker([Constant(1.0)])}, ValueError, "no delay for worker 1: .* has 1"),
        ({"protocol": KSync(3)}, ValueError, r"KSync\(k=3\) for 2 workers; give k from 1 to 2"),
        (
            {"protocol": "sync"},
            TypeError,
            "'sync'; give one, .* or parse_protocol",
        ),
        ({"failures": Preemption(1.0)}, TypeError, r"failures is Preemption.*; give a list"),
        ({"failures": ["crash"]}, TypeError, "failures hold 'crash'; give Crashes, Preemption"),
        ({"learning_rate": -1.0}, ValueError, r"learning_rate is -1\.0"),
    ],
)
def test_a_cluster_of_wrong_parts_is_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    given: dict[str, Any] = {"num_workers": 2, **options}
    with pytest.raises(error, match=match):
        Simulation().cluster(given.pop("num_workers"), **given)


def test_an_option_that_is_misspelt_is_found_by_mypy_and_refused() -> None:
    simulation = Simulation()
    with pytest.raises(TypeError, match="unexpected keyword argument 'compue'"):
        simulation.cluster(8, compue=Exponential(1.0))  # type: ignore[call-arg]

    async def program(worker: Worker) -> None:
        worker.session(recover=None)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'recover'"):
        simulation.cluster(1).run(program)


def test_a_cluster_that_was_refused_leaves_the_random_numbers_of_the_next_as_they_are() -> None:
    simulation = Simulation(seed=3)
    with pytest.raises(ValueError, match="num_workers is 0"):
        simulation.cluster(0)
    assert simulation.cluster(2).run(updates=9) == new_cluster(2, "asyncio", 3).run(updates=9)


def test_a_protocol_may_ask_for_the_time_before_it_begins() -> None:
    class Later(Asynchronous):
        def num_gradients(self, server: ParameterServer) -> int:
            return 1 if current_simulation().now < 5.0 else 2

    cluster = new_cluster(2, protocol=Later(), compute=Constant(1.0))
    with pytest.raises(SimulationError, match="no simulation runs here"):
        current_simulation()
    assert cluster.run(until=9.5).updates == 2 * 4 + 5


def test_reprs_show_the_state() -> None:
    simulation = Simulation(7, "turbo", keep_trace=True)
    cluster = simulation.cluster(2, protocol=KSync(2), compute=Constant(1.0), keep_timeline=True)
    assert repr(simulation) == "<Simulation seed=7 backend='turbo', not begun>"
    assert repr(cluster) == "<Cluster of 2 workers, KSync(k=2), at update 0>"
    seen: list[str] = []

    async def program(worker: Worker) -> None:
        await worker.compute(2.5)
        queue = simulation.queue(Constant(1.0), num_servers=3)
        seen.extend(map(repr, [simulation, worker, queue]))

    cluster.run(program)
    assert seen[:3] == [
        "<Simulation seed=7 backend='turbo', running at 2.5 virtual seconds>",
        "<worker 0 of 2>",
        "<Queue for 3 servers, Constant(secs=1.0), 0 requests>",
    ]
    assert repr(simulation) == "<Simulation seed=7 backend='turbo', over at 2.5 virtual seconds>"
    assert repr(cluster) == "<Cluster of 2 workers, KSync(k=2), at update 0, ended>"
    assert repr(cluster.timeline) == "<Timeline of 2 spans and 0 pushes>"
    assert repr(simulation.trace) == f"<Recording of {len(simulation.trace.events)} events>"


def test_a_cluster_trains_once_and_in_its_own_simulation() -> None:
    cluster = new_cluster(1)
    cluster.run(updates=1)
    with pytest.raises(SimulationError, match="has run; make another one"):
        cluster.run(updates=1)
    other = Simulation(backend="turbo")

    async def main(clusters: list[Cluster]) -> None:
        for each in clusters:
            await each.train(updates=1)

    with pytest.raises(SimulationError, match="the simulation is over; call this in"):
        other.run(main, [cluster])
    simulation = Simulation(backend="turbo")
    with pytest.raises(SimulationError, match="this cluster has trained; make another one"):
        simulation.run(main, [simulation.cluster(1)] * 2)


def test_clusters_and_queues_of_one_simulation_draw_numbers_of_their_own() -> None:
    simulation = Simulation(seed=1, backend="turbo")
    first, second = simulation.cluster(2), simulation.cluster(2)
    times: list[float] = []

    async def main() -> None:
        await first.train(updates=10)
        await second.train(updates=10)
        for _ in range(2):
            times.append(await simulation.queue(Exponential(1.0)).serve())

    simulation.run(main)
    assert first.report().secs != second.report().secs
    assert times[0] != times[1]
    alone = Simulation(seed=1, backend="turbo").cluster(2).run(updates=10)
    assert alone.secs == first.report().secs, "the first cluster draws as the only one does"


P = 3
DELAYS: list[Delay] = [Constant(1.0), Exponential(1.0), Uniform(0.5, 1.5)]
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
    st.builds(Preemption, TIMES, st.sampled_from([0.0, 1.0, 5.0]), workers=WORKERS),
    st.builds(Preemption, TIMES, st.just(math.inf), workers=st.sampled_from([{0}, {1}])),
    st.builds(Slowdown, TIMES, TIMES, st.sampled_from([1.0, 3.0, math.inf]), workers=WORKERS),
    st.builds(Partition, TIMES, TIMES, workers=WORKERS),
)
LINKS = st.sampled_from([None, Constant(0.25), Exponential(0.5)])
OPTIONS = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from(ALL),
        "compute": st.sampled_from(DELAYS),
        "pull": LINKS,
        "push": LINKS,
        "service": st.sampled_from([None, Constant(0.25)]),
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


@settings(max_examples=60, deadline=None)
@given(OPTIONS, st.integers(0, 99), st.booleans())
def test_updates_are_made_exactly_and_all_engines_agree(
    options: dict[str, Any], seed: int, in_session: bool
) -> None:
    found = [Watched(each, seed, in_session, options).run(updates=12) for each in BACKENDS]
    assert found[0] == found[1] == found[2]
    report = found[0][0]
    assert report.updates == 12
    assert len(report.workers) == P


@settings(max_examples=30, deadline=None)
@given(OPTIONS, st.integers(0, 99), st.booleans(), st.sampled_from([0.0, 0.5, 4.0, 7.3]))
def test_until_cuts_at_its_time_wherever_workers_are(
    options: dict[str, Any], seed: int, in_session: bool, until: float
) -> None:
    found = [Watched(each, seed, in_session, options).run(until=until) for each in BACKENDS]
    assert found[0] == found[1] == found[2]
    assert found[0][0].secs == until
