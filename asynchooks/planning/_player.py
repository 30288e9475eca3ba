"""Player: performs the timed work of a program in virtual time, and records what comes of it.

It keeps rows as a file of a recording has them, and writes none: figures of planned and recorded
runs have one definition.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from .._engine.base import Engine, Slot
from .._engine.recording import Kind, Recorder, Span, ended
from .._engine.threads import close_unrun
from .._errors import PlanError
from .._running.hooks import HookCall
from .._tracing._label import Label
from .._tracing._reader import Content
from .._tracing._runs import STEP, Run, RunRows
from ..simulation import Simulation
from ._model import SAVE, Model
from ._station import Drawn, Station, Use
from ._timed import Call
from ._trace import RUN, Trace


class Player(Recorder):
    """Stands in for the timed work of one run of a program, and for its threads.

    Args:
        simulation: that the program runs in.
        model: what is drawn from.
        seed: of the draws, >= 0.
    """

    def __init__(self, simulation: Simulation, model: Model, seed: int) -> None:
        self.model, self.simulation, self._seed = model, simulation, seed
        self._thread = threading.get_ident()
        self._stations: dict[str, Station] = {}
        self.save_secs = itertools.cycle(model.save_secs)
        self._labels: dict[Label, int] = {}
        self._spans: list[tuple[float, ...]] = []
        self._marks: list[tuple[float, ...]] = []
        self.tracks: dict[object, int] = {}  # of the tasks that have a session open
        self.num_sessions = 0
        self._calls: dict[int, _ThreadCall] = {}  # under way, by the number of their threads
        self.stand_in = self

    # Timed work

    async def serve(self, call: Call) -> Drawn:
        """Let as much virtual time pass as is drawn for a call of an async function."""
        station, drawn = self._draw(call)
        await station.serve(drawn.secs)
        return drawn

    def hold(self, call: Call) -> Drawn:
        """The same for a plain function: for all tasks of the event loop, or for its thread."""
        thread, name = threading.get_ident(), call.work.name
        apart = self._calls.get(thread)
        if apart is None and thread != self._thread:
            raise PlanError(
                f"{name!r} is a plain function, and is called in a thread of the program's "
                "own, for which a plan can let no time pass. Make the timed function an async one "
                f"around the thread: @timed({name!r}, ...) async def call(...): return await "
                "anyio.to_thread.run_sync(...)"
            )
        station, drawn = self._draw(call)
        if apart is None:
            station.hold(drawn.secs)
        else:
            apart.wait_for(station.serve(drawn.secs))
        return drawn

    def _draw(self, call: Call) -> tuple[Station, Drawn]:
        station = self._stations.get(call.work.name) or self._station(call.work.name)
        drawn = station.draw(call.input_size(), -1 if call.worker is None else call.worker)
        call.size = drawn.size
        return station, drawn

    def _station(self, name: str) -> Station:
        services = self.model.services
        if name not in services:
            known = ", ".join(map(repr, sorted(services))) or "none"
            raise PlanError(
                f"the program times {name!r}, of which nothing was recorded; recorded are: "
                f"{known}. Record a run of this program, in which {name!r} is called, and give it "
                "to Plan.read as well"
            )
        self._stations[name] = station = Station(
            self.simulation.kernel,
            services[name],
            np.random.default_rng([self._seed, 1, *name.encode()]),
        )
        return station

    def returned(self, call: Call, drawn: Drawn) -> Any:
        """What the call returns, after what the program's own code takes beside it."""
        if self.model.loop_secs and threading.get_ident() == self._thread:
            self.simulation.kernel.hold(self.model.loop_secs)
        returns = call.work.returns
        if not callable(returns):
            return returns
        try:
            return returns(*call.args, drawn=drawn, **call.kwargs)
        except Exception as error:
            error.add_note(
                f"in `returns` of timed({call.work.name!r}), which a plan calls with the arguments "
                "of the call and with the keyword `drawn`"
            )
            raise

    # Blocking calls

    def call_apart(self, engine: Engine, fn: Callable[[], Any], slot: Slot) -> None:
        """Call a blocking function as a thread does, and wake the slot with what it returns.

        Args:
            engine: of the running task.
            fn: what to call; it must not raise.
            slot: where the running task waits for it.
        """
        engine.start(self._drive, _ThreadCall(fn, self._calls, self._track_of(engine)), slot)

    async def _drive(self, call: _ThreadCall, slot: Slot) -> None:
        call.thread.start()
        pending = call.go_on()
        while pending is not None:
            try:
                await pending
            except BaseException as error:  # the run is over
                while (pending := call.go_on(_EndedError(error))) is not None:
                    close_unrun(pending)  # the call goes on in spite of that
                raise
            pending = call.go_on()
        slot.wake(call.result)

    # What is recorded

    def clock(self) -> float:
        """Virtual seconds."""
        return self.simulation.now

    def open_session(self, engine: Engine, name: str, step: Any) -> _Session:
        return _Session(self, engine, name)

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> Span:
        return _Span(self, Label(name, kind), -1, ident)

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        track = self._track_of(engine)
        return _Span(self, Label(name, kind, -1 if worker is None else worker, track >= 0), track)

    def use(self, engine: Engine, ident: int, staleness: float) -> None:
        self._mark(Label("use"), staleness, ident)

    def mark(self, engine: Engine, name: str, value: float, worker: int | None = None) -> None:
        self._mark(Label(name, None, -1 if worker is None else worker), value, -1)

    def _mark(self, label: Label, value: float, ident: int) -> None:
        now = self.clock()
        self._marks.append((self._number(label), -1, now, now, ident, value, False))

    def add(
        self, label: Label, track: int, begun: float, ended: float, *, ident: int = -1,
        value: float = math.nan, is_cut: bool = False,
    ) -> None:  # fmt: skip
        """A span has ended."""
        self._spans.append((self._number(label), track, begun, ended, ident, value, is_cut))

    def _number(self, label: Label) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def _track_of(self, engine: Engine | None) -> int:
        """Of the session that the running task has open; -1 if it has none."""
        if engine is None or engine.is_elsewhere:
            call = self._calls.get(threading.get_ident())
            return -1 if call is None else call.track
        return self.tracks.get(engine.current_task(), -1)

    # What came of it

    def trace(self) -> Trace:
        """All that was recorded, once the run is over; the plan adds the settings."""
        spans, marks = (
            np.array(rows, np.float64).reshape(-1, 7) for rows in (self._spans, self._marks)
        )
        labels = {number: label for label, number in self._labels.items()}
        about = {"began": 0.0, "ended": self.clock()}
        return Trace.of(Content(labels, about, spans, marks))

    @property
    def uses(self) -> dict[str, Use]:
        """How each service was used that the program has called."""
        return {name: each.use for name, each in self._stations.items()}

    @property
    def has_worked(self) -> bool:
        """Whether timed work was done."""
        return any(each.kind is Kind.WORK for each in self._labels)


