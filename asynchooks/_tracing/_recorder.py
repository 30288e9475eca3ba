"""FileRecorder: what tasks do, in one file that Perfetto opens.

What happens is kept as plain tuples; a thread makes lines of them at each flush. How the lines
look: `_lines.py`.

Invariants
- A span is on the track of the task that it is of, or on a track on which nothing else is under
  way, so that the spans of a track nest.
- A run is a row of times until it is written: see `_runs.py`.
- A span that takes longer than a flush has a line for its begin and one for its end, and each other
  one a line. What waits for a flush is bounded; what is more is counted.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from .._engine.base import Engine
from .._engine.recording import (
    Kind,
    Place,
    Recorder,
    Span,
    record_waits,
    recorded_in,
)
from ._file import TraceFile
from ._label import Label
from ._lines import BEGIN, END, MOMENT, SPAN, Event, Writer
from ._runs import STEP, Run, RunRows

logger = logging.getLogger("asynchooks")

MOST_EVENTS = 200_000
"""Events that wait for a flush: some 40 MB. More are dropped, and counted."""
_MOST_POINTS = 100
"""Of one counter in one flush."""
_MOST_TRACKS = (1 << 16) - 1
_NUMBER = re.compile(r"\d+")
_VALUE_OF = {"push": "staleness", "pull": "version"}
"""What the value of a mark is, by its name."""
_RUN = Label("run", Kind.RUN)
Row = tuple["FileSession", Run, float]
"""A run, and the global step after it; NaN where it was cut."""
MOST_ROWS = 100_000
"""Runs that wait for a flush: some 40 MB. More are dropped, and counted."""
Points = list[tuple[float, float]]
"""(Seconds, value) of a counter, in order of time."""


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class FileSpan(Span):
    """One span; its begin is written by itself where it takes longer than a flush."""

    recorder: FileRecorder
    label: Label
    track: int
    ident: int = -1
    is_live: bool = False
    """Whether its begin is written at the next flush."""
    least_secs: float = 0.0
    """It is left out if it takes less."""
    times: Callable[[], float | None] = _nothing
    """Tells whether something else has been recorded on the track meanwhile."""
    after: Callable[[], None] = _nothing
    """Called at the end, with the recorder's lock."""
    is_written: bool = False
    """Whether its begin is in the file."""
    before: float | None = field(init=False)
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.times()
        self.begun = self.recorder.clock()
        # last: the thread that writes looks at it from now on
        self.recorder.open_spans[self] = None

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        recorder, track, begun, ident = self.recorder, self.track, self.begun, self.ident
        ended = recorder.clock()
        with recorder.lock:
            recorder.open_spans.pop(self, None)
            if self.is_written:
                phase, begun, ident = END, ended, -1  # its arrow begins where it does
            else:
                phase = SPAN
                # a run of another task that has moved on meanwhile would not nest with it
                if self.times() != self.before:
                    track = recorder.take_track("other tasks")
            if self.is_written or ended - begun >= self.least_secs:
                is_cut = error is not None
                recorder.add((phase, self.label, track, begun, ended, ident, value, is_cut))
            self.after()


