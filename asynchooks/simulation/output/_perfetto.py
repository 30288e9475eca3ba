"""A simulated training as a trace that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's "Trace Event Format" in JSON. All data is that of the cluster's timeline.
Within a lane spans never overlap, or viewers would drop them.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from ..._check import instance
from ._report import Report
from ._timeline import Push, Span, Timeline, cut_spans, numbers_at_server, numbers_at_work
from ._whole_file import whole_file

_TICKS = 8e6
"""Per second. Eighths of a microsecond are exact as floats, and whole nanoseconds: whether a reader
counts in one or the other, neighbours touch."""

_SERVER = '"pid":1,"tid":1'
_MACHINE = '"pid":1,"tid":2'
_WORKERS = 2
"""The process of the workers, and the lane of the first one."""
_IDLE = ("wait", "down")
_LINES = 1024


def write_trace(path: str | os.PathLike[str], report: Report) -> None:
    """Write what every worker did when; open it in ui.perfetto.dev.

    There is a lane for each worker (compute, lost, wait, pull, push, served, down; a discarded
    gradient is a mark), one for the server (how long each version was the newest; of versions that
    were made at one moment the last), one for its saves and crashes, if there were any, and
    counters of the global step, of active workers, of the loss, if it was recorded, and of pushes
    at the server, if service takes time. The cluster's settings are in "otherData".
    Arrows lead from a gradient's last span to the update that it was part of, and from the span
    that made a version to what other workers did with that version. The same seed gives the same
    bytes on every backend.

    Args:
        path: of a file; it is replaced whole, or left as it was.
        report: of a cluster with keep_timeline=True.

    Raises:
        ValueError: the cluster kept no timeline.
        OSError: the file cannot be written.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, compute=Exponential(1.0), keep_timeline=True)
        report = cluster.run(updates=100)
        write_trace("training.json", report)  # open it in ui.perfetto.dev
    """
    timeline = timeline_of(report)
    lines = _events(report, timeline)
    with whole_file(path) as new, new.open("w", encoding="ascii", newline="\n") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(next(lines))
        batch: list[str] = []
        for line in lines:
            batch.append(line)
            if len(batch) == _LINES:  # a write for each would take half of the time
                file.write(",\n" + ",\n".join(batch))
                batch.clear()
        file.write("".join(f",\n{line}" for line in batch))
        settings = json.dumps(report.settings, sort_keys=True)
        file.write(f'\n],"otherData":{settings}}}\n')


def timeline_of(report: Report) -> Timeline:
    """The report's timeline; a TypeError of what is no report, a ValueError if it has none."""
    instance("report", report, Report, "one report, as Cluster.run returns it")
    if report.timeline is None:
        raise ValueError(
            "the cluster of this report kept no timeline; give simulation.cluster(..., "
            "keep_timeline=True)"
        )
    return report.timeline


def _events(report: Report, timeline: Timeline) -> Iterator[str]:
    yield from _names(report)
    writer = _Writer()
    spans = cut_spans(timeline.spans)
    span = next(spans, None)
    for push in timeline.pushes:
        # first, what the worker did until its push
        while span is not None and span.end <= push.time:
            yield from writer.span(span)
            span = next(spans, None)
        yield from writer.push(push)
    while span is not None:
        yield from writer.span(span)
        span = next(spans, None)
    yield from writer.end(report.secs)
    for secs, number in numbers_at_work(timeline):
        yield _counter("active workers", _ticks(secs), number)
    for secs, number in numbers_at_server(timeline):
        yield _counter("pushes at the server", _ticks(secs), number)
    for secs, _, loss in report.losses:
        if math.isfinite(loss):  # JSON has no other numbers
            yield _counter("loss", _ticks(secs), loss)
    if timeline.server:
        yield _name("thread_name", _MACHINE, "name", "saves and crashes")
    for kind, since, until in timeline.server:
        begin, end = _ticks(since), _ticks(until)
        if begin < end:
            yield _span(kind, _MACHINE, begin, end)


def _names(report: Report) -> Iterator[str]:
    """The names of the lanes, and their order."""
    workers = f'"pid":{_WORKERS}'
    for order, (pid, text) in enumerate(
        (('"pid":1', "server"), (workers, f"{report.num_workers} workers, {report.protocol}"))
    ):
        yield _name("process_name", pid, "name", text)
        yield _name("process_sort_index", pid, "sort_index", order)
    yield _name("thread_name", _SERVER, "name", "versions")
    for index in range(report.num_workers):
        lane = f'{workers},"tid":{_WORKERS + index}'
        yield _name("thread_name", lane, "name", f"worker {index}")
        yield _name("thread_sort_index", lane, "sort_index", index)


def _name(what: str, place: str, key: str, value: Any) -> str:
    return f'{{"ph":"M","name":"{what}",{place},"args":{{"{key}":{json.dumps(value)}}}}}'


def _span(name: str, place: str, begin: int, end: int) -> str:
    times = f'"ts":{_micros(begin)},"dur":{_micros(end - begin)}'
    return f'{{"ph":"X","name":"{name}",{place},{times}}}'


