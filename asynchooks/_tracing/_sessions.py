"""FileSession: the spans of one session, its runs, and its hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._engine.base import Engine
from .._engine.recording import Kind, Place, Recorder, SessionRecord, Span, record_waits
from .._running.hooks import HookCall
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
            self._place = Place(recorder, self.track, self._task, is_session=True)
            self._place.enter()
        self._runs: list[RunTimes] = []
        self.ends = np.zeros(0)
        """When the runs of the last `take` ended."""
        self.is_over = self.is_dropped = False
        record_waits(engine)
        label = Label(name, Kind.SESSION)
        self._span: Span | None = recorder.span(label, self.track, is_live=True)

    def around_runs(
        self, before_runs: tuple[HookCall, ...], after_runs: tuple[HookCall, ...]
    ) -> tuple[tuple[HookCall, ...], tuple[HookCall, ...]]:
        is_in_run = self.last_time() is not None
        runs = RunTimes(self._recorder.clock, before_runs, after_runs, is_in_run=is_in_run)
        self._runs = [*self._runs[-1:], runs]  # of the one before rows may wait for a flush
        return runs.before_runs, runs.after_runs

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
        self.is_over = True
        await self._recorder.session_ended(self._engine)

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