class FileRecorder(Recorder):
    """Records into one file, from its first session to its last, or until it is closed.

    Args:
        path: of the file; an existing one is replaced.
        clock: seconds, one clock for all threads and processes of the machine, or virtual ones.
        is_virtual: whether it leaps.
        closes_with_sessions: whether it ends with the last of its sessions.
        name: of the process, in Perfetto; "": that of the program.
        least_secs: calls of hooks in runs, and waits, that take less are left out.
        flush_secs: between two writes.
    """

    def __init__(
        self,
        path: str,
        clock: Callable[[], float],
        *,
        is_virtual: bool = False,
        closes_with_sessions: bool = True,
        name: str = "",
        least_secs: float = 10e-6,
        flush_secs: float = 0.5,
    ) -> None:
        self.clock = clock
        self._closes_with_sessions = closes_with_sessions
        self.is_of_program = not closes_with_sessions
        self._least_secs = least_secs
        # of all that follows; the garbage collector may close a coroutine of a span while this
        # thread holds it
        self.lock = threading.RLock()
        self.open_spans: dict[FileSpan, None] = {}
        self._events: list[Event] = []
        self._points: dict[str, Points] = {}  # by counter
        self._watched: dict[str, Callable[[], float | None]] = {}  # by counter
        self._rows: list[Row] = []
        self._sessions: list[FileSession] = []
        self._num_tracks = 0
        self._new_tracks: dict[int, str] = {}  # since the last flush
        self._num_of: dict[str, int] = {}  # tracks, by the name that was asked for
        self._free: dict[str, list[int]] = {}
        self._num_lost = 0
        self._has_warned = False
        self._flushed_at = began = clock()
        self._about: dict[str, Any] = {"began": began}
        self._inline: list[str] = []
        self._cpu_secs = None if is_virtual else _cpu_clock()
        program = os.path.basename(sys.argv[0]) if sys.argv else ""
        # processes of several containers may have one pid
        self._writer = Writer(1 + int.from_bytes(os.urandom(3)))
        self._opening = self._writer.opening(f"{name or program or 'python'} ({os.getpid()})")
        self._path = path
        self._file = TraceFile(path, self._chunk, self._stop, flush_secs)

    def _stop(self) -> None:
        self.is_closed = True

    async def session_ended(self, engine: Engine) -> None:
        """After the last one, record nothing more, and write what is left."""
        with self.lock:
            is_last = self._closes_with_sessions and all(each.is_over for each in self._sessions)
        if is_last:
            await self.aclose(engine)

    def describe(self, key: str, value: Any) -> None:
        with self.lock:
            self._about[key] = value

    async def aclose(self, engine: Engine) -> None:
        """Record nothing more, and write what is left."""
        self.is_closed = True
        self.describe("ended", self.clock())
        await self._file.aclose(engine)

    def close(self) -> None:
        """The same, and hold up the thread until then, for a few seconds at most."""
        self.is_closed = True
        self.describe("ended", self.clock())
        self._file.close()

    # What sessions, stages and side tasks call

    def open_session(self, engine: Engine, name: str, step: Any) -> FileSession:
        with self.lock:
            # sessions may share a step
            known = (each.counter for each in self._sessions if each.has_step(step))
            counter = next(known, "") or _new_name(
                "global step", {each.counter for each in self._sessions}
            )
            session = FileSession(self, engine, name, counter, step)
            self._sessions.append(session)
        return session

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> FileSpan:
        return self._span_of_task(engine, name, Label(name, kind), ident)

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> FileSpan:
        place, label = recorded_in.get(), Label(name, kind, -1 if worker is None else worker)
        if place is not None and place.track is not None:
            if engine is None or engine.is_elsewhere:
                # a thread, in which a session calls its step, or a task a function
                label = label._replace(is_on_session=place.is_session)
                return self.span_on(f"{name}: thread", label)
            if place.task is engine.current_task():
                return FileSpan(self, label, place.track)
        return self._span_of_task(engine, name if worker is None else f"worker {worker}", label)

    def _span_of_task(
        self, engine: Engine | None, track_name: str, label: Label, ident: int = -1
    ) -> FileSpan:
        """On a track of its own, on which what the running task does until then is recorded."""
        track, outer = self.take_track(track_name), Place.current()
        place = Place(self if outer is None else outer.recorder, track, task_of(engine))
        place.enter()

        def after() -> None:
            place.leave()
            self._give_back(track_name, track)

        return FileSpan(self, label, track, ident=ident, after=after)

    def note_inline(self, engine: Engine | None, name: str) -> None:
        """The event loop's own thread computes this work, unless the thread is another."""
        if engine is not None and not engine.is_elsewhere and name not in self._inline:
            with self.lock:
                self._inline = [*self._inline, name]
                self._about["inline"] = self._inline

    def wait(self, engine: Engine, what: str) -> FileSpan | None:
        track = self._track_of_task(engine)
        if track is None:
            return None
        label = Label(f"wait for {_NUMBER.sub('N', what)}", Kind.WAIT)
        times = next((each.last_time for each in self._sessions if each.track == track), _nothing)
        return FileSpan(self, label, track, least_secs=self._least_secs, times=times)

    def use(self, engine: Engine, ident: int, staleness: float) -> None:
        self._add_moment(engine, Label("use"), "staleness", staleness, ident)

    def mark(self, engine: Engine, name: str, value: float, worker: int | None = None) -> None:
        label = Label(name, None, -1 if worker is None else worker)
        self._add_moment(engine, label, f"{name}: {_VALUE_OF.get(name, 'value')}", value, -1)

    def _add_moment(
        self, engine: Engine, label: Label, counter: str, value: float, ident: int
    ) -> None:
        track, now = self._track_of_task(engine), self.clock()
        with self.lock:
            if track is None:  # a task of its own, as in a server
                track = self.take_track(label.name)
                self._give_back(label.name, track)
            self.add((MOMENT, label, track, now, now, ident, value, False))
            self._add_point(counter, now, value)

    def watch(self, name: str, read: Callable[[], float | None]) -> None:
        with self.lock:
            self._watched[_new_name(name, self._watched)] = read

    # What spans and sessions call

    def take_track(self, name: str) -> int:
        """A track of this name, or of this name with a number, on which nothing is under way."""
        with self.lock:
            if free := self._free.get(name):
                return heappop(free)
            if self._num_tracks < _MOST_TRACKS:
                self._num_tracks += 1
                self._num_of[name] = number = self._num_of.get(name, 0) + 1
                shown = name if number == 1 else f"{name} {number}"
                self._new_tracks[self._num_tracks] = shown
            return self._num_tracks

    def _give_back(self, name: str, track: int) -> None:
        with self.lock:
            heappush(self._free.setdefault(name, []), track)

    def span_on(self, track_name: str, label: Label) -> FileSpan:
        """One on a track of this name on which nothing is under way."""
        track = self.take_track(track_name)
        return FileSpan(self, label, track, after=lambda: self._give_back(track_name, track))

    def add(self, event: Event) -> None:
        """Have an event written; call it with the lock."""
        if self.is_closed:
            return
        # an end is never left out, for its begin is in the file
        if len(self._events) < MOST_EVENTS or event[0] == END:
            self._events.append(event)
        else:
            self._num_lost += 1

    def add_run(self, row: Row) -> None:
        """Have a run written."""
        with self.lock:
            if self.is_closed:
                return
            if len(self._rows) < MOST_ROWS:
                self._rows.append(row)
            else:
                self._num_lost += 1

    def _add_point(self, counter: str, time: float, value: float) -> None:
        points = self._points.setdefault(counter, [])
        if len(points) < MOST_EVENTS:
            points.append((time, value))

    def _track_of_task(self, engine: Engine) -> int | None:
        place = recorded_in.get()
        if place is None or place.track is None or place.task is not task_of(engine):
            return None
        track: int = place.track
        return track

    # The flush, in the thread of the file

    def _chunk(self) -> str:
        """The lines of what has come since the last chunk."""
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        now, before, writer = self.clock(), self._flushed_at, self._writer
        self._flushed_at = now
        with self.lock:
            begins: list[Event] = []
            for span in [*self.open_spans]:  # at once: spans are added without the lock
                if not span.is_written and (span.is_live or span.begun < before):
                    span.is_written, at = True, span.begun
                    is_of = span.label, span.track, at, at, span.ident
                    begins.append((BEGIN, *is_of, math.nan, False))
            rows, self._rows = self._rows, []
            events, self._events = self._events, []
            points_of, self._points = self._points, {}
            about, self._about = self._about, {}
            tracks, self._new_tracks = self._new_tracks, {}
            watched = [*self._watched.items()]
            self._forget_ended()
        for session, run, step in rows:
            if not math.isnan(step):
                points_of.setdefault(session.counter, []).append((run.times[-1], step))
        for name, read in watched:
            value = read()
            if value is None:
                del self._watched[name]
            else:
                points_of[name] = [(now, value)]
        self._warn_of_lost()
        opening, self._opening = self._opening, ""
        yield opening
        if about or rows or begins or events or points_of:
            cpu = None if self._cpu_secs is None else self._cpu_secs()
            # by the times of its chunks, a reader sees a clock that has jumped
            yield writer.about("asynchooks", 0, flushed=now, cpu=cpu, about=about)
        for number, name in tracks.items():
            yield writer.about("thread_name", number, name=name)
        spans = [each for row in rows for each in events_of(row, self._least_secs)]
        # of two others with the same times the inner one has ended first
        yield from writer.events([*begins, *spans, *reversed(events)])
        for name, values in points_of.items():
            yield from writer.counter(name, _thinned(values, _MOST_POINTS))

    def _forget_ended(self) -> None:
        """Of sessions that have ended, or were dropped; a file ends with the last of these."""
        ended = [each for each in self._sessions if each.is_over or each.is_dropped]
        for each in ended:
            self._sessions.remove(each)
            self._give_back(each.name, each.track)
        is_dropped = any(each.is_dropped for each in ended)
        if is_dropped and not self._sessions and self._closes_with_sessions:
            self.is_closed = True
            self._file.ask_to_end()

    def _warn_of_lost(self) -> None:
        if self._num_lost and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The trace %s lacks %d runs and spans, and perhaps more: its disk is too slow for "
                "what is recorded. Training goes on",
                self._path,
                self._num_lost,
            )


