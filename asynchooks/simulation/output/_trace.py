"""A simulated training as a trace, in the lines that a recorded run has, too.

All data is that of the cluster's timeline, in which spans of one worker never overlap.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import chain, islice

from ..._check import instance
from ..._engine.recording import Kind
from ..._errors import ScheduleError
from ..._tracing._label import Label
from ..._tracing._lines import MOMENT, SPAN, Event, Writer
from ._report import Report
from ._timeline import Timeline
from ._whole_file import whole_file

_STEP_SECS = 1e-6
_BATCH = 1024
"""Events that are in memory as lines at one time."""


def write_trace(path: str | os.PathLike[str], report: Report | ScheduleError) -> None:
    """Write what every worker did when, or a failing schedule; open it in ui.perfetto.dev.

    There is a lane for each worker (compute, lost, wait, pull, push, served, down), with a mark for
    each of its pushes, which has the outcome and the staleness of the gradient. The global step and
    the loss, if it was recorded, are counters. The file is one that `TraceHook` could have written
    in virtual time, so `Empirical.from_trace` reads it, too. The same seed gives the same bytes on
    every backend.

    Of a schedule there is a lane for each task, and a span of 1 us for each choice that let it go
    on, in their order, which names the virtual time and what the task had waited for.

    Args:
        path: of a file; it is replaced whole, or left as it was.
        report: of a cluster with keep_timeline=True; or the error of `explore`.

    Raises:
        ValueError: the cluster kept no timeline.
        OSError: the file cannot be written.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, compute=Exponential(1.0), keep_timeline=True)
        report = cluster.run(updates=100)
        write_trace("training.pftrace", report)  # open it in ui.perfetto.dev
    """
    writer = Writer(process=1)
    if isinstance(report, ScheduleError):
        with whole_file(path) as new, new.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(_lines_of_steps(writer, report))
        return
    timeline = timeline_of(report)
    events = _events(timeline)
    updates = ((push.time, push.version) for push in timeline.pushes if push.outcome == "applied")
    losses = ((secs, loss) for secs, _, loss in report.losses)
    with whole_file(path) as new, new.open("w", encoding="utf-8", newline="\n") as file:
        file.write(writer.opening(f"{report.num_workers} workers, {report.protocol}"))
        for worker in range(report.num_workers):
            file.write(writer.about("thread_name", _track(worker), name=f"worker {worker}"))
        while batch := list(islice(events, _BATCH)):
            file.writelines(writer.events(batch))
        file.writelines(writer.counter("global step", updates))
        file.writelines(writer.counter("loss", losses))


def _lines_of_steps(writer: Writer, error: ScheduleError) -> Iterator[str]:
    yield writer.opening(f"schedule {error.schedule}")
    tracks = {name: _track(i) for i, name in enumerate(dict.fromkeys(s[1] for s in error.steps))}
    for name, track in tracks.items():
        yield writer.about("thread_name", track, name=name)
    for place, (time, name, wait) in enumerate(error.steps):
        label = Label(f"{time:.6g} s: {wait}" if wait else f"{time:.6g} s", Kind.WORK)
        begin, end = place * _STEP_SECS, (place + 1) * _STEP_SECS
        yield from writer.events([(SPAN, label, tracks[name], begin, end, -1, math.nan, False)])


def timeline_of(report: Report) -> Timeline:
    """The report's timeline; a TypeError of what is no report, a ValueError if it has none."""
    instance("report", report, Report, "one report, as Cluster.run returns it")
    if report.timeline is None:
        raise ValueError(
            "the cluster of this report kept no timeline; give simulation.cluster(..., "
            "keep_timeline=True)"
        )
    return report.timeline


def _events(timeline: Timeline) -> Iterator[Event]:
    spans = (
        (SPAN, Label(kind, Kind.WORK, worker), _track(worker), begin, end, -1, math.nan, False)
        for worker, kind, begin, end in timeline.spans
    )
    pushes = (
        (MOMENT, Label(outcome, None, worker), _track(worker), time, time, -1, staleness, False)
        for worker, time, outcome, staleness, _ in timeline.pushes
    )
    return chain(spans, pushes)


def _track(worker: int) -> int:
    return worker + 1  # counters have the track 0
