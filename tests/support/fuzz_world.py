"""One random training program of several lives: played, and checked against laws.

What a program is made of stands here, too; which ones there are, `tests.fuzz` draws.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import numpy as np

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    EvaluationHook,
    FeedHook,
    FinalOpsHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    InputPositionHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionError,
    PreemptionHook,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StepUnreachableError,
    StopAtStepHook,
    TimeLimitHook,
)
from asynchooks.data import Stage, batch, interleave, map_concurrent, prefetch, repeat, shuffle

from .afterwards import check_gate, nothing_left
from .faults import Halt
from .loops import loop_of
from .moments import at

LIFE_SECS = 25.0
"""What takes longer hangs: less than the 30 s after which waits for other workers are given up."""

current_worker: ContextVar[int] = ContextVar("fuzz_worker", default=-1)


class FuzzError(Exception):
    """What is made to happen."""


RAISED: dict[str, Callable[[str], BaseException]] = {
    "error": FuzzError,
    "halt": Halt,
    "cancelled": asyncio.CancelledError,
    "interrupt": KeyboardInterrupt,
    "exit": SystemExit,
    "preemption": PreemptionError,
}
CANCELLED = ("cancel", "cancel all")
KINDS = (*RAISED, *CANCELLED)

MOMENTS = {
    "begin": "begin", "after_create_session": "created", "before_run": "before_run",
    "after_run": "after_run", "end": "end", "on_error": "on_error",
}  # fmt: skip
"""Those of a hook, and what their places are called."""
LATE_PLACES = ["after_run", "finish", "evaluate", "save", "before_save", "after_save"]
"""Those that a run may come to behind its step; one that is lost there is made again."""
PLACES = [
    *MOMENTS.values(), *LATE_PLACES[1:], "side task", "coord task", "body", "step", "source", "map",
    "restore",
]  # fmt: skip

STOPS = (
    "hook", "hook all", "before_run", "session", "session all", "coord", "coord all", "thread",
    "time limit", "preempt",
)  # fmt: skip
EXTRAS = ("nan", "final", "evaluate", "evaluate async")


@dataclass(frozen=True)
class FaultPlan:
    """What happens when a worker comes to a place for the n-th time; -1: any worker."""

    place: str
    kind: str
    nth: int = 1
    worker: int = -1


@dataclass(frozen=True)
class StopPlan:
    """What asks for a stop in which run of which worker."""

    kind: str
    worker: int
    nth: int


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: when it opens, what its block does and which hooks it has, in an order."""

    starts_at: int = 0
    """Opens after that many runs of the others, if any of them is open then."""
    feeds: bool = True
    savers: tuple[int, ...] = ()
    """Which directories it keeps checkpoints in."""
    background: bool = False
    save_steps: int = 3
    runner: str = "inline"
    is_plain: bool = False
    """Whether its hook has plain methods."""
    waits_for: int = 0
    looks: bool = True
    """Whether its loop looks at should_stop()."""
    retries: bool = False
    extras: tuple[str, ...] = ()
    order: int = 0
    """Seed of the order of its hooks; 0: input first."""


@dataclass(frozen=True)
class LifePlan:
    """The workers of one process, and what befalls them."""

    workers: tuple[WorkerPlan, ...]
    buffer_size: int = 1
    num_workers_known: bool = False
    limit: int = 0
    faults: tuple[FaultPlan, ...] = ()
    stop: StopPlan | None = None


@dataclass(frozen=True)
class Program:
    """Lives of one training; the last one goes on to the end of the data."""

    lives: tuple[LifePlan, ...]
    num_items: int = 12
    base: str = "range"
    stages: tuple[str, ...] = ("prefetch",)
    is_async: bool = False

    @property
    def saves_apart(self) -> bool:
        """Whether a directory has not been saved in by each life: the newest may be unknown."""
        used = [{place for each in life.workers for place in each.savers} for life in self.lives]
        return any(each != used[0] for each in used)