class FileSession(RunRows):
    """One session; `FileRecorder.open_session` makes it, in the task that opens the session.

    Args:
        counter: the name of the counter of its global step.
        step: with `last_known`; None: it has no step.
    """

    def __init__(
        self, recorder: FileRecorder, engine: Engine, name: str, counter: str, step: Any
    ) -> None:
        super().__init__(recorder.clock)
        self._recorder, self._engine, self.name = recorder, engine, name
        self.counter, self._step = counter, step
        self.track = recorder.take_track(name)
        self._task = engine.current_task()
        self._place: Place | None = None
        if not _is_recorded_otherwise(recorder):
            self._place = Place(recorder, self.track, self._task, is_session=True)
            self._place.enter()
        self.is_over = self.is_dropped = False
        record_waits(engine)
        self._span: Span | None = FileSpan(
            recorder, Label(name, Kind.SESSION), self.track, is_live=True
        )

    def has_step(self, step: Any) -> bool:
        """Whether its global step is this one."""
        return step is not None and self._step is not None and self._step.is_same(step)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        step = math.nan if self._step is None or run.is_cut else self._step.last_known
        self._recorder.add_run((self, run, step))

    def span(self, kind: Kind, name: str) -> Span:
        if task_of(self._engine) is self._task:
            return FileSpan(self._recorder, Label(name, kind), self.track, times=self.last_time)
        return self._recorder.span_on(f"{self.name}: another task", Label(name, kind))

    async def aclose(self, error: BaseException | None) -> None:
        if self._span is None:
            return
        self._span.end(error)
        self._span = None
        if self._place is not None:
            self._place.leave()
        self.is_over = True
        await self._recorder.session_ended(self._engine)

    def drop(self) -> None:
        self.is_dropped = True