class _Span(Span):
    """One span of which the player keeps a row once it has ended."""

    __slots__ = ("_begun", "_ident", "_label", "_player", "_track")

    def __init__(self, player: Player, label: Label, track: int, ident: int = -1) -> None:
        self._player, self._label, self._track, self._ident = player, label, track, ident
        self._begun = player.clock()

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        player = self._player
        player.add(
            self._label, self._track, self._begun, player.clock(), ident=self._ident, value=value,
            is_cut=error is not None,
        )  # fmt: skip


class _Session(RunRows):
    """One session, its runs, and the steps within them."""

    def __init__(self, player: Player, engine: Engine, name: str) -> None:
        super().__init__(player.clock)
        self._player = player
        self._task = engine.current_task()
        self._outer_track = player.tracks.get(self._task)
        self._track = player.tracks[self._task] = player.num_sessions
        player.num_sessions += 1
        self._span: Span | None = self.span(Kind.SESSION, name)

    def around_runs(
        self, before_runs: tuple[HookCall, ...], after_runs: tuple[HookCall, ...]
    ) -> tuple[tuple[HookCall, ...], tuple[HookCall, ...]]:
        before_runs, after_runs = super().around_runs(before_runs, after_runs)

        async def save(context: object, values: object) -> None:
            if secs := next(self._player.save_secs):
                with ended(self.span(Kind.SAVE, SAVE)):
                    await self._player.simulation.sleep(secs)

        return before_runs, (*after_runs, HookCall(-1, self, "after_run", save))

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        times, place = run.times, run.labels.index(STEP)
        self._player.add(_RUN, self._track, times[0], times[-1], is_cut=run.is_cut)
        if not run.is_cut:
            self._player.add(_STEP, self._track, times[place], times[place + 1])

    def span(self, kind: Kind, name: str) -> Span:
        return _Span(self._player, Label(name, kind, is_on_session=True), self._track)

    async def aclose(self, error: BaseException | None) -> None:
        self.drop()

    def drop(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()
            tracks = self._player.tracks
            if tracks.get(self._task) == self._track:
                del tracks[self._task]
                if self._outer_track is not None:
                    tracks[self._task] = self._outer_track


_RUN, _STEP = Label(RUN, Kind.RUN, is_on_session=True), STEP._replace(is_on_session=True)


class _ThreadCall:
    """A blocking call of a task, in a thread of its own. Of both, one goes on at a time.

    So what the call does is as reproducible as the tasks are. The thread stops where timed work
    begins, and the task lets the virtual time of that pass.

    Args:
        fn: what to call; it must not raise.
        under_way: by the numbers of their threads; it is in there from its beginning to its end.
        track: of the session whose call it is; -1: of none.
    """

    def __init__(
        self, fn: Callable[[], Any], under_way: dict[int, _ThreadCall], track: int
    ) -> None:
        self.track, self.result, self._fn, self._under_way = track, None, fn, under_way
        self._to_thread: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._to_task: queue.SimpleQueue[Awaitable[None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="asynchooks-plan", daemon=True)

    def go_on(self, error: BaseException | None = None) -> Awaitable[None] | None:
        """Let the thread go on, or raise this there: what to await then; None: it has returned."""
        self._to_thread.put(error)
        pending = self._to_task.get()
        if pending is None:
            self.thread.join()
        return pending

    def wait_for(self, pending: Awaitable[None]) -> None:
        """In the thread: let the task await this."""
        self._to_task.put(pending)
        if (error := self._to_thread.get()) is not None:
            raise error

    def _run(self) -> None:
        self._to_thread.get()
        self._under_way[threading.get_ident()] = self
        self.result = self._fn()
        del self._under_way[threading.get_ident()]
        self._to_task.put(None)


class _EndedError(BaseException):
    """Raised in a thread whose run is over, so that its call ends."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(f"the plan is over: {why!r}")
