"""FileSession: what is recorded of one session, its runs, and its hooks.

A run is a row of times: when each before_run was called, when the step began, when it ended and
the first after_run was called, when each further one was, and when the last had ended. So a call of
a hook costs one reading of the clock, where a span of its own would cost five times as much.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .._engine.base import Engine
from .._engine.recording import Kind, Place, Recorder, SessionRecord, Span, record_waits
from .._running.hooks import HookCall
from ._label import Label
from ._lines import SPAN, Event

_RUN, _STEP = Label("run", Kind.RUN), Label("step", Kind.RUN)
Row = tuple[tuple[Label, ...], tuple[float, ...], bool]
"""What was done in a run, the times from the beginning of one to the next, whether it was cut."""
MOST_ROWS = 100_000
"""Runs that wait for a flush: some 40 MB. More are dropped, and counted."""


class TrackRecorder(Recorder):
    """What a session needs of the recorder that it is part of, which is above it."""

    clock: Callable[[], float]
    lock: threading.RLock

    @abstractmethod
    def take_track(self, name: str) -> int: ...

    @abstractmethod
    def span(self, label: Label, track: int, **options: Any) -> Span: ...

    @abstractmethod
    def span_on(self, track_name: str, label: Label) -> Span: ...

    @abstractmethod
    async def session_ended(self, engine: Engine) -> None: ...


class FileSession(SessionRecord):
    """One session; `FileRecorder.open_session` makes it, in the task that opens the session.

    Args:
        counter: the name of the counter of its global step.
        step: with `last_known`; None: it has no step.
    """

    def __init__(
        self, recorder: TrackRecorder, engine: Engine, name: str, counter: str, step: Any
    ) -> None:
        self._recorder, self._engine, self.name = recorder, engine, name
        self.counter, self._step = counter, step
        self.track = recorder.take_track(name)
        self._task = engine.current_task()
        self._place: Place | None = None
        if not _is_recorded_otherwise(recorder):
            self._place = Place(recorder, self.track, self._task, is_session=True)
            self._place.enter()
        self._row: list[float] = []  # of the run under way
        self._labels: tuple[Label, ...] = ()  # of what is done in it
        self._rows: list[Row] = []  # with the recorder's lock
        self._points: list[tuple[float, float]] = []  # when runs ended, and the step then
        self.num_lost = 0
        """Runs that were dropped, as the disk was stuck."""
        self.is_over = self.is_dropped = False
        record_waits(engine)
        self._span: Span | None = recorder.span(Label(name, Kind.SESSION), self.track, is_live=True)

    def around_runs(
        self, before_runs: tuple[HookCall, ...], after_runs: tuple[HookCall, ...]
    ) -> tuple[tuple[HookCall, ...], tuple[HookCall, ...]]:
        labels = (*map(_label_of, before_runs), _STEP, *map(_label_of, after_runs))
        row, clock = self._row, self._recorder.clock
        add = row.append

        def noting(fn: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            def call(*args: Any) -> Awaitable[Any]:
                add(clock())
                return fn(*args)

            return call

        async def begin_step(context: Any) -> None: ...

        first, *others = (*before_runs, HookCall(-1, self, "before_run", begin_step))
        begin_first = noting(first.fn)

        def begin(context: Any) -> Awaitable[Any]:
            if row:  # the run before was cut without notice
                self._keep(is_cut=True)
            self._labels = labels
            return begin_first(context)

        async def end(context: Any, values: Any) -> None:
            add(clock())
            if self._labels is labels:
                self._keep(is_cut=False)
            else:  # another list of hooks was called before the step
                row.clear()

        return (
            (first.calling(begin), *(call.calling(noting(call.fn)) for call in others)),
            (
                *(call.calling(noting(call.fn)) for call in after_runs),
                HookCall(-1, self, "after_run", end),
            ),
        )

    def _keep(self, *, is_cut: bool) -> None:
        """Have the row of the run written, which has ended."""
        if is_cut:
            self._row.append(self._recorder.clock())
        times = tuple(self._row)
        self._row.clear()
        if self._recorder.is_closed:  # nothing is written any more
            return
        with self._recorder.lock:
            if len(self._rows) >= MOST_ROWS:
                self.num_lost += 1
                return
            self._rows.append((self._labels, times, is_cut))
            if self._step is not None and not is_cut:
                self._points.append((times[-1], self._step.last_known))

    def cut_run(self, error: BaseException) -> None:
        if self._row:
            self._keep(is_cut=True)

    def last_time(self) -> float | None:
        """The last time of the run under way; None if none is."""
        return self._row[-1] if self._row else None

    def span(self, kind: Kind, name: str) -> Span:
        if task_of(self._engine) is self._task:
            return self._recorder.span(Label(name, kind), self.track, times=self.last_time)
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

    def take(self) -> tuple[list[Row], list[tuple[float, float]]]:
        """The runs, and the points of the step, since the last call; with the recorder's lock."""
        rows, points = self._rows, self._points
        self._rows, self._points = [], []
        return rows, points


def events_of(rows: list[Row], track: int, least_secs: float) -> Iterator[Event]:
    """The spans of runs, and of what was done in them.

    Args:
        rows: of `FileSession.take`.
        track: of the session.
        least_secs: calls of hooks that took less are left out.
    """
    for labels, times, is_cut in rows:
        yield SPAN, _RUN, track, times[0], times[-1], -1, math.nan, is_cut
        begun, num_left = times[0], len(times) - 1
        for label, ended in zip(labels, times[1:], strict=False):
            num_left -= 1
            if is_cut or label is _STEP or ended - begun >= least_secs:
                yield SPAN, label, track, begun, ended, -1, math.nan, is_cut and not num_left
            begun = ended


def _label_of(call: HookCall) -> Label:
    return Label(f"{call.owner}.{call.moment}", Kind.HOOK)


def _is_recorded_otherwise(recorder: Recorder) -> bool:
    """Whether what tasks do belongs to the record of the whole program, as a plan needs it."""
    outer = Place.current()
    if outer is None or outer.recorder is recorder or outer.recorder.is_closed:
        return False
    return outer.recorder.is_of_program


def task_of(engine: Engine | None) -> object:
    """The running task; None in a thread that has none."""
    return None if engine is None or engine.is_elsewhere else engine.current_task()
