"""Clusters: ends, refusals and reports; properties under failures; trainings without updates."""

import math
from itertools import pairwise
from operator import or_
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import GlobalStepWaiterHook, StepUnreachableError
from asynchooks.protocols import (
    DiscardStale,
    KBatchAsync,
    KSync,
    ParameterServer,
    Protocol,
    Synchronous,
)
from asynchooks.simulation import (
    Cluster,
    Constant,
    Crashes,
    DeadlockError,
    Exponential,
    LivelockError,
    Network,
    Partition,
    PerWorker,
    Preemption,
    Report,
    Simulation,
    SimulationError,
    Slowdown,
    Uniform,
    Worker,
    WorkerReport,
)

from ..protocols.worlds import ALL
from ..support.moments import at
from .clusters import KINDS, bare, check_report, new_cluster, speeds, with_session
from .engines import BACKENDS


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
        ({"updates": 1, "max_secs_without_update": 0}, "max_secs_without_update is 0"),
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
        ({"failures": [Preemption(1.0, workers=[2])]}, "give numbers from 0 to 1"),
        ({"network": Network(bandwidth=[1.0] * 3)}, "3 values for 2 workers"),
        ({"network": Network(), "push": Constant(1.0)}, "got push=.* and a network"),
    ],
)
def test_a_cluster_of_wrong_parts_is_refused_and_draws_nothing(
    options: dict[str, Any], match: str
) -> None:
    simulation = Simulation(1, "turbo")
    with pytest.raises((TypeError, ValueError), match=match):
        simulation.cluster(**{"num_workers": 2, **options})
    assert simulation.cluster(2).run(updates=9) == new_cluster(2).run(updates=9)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Network(bandwidth=[1.0, -1.0]), r"bandwidth\[1\] is -1.0; give bytes per second"),
        (lambda: Network(parameter_bytes=-1), "parameter_bytes is -1; give an integer >= 0"),
        (lambda: Preemption(-1.0), r"at is -1\.0; give seconds, >= 0"),
        (lambda: Slowdown(1.0, 1.0, 0.5), r"factor is 0\.5; give a number >= 1"),
        (lambda: Slowdown(1.0, math.inf, math.inf), "never ends is a Preemption"),
        (lambda: Crashes(Constant(0.0), Constant(1.0)), "with which it never works"),
        (lambda: new_cluster(1).run(lambda worker: worker.compute(-1.0)), "secs is -1.0; give sec"),
        (
            lambda: new_cluster(1).run(
                lambda worker: worker.cluster.simulation.queue(Constant(1.0), num_servers=0)
            ),
            "num_servers is 0; give an integer >= 1",
        ),
    ],
)
def test_links_failures_and_times_that_cannot_be_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


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
NETWORK = Network(Uniform(0.0, 0.25), [1e3, 3e3, 1e9], 4e3, parameter_bytes=500, gradient_bytes=100)
MESSAGES = st.fixed_dictionaries({"pull": LINKS, "push": LINKS}) | st.just({"network": NETWORK})
OPTIONS = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from(ALL),
        "compute": st.sampled_from([Constant(1.0), Exponential(1.0), Uniform(0.5, 1.5)]),
        "service": LINKS,
        "num_servers": st.integers(1, 2),
        "failures": st.lists(FAILURES, max_size=3),
    }
)


def watched(
    backend: Any, seed: int, program: Any, options: dict[str, Any], end: dict[str, Any]
) -> tuple[Any, bytes]:
    """The report and the trace; of each worker one program runs at a time."""
    simulation = Simulation(seed, backend, keep_trace=True)
    cluster = simulation.cluster(P, keep_timeline=True, **options)
    running = set[int]()

    async def alone(worker: Worker) -> None:
        assert worker.index not in running
        running.add(worker.index)
        try:
            await program(worker)
        finally:
            running.remove(worker.index)

    report = cluster.run(alone, **end)
    check_report(report)
    assert not running
    times = [event.time for event in simulation.trace.events]
    assert times == sorted(times)
    for worker in report.workers:  # its spans overlap nowhere, and add up to what the report says
        spans = [each for each in cluster.timeline.spans if each.worker == worker.worker]
        spans.sort(key=lambda each: each.begin)
        assert all(first.end <= second.begin for first, second in pairwise(spans))
        busy = sum(each.end - each.begin for each in spans)
        assert math.isclose(busy, report.secs - worker.secs_idle, abs_tol=1e-9)
    return report, simulation.trace.to_bytes()


async def mixed(worker: Worker) -> None:
    await (with_session if worker.index == 0 else bare)(worker)


@settings(max_examples=40)
@given(
    st.builds(or_, OPTIONS, MESSAGES),
    st.integers(0, 99),
    st.sampled_from([bare, with_session, mixed]),
    st.none() | st.sampled_from([0.0, 0.5, 4.0, 7.3]),
)
def test_training_ends_exactly_where_it_shall_and_all_engines_agree(
    options: dict[str, Any], seed: int, program: Any, until: float | None
) -> None:
    end = {"updates": 12} if until is None else {"until": until}
    found = [watched(each, seed, program, options, end) for each in BACKENDS]
    assert found[0] == found[1] == found[2]
    report = found[0][0]
    assert (report.updates == 12) if until is None else (report.secs == until)


