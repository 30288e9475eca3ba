"""Player: performs the timed work of a program in virtual time, and records what comes of it.

It keeps rows as a file of a recording has them, and writes none: figures of planned and recorded
runs have one definition.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._engine.base import Engine, Slot
from .._engine.recording import Kind, Place, Recorder, Span, ended
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
        uses: are told how the services are used, by their names.
    """

    def __init__(
        self, simulation: Simulation, model: Model, seed: int, uses: Mapping[str, Use]
    ) -> None:
        self.simulation = simulation
        self._model, self._seed, self._uses = model, seed, uses
        self._stations: dict[str, Station] = {}
        self.save_secs = itertools.cycle(model.save_secs)
        self._labels: dict[Label, int] = {}
        self._rows: list[tuple[float, ...]] = []
        self.tracks = itertools.count()  # one for each session
        # what the running thread is there for: `call` is None in that of the event loop, and
        # missing in those of the program's own
        self._here = threading.local()
        self._here.call = None
        self.stand_in = self

    # Timed work

    async def serve(self, call: Call) -> Drawn:
        """Let as much virtual time pass as is drawn for a call of an async function."""
        station, drawn = self._draw(call)
        await station.serve(drawn.secs)
        return drawn

    def hold(self, call: Call) -> Drawn:
        """The same for a plain function: for all tasks of the event loop, or for its thread."""
        name = call.work.name
        if not hasattr(self._here, "call"):
            raise PlanError(
                f"{name!r} is a plain function, and is called in a thread of the program's "
                "own, for which a plan can let no time pass. Make the timed function an async one "
                f"around the thread: @timed({name!r}, ...) async def call(...): return await "
                "anyio.to_thread.run_sync(...)"
            )
        station, drawn = self._draw(call)
        if self._here.call is None:
            station.hold(drawn.secs)
        else:
            self._here.call.wait_for(station.serve(drawn.secs))
        return drawn

    def _draw(self, call: Call) -> tuple[Station, Drawn]:
        name, services = call.work.name, self._model.services
        if name not in services:
            known = ", ".join(map(repr, sorted(services))) or "none"
            raise PlanError(
                f"the program times {name!r}, of which nothing was recorded; recorded are: "
                f"{known}. Record a run of this program, in which {name!r} is called, and give it "
                "to Plan.read as well"
            )
        if (station := self._stations.get(name)) is None:
            rng = np.random.default_rng([self._seed, 1, *name.encode()])
            station = Station(self.simulation.kernel, services[name], rng, self._uses[name])
            self._stations[name] = station
        drawn = station.draw(call.input_size(), -1 if call.worker is None else call.worker)
        call.size = drawn.size
        return station, drawn

    def returned(self, call: Call, drawn: Drawn) -> Any:
        """What the call returns, after what the program's own code takes beside it."""
        if self._model.loop_secs and getattr(self._here, "call", self) is None:
            self.simulation.kernel.hold(self._model.loop_secs)
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
        call = _ThreadCall(fn, self._here, self._track_of(engine))
        engine.start(self._drive, call, slot)

    async def _drive(self, call: _ThreadCall, slot: Slot) -> None:
        over: BaseException | None = None
        call.thread.start()
        while (pending := call.go_on(over)) is not None:
            if over is not None:
                close_unrun(pending)  # the call goes on in spite of that
                continue
            try:
                await pending
            except BaseException as error:  # the run is over, and the call ends by the same
                over = error
        if over is not None:
            raise over
        slot.wake(call.result)

    # What is recorded

    def clock(self) -> float:
        """Virtual seconds."""
        return self.simulation.now

    def open_session(self, engine: Engine, name: str, step: Any) -> _Session:
        return _Session(self, Place(self, next(self.tracks), engine.current_task()), name)

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> Span:
        return _Span(self, Label(name, kind), -1, self.clock(), ident)

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        track = self._track_of(engine)
        label = Label(name, kind, -1 if worker is None else worker, track >= 0)
        return _Span(self, label, track, self.clock())

    def use(self, engine: Engine, ident: int, staleness: float) -> None:
        self.add(Label("use"), -1, self.clock(), ident, staleness)

    def mark(self, engine: Engine, name: str, value: float, worker: int | None = None) -> None:
        label = Label(name, None, -1 if worker is None else worker)
        self.add(label, -1, self.clock(), value=value)

    def add(
        self,
        label: Label,
        track: int,
        begun: float,
        ident: int = -1,
        value: float = math.nan,
        ended: float = math.nan,
        *,
        is_cut: bool = False,
    ) -> None:
        """A span has ended, now unless its end is given; or there is a moment to mark."""
        number = self._labels.setdefault(label, len(self._labels))
        ended = self.clock() if math.isnan(ended) else ended
        self._rows.append((number, track, begun, ended, ident, value, is_cut))

    def _track_of(self, engine: Engine | None) -> int:
        """Of the session that the running task has open; -1 if it has none."""
        if engine is None or engine.is_elsewhere:
            call = getattr(self._here, "call", None)
            return -1 if call is None else call.track
        place = Place.current()
        is_own = place is not None and place.task is engine.current_task()
        return place.track if place is not None and is_own else -1

    # What came of it

    def trace(self) -> Trace:
        """All that was recorded, once the run is over; the plan adds the settings."""
        rows = np.array(self._rows, np.float64).reshape(-1, 7)
        labels = {number: label for label, number in self._labels.items()}
        # the labels tell spans from marks
        return Trace.of(Content(labels, {"began": 0.0, "ended": self.clock()}, rows, rows))

    @property
    def has_worked(self) -> bool:
        """Whether timed work was done."""
        return any(each.kind is Kind.WORK for each in self._labels)


@dataclass(slots=True, eq=False)
class _Span(Span):
    """One span of which the player keeps a row once it has ended."""

    player: Player
    label: Label
    track: int
    begun: float
    ident: int = -1

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        is_cut = error is not None
        self.player.add(self.label, self.track, self.begun, self.ident, value, is_cut=is_cut)


class _Session(RunRows):
    """One session, its runs, and the steps within them."""

    def __init__(self, player: Player, place: Place, name: str) -> None:
        super().__init__(player.clock)
        self._player, self._place = player, place
        place.enter()
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
        add, track = self._player.add, self._place.track
        add(_RUN, track, times[0], ended=times[-1], is_cut=run.is_cut)
        if not run.is_cut:
            add(_STEP, track, times[place], ended=times[place + 1])

    def span(self, kind: Kind, name: str) -> Span:
        label = Label(name, kind, is_on_session=True)
        return _Span(self._player, label, self._place.track, self._player.clock())

    async def aclose(self, error: BaseException | None) -> None:
        self.drop()

    def drop(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()
            self._place.leave()


_RUN, _STEP = Label(RUN, Kind.RUN, is_on_session=True), STEP._replace(is_on_session=True)


class _ThreadCall:
    """A blocking call of a task, in a thread of its own. Of both, one goes on at a time.

    So what the call does is as reproducible as the tasks are. The thread stops where timed work
    begins, and the task lets the virtual time of that pass.

    Args:
        fn: what to call; it must not raise.
        here: has this as its `call`, in the thread.
        track: of the session whose call it is; -1: of none.
    """

    def __init__(self, fn: Callable[[], Any], here: threading.local, track: int) -> None:
        self.track, self.result, self._fn, self._here = track, None, fn, here
        self._to_thread: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._to_task: queue.SimpleQueue[Awaitable[None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="asynchooks-plan", daemon=True)

    def go_on(self, error: BaseException | None) -> Awaitable[None] | None:
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
        self._here.call = self
        self.result = self._fn()
        self._to_task.put(None)
