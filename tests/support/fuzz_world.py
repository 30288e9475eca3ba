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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
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
    DataWaitHook,
    EarlyStoppingHook,
    EvaluationHook,
    FeedHook,
    FinalOpsHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionError,
    PreemptionHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StepUnreachableError,
    StopAtStepHook,
    TimeLimitHook,
)
from asynchooks._engine.current import current_engine
from asynchooks.data import Stage, batch, interleave, map_concurrent, prefetch, repeat, shuffle
from asynchooks.hooks.guards._dump import report

from .afterwards import check_gate, nothing_left

LIFE_SECS = 25.0
"""What takes longer hangs: less than the 30 s after which waits for other workers are given up."""
GRACE_SECS = 5.0

current_worker: ContextVar[int] = ContextVar("fuzz_worker", default=-1)


class FuzzError(Exception):
    """What is made to happen."""


class Halt(BaseException):
    """What no `except Exception` catches."""


class Broken(AssertionError):  # noqa: N818
    """A law that does not hold."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "error": lambda: FuzzError("a fault"),
    "halt": lambda: Halt("a fault"),
    "cancelled": lambda: asyncio.CancelledError("a fault"),
    "interrupt": lambda: KeyboardInterrupt("a fault"),
    "exit": lambda: SystemExit("a fault"),
    "preemption": lambda: PreemptionError("a fault"),
}
CANCELLED = ("cancel", "cancel all")
KINDS = (*RAISED, *CANCELLED)

HOOK_PLACES = ("begin", "created", "before_run", "after_run", "finish", "end", "on_error")
TASK_PLACES = ("side task", "coord task", "body")
SHARED_PLACES = (
    "step", "source", "map", "save", "restore", "before_save", "after_save", "evaluate",
)  # fmt: skip
LATE_PLACES = ("after_run", "finish", "evaluate", "save", "before_save", "after_save")
"""Those that a run may come to behind its step; one that is lost there is made again."""
PLACES = (*HOOK_PLACES, *TASK_PLACES, *SHARED_PLACES)

STOPS = (
    "hook", "hook all", "before_run", "session", "session all", "coord", "coord all", "thread",
    "time limit", "preempt",
)  # fmt: skip
EXTRAS = (
    "count steps", "log", "nan", "early stopping", "stall", "lag", "final", "wait share",
    "evaluate", "evaluate async",
)  # fmt: skip


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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        self.error = RAISED[plan.kind]() if plan.kind in RAISED else None
        self.num_left = plan.nth
        self.is_played = False


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
        self.starts = {at: anyio.Event() for at in {each.starts_at for each in life.workers}}
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
        source: Any = self._base(0, num)
        for stage in self.program.stages:
            if stage == "prefetch":
                source = prefetch(source, size)
            elif stage == "batch":
                source = batch(source, 3)
            elif stage == "shuffle":
                source = shuffle(source, 5, seed=7)
            elif stage == "repeat":
                source = repeat(source, 2)
            elif stage == "interleave":
                source = interleave([source, self._base(1000, 1000 + num // 2)])
            elif stage == "map":
                source = map_concurrent(self._mapped, source, size)
            elif stage == "map in threads":
                source = map_concurrent(self._mapped_plainly, source, size)
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
        if self.program.base == "async":
            return lambda: self._items(first, last)
        if self.program.base == "thread":
            return lambda: self._items_in_thread(first, last)
        return range(first, last)

    async def _items(self, first: int, last: int) -> AsyncIterator[int]:
        self.num_read_begun += 1
        try:
            for number in range(first, last):
                await self.at("source")
                yield number
        finally:
            self.num_read_closed += 1

    def _items_in_thread(self, first: int, last: int) -> Iterator[int]:
        self.num_read_begun += 1
        try:
            for number in range(first, last):
                self.at_plain("source")
                yield number
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
        for at, event in self.starts.items():
            if at <= self.num_runs:
                event.set()

    async def train(self) -> None:
        async with anyio.create_task_group() as watch:
            watch.start_soon(self._report_a_hang)
            with anyio.fail_after(LIFE_SECS):
                with self.scope:
                    async with anyio.create_task_group() as group:
                        for worker in self.workers:
                            group.start_soon(worker.train)
            watch.cancel_scope.cancel()

    async def _report_a_hang(self) -> None:
        await anyio.sleep(LIFE_SECS - 3.0)
        self.broken.append(f"hangs: {report(current_engine().running_tasks)}")

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
        is_cancelled = any(fault.plan.kind in CANCELLED for fault in played)
        for fault in played:
            if fault.error is None or fault.plan.kind == "preemption":
                continue
            if fault.plan.place == "on_error" or is_cancelled or len(played) > 1:
                continue
            may_be_dropped = fault.plan.place in ("source", "map") and (
                self.life.stop is not None or self.life.limit
            )
            retried = any(each.retries for each in self.life.workers)
            if may_be_dropped or (retried and fault.plan.place in ("step", "before_run")):
                continue
            if not any(_is_of(error, fault.error) for error in left):
                self.broken.append(f"{fault.plan} was swallowed; what left: {left}")
        if len(played) > 1 and not left and not is_cancelled:
            surfacing = [
                fault for fault in played
                if fault.plan.kind not in (*CANCELLED, "preemption")
                and fault.plan.place not in ("on_error", "source", "map", "step", "before_run")
            ]  # fmt: skip
            if surfacing:
                self.broken.append(f"{[each.plan for each in surfacing]} were all swallowed")


def _is_of(error: BaseException | None, fault: BaseException) -> bool:
    if error is fault:
        return True
    if isinstance(error, CheckpointError):
        return _is_of(error.__cause__ or error.__context__, fault)
    return False


class Worker:
    """A task with a session."""

    def __init__(self, world: World, place: int) -> None:
        self.world, self.place, self.plan = world, place, world.life.workers[place]
        self.scope = anyio.CancelScope()
        self.left: BaseException | None = None
        self.num_runs = 0
        self.coord: Coordinator | None = None
        self.preemption = PreemptionHook(signals=())
        self.witnesses: list[Witness | PlainWitness] = []

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
        if name == "evaluate":

            def evaluate_plainly(session: Any, step: int) -> dict[str, float]:
                world.at_plain("evaluate")
                return {"accuracy": 0.5}

            return EvaluationHook(evaluate_plainly, every_n_steps=2)
        if name == "evaluate async":

            async def evaluate(session: Any, step: int) -> dict[str, float]:
                await world.at("evaluate")
                return {"accuracy": 0.5}

            return EvaluationHook(evaluate, every_n_steps=2, name="async")
        made: dict[str, Callable[[], SessionRunHook]] = {
            "count steps": lambda: StepCounterHook(every_n_steps=2),
            "log": lambda: LoggingTensorHook(["loss"], every_n_iter=2),
            "nan": lambda: NanTensorHook("loss"),
            "early stopping": lambda: EarlyStoppingHook("loss", patience=10_000),
            "stall": lambda: StallHook(secs=60.0),
            "lag": lambda: LoopLagHook(max_lag_secs=60.0),
            "final": lambda: FinalOpsHook("loss"),
            "wait share": lambda: DataWaitHook(world.source, every_n_steps=2),
        }
        return made[name]()

    def hooks(self) -> list[SessionRunHook]:
        plan, world, stop = self.plan, self.world, self.world.life.stop
        made: list[SessionRunHook] = []
        made.append(FeedHook(world.source, "x") if plan.feeds else InputPositionHook(world.source))
        for is_plain in (plan.is_plain, not plan.is_plain)[: 1 + plan.order % 2]:
            witness = PlainWitness(self) if is_plain else Witness(self)
            self.witnesses.append(witness)
            made.append(witness)
        made += [self._extra(name) for name in plan.extras]
        made += [self._saver(index) for index in plan.savers]
        if plan.waits_for:
            made.append(GlobalStepWaiterHook(plan.waits_for))
        if world.life.limit:
            made.append(StopAtStepHook(last_step=world.life.limit))
        if stop is not None and stop.worker == self.place:
            made.append(Stopper(self, stop))
            if stop.kind == "time limit":
                made.append(TimeLimitHook(0.003 * stop.nth))
            if stop.kind == "preempt":
                made.append(self.preemption)
        made.insert(1, Pace(self))
        fails_late = any(each.place == "after_run" for each in world.life.faults)
        if plan.order and not fails_late:
            random.Random(plan.order).shuffle(made)
        return made

    async def train(self) -> None:
        world, plan = self.world, self.plan
        current_worker.set(self.place)
        if plan.starts_at:
            await world.starts[plan.starts_at].wait()
            if not world.num_open:
                return
        world.num_open += 1
        session = MonitoredSession(
            self.hooks(), world.creator, GRACE_SECS,
            step_runner=plan.runner,  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            with self.scope:
                async with session:
                    if any(each.place == "side task" for each in world.life.faults):
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
        world, stop = self.world, self.world.life.stop
        try:
            await session.run("loss", feeds)
        except FuzzError:
            places = {fault.plan.place for fault in world.faults if fault.is_played}
            if (
                not self.plan.retries
                or not self.plan.feeds
                or places & {*LATE_PLACES, "source", "map"}
            ):
                raise
        await world.at("body")
        if stop is not None and stop.worker == self.place and stop.nth == self.num_runs:
            if stop.kind in ("session", "session all"):
                session.request_stop("fuzz", all_workers=stop.kind == "session all")
            elif stop.kind == "thread" and self.coord is not None:
                thread = threading.Thread(target=self.coord.request_stop)
                thread.start()
                thread.join()
            elif stop.kind == "preempt":
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
        for witness in self.witnesses:
            if witness.begun > 1 or witness.ended > 1 or witness.num_errors > 1:
                law(f"{name}: begin, end, on_error {witness.counts} times")
            is_clean = self.left is None and not (self.scope.cancelled_caught or is_preempted)
            if witness.begun and is_clean and (witness.ended, witness.num_errors) != (1, 0):
                law(f"{name}: left cleanly, but end, on_error {witness.counts[1:]} times")
            lacks_error = witness.begun > 0 and witness.num_errors != 1 and not is_interrupted
            if lacks_error and self.left is not None:
                law(f"{name}: {self.left!r} left, but on_error {witness.num_errors} times")
            if lacks_error and self.scope.cancelled_caught:
                law(f"{name}: cancelled, but on_error {witness.num_errors} times")
            if witness.num_after > witness.num_before:
                law(f"{name}: {witness.num_before} before_run, {witness.num_after} after_run")
        if self.left is not None and not self._is_allowed(self.left, played):
            law(f"{name}: {self.left!r} left, which nothing raised {_notes(self.left)}")

    @property
    def is_refused(self) -> bool:
        """Whether it could not open, as others have begun to train the model that it restores."""
        is_late = self.plan.savers and self.plan.starts_at
        error = self.left
        return bool(is_late) and isinstance(error, CheckpointError) and "opens late" in str(error)

    def _is_allowed(self, error: BaseException, played: list[Fault]) -> bool:
        if self.is_refused:
            return True
        if isinstance(error, CheckpointError) and "newest is not known" in str(error):
            return self.world.program.saves_apart
        if isinstance(error, CheckpointError) and "to one session" in str(error):
            saving = [each for each in self.world.life.workers if each.savers]
            return len(saving) > 1 and any(each.extras for each in saving)
        if any(fault.error is not None and _is_of(error, fault.error) for fault in played):
            return True
        is_cancelled = any(fault.plan.kind in CANCELLED for fault in played)
        if is_cancelled and isinstance(error, CancelledTypes.get()):
            return True
        waits = any(each.waits_for for each in self.world.life.workers)
        return waits and isinstance(error, StepUnreachableError)


class CancelledTypes:
    """What a cancellation is, on each backend."""

    @staticmethod
    def get() -> tuple[type[BaseException], ...]:
        trio = sys.modules.get("trio")
        return (asyncio.CancelledError, *((trio.Cancelled,) if trio is not None else ()))


def _notes(error: BaseException) -> str:
    chain = [f"notes {getattr(error, '__notes__', [])}"]
    below = error.__cause__ or error.__context__
    while below is not None and len(chain) < 5:
        chain.append(f"from {below!r}")
        below = below.__cause__ or below.__context__
    return ", ".join(chain)


class _Counts:
    begun = ended = num_errors = num_before = num_after = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.begun, self.ended, self.num_errors


class Witness(_Counts, SessionRunHook):
    """Counts its moments and comes to their places."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._world = worker, worker.world

    async def begin(self) -> None:
        self.begun += 1
        await self._world.at("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._worker.coord = coord
        if any(each.place == "coord task" for each in self._world.life.faults):
            coord.start_soon(self._world.at, "coord task")
        await self._world.at("created")

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.num_before += 1
        await self._world.at("before_run")
        return SessionRunArgs("x")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.num_after += 1
        await self._world.at("after_run")
        run_context.finish_with(lambda: self._world.at("finish"))

    async def end(self, session: Any) -> None:
        self.ended += 1
        await self._world.at("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.num_errors += 1
        await self._world.at("on_error")


class PlainWitness(_Counts, SessionRunHook):
    """The same with plain methods."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._world = worker, worker.world

    def begin(self) -> None:
        self.begun += 1
        self._world.at_plain("begin")

    def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._worker.coord = coord
        self._world.at_plain("created")

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.num_before += 1
        self._world.at_plain("before_run")
        return SessionRunArgs("x")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.num_after += 1
        self._world.at_plain("after_run")

    def end(self, session: Any) -> None:
        self.ended += 1
        self._world.at_plain("end")

    def on_error(self, session: Any, exception: BaseException) -> None:
        self.num_errors += 1
        self._world.at_plain("on_error")


class Stopper(SessionRunHook):
    """Counts its worker's runs, and asks for a stop in one of them."""

    def __init__(self, worker: Worker, plan: StopPlan) -> None:
        self._worker, self._plan = worker, plan

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        if self._plan.kind == "before_run" and self._worker.num_runs == self._plan.nth:
            run_context.request_stop("fuzz")
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        worker, kind = self._worker, self._plan.kind
        if worker.num_runs == self._plan.nth:
            if kind in ("hook", "hook all"):
                run_context.request_stop("fuzz", all_workers=kind == "hook all")
            elif kind in ("coord", "coord all") and worker.coord is not None:
                worker.coord.request_stop(reason="fuzz", all_workers=kind == "coord all")


class Pace(SessionRunHook):
    """Counts all runs, for workers that open later."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._worker.num_runs += 1
        self._worker.world.has_run()


class Listener(CheckpointSaverListener):
    """Comes to the places around a save."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self._world.at("before_save")

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await self._world.at("after_save")


class _Errors(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class _Formats(logging.Handler):
    """Makes the text of each line of the log, and drops it."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What is said inside of errors that nothing raised: by loops, finalizers and threads."""
    handler, texts = _Errors(), []
    loops, ours = logging.getLogger("asyncio"), logging.getLogger("asynchooks")
    loops.addHandler(handler)
    level, propagates, formats = ours.level, ours.propagate, _Formats()
    ours.addHandler(formats)
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
            loops.removeHandler(handler)
            ours.removeHandler(formats)
            ours.setLevel(level)
            ours.propagate = propagates
            sys.unraisablehook, threading.excepthook = hook, thread_hook
            texts += handler.texts


BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


def play(program: Program, backend: str, directory: Path, counted: Counter[str]) -> list[str]:
    """Play all lives, each on an event loop of its own; returns the laws that were broken."""
    name, options = BACKENDS[backend]
    broken: list[str] = []
    may_repeat = False
    for place, life in enumerate(program.lives):

        async def live(life: LifePlan = life, place: int = place) -> None:
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
                broken.append(
                    f"life {place}: {type(error).__name__}: {error} {_notes(error)}, {where}"
                )
                for each in getattr(error, "exceptions", ()):
                    broken.append(f"life {place}: in a group: {each!r} {_notes(each)}")
            broken.extend(f"life {place}: {each}" for each in world.broken)
            counted.update(fault.plan.kind for fault in world.faults if fault.is_played)
            counted["lives"] += 1
            counted["steps"] += world.model.num_steps

        with complaints() as texts:
            anyio.run(live, backend=name, backend_options=options)
        broken.extend(f"life {place}: {each}" for each in texts)
    return broken