def _ticks(secs: float) -> int:
    return round(secs * _TICKS)


def _micros(ticks: int) -> str:
    whole, eighths = divmod(ticks, 8)
    return f"{whole}{('', '.125', '.25', '.375', '.5', '.625', '.75', '.875')[eighths]}"


def _counter(name: str, ticks: int, value: float) -> str:
    args = f'"args":{{"value":{value}}}'
    return f'{{"ph":"C","name":"{name}","pid":1,"ts":{_micros(ticks)},{args}}}'


class _Writer:
    """Converts spans and pushes to events, in order of time."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, int]] = {}  # by worker: kind and end of its last span
        self._begins: dict[int, list[int]] = {}  # of its work since its last push or loss
        self._parts: list[tuple[int, int]] = []  # lane and end of what made the next update
        self._version: tuple[int, int, Push] | None = None  # since when, which
        self._sources: list[tuple[int, int]] = []  # what it was made of
        # by version: lane and moment at which it was made. Arrays: there are as many as updates
        self._made_by = array("q", [0])
        self._made_at = array("q", [0])
        self._num_flows = 0

    def span(self, span: Span) -> Iterator[str]:
        begin, end = _ticks(span.begin), _ticks(span.end)
        if begin == end:
            return
        worker, kind = span.worker, span.kind
        self._last[worker] = (kind, end)
        if kind == "lost":  # what it pushes is from a later pull
            self._begins.pop(worker, None)
        elif kind not in _IDLE:
            self._begins.setdefault(worker, []).append(begin)
        yield _span(kind, f'"pid":{_WORKERS},"tid":{_WORKERS + worker}', begin, end)

    def push(self, push: Push) -> Iterator[str]:
        at, worker = _ticks(push.time), push.worker
        lane = _WORKERS + worker
        kind, end = self._last.get(worker, ("wait", 0))
        source = None if kind in _IDLE or end != at else (lane, end)
        begins = self._begins.pop(worker, [])
        if push.outcome == "discarded":
            yield (
                f'{{"ph":"i","s":"t","name":"discarded","pid":{_WORKERS},"tid":{lane},'
                f'"ts":{_micros(at)},"args":{{"staleness":{push.staleness}}}}}'
            )
            return
        if source is not None:
            self._parts.append(source)
        yield from self._from_maker(push, lane, begins)
        if push.outcome == "applied":
            yield from self._update(at, push, source)

    def _from_maker(self, push: Push, lane: int, begins: list[int]) -> Iterator[str]:
        """The arrow from the span that made a version to the first that worked on it."""
        pulled = push.version - push.staleness - (push.outcome == "applied")
        if not 0 < pulled < len(self._made_by):
            return
        maker, made_at = self._made_by[pulled], self._made_at[pulled]
        # what began earlier asked for it: a request may wait for the network
        first = bisect_left(begins, made_at)
        # a worker that continues from its own update needs no arrow
        if maker not in (0, lane) and first < len(begins):
            yield from self._flow("pulled", (maker, made_at), _WORKERS, lane, begins[first])

    def _update(self, at: int, push: Push, source: tuple[int, int] | None) -> Iterator[str]:
        yield from self._end_version(at)
        if self._version is None or self._version[0] < at:
            self._sources.clear()
        self._version = (at, push.version, push)
        self._sources += self._parts
        self._parts.clear()
        yield _counter("global step", at, push.version)
        lane, end = source or (0, 0)
        while len(self._made_by) <= push.version:  # after a restore, versions come again
            self._made_by.append(0)
            self._made_at.append(0)
        self._made_by[push.version], self._made_at[push.version] = lane, end

    def _end_version(self, at: int) -> Iterator[str]:
        """How long a version was the newest, with the arrows that lead to it."""
        if self._version is None or self._version[0] == at:
            return
        since, version, push = self._version
        args = f'"args":{{"worker":{push.worker},"staleness":{push.staleness}}}'
        yield (
            f'{{"ph":"X","name":"version {version}",{_SERVER},"ts":{_micros(since)},'
            f'"dur":{_micros(at - since)},{args}}}'
        )
        for source in self._sources:
            yield from self._flow("update", source, 1, 1, since)

    def _flow(
        self, name: str, source: tuple[int, int], pid: int, lane: int, at: int
    ) -> Iterator[str]:
        """An arrow from a lane and the end of its span, to where a span of another begins."""
        self._num_flows += 1
        common = f'"cat":"flow","name":"{name}","id":{self._num_flows}'
        # within the span, as viewers may miss one at its very end
        begin = f'"pid":{_WORKERS},"tid":{source[0]},"ts":{_micros(source[1] - 1)}'
        yield f'{{"ph":"s",{common},{begin}}}'
        yield f'{{"ph":"f","bp":"e",{common},"pid":{pid},"tid":{lane},"ts":{_micros(at)}}}'

    def end(self, secs: float) -> Iterator[str]:
        """The last version, until the end of training."""
        yield from self._end_version(max(_ticks(secs), self._version[0] if self._version else 0))
