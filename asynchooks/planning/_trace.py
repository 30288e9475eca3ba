"""Trace: what was recorded of one run, or came of a planned one."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _check
from .._engine.recording import Kind
from .._errors import TraceError
from .._tracing._label import Label
from .._tracing._reader import (
    BEGUN,
    ENDED,
    IDENT,
    IS_CUT,
    KINDS,
    LABEL,
    TRACK,
    VALUE,
    Content,
    read_contents,
)
from ._spans import Floats, Spans

WARM_UP = 0.1
"""Share of a run that its figures leave out at its beginning."""
RUN, STEP = "run", "step"
"""Names of the spans of `session.run`, and of the step within it; their kind is `Kind.RUN`."""
UPDATE, PUSH = "update", "push"
"""Names of marks: an update of a parameter server (its version), a gradient (its staleness)."""


class Uses(NamedTuple):
    """Results that a learner took, each some steps after the call that made it had begun.

    Example:
        uses = Trace.read("run.pftrace").uses
        print(len(uses.time), uses.staleness.max())
    """

    time: Floats
    ident: NDArray[np.int64]
    """Of the span that made it."""
    staleness: Floats


class Marks(NamedTuple):
    """Moments of one name, with a number each.

    Example:
        for name, marks in Trace.read("run.pftrace").marks.items():
            print(name, len(marks.time), marks.value.mean())
    """

    time: Floats
    value: Floats
    worker: NDArray[np.int64]
    """-1 if none was named."""


class Figures(NamedTuple):
    """What came of a run, recorded or planned; NaN for what there was none of.

    Example:
        figures = Trace.read("run.pftrace").figures()
        print(f"{figures.rate:.1f} updates/s, staleness {figures.staleness:.2f}")
    """

    rate: float
    """Updates per second: of the parameter server if there is one, else runs of sessions."""
    staleness: float
    """Mean over what was used: steps between the beginning of its making and its use."""
    max_staleness: float
    """The greatest of these."""
    idle_share: float
    """Share of the sessions' time in which no timed work of theirs (else no step) was done."""
    num_updates: int
    """Of which the rate is made."""
    secs: float
    """Over which the rate was counted; the first tenth of a run is left out."""