class Model:
    """Knows what it was trained with, and how often."""

    def __init__(self, world: World) -> None:
        self.items: list[int] = []
        self.num_steps = self.num_restored = 0
        self._world = world
        self._num_inside = 0

    def state_dict(self) -> dict[str, Any]:
        self._world.at_plain("save")
        return {"items": np.array(self.items, np.int64), "steps": self.num_steps}

    def load_state_dict(self, state: Any) -> None:
        self._world.at_plain("restore")
        self.items = [int(each) for each in state["items"]]
        self.num_steps = self.num_restored = int(state["steps"])

    def step(self, x: Any) -> dict[str, Any]:
        self._num_inside += 1
        try:
            if self._num_inside > 1:
                self._world.broken.append("two calls of the sync step overlap")
            self._world.at_plain("step")
            return self._learn(x)
        finally:
            self._num_inside -= 1

    async def step_async(self, x: Any) -> dict[str, Any]:
        await self._world.at("step")
        return self._learn(x)

    def _learn(self, x: Any) -> dict[str, Any]:
        self.items += [int(each) for each in np.ravel(x)]
        self.num_steps += 1
        return {"loss": 0.5, "x": x}


class Fault:
    """A plan, and whether it has been played."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.error = RAISED[plan.kind]("a fault") if plan.kind in RAISED else None
        self.num_left = plan.nth
        self.is_played = False

    @property
    def is_cancellation(self) -> bool:
        return self.error is None


class World:
    """One life under way."""

    def __init__(
        self, program: Program, life: LifePlan, directory: Path, *, may_repeat: bool
    ) -> None:
        self.may_repeat = may_repeat
        self.program, self.life, self.directory = program, life, directory
        self.broken: list[str] = []
        self.faults = [Fault(plan) for plan in life.faults]
        self.model = Model(self)
        self.num_runs = self.num_open = 0
        self.last_step: int | None = None  # when the last session was closed
        self.num_read_begun = self.num_read_closed = 0
        self.starts = {each.starts_at: anyio.Event() for each in life.workers}
        self.scope = anyio.CancelScope()
        self.workers = [Worker(self, place) for place in range(len(life.workers))]
        self.creator = SharedSessionCreator(
            FunctionSessionCreator(self.model.step_async if program.is_async else self.model.step),
            len(life.workers) if life.num_workers_known else None,
        )
        self.source = self._pipeline()
        self._lock = threading.Lock()
        self._token = anyio.lowlevel.current_token()
        self._loop_thread = threading.get_ident()

    # Faults

    def has(self, place: str) -> bool:
        """Whether a fault is planned there."""
        return any(each.place == place for each in self.life.faults)

    def _due(self, place: str) -> Fault | None:
        worker = current_worker.get()
        with self._lock:
            for fault in self.faults:
                plan = fault.plan
                if plan.place == place and plan.worker in (-1, worker) and not fault.is_played:
                    fault.num_left -= 1
                    if fault.num_left == 0:
                        fault.is_played = True
                        return fault
        return None

    def at_plain(self, place: str) -> None:
        """A plain function comes to a place, in any thread."""
        fault = self._due(place)
        if fault is None:
            return
        if fault.error is not None:
            raise fault.error
        if threading.get_ident() == self._loop_thread:
            self._cancel(fault)
        else:
            anyio.from_thread.run_sync(self._cancel, fault, token=self._token)

    async def at(self, place: str) -> None:
        """A coroutine comes to a place."""
        await anyio.lowlevel.checkpoint()
        self.at_plain(place)
        await anyio.lowlevel.checkpoint()

    def _cancel(self, fault: Fault) -> None:
        if fault.plan.kind == "cancel all":
            self.scope.cancel()
        else:
            place = current_worker.get()
            self.workers[max(fault.plan.worker, place, 0)].scope.cancel()

    # Data

    def _pipeline(self) -> Stage[Any]:
        num, size = self.program.num_items, self.life.buffer_size
        stages: dict[str, Callable[[Any], Any]] = {
            "prefetch": lambda source: prefetch(source, size),
            "batch": lambda source: batch(source, 3),
            "shuffle": lambda source: shuffle(source, 5, seed=7),
            "repeat": lambda source: repeat(source, 2),
            "interleave": lambda source: interleave([source, self._base(1000, 1000 + num // 2)]),
            "map": lambda source: map_concurrent(self._mapped, source, size),
            "map in threads": lambda source: map_concurrent(self._mapped_plainly, source, size),
        }
        source: Any = self._base(0, num)
        for stage in self.program.stages:
            source = stages[stage](source)
        assert isinstance(source, Stage)
        return source

    def expected(self) -> Counter[int]:
        """What one whole training is given."""
        num, items = self.program.num_items, Counter(range(self.program.num_items))
        for stage in self.program.stages:
            if stage == "repeat":
                items = items + items
            elif stage == "interleave":
                items = items + Counter(range(1000, 1000 + num // 2))
        return items

    def _base(self, first: int, last: int) -> Any:
        numbers = range(first, last)
        made = {"async": lambda: self._items(numbers), "thread": lambda: self._in_thread(numbers)}
        return made.get(self.program.base, numbers)

    async def _items(self, numbers: range) -> AsyncIterator[int]:
        with self._reading():
            for number in numbers:
                await self.at("source")
                yield number

    def _in_thread(self, numbers: range) -> Iterator[int]:
        with self._reading():
            for number in numbers:
                self.at_plain("source")
                yield number

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self.num_read_begun += 1
        try:
            yield
        finally:
            self.num_read_closed += 1

    async def _mapped(self, item: Any) -> Any:
        await self.at("map")
        return item

    def _mapped_plainly(self, item: Any) -> Any:
        self.at_plain("map")
        return item

    # Workers

    def has_run(self) -> None:
        self.num_runs += 1
        for step, event in self.starts.items():
            if step <= self.num_runs:
                event.set()

    async def train(self) -> None:
        with anyio.fail_after(LIFE_SECS), self.scope:
            async with anyio.create_task_group() as group:
                for worker in self.workers:
                    group.start_soon(worker.train)

    # Laws

    def check(self, *, is_last: bool) -> None:
        played = [fault for fault in self.faults if fault.is_played]
        for worker in self.workers:
            worker.check(played)
        self._check_surfaced(played)
        check_gate(self.creator)
        law = self.broken.append
        if self.num_read_begun != self.num_read_closed:
            law(f"{self.num_read_begun} sources were begun, {self.num_read_closed} closed")
        step = self.last_step
        limit, model = self.life.limit, self.model
        if limit and model.num_steps > max(limit, model.num_restored):
            law(f"{model.num_steps} steps, beyond the limit {limit}")
        is_whole = not self.scope.cancelled_caught  # else a restore may have come half of its way
        if is_whole and step is not None and model.num_steps != step:
            law(f"the model has made {model.num_steps} steps, the global step is {step}")
        excess = Counter(model.items) - self.expected()
        # after a run that failed behind its step it is made again, in a later life, too
        gives_feeds = any(not each.plan.feeds for each in self.workers)
        for plan in (each.plan for each in played):
            late = LATE_PLACES if plan.kind == "preemption" else ("after_run", "finish")
            # a side task's loss may meet any moment of a run that is made again with its feeds
            is_late = plan.place in late or (plan.place == "coord task" and gives_feeds)
            self.may_repeat = self.may_repeat or is_late
        if excess and not self.may_repeat:
            law(f"items trained too often: {dict(excess)}; in order {model.items}")
        missing = self.expected() - Counter(model.items)
        is_whole = is_last and all(each.left is None or each.is_refused for each in self.workers)
        if is_whole and missing:
            law(f"items never trained: {dict(missing)}; in order {model.items}")

    def _check_surfaced(self, played: list[Fault]) -> None:
        left = [each.left for each in self.workers if each.left is not None and not each.is_refused]
        if any(fault.is_cancellation for fault in played):
            return
        has_ended = self.life.stop is not None or bool(self.life.limit)
        retried = any(each.retries for each in self.life.workers)
        dropped = ["on_error"]
        if has_ended or len(played) > 1:
            dropped += ["source", "map"]
        if retried or len(played) > 1:
            dropped += ["step", "before_run"]
        plans = [each for each in played if each.plan.kind != "preemption"]
        surfacing = [each for each in plans if each.plan.place not in dropped]
        if len(played) == 1:
            surfacing = [each for each in surfacing if not any(_is_of(e, each.error) for e in left)]
        elif left:
            return
        if surfacing:
            self.broken.append(f"{[each.plan for each in surfacing]} swallowed; what left: {left}")


def _is_of(error: BaseException | None, fault: BaseException | None) -> bool:
    if isinstance(error, CheckpointError) and error is not fault:
        return _is_of(error.__cause__ or error.__context__, fault)
    return error is not None and error is fault


class Worker:
    """A task with a session."""

    def __init__(self, world: World, place: int) -> None:
        self.world, self.place, self.plan = world, place, world.life.workers[place]
        self.scope = anyio.CancelScope()
        self.left: BaseException | None = None
        self.num_runs = 0
        self.coord: Coordinator | None = None
        self.preemption = PreemptionHook(signals=())
        self.witnesses: list[Counter[str]] = []
        stop = world.life.stop
        self.stop = StopPlan("", 0, 0) if stop is None or stop.worker != place else stop

    def _witness(self, *, is_plain: bool) -> SessionRunHook:
        """Counts its moments, and comes to their places."""
        counts, world = Counter[str](), self.world
        self.witnesses.append(counts)

        def method(moment: str, place: str) -> Callable[..., Any]:
            def come(*given: Any) -> SessionRunArgs | None:
                counts[moment] += 1
                if moment == "after_create_session":
                    self.coord = given[1]
                    if world.has("coord task") and not is_plain:  # that one may be in a thread
                        given[1].start_soon(world.at, "coord task")
                return SessionRunArgs("x") if moment == "before_run" else None

            def plain(hook: Any, *given: Any) -> Any:
                result = come(*given)
                world.at_plain(place)
                return result

            async def coroutine(hook: Any, *given: Any) -> Any:
                result = come(*given)
                await world.at(place)
                if moment == "after_run":
                    given[0].finish_with(lambda: world.at("finish"))
                return result

            return plain if is_plain else coroutine

        methods = {moment: method(moment, place) for moment, place in MOMENTS.items()}
        hook: SessionRunHook = type("Witness", (SessionRunHook,), methods)()
        return hook

    def _saver(self, index: int) -> CheckpointSaverHook:
        world, plan = self.world, self.plan
        return CheckpointSaverHook(
            world.directory / f"checkpoints-{index}",
            save_steps=plan.save_steps,
            saver=StateDictSaver(model=world.model),
            listeners=[Listener(world)],
            background=plan.background,
        )

    def _extra(self, name: str) -> SessionRunHook:
        world = self.world

        def evaluate(session: Any, step: int) -> dict[str, float]:
            world.at_plain("evaluate")
            return {"accuracy": 0.5}

        async def evaluate_async(session: Any, step: int) -> dict[str, float]:
            await world.at("evaluate")
            return {"accuracy": 0.5}

        made: dict[str, Callable[[], SessionRunHook]] = {
            "nan": lambda: NanTensorHook("loss"),
            "final": lambda: FinalOpsHook("loss"),
            "evaluate": lambda: EvaluationHook(evaluate, every_n_steps=2),
            "evaluate async": lambda: EvaluationHook(evaluate_async, every_n_steps=2, name="async"),
        }
        return made[name]()

    def hooks(self) -> list[SessionRunHook]:
        plan, world, stop = self.plan, self.world, self.stop
        made: list[SessionRunHook] = []
        made.append(FeedHook(world.source, "x") if plan.feeds else InputPositionHook(world.source))
        made.append(at(after_run=lambda *_: self._has_run()))
        for is_plain in (plan.is_plain, not plan.is_plain)[: 1 + plan.order % 2]:
            made.append(self._witness(is_plain=is_plain))
        made += [self._extra(name) for name in plan.extras]
        made += [self._saver(index) for index in plan.savers]
        if plan.waits_for:
            made.append(GlobalStepWaiterHook(plan.waits_for))
        if world.life.limit:
            made.append(StopAtStepHook(last_step=world.life.limit))
        made.append(at(before_run=self._stop_before, after_run=self._stop_after))
        if stop.kind == "time limit":
            made.append(TimeLimitHook(0.003 * stop.nth))
        if stop.kind == "preempt":
            made.append(self.preemption)
        if plan.order and not world.has("after_run"):
            random.Random(plan.order).shuffle(made)
        return made

    def _has_run(self) -> None:
        self.num_runs += 1
        self.world.has_run()

    def _stop_before(self, run_context: Any) -> None:
        if self.stop.kind == "before_run" and self.num_runs == self.stop.nth:
            run_context.request_stop("fuzz")

    def _stop_after(self, run_context: Any, run_values: Any) -> None:
        kind, for_all = self.stop.kind, self.stop.kind.endswith(" all")
        if self.num_runs != self.stop.nth:
            return
        if kind in ("hook", "hook all"):
            run_context.request_stop("fuzz", all_workers=for_all)
        elif kind in ("coord", "coord all") and self.coord is not None:
            self.coord.request_stop(reason="fuzz", all_workers=for_all)

    async def train(self) -> None:
        world, plan = self.world, self.plan
        current_worker.set(self.place)
        if plan.starts_at:
            await world.starts[plan.starts_at].wait()
            if not world.num_open:
                return
        world.num_open += 1
        runner: Any = plan.runner
        session = MonitoredSession(self.hooks(), world.creator, 5.0, step_runner=runner)
        try:
            with self.scope:
                async with session:
                    if world.has("side task"):
                        session.start_soon(world.at, "side task")
                    await self._loop(session)
        except BaseException as error:
            self.left = error
            if isinstance(error, anyio.get_cancelled_exc_class()) and not self._is_raised(error):
                raise
        finally:
            world.num_open -= 1
            world.last_step = session.global_step.statistics().value
            if not world.num_open:
                for event in world.starts.values():
                    event.set()

    def _is_raised(self, error: BaseException) -> bool:
        return any(error is fault.error for fault in self.world.faults)

    async def _loop(self, session: MonitoredSession) -> None:
        if not self.plan.feeds:
            async for item in session.batches(self.world.source):
                await self._run(session, {"x": item})
            return
        while not (self.plan.looks and session.should_stop()):
            await self._run(session, None)

    async def _run(self, session: MonitoredSession, feeds: Any) -> None:
        world, kind = self.world, self.stop.kind
        try:
            await session.run("loss", feeds)
        except FuzzError:
            places = {fault.plan.place for fault in world.faults if fault.is_played}
            may_retry = self.plan.retries and self.plan.feeds
            if not may_retry or places & {*LATE_PLACES, "source", "map"}:
                raise
        await world.at("body")
        if self.stop.nth != self.num_runs:
            return
        if kind in ("session", "session all"):
            session.request_stop("fuzz", all_workers=kind == "session all")
        elif kind == "thread" and self.coord is not None:
            thread = threading.Thread(target=self.coord.request_stop)
            thread.start()
            thread.join()
        elif kind == "preempt":
            self.preemption.preempt("fuzz")

    def check(self, played: list[Fault]) -> None:
        law, name = self.world.broken.append, f"worker {self.place}"
        # Ctrl-C out of one hook's end or on_error keeps the other hooks from theirs
        is_interrupted = any(
            each.plan.kind == "interrupt" and each.plan.place in ("end", "on_error")
            for each in played
        )
        # PreemptionHook logs a session that is lost while it stops training, and leaves cleanly
        stop, kinds = self.world.life.stop, {each.plan.kind for each in played}
        is_preempted = stop is not None and stop.kind == "preempt" and "preemption" in kinds
        is_cancelled = self.scope.cancelled_caught
        for counts in self.witnesses:
            begun, *ends = (counts[each] for each in ("begin", "end", "on_error"))
            if max(begun, *ends) > 1:
                law(f"{name}: begin, end, on_error {begun, *ends} times")
            is_clean = self.left is None and not (is_cancelled or is_preempted)
            if begun and is_clean and ends != [1, 0]:
                law(f"{name}: left cleanly, but end, on_error {ends} times")
            lacks_error = begun > 0 and ends[1] != 1 and not is_interrupted
            if lacks_error and (self.left is not None or is_cancelled):
                law(f"{name}: {self.left or 'cancelled'!r}, but on_error {ends[1]} times")
            if counts["after_run"] > counts["before_run"]:
                law(f"{name}: more after_run than before_run: {counts}")
        if self.left is not None and not self._is_allowed(self.left, played):
            law(f"{name}: {self.left!r} left, which nothing raised {_notes(self.left)}")

    @property
    def is_refused(self) -> bool:
        """Whether it could not open, as others have begun to train the model that it restores."""
        is_late = self.plan.savers and self.plan.starts_at
        error = self.left
        return bool(is_late) and isinstance(error, CheckpointError) and "opens late" in str(error)

    def _is_allowed(self, error: BaseException, played: list[Fault]) -> bool:
        workers = self.world.life.workers
        if isinstance(error, CheckpointError) and "newest is not known" in str(error):
            return self.world.program.saves_apart
        if isinstance(error, CheckpointError) and "to one session" in str(error):
            saving = [each for each in workers if each.savers]
            return len(saving) > 1 and any(each.extras for each in saving)
        if self.is_refused or any(_is_of(error, fault.error) for fault in played):
            return True
        if any(fault.is_cancellation for fault in played) and isinstance(
            error, (asyncio.CancelledError, anyio.get_cancelled_exc_class())
        ):
            return True
        return isinstance(error, StepUnreachableError) and any(each.waits_for for each in workers)


def _notes(error: BaseException) -> str:
    below = error.__cause__ or error.__context__
    return f"notes {getattr(error, '__notes__', [])}, from {below!r}"


class Listener(CheckpointSaverListener):
    """Comes to the places around a save."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self._world.at("before_save")

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await self._world.at("after_save")