def events_of(row: Row, least_secs: float) -> Iterator[Event]:
    """The spans of a run, and of what was done in it.

    Args:
        row: of `FileSession`.
        least_secs: calls of hooks that took less are left out.
    """
    session, (labels, times, is_cut), _ = row
    yield SPAN, _RUN, session.track, times[0], times[-1], -1, math.nan, is_cut
    begun, num_left = times[0], len(times) - 1
    for label, ended in zip(labels, times[1:], strict=False):
        num_left -= 1
        if is_cut or label is STEP or ended - begun >= least_secs:
            yield SPAN, label, session.track, begun, ended, -1, math.nan, is_cut and not num_left
        begun = ended


def _is_recorded_otherwise(recorder: Recorder) -> bool:
    """Whether what tasks do belongs to the record of the whole program, as a plan needs it."""
    outer = Place.current()
    if outer is None or outer.recorder is recorder or outer.recorder.is_closed:
        return False
    return outer.recorder.is_of_program


def task_of(engine: Engine | None) -> object:
    """The running task; None in a thread that has none."""
    return None if engine is None or engine.is_elsewhere else engine.current_task()


def _cpu_clock() -> Callable[[], float | None] | None:
    """Of this thread, for others to read: its processor seconds, None once it has ended.

    None on systems that have no such clock.
    """
    if sys.platform == "win32" or not hasattr(time, "pthread_getcpuclockid"):
        return None
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def read() -> float | None:
        with suppress(OSError):
            return time.clock_gettime(clock)
        return None

    return read


def _new_name(name: str, known: Container[str]) -> str:
    """The name, with a number if it is known already."""
    names = (name if number == 1 else f"{name} {number}" for number in count(1))
    return next(each for each in names if each not in known)


def _thinned(points: Points, most: int) -> Points:
    """Some of the points, at most so many, the last one among them."""
    every = -(-len(points) // most) or 1
    return points[(len(points) - 1) % every :: every]