_MOST_SHOWN = 8
_NO_USES = Uses(np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """One run of a program: its spans, uses and marks, in the seconds of its machine's clock.

    Example:
        trace = Trace.read("run.pftrace")
        print(trace.figures())
        print(trace.find("rollout").secs.mean())
    """

    spans: Mapping[Kind, Mapping[str, Spans]]
    """By kind and name; `find` looks there."""
    uses: Uses = _NO_USES
    """Of results of `rollouts`."""
    marks: Mapping[str, Marks] = field(default_factory=dict)
    """By name: "push", "push (dropped)", "pull" and "update" of parameter servers."""
    began: float = 0.0
    """When the first recorder began."""
    ended: float = 0.0
    """When the last one ended, or what it wrote last."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What `record` was given as settings: the arguments of the program."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of the recorder: the machine, its load, the stages of data, the protocol."""
    is_complete: bool = True
    """Whether the recorder was closed; a killed process lacks its last half second."""

    def __repr__(self) -> str:
        counts: Counter[str] = Counter()
        for each in self.spans.values():
            # a call that is recorded as two kinds of span counts once
            counts |= Counter({name: len(spans) for name, spans in each.items()})
        shown = ", ".join(f"{num} {name}" for name, num in counts.most_common(_MOST_SHOWN))
        rest = ", ..." if len(counts) > _MOST_SHOWN else ""
        return f"<Trace of {self.ended - self.began:.3g} s: {shown}{rest}>"

    @classmethod
    def read(cls, path: str | os.PathLike[str], *more_paths: str | os.PathLike[str]) -> Trace:
        """What was recorded of one run.

        Args:
            path: of a file that `record` or `TraceHook` has written, also of a process that was
                killed; files may be joined (`cat a b > c`).
            more_paths: of files that other processes of the run have written. The clocks of
                other machines are joined by their time of day, which their hosts should keep equal.

        Raises:
            TraceError: a file is no trace, of another version, without a span, given twice, or of
                a clock that has jumped; or several processes did not run at the same time.
            OSError: a file cannot be read.
        """
        contents: list[tuple[str, Content]] = []
        known: set[str] = set()
        for each in (path, *more_paths):
            name = _check.path("path", each, "the path of a file that record(...) has written")
            if (real := os.path.realpath(name)) in known:
                raise TraceError(f"{name} is given twice; give each file of a run once")
            known.add(real)
            with open(name, "rb") as file:
                contents += [(name, content) for content in read_contents(file.read(), name)]
        return _trace_of(contents)

    def find(self, name: str, kind: Kind | None = None) -> Spans:
        """The spans of a name, in order of their beginnings; none if nothing was recorded.

        Args:
            name: of the spans.
            kind: of the spans; None: the first of WORK, REQUEST, and the others, which has
                spans of the name.
        """
        for each in KINDS if kind is None else (kind,):
            if (found := self.spans.get(each, {}).get(name)) is not None:
                return found
        return Spans.none()

    def update_times(self) -> Floats:
        """When updates were made, in order."""
        if UPDATE in self.marks:
            return np.sort(self.marks[UPDATE].time)
        runs = self.find(RUN, Kind.RUN)
        return np.sort(runs.ended[~runs.is_cut])

    def window(self) -> tuple[float, float]:
        """From when until when figures count: from the end of the warm-up to the last update."""
        times, runs = self.update_times(), self.find(RUN, Kind.RUN)
        if not len(times):
            return math.nan, math.nan
        first = float(runs.begun[0]) if len(runs) else self.began
        after = times[times >= first + WARM_UP * (times[-1] - first)]
        return float(after[0]), float(after[-1])

    def figures(self) -> Figures:
        """What came of it: one definition for recorded and for planned runs."""
        start, end = self.window()
        times, secs = self.update_times(), end - start
        num = int(np.count_nonzero((times > start) & (times <= end)))
        stale, used_at = self.uses.staleness, self.uses.time
        if not len(stale) and PUSH in self.marks:
            stale, used_at = self.marks[PUSH].value, self.marks[PUSH].time
        stale = stale[(used_at >= start) & (used_at <= end)]
        return Figures(
            num / secs if secs > 0 else math.nan,
            float(stale.mean()) if len(stale) else math.nan,
            float(stale.max()) if len(stale) else math.nan,
            self._idle_share(start, end),
            num,
            secs,
        )

    def _idle_share(self, start: float, end: float) -> float:
        sessions = self.spans.get(Kind.SESSION, {})
        total = sum(_secs_within(each, start, end) for each in sessions.values())
        work = [each.pick(each.is_on_session) for each in self.spans.get(Kind.WORK, {}).values()]
        if not any(len(each) for each in work):
            work = [self.find(STEP, Kind.RUN)]
        busy = _outermost(Spans.joined(work))
        if not total > 0:
            return math.nan
        # sums of the same seconds differ by rounding
        return max(0.0, 1.0 - _secs_within(busy, start, end) / total)


def _trace_of(contents: list[tuple[str, Content]]) -> Trace:
    """The run whose processes have recorded these."""
    spans: dict[Kind, dict[str, list[Spans]]] = {}
    uses, marks = [np.zeros((0, 3))], dict[str, list[NDArray[np.float64]]]()
    about: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    bounds: list[tuple[float, float, str]] = []
    first = contents[0][1].about
    for number, (source, content) in enumerate(contents):
        # idents and tracks of several files are apart
        own_track, own_ident = number << 16, number << 44
        _check_clock(source, content)
        if secs := _secs_apart(first.get("machine", {}), content.about.get("machine", {})):
            content.shift(secs)
        settings = content.about.get("settings", {}) | settings
        about = content.about | about  # what the first file says counts
        if len(contents) == 1 and content.cpu:
            about["cpu"] = content.cpu
        for label_number, label in content.labels.items():
            some = content.spans[content.spans[:, LABEL] == label_number]
            if label.kind is not None and len(some):
                found = _spans_of(some, label, own_track, own_ident)
                spans.setdefault(label.kind, {}).setdefault(label.name, []).append(found)
            moments = content.marks[content.marks[:, LABEL] == label_number]
            if len(moments):
                workers = np.full(len(moments), label.worker, np.float64)
                columns = np.stack([moments[:, BEGUN], moments[:, VALUE], workers], 1)
                marks.setdefault(label.name, []).append(columns)
        used = content.uses
        idents = np.where(used[:, IDENT] >= 0, used[:, IDENT] + own_ident, -1.0)
        uses.append(np.stack([used[:, BEGUN], idents, used[:, VALUE]], 1))
        if len(content.spans):
            began = content.about.get("began", float(content.spans[:, BEGUN].min()))
            ended = content.about.get("ended", float(content.spans[:, ENDED].max()))
            bounds.append((began, ended, source))
    if not bounds:
        raise TraceError(
            f"{contents[0][0]} has no span; record a run in which a session, a stage or timed work "
            "does something"
        )
    _check_overlap(bounds)
    used = np.concatenate(uses)
    used = used[np.argsort(used[:, 0], kind="stable")]
    return Trace(
        {
            kind: {name: Spans.joined(parts) for name, parts in by_name.items()}
            for kind, by_name in spans.items()
        },
        Uses(used[:, 0], used[:, 1].astype(np.int64), used[:, 2]),
        {name: _marks_of(np.concatenate(parts)) for name, parts in marks.items()},
        min(began for began, _, _ in bounds),
        max(ended for _, ended, _ in bounds),
        settings,
        about,
        all("ended" in content.about for _, content in contents),
    )


def _spans_of(rows: NDArray[np.float64], label: Label, own_track: int, own_ident: int) -> Spans:
    num = len(rows)
    return Spans.of(
        rows[:, BEGUN],
        rows[:, ENDED],
        size=rows[:, VALUE],
        worker=np.full(num, label.worker, np.int64),
        track=rows[:, TRACK].astype(np.int64) + own_track,
        ident=np.where(rows[:, IDENT] >= 0, rows[:, IDENT] + own_ident, -1.0).astype(np.int64),
        is_cut=rows[:, IS_CUT] > 0,
        is_on_session=np.full(num, label.is_on_session),
    )


def _marks_of(rows: NDArray[np.float64]) -> Marks:
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return Marks(rows[:, 0], rows[:, 1], rows[:, 2].astype(np.int64))


def _check_clock(source: str, content: Content) -> None:
    secs = content.spans[:, ENDED] - content.spans[:, BEGUN]
    if (back := max(content.secs_back, -float(secs.min(initial=0.0)))) > 0:
        raise TraceError(
            f"{source} was recorded by a clock that went back by {back:g} s, where a clock only "
            "goes forward; record the run again"
        )


def _secs_apart(first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How far the clock of another machine is behind that of the first; 0: it is the same one."""
    if None in (first.get("boot"), other.get("boot")) or first["boot"] == other["boot"]:
        return 0.0
    if None in (first.get("host_time"), other.get("host_time")):
        return 0.0
    return float(other["host_time"]) - float(first["host_time"])


def _check_overlap(bounds: list[tuple[float, float, str]]) -> None:
    """Processes of one run on one machine share a clock, and run at the same time."""
    for began, ended, source in bounds:
        others = [each for each in bounds if each[2] != source]
        if others and not any(each[0] <= ended and each[1] >= began for each in others):
            raise TraceError(
                f"{source} was recorded from {began:.6g} to {ended:.6g} s, and {others[0][2]} from "
                f"{others[0][0]:.6g} to {others[0][1]:.6g} s: files of one run overlap; give files "
                "of several runs as several traces"
            )


def _outermost(spans: Spans) -> Spans:
    """Those that are in no other one of their track, as timed work may call other timed work."""
    spans = spans.pick(np.lexsort((-spans.ended, spans.begun, spans.track)))
    kept = np.ones(len(spans), np.bool_)
    latest: dict[int, float] = {}
    for place, (track, ended) in enumerate(
        zip(spans.track.tolist(), spans.ended.tolist(), strict=True)
    ):
        kept[place] = ended > latest.get(track, -math.inf)
        latest[track] = max(ended, latest.get(track, -math.inf))
    return spans.pick(kept)


def _secs_within(spans: Spans, start: float, end: float) -> float:
    """Seconds of all spans within a window; those that overlap count each."""
    secs = np.minimum(spans.ended, end) - np.maximum(spans.begun, start)
    return float(np.maximum(secs, 0.0).sum())
