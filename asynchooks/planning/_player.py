"""Player: performs the timed work of a program in virtual time, and records what comes of it.

It keeps rows of numbers, and makes a `Trace` of them at the end: figures of planned and recorded
runs have one definition. It writes no file.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._engine.base import Engine, Slot
from .._engine.recording import (
    Kind,
    Recorder,
    SessionRecord,
    Span,
    ended,
)
from .._engine.threads import close_unrun
from .._errors import PlanError
from .._running.hooks import HookCall
from ..simulation import Simulation
from ._service import Beyond, Service
from ._spans import Spans
from ._station import Drawn, Station, Use
from ._timed import Performer, TimedWork, input_size_of, worker_of
from ._trace import RUN, STEP, Marks, Trace, Uses

_Row = tuple[float, float, float, int, int, int, bool, bool]
"""As the fields of `Spans`."""
_NONE: Any = iter(())
SAVE = "write a checkpoint"
"""Name of the spans of saves that a run waits for; their kind is `Kind.SAVE`."""


class Saves(NamedTuple):
    """Saves that runs of sessions waited for."""

    num_runs: int
    """From one to the next, of all sessions together."""
    secs: list[float]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Saves | None:
        """Those that were recorded; None if there were none."""
        spans = [each.find(SAVE, Kind.SAVE) for each in traces]
        # others are written in the background
        waited = [each.pick(each.is_on_session & ~each.is_cut) for each in spans]
        secs = [secs for each in waited for secs in each.secs.tolist()]
        num_runs = sum(len(each.find(RUN, Kind.RUN)) for each in traces)
        return cls(max(1, round(num_runs / len(secs))), secs) if secs else None


class Player(Recorder, Performer):
    """Stands in for the timed work of one run of a program; `Plan` makes it.

    Args:
        simulation: that the program runs in.
        service_of: what is drawn from for a kind of work; None: nothing was recorded of it.
        recorded: the names of the kinds that were.
        seed: of the draws, >= 0.
        beyond: what is assumed of shared services outside of the recorded load.
        are_sizes_linear: whether work of which one size was recorded grows with its size.
        saves: what runs wait for in place of hooks that save.
        loop_secs: what the program's own code takes beside each timed call, >= 0.
    """

    is_closed = False

    def __init__(
        self,
        simulation: Simulation,
        service_of: Callable[[TimedWork], Service | None],
        recorded: Sequence[str],
        seed: int,
        *,
        beyond: Beyond = Beyond.LAW,
        are_sizes_linear: bool = False,
        saves: Saves | None = None,
        loop_secs: float = 0.0,
    ) -> None:
        self._loop_secs = loop_secs
        self.saves, self._num_runs = saves, 0
        self._simulation, self._service_of, self._recorded = simulation, service_of, recorded
        self._seed, self._beyond, self._are_sizes_linear = seed, beyond, are_sizes_linear
        self._thread = threading.get_ident()
        self._stations: dict[str, Station] = {}
        self.clock: Callable[[], float] = lambda: simulation.now
        # what was recorded
        self.rows: dict[Kind, dict[str, list[_Row]]] = defaultdict(lambda: defaultdict(list))
        self._work_rows = self.rows[Kind.WORK]
        self._uses: list[tuple[float, int, float]] = []
        self._marks: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        self.tracks: dict[object, int] = {}  # of the tasks that have a session open
        self.num_sessions = 0
        # threads that make blocking calls, and which of them are free
        self._turns: dict[int, _Turns] = {}
        self._free: list[_Turns] = []
        self._calling: _Turns | None = None  # which the event loop waits for
        self.stand_in = self

    # Timed work

    async def perform(
        self, work: TimedWork, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        station = self._stations.get(work.name) or self._station(work)
        drawn, worker = _draw(station, work, args, kwargs)
        clock, is_cut = self.clock, True
        track = self._track_of(station.kernel)
        begun = clock()
        try:
            await station.serve(drawn.secs)
            is_cut = False
        finally:
            self._work_rows[work.name].append(
                (begun, clock(), drawn.size, worker, track, -1, is_cut, track >= 0)
            )
        if self._loop_secs:
            station.kernel.hold(self._loop_secs)
        returns = work.returns
        return _returned(work, args, kwargs, drawn) if callable(returns) else returns

    def perform_inline(
        self, work: TimedWork, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        thread = threading.get_ident()
        turns = None if thread == self._thread else self._turns.get(thread)
        if thread != self._thread and turns is None:
            raise PlanError(
                f"{work.name!r} is a plain function, and is called in a thread of the program's "
                "own, for which a plan can let no time pass. Make the timed function an async one "
                f"around the thread: @timed({work.name!r}, ...) async def call(...): return await "
                "anyio.to_thread.run_sync(...)"
            )
        station = self._stations.get(work.name) or self._station(work)
        drawn, worker = _draw(station, work, args, kwargs)
        begun, is_cut = self.clock(), True
        track = self._track_of(station.kernel) if turns is None else turns.track
        try:
            if turns is None:
                station.hold(drawn.secs)
            else:
                turns.wait_for(station.serve(drawn.secs))
            is_cut = False
        finally:
            self._work_rows[work.name].append(
                (begun, self.clock(), drawn.size, worker, track, -1, is_cut, track >= 0)
            )
        if self._loop_secs and turns is None:
            station.kernel.hold(self._loop_secs)
        return _returned(work, args, kwargs, drawn) if callable(work.returns) else work.returns

    def _track_of(self, engine: Engine) -> int:
        """Of the session that the running task has open; -1 if it has none."""
        return self.tracks.get(engine.current_task(), -1)

    def _station(self, work: TimedWork) -> Station:
        name, service = work.name, self._service_of(work)
        if service is None:
            known = ", ".join(map(repr, sorted(self._recorded))) or "none"
            raise PlanError(
                f"the program times {name!r}, of which nothing was recorded; recorded are: "
                f"{known}. Record a run of this program, in which {name!r} is called, and give it "
                "to Plan.read as well"
            )
        rng = np.random.default_rng([self._seed, 1, *name.encode()])
        kernel = self._simulation.kernel
        self.clock = kernel.now
        station = Station(
            kernel,
            service,
            rng,
            self._beyond,
            are_sizes_linear=self._are_sizes_linear,
        )
        self._stations[name] = station
        return station

    # Blocking calls

    def call_apart(self, engine: Engine, fn: Callable[[], Any], slot: Slot) -> None:
        turns = self._free.pop() if self._free else _Turns(self._turns)
        turns.track = self._track_of(engine)
        engine.start(self._drive, turns, fn, slot)

    async def _drive(self, turns: _Turns, fn: Callable[[], Any], slot: Slot) -> None:
        self._calling = turns
        pending = turns.call(fn)
        while pending is not None:
            self._calling = None
            try:
                await pending
            except BaseException as error:  # the run is over
                turns.give_up(error)
                raise
            self._calling = turns
            pending = turns.go_on()
        self._calling = None
        result = turns.result
        turns.result = None
        self._free.append(turns)
        slot.wake(result)

    def thread_in_call(self) -> int | None:
        """The number of the thread that the event loop waits for; None if it does not."""
        calling = self._calling
        return None if calling is None else calling.number

    def close(self) -> None:
        """End the threads; the run is over."""
        for each in self._free:
            each.close()

    def save_if_due(self, track: int) -> Awaitable[Any]:
        """At the end of a run: wait as long as a save took, if one would be made now."""
        assert self.saves is not None
        self._num_runs += 1
        if self._num_runs % self.saves.num_runs:
            return _DONE
        secs = self.saves.secs
        return self._save(secs[self._num_runs // self.saves.num_runs % len(secs)], track)

    async def _save(self, secs: float, track: int) -> None:
        span = _Span(self, Kind.SAVE, SAVE, track)
        with ended(span):
            await self._simulation.sleep(secs)

    # What is recorded

    def open_session(self, engine: Engine, name: str, step: Any) -> SessionRecord:
        self.clock = engine.now
        return _Session(self, engine, name)

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> Span:
        return _Span(self, kind, name, -1, ident=ident)

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        track = -1 if engine is None or engine.is_elsewhere else self._track_of(engine)
        return _Span(self, kind, name, track, worker=-1 if worker is None else worker)

    def use(self, engine: Engine, ident: int, staleness: float) -> None:
        self._uses.append((self.clock(), ident, staleness))

    def mark(self, engine: Engine, name: str, value: float, worker: int | None = None) -> None:
        self._marks[name].append((self.clock(), value, -1 if worker is None else worker))

    # What came of it

    def trace(self) -> Trace:
        """All that was recorded, once the run is over; the plan adds the settings."""
        uses = _columns(self._uses, 3)
        return Trace(
            {
                kind: {name: _spans(rows) for name, rows in by_name.items()}
                for kind, by_name in self.rows.items()
                if by_name
            },
            Uses(uses[0], uses[1].astype(np.int64), uses[2]),
            {name: _marks(rows) for name, rows in self._marks.items()},
            0.0,
            self.clock(),
        )

    @property
    def uses(self) -> dict[str, tuple[Service, Use]]:
        """How each service was used that the program has called."""
        return {name: (each.service, each.use) for name, each in self._stations.items()}

    @property
    def num_done(self) -> int:
        """How often timed work was done."""
        return sum(map(len, self._work_rows.values()))


def _draw(
    station: Station, work: TimedWork, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Drawn, int]:
    size = None if work.input_size is None else input_size_of(work, args, kwargs)
    worker = -1 if work.worker is None else worker_of(work, args, kwargs)
    return station.draw(size, worker), worker


def _returned(
    work: TimedWork, args: tuple[Any, ...], kwargs: Mapping[str, Any], drawn: Drawn
) -> Any:
    """What the program's `returns` makes."""
    try:
        return work.returns(*args, drawn=drawn, **kwargs)
    except Exception as error:
        error.add_note(
            f"in `returns` of timed({work.name!r}), which a plan calls with the arguments of the "
            "call and with the keyword `drawn`"
        )
        raise


