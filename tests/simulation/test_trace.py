"""A trace is read back: lanes without overlap, marks and counters that are right."""

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

from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import (
    Constant,
    Crashes,
    Exponential,
    Partition,
    Preemption,
    Report,
    write_trace,
)

from ..protocols.worlds import ALL
from .clusters import new_cluster, trained
from .engines import BACKENDS

Event = dict[str, Any]


def report_of(protocol: Protocol, updates: int = 60, workers: int = 6, **options: Any) -> Report:
    return trained(options.pop("backend", "turbo"), protocol, updates, workers, **options).report()


def busy(protocol: Protocol, updates: int, **options: Any) -> Report:
    """All kinds of spans."""
    failures = [
        Crashes(Exponential(6.0), Exponential(2.0), workers=[0, 1]),
        Crashes(Exponential(6.0), Exponential(2.0), loses_work=False, workers=[1, 2, 3]),
        Partition(at=5.0, secs=2.0, workers=[3, 4]),
        Preemption(at=9.0, workers=[5]),
    ]
    delays: dict[str, Any] = {
        "pull": Constant(0.1),
        "push": Exponential(0.2),
        "service": Constant(0.05),
    }
    return report_of(protocol, updates, failures=failures, **delays, **options)


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
    protocol=st.sampled_from(ALL),
    secs=st.sampled_from([Constant(0.0), Constant(1 / 3), Exponential(1e-6), Exponential(1.0)]),
)
@example(
    seed=265, protocol=StaleSynchronous(0), secs=Constant(0.0)
)  # an update during a cut link's request
@settings(max_examples=20)
def test_spans_of_a_lane_do_not_overlap_also_after_virtual_years(
    tmp_path_factory: pytest.TempPathFactory, seed: int, protocol: Protocol, secs: Any
) -> None:
    for report in (
        busy(protocol, 20, seed=seed, compute=secs),
        report_of(protocol, 20, seed=seed, compute=Exponential(1e7), push=Exponential(1e6)),
    ):
        for spans in lanes_of(events_of(report, tmp_path_factory.mktemp("traces"))).values():
            assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_times_are_microseconds_of_virtual_time_in_lanes_with_names(tmp_path: Path) -> None:
    report = report_of(Synchronous(), 2, 2, compute=Constant(0.25))
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
    report = report_of(DiscardStale(Asynchronous(), 2), 40)
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


def test_the_same_seed_gives_the_same_bytes_with_every_kind_of_span_on_every_backend(
    tmp_path: Path,
) -> None:
    contents = set()
    for backend in BACKENDS:
        report = busy(KSync(3), 100, backend=backend)
        spans = [span for lane in lanes_of(events_of(report, tmp_path)).values() for span in lane]
        contents.add((tmp_path / "out.json").read_bytes())
    assert len(contents) == 1
    kinds = {"compute", "lost", "wait", "pull", "push", "served", "down"}
    assert {name for _, _, name in spans} == kinds


def test_a_file_appears_whole_with_the_mode_of_any_new_one_and_a_link_stays_one(
    tmp_path: Path,
) -> None:
    cluster = trained("turbo", Asynchronous(), 9)
    plain, link = tmp_path / "plain", tmp_path / "link"
    plain.touch()
    link.symlink_to(tmp_path / "target")
    write_trace(link, cluster.report())
    assert link.is_symlink()
    assert link.stat().st_mode == plain.stat().st_mode
    whole = link.read_text()
    cluster.timeline.spans.append((0, "compute", 0.0, math.nan))  # type: ignore[arg-type]
    with pytest.raises((ValueError, AttributeError)):
        write_trace(link, cluster.report())
    with pytest.raises(ValueError, match="keep_timeline=True"):
        write_trace(link, new_cluster(2).run(updates=3))
    assert link.read_text() == whole
    assert sorted(os.listdir(tmp_path)) == ["link", "plain", "target"]


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    for path, error, match in (
        ("", IsADirectoryError, "it is a directory; name a file"),
        ("/dev/null", FileExistsError, "no regular file"),
        ("x" * 300, OSError, "cannot be written.*name another file"),
    ):
        with pytest.raises(error, match=match):
            write_trace(tmp_path / path, report_of(Asynchronous()))
