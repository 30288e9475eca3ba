"""A trace is read back: lanes without overlap, arrows in pairs, counters that are right."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynchooks.protocols import parse_protocol
from asynchooks.simulation import (
    Checkpoints,
    Constant,
    Crashes,
    Exponential,
    Network,
    Partition,
    PerWorker,
    Preemption,
    Report,
    ServerCrashes,
    Simulation,
    write_trace,
)

from .engines import BACKENDS

Event = dict[str, Any]


def report_of(
    protocol: str = "async", *, workers: int = 6, updates: int = 60, **options: Any
) -> Report:
    simulation = Simulation(options.pop("seed", 7), options.pop("backend", "turbo"))
    cluster = simulation.cluster(
        workers,
        protocol=parse_protocol(protocol, workers),
        keep_timeline=True,
        **{"compute": Exponential(1.0), **options},
    )
    return cluster.run(updates=updates)


def busy(**options: Any) -> Report:
    """All kinds of spans."""
    failures = [
        Crashes(Exponential(6.0), Exponential(2.0), workers=[0, 1]),
        Crashes(Exponential(6.0), Exponential(2.0), loses_work=False, workers=[1, 2, 3]),
        Partition(at=5.0, secs=2.0, workers=[3, 4]),
        Preemption(at=9.0, workers=[5]),
    ]
    return report_of(
        failures=failures,
        pull=Constant(0.1),
        push=Exponential(0.2),
        service=Constant(0.05),
        **options,
    )


def events_of(report: Report, directory: Path) -> list[Event]:
    path = directory / "out.json"
    write_trace(path, report)
    events: list[Event] = json.loads(path.read_text(encoding="ascii"))["traceEvents"]
    return events


def lanes_of(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    lanes = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            span = (each["ts"], each["ts"] + each["dur"], each["name"])
            lanes[each["pid"], each["tid"]].append(span)
    return {lane: sorted(spans) for lane, spans in lanes.items()}


def check_events(events: list[Event]) -> None:
    """Spans of a lane do not overlap, and flows lead from one span to a later one."""
    lanes = lanes_of(events)
    for spans in lanes.values():
        for first, second in pairwise(spans):
            assert first[1] <= second[0]
    begins = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(each["ph"] == "s" for each in events)
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        (source,) = [
            span for span in lanes[begin["pid"], begin["tid"]] if span[0] <= begin["ts"] < span[1]
        ]
        assert source[2] in ("compute", "push", "served")
        (target,) = [span for span in lanes[end["pid"], end["tid"]] if span[0] == end["ts"]]
        assert source[1] <= target[0], "an arrow never leads back in time"


@pytest.mark.parametrize("protocol", ["async", "sync", "ksync:4", "kbatch-async:3", "ssp:1"])
def test_spans_do_not_overlap_and_flows_are_paired(protocol: str, tmp_path: Path) -> None:
    events = events_of(busy(protocol=protocol), tmp_path)
    check_events(events)
    assert {"s", "f", "X", "C", "M"} <= {each["ph"] for each in events}


@given(
    seed=st.integers(0, 1000),
    protocol=st.sampled_from(["async", "sync", "kasync:2", "ssp:0", "async+discard:1"]),
    secs=st.sampled_from([Constant(0.0), Constant(1 / 3), Exponential(1e-6), Exponential(1.0)]),
)
@example(seed=265, protocol="ssp:0", secs=Constant(0.0))  # an update during a cut link's request
@settings(max_examples=25, deadline=None)
def test_any_delay_leaves_lanes_and_flows_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int, protocol: str, secs: Any
) -> None:
    report = busy(seed=seed, protocol=protocol, compute=secs, updates=20)
    events = events_of(report, tmp_path_factory.mktemp("traces"))
    check_events(events)


def test_after_virtual_years_neighbours_still_touch(tmp_path: Path) -> None:
    report = report_of("ssp:1", compute=Exponential(1e7), push=Exponential(1e6))
    events = events_of(report, tmp_path)
    check_events(events)
    assert max(each.get("ts", 0) for each in events) > 3e7 * 1e6


def test_every_kind_of_span_is_in_the_trace(tmp_path: Path) -> None:
    events = events_of(busy(protocol="ksync:3", updates=100), tmp_path)
    names = {each["name"] for each in events if each["ph"] == "X" and each["pid"] == 2}
    assert names == {"compute", "lost", "wait", "pull", "push", "served", "down"}


def test_times_are_microseconds_of_virtual_time(tmp_path: Path) -> None:
    report = report_of("sync", workers=2, updates=2, compute=Constant(0.25))
    assert lanes_of(events_of(report, tmp_path)) == {
        (2, 2): [(0, 250_000, "compute"), (250_000, 500_000, "compute")],
        (2, 3): [(0, 250_000, "compute"), (250_000, 500_000, "compute")],
        (1, 1): [(250_000, 500_000, "version 1")],
    }


def test_lanes_have_names_in_order(tmp_path: Path) -> None:
    events = events_of(report_of("ssp:2", workers=3), tmp_path)
    named = [each for each in events if each["ph"] == "M"]
    texts = {each["tid"]: each["args"]["name"] for each in named if each["name"] == "thread_name"}
    order = {
        each["tid"]: each["args"]["sort_index"]
        for each in named
        if each["name"] == "thread_sort_index"
    }
    assert texts == {1: "versions", 2: "worker 0", 3: "worker 1", 4: "worker 2"}
    assert order == {2: 0, 3: 1, 4: 2}
    processes = [each["args"]["name"] for each in named if each["name"] == "process_name"]
    assert processes == ["server", "3 workers, StaleSynchronous(staleness=2)"]


def counter(events: list[Event], name: str) -> list[tuple[float, int]]:
    return [
        (each["ts"], each["args"]["value"])
        for each in events
        if each["ph"] == "C" and each["name"] == name
    ]


def test_the_global_step_counts_the_updates_at_their_times(tmp_path: Path) -> None:
    report = report_of("kasync:3", updates=20)
    steps = counter(events_of(report, tmp_path), "global step")
    assert [value for _, value in steps] == list(range(1, 21))
    applied = [push.time for push in report.timeline.pushes if push.outcome == "applied"]  # type: ignore[union-attr]
    assert [ts for ts, _ in steps] == pytest.approx([1e6 * secs for secs in applied], abs=0.1)


def test_active_workers_are_counted_through_a_preemption_and_a_repair(tmp_path: Path) -> None:
    failures = [Preemption(at=2.0, secs=1.5, workers=[0]), Preemption(at=3.0, workers=[1])]
    report = report_of(workers=3, updates=30, compute=Constant(0.5), failures=failures)
    active = counter(events_of(report, tmp_path), "active workers")
    assert active[:-1] == [(0, 3), (2e6, 2), (3e6, 1), (3.5e6, 2)]
    assert active[-1] == (1e6 * report.secs, 0)


def test_arrows_lead_from_gradients_to_their_update_and_on_to_its_pulls(
    tmp_path: Path,
) -> None:
    report = report_of("sync", workers=3, updates=3)
    events = events_of(report, tmp_path)
    begins, ends = ([each for each in events if each["ph"] == phase] for phase in "sf")
    updates = [each["ts"] for each in ends if each["name"] == "update"]
    # the last update is the end: nothing begins there
    assert len(updates) == 6
    assert len(set(updates)) == 2
    makers = {each["id"]: each["tid"] for each in begins if each["name"] == "pulled"}
    pulls = [(makers[each["id"]], each["tid"]) for each in ends if each["name"] == "pulled"]
    assert len(pulls) == 4
    assert all(maker != puller for maker, puller in pulls)


def arrows_of(events: list[Event], name: str) -> list[tuple[float, float]]:
    """Times at which they begin and end, in order."""
    begins, ends = (
        {each["id"]: each["ts"] for each in events if each["ph"] == phase and each["name"] == name}
        for phase in "sf"
    )
    return sorted((begins[number], ends[number]) for number in begins)


def test_an_arrow_leads_to_the_download_where_an_update_came_during_its_request(
    tmp_path: Path,
) -> None:
    report = report_of(
        workers=2,
        updates=3,
        compute=PerWorker([Constant(3.0), Constant(2.5)]),
        network=Network(latency=1.0),
    )
    events = events_of(report, tmp_path)
    check_events(events)
    # worker 0 updates at 6 s; worker 1 has asked for parameters at 5.5 s, and gets them from 6.5 s
    assert arrows_of(events, "pulled") == [(6e6 - 0.125, 6.5e6)]


def test_an_arrow_leads_to_the_worker_whose_computation_was_lost(tmp_path: Path) -> None:
    report = report_of("ksync:1", workers=2, updates=8)
    events = events_of(report, tmp_path)
    check_events(events)
    pushes = report.timeline.pushes  # type: ignore[union-attr]
    turns = [first.time for first, second in pairwise(pushes) if first.worker != second.worker]
    assert len(turns) > 1
    ends = [end for _, end in arrows_of(events, "pulled")]
    assert ends == pytest.approx([1e6 * secs for secs in turns], abs=0.1)


def test_the_last_version_lasts_until_the_end_of_the_run(tmp_path: Path) -> None:
    simulation = Simulation(7, "turbo")
    cluster = simulation.cluster(1, compute=Constant(2.0), keep_timeline=True)
    events = events_of(cluster.run(until=5.0), tmp_path)
    assert lanes_of(events)[1, 1] == [(2e6, 4e6, "version 1"), (4e6, 5e6, "version 2")]


def test_a_discarded_gradient_is_a_mark_with_its_staleness(tmp_path: Path) -> None:
    report = report_of("async+discard:2", updates=40)
    events = events_of(report, tmp_path)
    marks = [each for each in events if each["ph"] == "i"]
    assert len(marks) == report.discarded > 0
    assert min(each["args"]["staleness"] for each in marks) > 2
    # after a discarded gradient a worker goes on from the version of another
    assert any(each["ph"] == "f" and each["name"] == "pulled" for each in events)
    check_events(events)


def test_the_same_seed_gives_the_same_bytes_on_every_backend(tmp_path: Path) -> None:
    contents = set()
    for backend in BACKENDS:
        path = tmp_path / backend
        write_trace(path, busy(protocol="ssp:1", backend=backend))
        contents.add(path.read_bytes())
    assert len(contents) == 1
    write_trace(tmp_path / "other", busy(protocol="ssp:1", seed=8))
    assert (tmp_path / "other").read_bytes() not in contents


def test_the_settings_are_in_the_trace(tmp_path: Path) -> None:
    report = report_of("ssp:1", workers=2, updates=4, learning_rate=abs, pull=Constant(0.5))
    write_trace(tmp_path / "out.json", report)
    settings = json.loads((tmp_path / "out.json").read_text())["otherData"]
    assert settings == report.settings
    assert settings == {
        "seed": "7", "num_workers": "2", "protocol": "StaleSynchronous(staleness=1)",
        "updates": "4", "compute": str(Exponential(1.0)), "pull": str(Constant(0.5)),
        "num_servers": "1", "learning_rate": "abs",
    }  # fmt: skip


def test_the_loss_is_a_counter_where_it_is_a_number(tmp_path: Path) -> None:
    cluster = Simulation(7, "turbo").cluster(
        1, parameters=np.zeros(1), compute=Constant(1.0), learning_rate=1.0, keep_timeline=True
    )
    losses = [3.0, math.inf, 0.5]
    report = cluster.run(
        gradient=lambda *_: -np.ones(1), updates=2, loss=lambda p: losses[int(p[0])]
    )
    assert counter(events_of(report, tmp_path), "loss") == [(0, 3.0), (2e6, 0.5)]


def test_pushes_at_the_server_are_counted(tmp_path: Path) -> None:
    report = report_of(workers=3, updates=3, compute=Constant(1.0), service=Constant(0.5))
    numbers = counter(events_of(report, tmp_path), "pushes at the server")
    # training ends with the third push
    assert numbers[3:] == [(2.5e6, 0)]


def test_saves_and_crashes_have_a_lane(tmp_path: Path) -> None:
    report = report_of(
        workers=1,
        updates=6,
        compute=Constant(1.0),
        checkpoints=Checkpoints(every_updates=2, save=Constant(0.5)),
        failures=[ServerCrashes(Constant(3.75), Constant(0.75))],
    )
    events = events_of(report, tmp_path)
    check_events(events)
    assert lanes_of(events)[1, 2] == [
        (2e6, 2.5e6, "save"), (3.75e6, 4.5e6, "down"), (6.5e6, 7e6, "save"),
        (8.25e6, 9e6, "down"),
    ]  # fmt: skip
    assert any(each["ph"] == "M" and each["args"].get("name") == "saves and crashes"
               for each in events)  # fmt: skip


def test_a_trace_is_streamed(tmp_path: Path) -> None:
    report = report_of("ssp:3", workers=50, updates=6_000)
    tracemalloc.start()
    try:
        write_trace(tmp_path / "out.json", report)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = os.path.getsize(tmp_path / "out.json")
    assert size > 2_000_000
    assert peak < size / 4


def test_a_report_without_a_timeline_is_refused(tmp_path: Path) -> None:
    report = Simulation(7, "turbo").cluster(2).run(updates=3)
    with pytest.raises(ValueError, match="keep_timeline=True"):
        write_trace(tmp_path / "out.json", report)
    assert os.listdir(tmp_path) == []


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    report = report_of()
    assert report.timeline is not None
    report.timeline.spans.append((0, "compute", 0.0, math.nan))  # type: ignore[arg-type]
    (tmp_path / "out.json").write_text("old")
    with pytest.raises((ValueError, AttributeError)):
        write_trace(tmp_path / "out.json", report)
    assert os.listdir(tmp_path) == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "old"


def test_a_trace_may_be_of_real_gradients(tmp_path: Path) -> None:
    cluster = Simulation(7, "turbo").cluster(3, parameters=np.ones(2), keep_timeline=True)
    report = cluster.run(gradient=lambda parameters, _: parameters, updates=5)
    assert counter(events_of(report, tmp_path), "global step")[-1][1] == 5