class _Lines(logging.Handler):
    """Makes the text of each line of the log, and keeps the errors."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__()
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            self._errors.append(text)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What is said inside of errors that nothing raised: by loops, finalizers and threads."""
    texts: list[str] = []
    loops, ours = logging.getLogger("asyncio"), logging.getLogger("asynchooks")
    handlers = {loops: _Lines(texts), ours: _Lines([])}
    level, propagates = ours.level, ours.propagate
    for logger, handler in handlers.items():
        logger.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    hook, thread_hook = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda args: texts.append(
        f"unraisable: {args.exc_value!r} in {args.object!r}"
    )
    threading.excepthook = lambda args: texts.append(f"in a thread: {args.exc_value!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            yield texts
            gc.collect()
        finally:
            for logger, handler in handlers.items():
                logger.removeHandler(handler)
            ours.setLevel(level)
            ours.propagate = propagates
            sys.unraisablehook, threading.excepthook = hook, thread_hook


def play(program: Program, backend: str, directory: Path, counted: Counter[str]) -> list[str]:
    """Play all lives, each on an event loop of its own; returns the laws that were broken."""
    name, options = loop_of(backend)
    broken: list[str] = []
    may_repeat = False
    for place, life in enumerate(program.lives):

        async def live(life: LifePlan = life, place: int = place) -> list[str]:
            nonlocal may_repeat
            world = World(program, life, directory, may_repeat=may_repeat)
            try:
                async with nothing_left():
                    await world.train()
                world.check(is_last=place == len(program.lives) - 1)
                may_repeat = world.may_repeat
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{last.name}, line {last.lineno}: {last.line}"
                kind = type(error).__name__
                world.broken.append(f"{kind}: {error} {_notes(error)}, {where}")
                for each in getattr(error, "exceptions", ()):
                    world.broken.append(f"in a group: {each!r} {_notes(each)}")
            counted.update(fault.plan.kind for fault in world.faults if fault.is_played)
            counted.update(lives=1, steps=world.model.num_steps)
            return world.broken

        with complaints() as texts:
            found = anyio.run(live, backend=name, backend_options=options)
        broken += [f"life {place}: {each}" for each in (*found, *texts)]
    return broken
