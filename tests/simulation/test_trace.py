"""A trace is read back: lanes without overlap, marks and counters that are right."""

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
    Constant,
    Crashes,
    Empirical,
    Exponential,
    Partition,
    Preemption,
    Report,
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
    lines = path.read_text(encoding="utf-8").removesuffix(",\n")
    events: list[Event] = json.loads(f"{lines}]")
    return events


def lanes_of(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    lanes = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            span = (each["ts"], each["ts"] + each["dur"], each["name"])
            lanes[each["pid"], each["tid"]].append(span)
    return {lane: sorted(spans) for lane, spans in lanes.items()}


def check_events(events: list[Event]) -> None:
    """Spans of a lane do not overlap."""
    for spans in lanes_of(events).values():
        for first, second in pairwise(spans):
            assert first[1] <= second[0]


@pytest.mark.parametrize("protocol", ["async", "sync", "ksync:4", "kbatch-async:3", "ssp:1"])
def test_spans_do_not_overlap(protocol: str, tmp_path: Path) -> None:
    events = events_of(busy(protocol=protocol), tmp_path)
    check_events(events)
    assert {"X", "i", "C", "M"} == {each["ph"] for each in events}


@given(
    seed=st.integers(0, 1000),
    protocol=st.sampled_from(["async", "sync", "kasync:2", "ssp:0", "async+discard:1"]),
    secs=st.sampled_from([Constant(0.0), Constant(1 / 3), Exponential(1e-6), Exponential(1.0)]),
)
@example(seed=265, protocol="ssp:0", secs=Constant(0.0))  # an update during a cut link's request
@settings(max_examples=25, deadline=None)
def test_any_delay_leaves_lanes_whole(
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
    names = {each["name"] for each in events if each["ph"] == "X"}
    assert names == {"compute", "lost", "wait", "pull", "push", "served", "down"}


def test_times_are_microseconds_of_virtual_time(tmp_path: Path) -> None:
    report = report_of("sync", workers=2, updates=2, compute=Constant(0.25))
    assert lanes_of(events_of(report, tmp_path)) == {
        (1, 1): [(0, 250_000, "compute"), (250_000, 500_000, "compute")],
        (1, 2): [(0, 250_000, "compute"), (250_000, 500_000, "compute")],
    }


def test_lanes_have_names(tmp_path: Path) -> None:
    events = events_of(report_of("ssp:2", workers=3), tmp_path)
    named = [(each["tid"], each["args"]["name"]) for each in events if each["ph"] == "M"]
    whole = "3 workers, StaleSynchronous(staleness=2)"
    assert named == [(0, whole), (1, "worker 0"), (2, "worker 1"), (3, "worker 2")]


def test_durations_are_read_back_as_a_delay(tmp_path: Path) -> None:
    report = report_of("ksync:4")
    write_trace(tmp_path / "out.json", report)
    assert report.timeline is not None
    secs = [each.end - each.begin for each in report.timeline.spans if each.kind == "lost"]
    samples = Empirical.from_trace(tmp_path / "out.json", "lost").samples
    assert sorted(samples) == pytest.approx(sorted(secs), abs=1e-6)


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


def test_a_push_is_a_mark_with_its_outcome_and_staleness(tmp_path: Path) -> None:
    report = report_of("async+discard:2", updates=40)
    marks = [each for each in events_of(report, tmp_path) if each["ph"] == "i"]
    assert report.timeline is not None
    assert [(each["name"], each["tid"] - 1, each["args"]["value"]) for each in marks] == [
        (push.outcome, push.worker, push.staleness) for push in report.timeline.pushes
    ]
    dropped = [each["args"]["value"] for each in marks if each["name"] == "discarded"]
    assert len(dropped) == report.discarded > 0
    assert min(dropped) > 2


def test_the_same_seed_gives_the_same_bytes_on_every_backend(tmp_path: Path) -> None:
    contents = set()
    for backend in BACKENDS:
        path = tmp_path / backend
        write_trace(path, busy(protocol="ssp:1", backend=backend))
        contents.add(path.read_bytes())
    assert len(contents) == 1
    write_trace(tmp_path / "other", busy(protocol="ssp:1", seed=8))
    assert (tmp_path / "other").read_bytes() not in contents


def test_the_loss_is_a_counter_where_it_is_a_number(tmp_path: Path) -> None:
    cluster = Simulation(7, "turbo").cluster(
        1, parameters=np.zeros(1), compute=Constant(1.0), learning_rate=1.0, keep_timeline=True
    )
    losses = [3.0, math.inf, 0.5]
    report = cluster.run(
        gradient=lambda *_: -np.ones(1), updates=2, loss=lambda p: losses[int(p[0])]
    )
    assert counter(events_of(report, tmp_path), "loss") == [(0, 3.0), (2e6, 0.5)]


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
