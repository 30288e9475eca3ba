"""FileSession: the spans of one session, its runs, and its hooks."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._engine.base import Engine
from .._engine.recording import Kind, Place, Recorder, SessionRecord, Span, ended, recorded_park
from .._running.dispatch import Group, HookCall
from ._events import NO_IDENT, SPAN, Spans, Table, nanoseconds, table
from ._runs import Cut, RunTimes
from ._tracks import Label


class TrackRecorder(Recorder):
    """What a session needs of the recorder that it is part of, which is above it."""

    clock: Callable[[], float]

    @abstractmethod
    def take_track(self, name: str) -> int: ...

    @abstractmethod
    def span(self, label: Label, track: int, **options: Any) -> Span: ...

    @abstractmethod
    def span_on(self, track_name: str, label: Label) -> Span: ...

    @abstractmethod
    async def session_ended(self, engine: Engine) -> None: ...


class FileSession(SessionRecord):
    """One session; `FileRecorder.open_session` makes it, in the task that opens the session."""

    def __init__(self, recorder: TrackRecorder, engine: Engine, name: str, step: Any) -> None:
        self._recorder, self._engine, self._name = recorder, engine, name
        self.step = step
        self.track = recorder.take_track(name)
        self._task = engine.current_task()
        self._place: Place | None = None
        if not _is_recorded_otherwise(recorder):
            self._place = Place(recorder, self.track, self._task, is_session=True, engine=engine)
            self._place.enter()
        self._runs: list[RunTimes] = []
        self.ends = np.zeros(0)
        """When the runs of the last `take` ended."""
        self.is_over = self.is_dropped = False
        self._records_waits = True
        engine.begin_recording(recorded_park)
        label = Label(name, Kind.SESSION)
        self._span: Span | None = recorder.span(label, self.track, is_live=True)

    def around_runs(
        self, before_runs: tuple[Group, ...], after_runs: tuple[Group, ...]
    ) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        before, after = (self._each_alone(groups) for groups in (before_runs, after_runs))
        is_in_run = self.last_time() is not None
        runs = RunTimes(self._recorder.clock, before, after, is_in_run=is_in_run)
        self._runs = [*self._runs[-1:], runs]  # of the one before rows may wait for a flush
        return runs.before_runs, runs.after_runs

    def _each_alone(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """Plain methods that are called together in a place get a span each."""
        return tuple(
            (call, method, tuple(_PlainCall.of(each, self) for each in group))
            if len(group) > 1
            else (call, method, group)
            for call, method, group in groups
        )

    def plain_span(self, name: str, thread: int) -> Span:
        """Of a plain method, which is called here or in the thread of the session's steps."""
        if threading.get_ident() == thread:
            return self.span(Kind.HOOK, name)
        return self._recorder.span_on(f"{self._name}: thread", Label(name, Kind.HOOK))

    def cut_run(self, error: BaseException) -> None:
        for each in self._runs:
            each.cut()

    def last_time(self) -> float | None:
        """The last time of the run under way; None if none is."""
        for each in self._runs:
            if (last := each.last) is not None:
                return last
        return None

    def span(self, kind: Kind, name: str) -> Span:
        if task_of(self._engine) is self._task:
            return self._recorder.span(Label(name, kind), self.track, times=self.last_time)
        return self._recorder.span_on(f"{self._name}: another task", Label(name, kind))

    async def aclose(self, error: BaseException | None) -> None:
        if self._span is None:
            return
        self._span.end(error)
        self._span = None
        if self._place is not None:
            self._place.leave()
        self.end_waits()
        self.is_over = True
        await self._recorder.session_ended(self._engine)

    def end_waits(self) -> None:
        """Record no further waits for it, once."""
        if self._records_waits:
            self._records_waits = False
            self._engine.end_recording()

    def drop(self) -> None:
        self.is_dropped = True

    def take(self, number: Callable[[Label], int], least_secs: float) -> tuple[list[Spans], Table]:
        """The spans of runs since the last call, and of those cut; in the thread that writes.

        Args:
            number: of a name.
            least_secs: calls of hooks that took less are left out.
        """
        found: list[Spans] = []
        of_cuts = [table(())]
        ends = [np.zeros(0)]
        for runs in list(self._runs):
            rows, cuts = runs.take()
            ends.append(rows[:, -1])
            times = nanoseconds(rows)
            found.append(
                Spans(number(Label("run", Kind.RUN)), self.track, times[:, 0], times[:, -1])
            )
            is_long = np.diff(times) >= least_secs * 1e9
            is_long[:, runs.names.index("step")] = True
            has_any: NDArray[np.bool_] = np.any(is_long, axis=0)
            for place, name in enumerate(runs.names):
                if not has_any[place]:
                    continue
                some = times[:, place : place + 2]
                if name != "step":
                    some = some[is_long[:, place]]
                found.append(Spans(number(_part_of_run(name)), self.track, some[:, 0], some[:, 1]))
            of_cuts += [self._of_cut(each, runs.names, number) for each in cuts]
        self.ends = np.concatenate(ends)
        return found, np.concatenate(of_cuts)

    def _of_cut(self, cut: Cut, names: list[str], number: Callable[[Label], int]) -> Table:
        """A run that failed, what it has done, and what it was cut in."""
        times = [*cut.times, cut.ended]
        run = Label("run", Kind.RUN, is_cut=True)
        rows = [(SPAN, number(run), self.track, times[0], times[-1], NO_IDENT, np.nan)]
        last = len(cut.times) - 1
        for place, name in enumerate(names[: len(cut.times)]):
            label = _part_of_run(name)._replace(is_cut=place == last)
            begun, done = times[place], times[place + 1]
            rows.append((SPAN, number(label), self.track, begun, done, NO_IDENT, np.nan))
        return table(rows)

    @property
    def num_lost(self) -> int:
        """Runs that were dropped, as the disk was stuck."""
        return sum(each.num_lost for each in self._runs)


class _PlainCall(HookCall):
    """A plain method that records itself, in whichever thread."""

    __slots__ = ("_session", "_thread")

    _session: FileSession
    _thread: int

    @classmethod
    def of(cls, call: HookCall, session: FileSession) -> HookCall:
        made = cls(call.place, call.hook, call.moment)
        made._session, made._thread = session, threading.get_ident()
        return made

    @property
    def method(self) -> Callable[..., Any]:
        method = super().method
        session: FileSession | None = getattr(self, "_session", None)
        if session is None:  # while it is made
            return method

        def recorded(*args: Any) -> Any:
            with ended(session.plain_span(f"{self.owner}.{self.moment}", self._thread)):
                return method(*args)

        return recorded


def _is_recorded_otherwise(recorder: Recorder) -> bool:
    """Whether what tasks do belongs to the record of the whole program, as a plan needs it."""
    outer = Place.current()
    if outer is None or outer.recorder is recorder or outer.recorder.is_closed:
        return False
    return outer.recorder.is_of_program


def _part_of_run(name: str) -> Label:
    return Label(name, Kind.RUN if name == "step" else Kind.HOOK)


def task_of(engine: Engine | None) -> object:
    """The running task; None in a thread that has none."""
    return None if engine is None or engine.is_elsewhere else engine.current_task()
