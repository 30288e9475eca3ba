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
USE, UPDATE, PUSH = "use", "update", "push"
"""Names of marks: a result that a learner took, so many steps after the call that made it began; an
update of a parameter server (its version); a gradient (its staleness)."""


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
    ident: NDArray[np.int64]
    """Of the span that made what was used; -1 of all others."""


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


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """One run of a program: its spans and marks, in the seconds of its machine's clock.

    Example:
        trace = Trace.read("run.pftrace")
        print(trace.figures())
        print(trace.find("rollout").secs.mean())
    """

    spans: Mapping[Kind, Mapping[str, Spans]]
    """By kind and name; `find` looks there."""
    marks: Mapping[str, Marks] = field(default_factory=dict)
    """By name: "use" of results of `rollouts`, whose values are their staleness, and "push",
    "push (dropped)", "pull" and "update" of parameter servers."""
    began: float = 0.0
    """When the recorder began."""
    ended: float = 0.0
    """When it ended, or what it wrote last."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What `record` was given as settings: the arguments of the program."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else the recorder says: of stages of data, of the protocol, of processor time."""
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
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """What was recorded of one run.

        Args:
            path: of a file that `record` or `TraceHook` has written, also of a process that was
                killed.

        Raises:
            TraceError: the file is no trace, of another version, without a span, of a clock that
                has jumped, or joined of several.
            OSError: the file cannot be read.
        """
        source = _check.path("path", path, "the path of a file that record(...) has written")
        with open(source, "rb") as file:
            contents = read_contents(file.read(), source)
        content = contents[0]
        if len(contents) > 1:
            raise TraceError(
                f"{source} is joined of {len(contents)} files, each of a process with a clock and "
                "a program of its own; give one of them"
            )
        secs = content.spans[:, ENDED] - content.spans[:, BEGUN]
        if (back := max(content.secs_back, -float(secs.min(initial=0.0)))) > 0:
            raise TraceError(
                f"{source} was recorded by a clock that went back by {back:g} s, where a clock "
                "only goes forward; record the run again"
            )
        if not len(content.spans):
            raise TraceError(
                f"{source} has no span; record a run in which a session, a stage or timed work "
                "does something"
            )
        return cls.of(content)

    @classmethod
    def of(cls, content: Content) -> Trace:
        """What one recorder has written, or a plan has kept, as columns."""
        labels = [*content.labels.values()]
        workers = np.array([each.worker for each in labels], np.int64)
        are_on_session = np.array([each.is_on_session for each in labels], np.bool_)
        spans: dict[Kind, dict[str, Spans]] = {}
        marks: dict[str, Marks] = {}
        for kind, name in dict.fromkeys((each.kind, each.name) for each in labels):
            numbers = [place for place, each in enumerate(labels) if each[:2] == (name, kind)]
            table = content.marks if kind is None else content.spans
            rows = table[np.isin(table[:, LABEL], numbers)]
            rows = rows[np.argsort(rows[:, BEGUN], kind="stable")]
            label, track, ident = rows[:, [LABEL, TRACK, IDENT]].astype(np.int64).T
            begun, value = rows[:, BEGUN], rows[:, VALUE]
            if kind is None:
                marks[name] = Marks(begun, value, workers[label], ident)
            elif len(rows):
                of_kind = spans.setdefault(kind, {})
                of_kind[name] = Spans(
                    begun,
                    rows[:, ENDED],
                    value,
                    workers[label],
                    track,
                    ident,
                    rows[:, IS_CUT] > 0,
                    are_on_session[label],
                )
        about, times = content.about, content.spans[:, BEGUN : ENDED + 1]
        return cls(
            spans,
            marks,
            about.get("began", float(times.min(initial=math.inf))),
            about.get("ended", float(times.max(initial=-math.inf))),
            about.get("settings", {}),
            about | ({"cpu": content.cpu} if content.cpu else {}),
            "ended" in about,
        )

    def find(self, name: str, kind: Kind | None = None) -> Spans:
        """The spans of a name, in order of their beginnings; none if nothing was recorded.

        Args:
            name: of the spans.
            kind: of the spans; None: WORK, else the first of the others that has spans of
                the name.
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
        used = self.marks.get(USE, self.marks.get(PUSH))
        stale = np.zeros(0)
        if used is not None:
            stale = used.value[(used.time >= start) & (used.time <= end)]
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
        total = sum(
            float((np.clip(each.ended, start, end) - np.clip(each.begun, start, end)).sum())
            for each in sessions.values()
        )
        work = [each.pick(each.is_on_session) for each in self.spans.get(Kind.WORK, {}).values()]
        if not any(len(each) for each in work):
            work = [self.find(STEP, Kind.RUN)]
        busy = Spans.joined(work)
        if not total > 0:
            return math.nan
        secs = sum(
            _union_within(busy.pick(busy.track == track), start, end)
            for track in np.unique(busy.track)
        )
        return max(0.0, 1.0 - secs / total)  # sums of the same seconds differ by rounding


def _union_within(spans: Spans, start: float, end: float) -> float:
    """Seconds of a window in which one of these is under way, as timed work may call other work."""
    begun, ended = np.clip(spans.begun, start, end), np.clip(spans.ended, start, end)
    latest = np.maximum.accumulate(np.concatenate([[start], ended]))
    return float(np.maximum(ended - np.maximum(begun, latest[:-1]), 0.0).sum())
