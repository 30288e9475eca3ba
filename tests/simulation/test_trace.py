"""A trace is read back: lanes without overlap, marks and counters that are right."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynchooks.protocols import parse_protocol
from asynchooks.simulation import (
    Constant,
    Crashes,
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


@given(
    seed=st.integers(0, 1000),
    protocol=st.sampled_from(["async", "sync", "kasync:2", "ksync:4", "ssp:0", "async+discard:1"]),
    secs=st.sampled_from([Constant(0.0), Constant(1 / 3), Exponential(1e-6), Exponential(1.0)]),
)
@example(seed=265, protocol="ssp:0", secs=Constant(0.0))  # an update during a cut link's request
@settings(max_examples=25, deadline=None)
def test_spans_of_a_lane_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, seed: int, protocol: str, secs: Any
) -> None:
    report = busy(seed=seed, protocol=protocol, compute=secs, updates=20)
    for spans in lanes_of(events_of(report, tmp_path_factory.mktemp("traces"))).values():
        for first, second in pairwise(spans):
            assert first[1] <= second[0]


def test_after_virtual_years_neighbours_still_touch(tmp_path: Path) -> None:
    report = report_of("ssp:1", compute=Exponential(1e7), push=Exponential(1e6))
    for spans in lanes_of(events_of(report, tmp_path)).values():
        assert spans[-1][1] > 3e7 * 1e6
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_every_kind_of_span_is_in_the_trace(tmp_path: Path) -> None:
    lanes = lanes_of(events_of(busy(protocol="ksync:3", updates=100), tmp_path))
    names = {name for spans in lanes.values() for _, _, name in spans}
    assert names == {"compute", "lost", "wait", "pull", "push", "served", "down"}


def test_times_are_microseconds_of_virtual_time_in_lanes_with_names(tmp_path: Path) -> None:
    report = report_of("sync", workers=2, updates=2, compute=Constant(0.25))
    events = events_of(report, tmp_path)
    assert lanes_of(events) == {
        (1, 1): [(0, 250_000, "compute"), (250_000, 500_000, "compute")],
        (1, 2): [(0, 250_000, "compute"), (250_000, 500_000, "compute")],
    }
    named = [(each["tid"], each["args"]["name"]) for each in events if each["ph"] == "M"]
    assert named == [(0, "2 workers, Synchronous()"), (1, "worker 0"), (2, "worker 1")]


def counter(events: list[Event], name: str) -> list[tuple[float, int]]:
    return [
        (each["ts"], each["args"]["value"])
        for each in events
        if each["ph"] == "C" and each["name"] == name
    ]


def test_updates_are_counted_and_pushes_marked_with_outcome_and_staleness(tmp_path: Path) -> None:
    report = report_of("async+discard:2", updates=40)
    losses = [(0.0, 0, 3.0), (1.0, 1, math.inf), (2.0, 2, 0.5)]
    events = events_of(replace(report, losses=losses), tmp_path)
    assert report.timeline is not None
    pushes = report.timeline.pushes
    steps = counter(events, "global step")
    assert [value for _, value in steps] == list(range(1, 41))
    applied = [1e6 * push.time for push in pushes if push.outcome == "applied"]
    assert [ts for ts, _ in steps] == pytest.approx(applied, abs=0.1)
    marks = [each for each in events if each["ph"] == "i"]
    assert [(each["name"], each["tid"] - 1, each["args"]["value"]) for each in marks] == [
        (push.outcome, push.worker, push.staleness) for push in pushes
    ]
    assert report.discarded > 0
    assert counter(events, "loss") == [(0, 3.0), (2e6, 0.5)]  # where it is a number


def test_the_same_seed_gives_the_same_bytes_on_every_backend(tmp_path: Path) -> None:
    contents = set()
    for backend in BACKENDS:
        write_trace(tmp_path / backend, busy(protocol="ssp:1", backend=backend))
        contents.add((tmp_path / backend).read_bytes())
    assert len(contents) == 1


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    report = report_of()
    assert report.timeline is not None
    report.timeline.spans.append((0, "compute", 0.0, math.nan))  # type: ignore[arg-type]
    (tmp_path / "out.json").write_text("old")
    with pytest.raises((ValueError, AttributeError)):
        write_trace(tmp_path / "out.json", report)
    with pytest.raises(ValueError, match="keep_timeline=True"):
        write_trace(tmp_path / "out.json", Simulation(7, "turbo").cluster(2).run(updates=3))
    assert os.listdir(tmp_path) == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "old"