class Never(Protocol):
    """No number of gradients makes an update; no worker waits."""

    def num_gradients(self, server: ParameterServer) -> int:
        return 1_000_000


class ForOthers(Protocol):
    """Every worker waits for an update that takes one gradient more than there are workers."""

    def num_gradients(self, server: ParameterServer) -> int:
        return server.num_workers + 1

    async def begin_step(self, server: ParameterServer, worker: int) -> None:
        await server.wait_for_update(worker)


def test_sessions_that_all_wait_end_by_their_own_error(backend: Any) -> None:
    """The step says so as soon as all sessions are open together."""
    cluster = new_cluster(3, backend, failures=[Crashes(Exponential(10.0), Exponential(5.0))])
    errors = []

    async def program(worker: Worker) -> None:
        try:
            async with worker.session([GlobalStepWaiterHook(100)]) as session:
                await session.run("computed")
        except StepUnreachableError as error:
            errors.append(str(error))

    cluster.run(program)
    assert errors


@pytest.mark.parametrize(
    ("options", "error", "how"),
    [
        ({"protocol": Never()}, LivelockError, "go on"),
        ({"protocol": ForOthers()}, DeadlockError, "wait"),
        (
            {"compute": Constant(10.0), "failures": [Crashes(Constant(3.0), Constant(1.0))]},
            LivelockError, "go on",
        ),
    ],
)  # fmt: skip
def test_training_that_makes_no_update_for_long_is_an_error(
    backend: Any, options: dict[str, Any], error: type[Exception], how: str
) -> None:
    cluster = new_cluster(3, backend, **options)
    with pytest.raises(error, match="no update came from virtual time 0.0 to 50.0") as caught:
        cluster.run(updates=10, max_secs_without_update=50.0)
    assert f"while the tasks {how}:\n" in str(caught.value)
    assert "worker 2" in str(caught.value)
    assert cluster.simulation.now == 50.0


def test_the_seconds_count_from_the_last_update(backend: Any) -> None:
    async def program(worker: Worker) -> None:
        for version in range(20):
            await worker.compute(4.0)
            await worker.push(np.zeros(1), version)
        while True:
            await worker.compute(4.0)

    with pytest.raises(LivelockError, match="from virtual time 80.0 to 85.0, for "):
        new_cluster(1, backend).run(program, max_secs_without_update=5.0)


# Reports


def test_rows_are_flat_and_hold_all_of_a_report() -> None:
    cluster = new_cluster(
        3, protocol=DiscardStale(KBatchAsync(2), 1), parameters=np.ones(1),
        compute=speeds(1.0, 2.0, 5.0), pull=Constant(0.25), push=Exponential(0.25),
    )  # fmt: skip
    report = cluster.run(gradient=lambda p, _: p, updates=20, loss=lambda p: float(p[0]))
    check_report(report)
    workers, counts, losses = report.worker_rows(), report.staleness_rows(), report.loss_rows()
    for rows in (workers, counts, losses):
        assert all(row.keys() == rows[0].keys() for row in rows)
        assert all(isinstance(cell, str | int | float) for row in rows for cell in row.values())
    assert [row["worker"] for row in workers] == [0, 1, 2]
    for row in workers:
        assert sum(row[f"secs_{kind}"] for kind in KINDS) == pytest.approx(report.secs)
    assert sum(row["count"] for row in counts) == report.applied == 40
    mean = sum(row["count"] * row["staleness"] for row in counts) / 40
    assert report.mean_staleness == pytest.approx(mean)
    row = report.summary_row()
    assert [each["updates"] for each in losses] == list(range(21))
    first, *_, last = ((each["secs"], each["loss"]) for each in losses)
    assert (first, last) == ((0.0, 1.0), (report.secs, row["loss"]))
    assert row["protocol"] == "DiscardStale(protocol=KBatchAsync(k=2), bound=1)"
    assert row["updates_per_second"] == report.updates / report.secs
    assert row["max_staleness"] <= 1
    assert row["discarded"] == report.discarded > 0


def test_sums_of_a_report_are_exact_on_every_version_of_python() -> None:
    """Added up one by one, as `sum` did until Python 3.11, each of these differs by one bit."""
    workers = [WorkerReport(i, 1, {}, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9) for i in range(10)]
    row = Report("any", 10, 1.0, 10, 10, 0, {0: 10}, workers, []).summary_row()
    assert (row["share_computed"], row["share_idle"]) == (0.1, 0.9)


def test_a_report_may_be_made_while_training_goes_on() -> None:
    cluster = new_cluster(2, protocol=Synchronous(), compute=speeds(1.0, 2.0))
    reports: list[Report] = []

    looks = at(before_run=lambda _: reports.append(cluster.report()))
    final = cluster.run(lambda worker: with_session(worker, looks), updates=3)
    assert [each.updates for each in reports] == [0, 0, 1, 1, 2, 2]
    assert [each.secs for each in reports] == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    for each in [*reports, final]:
        check_report(each)
