"""FileRecorder: what tasks do, in one file in Perfetto's format.

What happens is kept as numbers; a thread makes spans and counters of them at each flush. How they
are encoded: `_format.py`. The moments of runs: `_runs.py`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, count
from typing import Any

import numpy as np

from .._engine.base import Engine
from .._engine.recording import (
    Kind,
    Place,
    Span,
    recorded_in,
)
from ._counters import Counters, Levels, Points, StepCounter, Watched
from ._events import (
    BEGIN,
    END,
    MARK,
    NO_IDENT,
    SPAN,
    USE,
    encoded,
    in_order,
    table,
)
from ._file import TraceFile
from ._format import Encoder
from ._sessions import FileSession, TrackRecorder, task_of
from ._tracks import Label, Labels, Tracks

logger = logging.getLogger("asynchooks")

MOST_EVENTS = 200_000
"""Events that wait for a flush: some 30 MB. More are dropped, and counted."""
CUT = Label("cut")
"""At the end of a span whose begin is in the file already, and which was cut."""
_NUMBER = re.compile(r"\d+")


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


class FileSpan(Span):
    """One span; its begin is written by itself where it takes longer than a flush."""

    __slots__ = (
        "_after", "_before", "_recorder", "_times", "begun", "ident", "is_live", "is_written",
        "label", "least_secs", "track",
    )  # fmt: skip

    def __init__(
        self,
        recorder: FileRecorder,
        label: Label,
        track: int,
        *,
        ident: int = -1,
        is_live: bool = False,
        least_secs: float = 0.0,
        times: Callable[[], float | None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._recorder, self.label, self.track, self.ident = recorder, label, track, ident
        self.is_live = is_live  # its begin is written at the next flush
        self.is_written = False
        self.least_secs = least_secs  # it is left out if it takes less
        self._times, self._before = times, None if times is None else times()
        self._after = after
        self.begun = recorder.clock()

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        # a run of another task that has moved on meanwhile would not nest with it
        is_crossed = self._times is not None and self._times() != self._before
        self._recorder.end(self, value, is_cut=error is not None, is_crossed=is_crossed)
        if self._after is not None:
            self._after()


class WorkSpan(Span):
    """Work within what a task does, as cheap as it can be: steps of 100 us have some."""

    __slots__ = ("_number", "_recorder", "begun", "is_written", "label", "track")

    ident = -1
    is_live = False

    def __init__(self, recorder: FileRecorder, work: tuple[Label, int], track: int) -> None:
        self._recorder, self.track = recorder, track
        self.label, self._number = work
        self.is_written = False
        recorder.work_under_way[self] = None
        self.begun = recorder.clock()

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        recorder = self._recorder
        ended = recorder.clock()
        with recorder._lock:
            del recorder.work_under_way[self]
            events = recorder._events
            if error is None and not self.is_written and len(events) < MOST_EVENTS:
                event = (SPAN, self._number, self.track, self.begun, ended, NO_IDENT, value)
                events.append(event)
            else:
                recorder.end_other_work(self, ended, value, is_cut=error is not None)


class FileRecorder(TrackRecorder):
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
        self._is_virtual = is_virtual
        self._closes_with_sessions = closes_with_sessions
        self.is_of_program = not closes_with_sessions
        self._least_secs = least_secs
        # of what follows, up to the steps; the garbage collector may close a coroutine of a span
        # while this thread holds it
        self._lock = threading.RLock()
        self._tracks, self._labels = Tracks(), Labels()
        self._mark_tracks: dict[str, int] = {}
        self._open: dict[FileSpan, None] = {}
        self.work_under_way: dict[WorkSpan, None] = {}
        self._events: list[tuple[float, ...]] = []
        self._num_lost = 0
        self._calls, self._values = Levels(), dict[str, Points]()
        self._watched: list[Watched] = []
        self._sessions: list[FileSession] = []
        self._steps: list[StepCounter] = []
        self._flushed_at = self.clock()
        self._inline: list[str] = []
        self._cpu_secs = None if is_virtual else _cpu_clock()
        self._has_warned = False
        program = os.path.basename(sys.argv[0]) if sys.argv else ""
        self._encoder = Encoder(name or program or "python")
        self._about: dict[str, Any] = {"began": self._flushed_at}
        self._counters = Counters(self._encoder)
        self._opening = self._encoder.opening
        self._path = path
        self._file = TraceFile(path, self._chunk, self._stop, flush_secs)

    def _stop(self) -> None:
        self.is_closed = True

    async def session_ended(self, engine: Engine) -> None:
        """After the last one, record nothing more, and write what is left."""
        with self._lock:
            is_last = self._closes_with_sessions and all(each.is_over for each in self._sessions)
            self.is_closed = self.is_closed or is_last
        if is_last:
            await self.aclose(engine)

    def describe(self, key: str, value: Any) -> None:
        with self._lock:
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
        session = FileSession(self, engine, name, step)
        with self._lock:
            self._sessions.append(session)
            if step is not None and not any(each.is_of(step) for each in self._steps):
                known = {each.number for each in self._steps}
                number = next(each for each in count(1) if each not in known)
                self._steps.append(StepCounter(step, number, self.clock()))
        return session

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> FileSpan:
        track, outer = self.take_track(name), Place.current()
        place = Place(self if outer is None else outer.recorder, track, task_of(engine))
        place.enter()
        counter = f"{name} under way" if kind is Kind.CALL else ""

        def after() -> None:
            place.leave()
            with self._lock:
                self._tracks.give_back(track)
                if counter:
                    self._calls.add(counter, self.clock(), -1)

        if counter:
            with self._lock:
                self._calls.add(counter, self.clock(), 1)
        return self.span(Label(name, kind), track, ident=ident, after=after)

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        place = recorded_in.get()
        if place is None or place.track is None:
            return self._work_on_own_track(engine, kind, name, worker)
        if (
            engine is None or engine.is_elsewhere
        ):  # a thread, in which a session calls its step, or a task a function
            label = _work_label(kind, name, worker, place.is_session)
            return self.span_on(f"{name}: thread", label)
        if place.task is not engine.current_task():
            return self._work_on_own_track(engine, kind, name, worker)
        label = _work_label(kind, name, worker, place.is_session)
        with self._lock:
            number = self._labels.number(label)
        return WorkSpan(self, (label, number), place.track)

    def note_inline(self, engine: Engine | None, name: str) -> None:
        """The event loop's own thread computes this work, unless the thread is another."""
        if engine is not None and not engine.is_elsewhere and name not in self._inline:
            with self._lock:
                self._inline = [*self._inline, name]
                self._about["inline"] = self._inline

    def _work_on_own_track(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None
    ) -> FileSpan:
        track = self.take_track(name if worker is None else f"worker {worker}")
        outer = Place.current()
        place = Place(self if outer is None else outer.recorder, track, task_of(engine))
        place.enter()

        def after() -> None:
            place.leave()
            with self._lock:
                self._tracks.give_back(track)

        return self.span(_work_label(kind, name, worker, False), track, after=after)

    def wait(self, engine: Engine, what: str) -> FileSpan | None:
        track = self._track_of_task(engine)
        if track is None:
            return None
        name = f"wait for {_NUMBER.sub('N', what)}"
        times = next((each.last_time for each in self._sessions if each.track == track), None)
        label = Label(name, Kind.WAIT)
        return self.span(label, track, least_secs=self._least_secs, times=times)

    def use(self, engine: Engine, ident: int, staleness: float) -> None:
        self._note(engine, USE, Label("use"), "staleness", staleness, ident)

    def mark(self, engine: Engine, name: str, value: float, worker: int | None = None) -> None:
        label = Label(name, None, -1 if worker is None else worker)
        counter = f"{name}: {VALUE_OF.get(name, 'value')}"
        self._note(engine, MARK, label, counter, value, NO_IDENT)

    def _note(
        self, engine: Engine, layout: int, label: Label, counter: str, value: float, ident: float
    ) -> None:
        track, now = self._track_of_task(engine), self.clock()
        with self._lock:
            if track is None:  # a task of its own, as in a server
                track = self._track_of_marks(label.name)
            self._add((layout, self._labels.number(label), track, now, now, ident, value))
            points = self._values.setdefault(counter, [])
            if len(points) < MOST_EVENTS:
                points.append((now, value))

    def _track_of_marks(self, name: str) -> int:
        track = self._mark_tracks.get(name)
        if track is None:
            track = self._mark_tracks[name] = self._tracks.take(name)
        return track

    def _track_of_task(self, engine: Engine) -> int | None:
        place = recorded_in.get()
        if place is None or place.track is None or place.task is not task_of(engine):
            return None
        track: int = place.track
        return track

    def watch(self, name: str, read: Callable[[], float | None]) -> None:
        with self._lock:
            known = {each.name for each in self._watched}
            names = chain([name], (f"{name} {number}" for number in range(2, len(known) + 3)))
            self._watched.append(Watched(next(each for each in names if each not in known), read))

    # What spans and sessions call

    def take_track(self, name: str) -> int:
        with self._lock:
            return self._tracks.take(name)

    def span(self, label: Label, track: int, **options: Any) -> FileSpan:
        """One that begins now; options as those of `FileSpan`."""
        span = FileSpan(self, label, track, **options)
        with self._lock:
            if len(self._open) < MOST_EVENTS:
                self._open[span] = None
        return span

    def span_on(self, track_name: str, label: Label) -> FileSpan:
        """One on a track of this name on which nothing is under way."""
        track = self.take_track(track_name)

        def after() -> None:
            with self._lock:
                self._tracks.give_back(track)

        return self.span(label, track, after=after)

    def end_other_work(self, span: WorkSpan, ended: float, value: float, *, is_cut: bool) -> None:
        """Of work that was cut, whose begin is written, or of which there is too much."""
        if span.is_written:
            self._end_written(span.track, ended, value, is_cut=is_cut)
        else:
            number = self._labels.number(span.label._replace(is_cut=is_cut))
            self._add((SPAN, number, span.track, span.begun, ended, NO_IDENT, value))

    def _end_written(self, track: int, ended: float, value: float, *, is_cut: bool) -> None:
        self._add((END, 0, track, ended, ended, NO_IDENT, value))
        if is_cut:
            # it stands at the end of the span, whose name is written
            event = (SPAN, self._labels.number(CUT), track, ended, ended, NO_IDENT, math.nan)
            self._events.insert(len(self._events) - 1, event)

    def end(self, span: FileSpan, value: float, *, is_cut: bool, is_crossed: bool) -> None:
        ended = self.clock()
        with self._lock:
            self._open.pop(span, None)
            if span.is_written:
                self._end_written(span.track, ended, value, is_cut=is_cut)
                return
            if ended - span.begun < span.least_secs:
                return
            track = self._tracks.take("other tasks") if is_crossed else span.track
            label = span.label._replace(is_cut=True) if is_cut else span.label
            self._add(
                (SPAN, self._labels.number(label), track, span.begun, ended, span.ident, value)
            )

    def _add(self, event: tuple[float, ...]) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        else:
            self._num_lost += 1

    # The flush, in the thread of the file

    def _chunk(self) -> bytes:
        """What has come since the last chunk."""
        now, before = self.clock(), self._flushed_at
        with self._lock:
            sessions, steps, watched = [*self._sessions], [*self._steps], [*self._watched]
            number = self._labels.number
            taken = [it.take(number, self._least_secs) for it in sessions]
            begins = []
            under_way: list[Any] = [*self._open, *self.work_under_way]
            for span in under_way:
                if not span.is_written and (span.is_live or span.begun < before):
                    span.is_written = True
                    name, begun = number(span.label), span.begun
                    begins.append((BEGIN, name, span.track, begun, begun, span.ident, math.nan))
            events, self._events = self._events, []
            points: list[dict[str, Points]] = [self._calls.take(), self._values]
            self._values = {}
            for each in sessions:
                if each.is_over or each.is_dropped:
                    self._sessions.remove(each)
                    self._tracks.give_back(each.track)
            self._steps = [
                step for step in steps if any(step.is_of(each.step) for each in self._sessions)
            ]
            is_over = not self._sessions and any(each.is_dropped for each in sessions)
            if is_over and self._closes_with_sessions:
                self.is_closed = True
                self._file.drop()
            new_tracks, new_names = self._tracks.take_new(), self._labels.take_new()
            about, self._about = self._about, {}
            num_lost = self._num_lost + sum(each.num_lost for each in sessions)
        self._flushed_at = now
        of_runs = [each for runs, _ in taken for each in runs]
        # of the others the inner one was recorded first
        tables = [table(begins), *(cuts for _, cuts in taken), table(events)[::-1]]
        if self._is_virtual:
            everything = in_order(np.concatenate([*(each.table for each in of_runs), *tables]))
            of_runs = []
        else:
            everything = np.concatenate(tables)
        points += self._step_points(now, steps, sessions)
        points.append({each.name: [(now, each.value)] for each in watched if self._read(each)})
        self._warn_of_lost(num_lost)
        opening, self._opening = self._opening, b""
        chunk = b"".join(
            (
                opening,
                self._encoder.about({"about": about}) if about else b"",
                self._encoder.tracks(new_tracks),
                self._encoder.names(new_names),
                *(each.encoded(self._encoder) for each in of_runs),
                encoded(self._encoder, everything, is_sorted=self._is_virtual),
                self._counters.encoded(points),
            )
        )
        # by the times of its chunks, a reader sees a clock that has jumped
        if not chunk:
            return b""
        flushed: dict[str, Any] = {"flushed": now}
        if self._cpu_secs is not None and (secs := self._cpu_secs()) is not None:
            flushed["cpu"] = secs
        return self._encoder.about(flushed) + chunk

    def _step_points(
        self, now: float, steps: list[StepCounter], sessions: list[FileSession]
    ) -> list[dict[str, Points]]:
        found: list[dict[str, Points]] = []
        for each in steps:
            ends = [session.ends for session in sessions if each.is_of(session.step)]
            in_time = np.sort(np.concatenate([*ends, np.zeros(0)]))
            values, rates = each.points(now, in_time, is_virtual=self._is_virtual)
            suffix = f" {each.number}" if each.number > 1 else ""
            found.append({f"global step{suffix}": values, f"steps per second{suffix}": rates})
        return found

    def _read(self, watched: Watched) -> bool:
        """Whether there is a value; else it is not read any more."""
        value = watched.read()
        if value is None:
            with self._lock:
                self._watched.remove(watched)
            return False
        watched.value = value
        return True

    def _warn_of_lost(self, num_lost: int) -> None:
        if num_lost and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The trace %s lacks %d runs and spans, and perhaps more: its disk is too slow for "
                "what is recorded. Training goes on",
                self._path, num_lost,
            )  # fmt: skip


def _work_label(kind: Kind, name: str, worker: int | None, is_on_session: bool) -> Label:
    return Label(name, kind, -1 if worker is None else worker, is_on_session)


VALUE_OF = {"push": "staleness", "pull": "version"}
"""What the value of a mark is, by its name."""