class _Span(Span):
    """One span of which the player keeps a row once it has ended."""

    __slots__ = ("_begun", "_ident", "_kind", "_name", "_player", "_track", "_worker")

    def __init__(
        self, player: Player, kind: Kind, name: str, track: int, *, ident: int = -1,
        worker: int = -1,
    ) -> None:  # fmt: skip
        self._player, self._kind, self._name, self._track = player, kind, name, track
        self._ident, self._worker = ident, worker
        self._begun = player.clock()

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        player, track = self._player, self._track
        player.rows[self._kind][self._name].append(
            (
                self._begun, player.clock(), value, self._worker, track, self._ident,
                error is not None, track >= 0,
            )
        )  # fmt: skip


class _Session(SessionRecord):
    """One session: its runs, and the steps within them."""

    def __init__(self, player: Player, engine: Engine, name: str) -> None:
        self._player = player
        self._task = engine.current_task()
        self._outer_track = player.tracks.get(self._task, -1)
        self._track = player.num_sessions
        player.num_sessions += 1
        player.tracks[self._task] = self._track
        self._span = _Span(player, Kind.SESSION, name, self._track)
        self._is_over = False
        self._runs, self._steps = player.rows[Kind.RUN][RUN], player.rows[Kind.RUN][STEP]
        self._run_begun = self._step_begun = self._step_ended = math.nan  # of the one under way

    def around_runs(
        self, before_runs: tuple[HookCall, ...], after_runs: tuple[HookCall, ...]
    ) -> tuple[tuple[HookCall, ...], tuple[HookCall, ...]]:
        def before(fn: Callable[..., Awaitable[Any]]) -> HookCall:
            return HookCall(-1, self, "before_run", fn)

        def after(fn: Callable[..., Awaitable[Any]]) -> HookCall:
            return HookCall(-1, self, "after_run", fn)

        return (
            (before(self._begin_run), *before_runs, before(self._begin_step)),
            (after(self._end_step), *after_runs, after(self._end_run)),
        )

    # Called as methods of hooks are, and awaited

    def _begin_run(self, run_context: Any) -> Awaitable[Any]:
        self._run_begun = self._player.clock()
        return _DONE

    def _begin_step(self, run_context: Any) -> Awaitable[Any]:
        self._step_begun = self._player.clock()
        return _DONE

    def _end_step(self, run_context: Any, run_values: Any) -> Awaitable[Any]:
        self._step_ended = self._player.clock()
        return _DONE

    def _end_run(self, run_context: Any, run_values: Any) -> Awaitable[Any]:
        track, now = self._track, self._player.clock()
        self._steps.append(
            (self._step_begun, self._step_ended, math.nan, -1, track, -1, False, True)
        )
        self._runs.append((self._run_begun, now, math.nan, -1, track, -1, False, True))
        self._run_begun = math.nan
        return _DONE if self._player.saves is None else self._player.save_if_due(track)

    def cut_run(self, error: BaseException) -> None:
        if not math.isnan(self._run_begun):
            now = self._player.clock()
            self._runs.append((self._run_begun, now, math.nan, -1, self._track, -1, True, True))
            self._run_begun = math.nan

    def span(self, kind: Kind, name: str) -> Span:
        return _Span(self._player, kind, name, self._track)

    async def aclose(self, error: BaseException | None) -> None:
        self.drop()

    def drop(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._span.end()
            tracks = self._player.tracks
            if tracks.get(self._task) == self._track:
                del tracks[self._task]
                if self._outer_track >= 0:
                    tracks[self._task] = self._outer_track


class _Done:
    """What can be awaited again and again, and never waits."""

    def __await__(self) -> Any:
        return _NONE


_DONE = _Done()


class _Turns:
    """A thread that makes blocking calls for tasks of a simulation; one of both runs at a time.

    So what the call does is as reproducible as the tasks are. The thread stops where timed work
    begins, and its task lets the virtual time of that pass.
    """

    def __init__(self, known: dict[int, _Turns]) -> None:
        self.track = -1  # of the session whose call it is; -1: of none
        self.result: Any = None
        self._to_thread: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_task: queue.SimpleQueue[Awaitable[None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, name="asynchooks-plan", daemon=True)
        thread.start()
        assert thread.ident is not None
        self._thread, self.number = thread, thread.ident
        known[self.number] = self

    def call(self, fn: Callable[[], Any]) -> Awaitable[None] | None:
        """Begin a call: what to await before `go_on`, or None if it has returned."""
        self._to_thread.put(fn)
        return self._to_task.get()

    def go_on(self) -> Awaitable[None] | None:
        """As `call`; the wait of the thread has ended."""
        self._to_thread.put(None)
        return self._to_task.get()

    def give_up(self, why: BaseException) -> None:
        """End the call at its wait, and the thread."""
        self._to_thread.put(_Ended(why))
        while (pending := self._to_task.get()) is not None:  # it goes on in spite of that
            close_unrun(pending)
            self._to_thread.put(_Ended(why))
        self.close()

    def close(self) -> None:
        """End the thread, which makes no call."""
        self._to_thread.put(None)
        self._thread.join()

    def wait_for(self, pending: Awaitable[None]) -> None:
        """In the thread: let the task await this."""
        self._to_task.put(pending)
        ended = self._to_thread.get()
        if ended is not None:
            raise ended

    def _serve(self) -> None:
        while (fn := self._to_thread.get()) is not None:
            self.result = fn()
            del fn
            self._to_task.put(None)


class _Ended(BaseException):
    """Raised in a thread whose run is over, so that its call ends."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(f"the plan is over: {why!r}")


def _columns(rows: list[Any], num: int) -> Any:
    return np.array(rows, np.float64).reshape(-1, num).T if rows else np.zeros((num, 0))


def _marks(rows: list[tuple[float, float, int]]) -> Marks:
    times, values, workers = _columns(rows, 3)
    return Marks(times, values, workers.astype(np.int64))


def _spans(rows: list[_Row]) -> Spans:
    begun, ended, size, worker, track, ident, is_cut, is_on_session = _columns(rows, 8)
    return Spans.of(
        begun,
        ended,
        size=size,
        worker=worker.astype(np.int64),
        track=track.astype(np.int64),
        ident=ident.astype(np.int64),
        is_cut=is_cut.astype(bool),
        is_on_session=is_on_session.astype(bool),
    )
