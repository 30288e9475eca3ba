"""MonitoredSession: training under hooks. A reader starts here.

Timeline of a session:

    normal   begin · create · restore_model · after_create_session ·
             (before_run · step · after_run · functions of finish_with)* · before_end · end ·
             side tasks and threads stop · close · after_close
    stop     should_stop() is True, and the next run raises StopTraining, which ends the block
             cleanly: normal from `end` on. A hook's request_stop lets the run it asked in complete;
             any other stop ends every wait, too
    failure  what the body or a run raised: no end, on_error in reverse order, side tasks and
             threads stop, close; the error leaves as itself. One of a side task is a stop, and
             leaves after `end`, with on_error
    lost     AbortedError, UnavailableError or PreemptionError in a run: side tasks and threads of
             the coordinator stop, close, create · restore_model · after_create_session, and the
             whole run again. Workers that share it do the same, each at its next run
    cancel   as failure; clean-up is shielded, for the grace period at most

`run` makes attempts of `_run_once` until one is not lost; `_Steps.make` makes the step when
`_step/gate.py` grants it. What hooks ask for is merged in `_running/hooks.py`, which also names
them in errors; stops are a tree, `_engine/stop.py`; side tasks: `_stopping/tasks.py`.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from enum import Enum, auto
from functools import partial, wraps
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsFloat, TypeVar, cast

from ._check import always_called, instance
from ._engine.base import STOPPED, AsyncOnly, Engine, Slot
from ._engine.current import current_engine
from ._engine.stacks import holds_loop
from ._engine.stop import EndsAtStop, Stop, StopReason, reason_for
from ._engine.sync import NO_LOCK, CallLock, Condition
from ._engine.threads import (
    INLINE_SECS,
    CallKind,
    Outcome,
    StepRunner,
    StepRunnerName,
    StepTimes,
    WhenLate,
    check_runner,
    close_unrun,
    drop,
)
from ._errors import (
    PreemptionError,
    StopTraining,
    add_note,
    is_clean_end,
    is_input_end,
    is_preemption,
    leaves_of,
    public_dir,
    raised_by,
    shorten_traceback,
)
from ._hook import AnyHook, SessionRunContext
from ._running.hooks import NOTHING, HookList, MergedRun, RunArguments, wrong_feeds
from ._running.status import PhaseName, Status, StatusBoard, Subscription
from ._running.step_context import StepContext, check_step_fn
from ._step.gate import Ticket
from ._step.global_step import GlobalStep
from ._stopping.backoff import Recovery, Restart, checked_grace_secs
from ._stopping.session_stop import SessionStop
from ._stopping.tasks import OnFailure, SideTask, name_of
from .backends import _creator
from .backends._creator import (
    Restore,
    SessionCreator,
    SessionHandle,
    close_raw,
)
from .backends._function import checked_creator
from .backends._raw_session import RawSession
from .metrics._live import checked_values

if TYPE_CHECKING:
    from .data import Batches
    from .data._sources import Source
    from .metrics import Histogram

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])

_RECOVERY = Recovery()
_MANY_REFUSED = 10
"""So many runs that end by StopTraining are those of a loop that goes on all the same."""

_is_session = holds_loop(lambda session: "the session")


def _refuses_unawaited(run: F) -> F:
    """A call fails where the one before it was not awaited: a loop of those would never end."""

    @wraps(run)
    def call(
        session: Any,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        if session._called is not None:
            session._check_awaited()
        session._called = called = run(session, fetches, feed_dict, options, run_metadata)
        return called

    mark = getattr(inspect, "markcoroutinefunction", lambda fn: fn)  # from Python 3.12 on
    return cast(F, mark(call))


class State(Enum):
    """Where a session stands, with its raw session."""

    NEW = auto()
    OPENING = auto()
    READY = auto()  # there is a raw session, and all hooks have had after_create_session
    LOST = auto()  # the next run creates a raw session
    BROKEN = auto()  # that has failed for good: the session should stop; a run tries again
    CLOSING = auto()
    CLOSED = auto()

    @property
    def phase(self) -> PhaseName:
        """As `Status.phase` has it."""
        return "open" if self in _OPEN else cast(PhaseName, self.name.lower())


_OPEN = (State.READY, State.LOST, State.BROKEN)
_READY = State.READY  # an enum's member costs as much as a call
_NEXT = {
    State.NEW: (State.OPENING,),
    State.OPENING: (State.READY, State.BROKEN, State.CLOSING),
    State.READY: (State.LOST, State.BROKEN, State.CLOSING),
    State.LOST: (State.READY, State.BROKEN, State.CLOSING),
    State.BROKEN: (State.READY, State.LOST, State.CLOSING),
    State.CLOSING: (State.CLOSED,),
}
"""Which state may follow which; while a session closes, its raw session changes no state."""


class MonitoredSession(AsyncOnly):
    """A training session: hooks around every run, recovery, and an orderly end.

    Open and close it with `async with`. It holds no task group or cancel scope, so you can open and
    close several sessions in any order, from different tasks.

    Args:
        hooks: hooks of asynchooks or TensorFlow, called in this order at every moment.
        session_creator: a step function, sync or async, that returns a mapping of named outputs; or
            what makes the raw session: see `FunctionSessionCreator` for the options of a step
            function, `SharedSessionCreator` for several workers. None means a
            `ChiefSessionCreator` on TensorFlow's current default graph.
        stop_grace_period_secs: seconds, >= 0, that threads and side tasks get to stop at the end,
            and a step in a thread gets to finish when it is cancelled.
        step_runner: where a blocking step runs: "inline" on the event loop, "thread" in a thread of
            the session; "auto" measures and chooses.
        recovery: how often a lost raw session is recreated, and after which pauses.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
        ImportError: no creator was given and TensorFlow is not installed.

    Source: TensorFlow's `tf.compat.v1.train.MonitoredSession`.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=100)], step) as session:
            while not session.should_stop():
                loss = await session.run("loss")
    """

    __dir__ = public_dir
    _in_with = "session"
    _recovers: ClassVar[bool] = True
    _called: Any = None  # a run that has not begun
    _num_refused = 0  # runs that ended by StopTraining

    def __init__(
        self,
        hooks: Iterable[AnyHook] | None = None,
        session_creator: SessionCreator | Callable[..., Any] | None = None,
        stop_grace_period_secs: float = 120,
        *,
        step_runner: StepRunnerName = "auto",
        recovery: Recovery | None = None,
    ) -> None:
        self._hooks = HookList(hooks)
        creator = _creator.default_creator() if session_creator is None else session_creator
        creator = checked_creator(creator, "session_creator")
        instance("recovery", recovery, (Recovery, NoneType), "a Recovery(max_attempts=...)")
        self._recovery = recovery or _RECOVERY
        self._grace_secs = checked_grace_secs(stop_grace_period_secs)
        self._runner_name = check_runner(step_runner)
        self._handle = creator.handle()
        self._handle.grace_secs = self._grace_secs
        self._gate = self._handle.global_step.gate
        self._stop = self._hooks.stop
        self.global_step: GlobalStep = self._handle.global_step.bound(self._stop)
        """The global step, as a handle of this session: a stop of the session ends waits for it."""
        self._stop.handle, self._stop.recovers = self._handle, self._recovers
        self._tasks = self._stop.tasks
        self._tasks.in_context = self._handle.in_session_context
        self._state = State.NEW
        self._raw: RawSession | None = None
        self._lost: RawSession | None = None  # what the next one replaces
        self._is_in_step_fn = False
        self._others = Condition()  # of tasks that wait for this one's run, or the session's end
        self._board = StatusBoard(self, self._hooks)

    def __repr__(self) -> str:
        # the garbage collector may ask, while the step's lock is held: `should_stop` takes none
        phase, step = self._state.phase, self._handle.global_step.last_known
        stops = ", to stop" if self._state in _OPEN and self.should_stop() else ""
        return (
            f"<{type(self).__name__} {phase}{stops}, at step {step}, of {self._handle.creator!r}, "
            f"hooks {self._hooks.hooks!r}>"
        )

    @property
    def graph(self) -> Any:
        """The TensorFlow graph that is run; None for step functions, and outside of the block."""
        return None if self._raw is None else self._handle.graph

    def raw_session(self) -> Any:
        """The raw session, which bypasses hooks and recovery; None outside of the block."""
        return None if self._raw is None else self._raw.exposed

    # --- opening ----------------------------------------------------------------------------------

    @_is_session
    async def __aenter__(self) -> Self:
        """Call `begin` of all hooks, create the raw session, and call `after_create_session`.

        A service may call it `open()`, and `await close()` at its end, in place of `async with`. If
        that fails or is cancelled, the raw session is closed, and `on_error` is called for every
        hook whose `begin` was called.
        """
        if self._state is not State.NEW:
            raise RuntimeError(
                f"the session is {self._state.phase} already and can be opened only once; "
                "make a new MonitoredSession for each `async with`"
            )
        hooks, handle, stop = self._hooks, self._handle, self._stop
        self._engine: Engine = current_engine()
        self._runner = StepRunner(self._engine, self._runner_name, self._grace_secs)
        self._enter(State.OPENING)
        stop.worker = self._worker = self._gate.open(self._engine, stop)
        self._worker.task = self._engine.current_task()
        if stop.for_all is not None:
            self._gate.stop_all(stop.for_all)
        self.global_step = handle.global_step.bound(stop, body=self._worker)
        self._steps = _Steps(self._runner, handle, stop)
        hooks.call_plain = self._steps.call_plain
        self._enters_graph = hooks.needs_graph_entered and handle.graph is not None
        try:
            async with handle.opening():
                begin = hooks.begin(handle.has_global_step, handle.graph)
                await handle.in_session_context(begin)
            await self._recovering(self._create)
            self._board.begin(self._engine.now(), self._gate.value)
        except BaseException as error:
            leaving = await self._close(error) or error
            if leaving is not error:
                raise leaving from error
            raise
        return self

    open = __aenter__

    async def _create(self) -> RawSession:
        """Have a raw session with a coordinator, of use to all hooks."""
        hooks, handle, stop = self._hooks, self._handle, self._stop
        if self._raw is not None:  # it is lost, or its hooks were not all called
            await self._drop()
        restores = []
        if names := hooks.names_of_restoring():  # other workers may use it: it holds no session
            restores = [Restore(names, lambda raw: handle.in_session_context(hooks.restore(raw)))]
        try:
            lost, self._lost = self._lost, None
            raw = await handle.acquire(lost, restores)
            if self._state is State.CLOSED:
                await handle.release(raw)
                self._enter(State.READY)  # which says so
            self._raw = self._steps.raw = raw
            stop.coord = coord = handle.coordinator_type(())
            coord.on_stop, coord.tasks.in_context = stop.coord_stopped, handle.in_session_context
            coord.stop.join(stop)
            handle.start_threads(raw, coord)
            created = hooks.after_create_session(raw, coord)
            await handle.in_session_context(created)
        except Exception as error:
            if not is_preemption(error):
                self._enter(State.BROKEN)
            raise
        self._run_stop, gate_step = coord.stop, handle.global_step
        self._run_step = gate_step.bound(coord.stop, self._worker)
        self._enter(State.READY)
        return raw

    # --- running ----------------------------------------------------------------------------------

    @_refuses_unawaited
    @holds_loop(lambda session: str(session._hooks.current or "the step"))
    async def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Run one step with all hooks, and return what was fetched.

        A cancellation waits for a step under way, up to the grace period; that step counts.

        Args:
            fetches: what to compute: as for `tf.compat.v1.Session.run` on a graph; names of
                outputs, in any nesting, on a step function.
            feed_dict: values by tensor, variable or name; never changed.
            options: `tf.compat.v1.RunOptions`, for graphs; never changed.
            run_metadata: `tf.compat.v1.RunMetadata` to fill, for graphs.

        Raises:
            StopTraining: the input has ended, the last step was reached, or a stop was requested;
                it ends the block cleanly.
            RuntimeError: the session is not open, a run is already under way, or the last one was
                called without `await`.
            BaseException: what a hook or the step raised, with a note that says which one.
        """
        self._called = None
        if self._state not in _OPEN or self._worker.is_running:
            self._check_may_run("run")
        if feed_dict is not None and not isinstance(feed_dict, Mapping):
            raise wrong_feeds("feed_dict is", feed_dict)
        args, failures = (fetches, feed_dict, options, run_metadata), 0
        worker = self._worker
        worker.is_running = True
        worker.has_run = True
        try:
            while True:  # one attempt after the other, as long as the raw session is lost
                try:
                    if not self._enters_graph or self._is_in_step_fn:
                        return await self._run_once(args)
                    run = self._run_once(args)
                    return await self._handle.in_session_context(run)
                except Exception as error:
                    failures = await self._recover(error, failures)
        except BaseException as error:
            if type(error) is StopTraining:  # a loop that swallows it would hold the event loop
                self._num_refused += 1
                if self._num_refused == _MANY_REFUSED:
                    logger.warning(
                        "%d runs have raised StopTraining, which ends the block: does a loop "
                        "around them catch it, as by `except Exception`? Write `while not "
                        "session.should_stop():`, and catch your own errors only",
                        _MANY_REFUSED,
                        extra=self._stop.log_fields(error),
                    )
                await self._engine.turn()
            shorten_traceback(error)
            raise
        finally:
            worker.is_running = self._is_in_step_fn
            if self._others.slots:
                self._others.notify()

    async def _run_once(self, args: RunArguments) -> Any:
        """One attempt at a run, on the raw session that there is then."""
        hooks, stop, raw = self._hooks, self._stop, self._raw
        context = merged = hooks.current = None
        # there may be a stop to look at, perhaps one that recreating makes forgotten
        is_asked = self._state is not _READY or self._run_stop.is_set or stop.hook_reason
        if is_asked or raw is None or raw.is_retired:
            if raw is None or not stop.is_for_good:  # else it need not be recreated before
                raw = await self._present()
            if stop.hook_reason is not None or (stop.is_set and stop.reason is not None):
                # a session that another task closes lets a step_fn end: that stop has no reason
                raise StopTraining(f"no run begins after a stop, by {stop.reason}")
        try:
            if args[2] is not None or args[3] is not None:
                merged = MergedRun(raw, args, hooks)
            if hooks.before_runs or hooks.after_runs:
                context = SessionRunContext(args, raw.exposed, self._run_step)
                context.called_by = hooks
                for call in hooks.before_runs:
                    hooks.current = call
                    request = await call.fn(context)
                    if request is not None:
                        merged = merged or MergedRun(raw, args, hooks)
                        merged.add(call, request)
                hooks.current = None
            if merged is not None:
                args = merged.finish()

            result = self._steps.make(raw, args, context)
            outputs = result[0] if type(result) is tuple else await result

            values, asked = hooks.unasked, NOTHING
            if merged is not None:
                outputs, values, asked = merged.split(outputs)
            if context is not None:
                for call in hooks.after_runs:
                    hooks.current = call
                    await call.fn(context, asked.get(call.place, values) if asked else values)
                if context._last:
                    await context.finish()
                hooks.current = None
                if context.stop_reason is not None:
                    stop.request_by_hook(context.stop_reason, context.stops_all)
        except BaseException as error:
            explained = self._judged(hooks.explained(error, hooks.current, merged))
            if explained is not error:
                raise explained from explained.__cause__
            raise
        return outputs

    async def _present(self) -> RawSession:
        """The raw session, a new one if the last was lost.

        But within a step_fn, which has the old one in its hands, and is called again itself.
        """
        raw = self._raw
        if raw is None or self._state in (State.LOST, State.BROKEN):
            return await self._create()
        is_lost = self._preemption is not None or (self._recovers and raw.is_retired)
        return await self._create() if is_lost and not self._is_in_step_fn else raw

    @property
    def _preemption(self) -> BaseException | None:
        """What is reported to the coordinator, if recreating the raw session cures it."""
        coord = self._stop.coord
        return coord.error if coord is not None and self._stop.is_curable(coord.error) else None

    async def _recovering(self, attempt: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Make the attempt; recreate a lost raw session and try again, within bounds."""
        failures = 0
        while True:
            try:
                return await attempt(*args)
            except Exception as error:
                failures = await self._recover(error, failures)

    async def _recover(self, error: Exception, failures: int) -> int:
        """Let go of a lost raw session, and wait until the next attempt is due.

        Returns how many attempts have failed by now; raises what leaves, if recreating the session
        cannot cure it.
        """
        stop, lost = self._stop, error
        if self._raw is not None and self._raw.is_retired and self._raw.tells_of_close(error):
            # another worker has closed it under this one's hook
            lost = PreemptionError(f"the shared session was replaced: {error!r}")
            lost.__cause__ = error
        if self._is_in_step_fn or not stop.is_curable(lost):
            raise error
        failures += 1
        recovery = self._recovery
        if failures > recovery.max_attempts:
            self._enter(State.BROKEN)
            add_note(lost, f"recreating the session was given up after {failures - 1} attempts")
            raise lost
        pause = recovery.pause_before(failures)
        causes = dict.fromkeys(f"{type(each).__name__}: {each}" for each in leaves_of(lost))
        logger.warning(
            "The session was lost (%s); recreating it, attempt %d of %d, in %g s",
            "; ".join(causes),
            failures,
            recovery.max_attempts,
            pause,
            extra=stop.log_fields(repr(lost)),
        )
        await self._drop()
        if pause:
            slot = Slot(self._engine, "the next attempt to recreate the session")
            with EndsAtStop(slot, stop):
                if await self._engine.park(slot, self._engine.now() + pause) is STOPPED:
                    self._enter(State.BROKEN)
                    raise lost
        return failures

    def _judged(self, error: BaseException) -> BaseException:
        """The error that leaves a run: a preemption that the coordinator holds is its cause.

        Where the coordinator holds another error than the run's preemption, that one leaves when
        the session is dropped. Source: TensorFlow's `_CoordinatedSession.run`.
        """
        held = self._preemption
        if held is None or is_preemption(error) or not isinstance(error, Exception):
            return error
        if type(error) is StopTraining and self._stop.is_set:
            return error  # a preemption ends the waits of a run, and no other ones
        held.__cause__ = held.__cause__ or error
        return held

    async def _drop(self) -> None:
        """Let go of a raw session: join the threads and side tasks of its coordinator.

        Raises what the coordinator holds, if that is no preemption.
        """
        stop, coord = self._stop, self._stop.coord
        self._enter(State.LOST)
        if coord is not None:
            await self._end_coord(self._engine.now() + self._grace_secs, cancel=False)
            if coord.error is not None and not is_preemption(coord.error):
                self._enter(State.BROKEN)
                raise coord.error
        self._lost = self._raw or self._lost
        self._raw = stop.coord = None
        self._steps.forget()
        stop.forget()

    async def _end_coord(self, until: float, *, cancel: bool) -> None:
        """Join the threads and side tasks of the coordinator, if there is one."""
        coord, lost_peer = self._stop.coord, None if self._raw is None else self._raw.lost_peer
        if coord is not None:
            await coord.end(self._engine, until, cancel_tasks=cancel, lost_peer=lost_peer)

    async def run_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        """Call a function that runs steps on the raw session, with or without hooks.

        Unlike `run`, it is not refused after a stop; `step_context.run_with_hooks` is.

        Args:
            step_fn: takes exactly `step_context` (plus `self`), sync or async; its value is
                returned. A sync one runs where steps run. After a recovery it is called again.

        Raises:
            ValueError: it takes something else.
            StopTraining: it called `step_context.request_stop()`, or its input ended.
        """
        check_step_fn(step_fn)
        self._check_may_run("run_step_fn")
        self._worker.is_running = True
        try:
            return await self._recovering(self._call_step_fn, step_fn)
        except BaseException as error:
            shorten_traceback(error)
            raise
        finally:
            self._worker.is_running = False
            self._others.notify()

    @holds_loop(lambda session: "the step_fn")
    async def _call_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        raw = await self._present()
        context = StepContext(raw.exposed, self._run_in_step_fn)
        key: Any = getattr(step_fn, "__code__", type(step_fn))  # itself it may not be hashable
        call = self._hooks.as_async(step_fn, key, lambda: self._stop)(context)
        self._is_in_step_fn = True
        try:
            return await self._handle.in_session_context(call)
        except BaseException as error:
            if is_input_end(error):
                raise StopTraining(f"the input ended in {step_fn!r}") from error
            raise
        finally:
            self._is_in_step_fn = False

    def _run_in_step_fn(self, *args: Any) -> Awaitable[Any]:
        self._worker.is_running = False  # the step_fn makes room for it
        return MonitoredSession.run(self, *args)

    # --- stopping, and work beside the runs -------------------------------------------------------

    @always_called
    def should_stop(self) -> bool:
        """Whether the training loop should end; never raises, never does work."""
        stop, state = self._stop, self._state
        if state in (State.CLOSING, State.CLOSED, State.BROKEN):
            return True
        if state is State.LOST or self._preemption is not None:
            return stop.is_for_good  # the next run recreates it, which makes others forgotten
        return stop.is_set or stop.hook_reason is not None or self._gate.is_at_limit

    @property
    def stop_reason(self) -> StopReason | None:
        """What stopped training, and why: the first request, or what ended the block; else None."""
        gate, reason = self._gate, self._stop.reason
        if reason is None and gate.is_at_limit:
            reason = StopReason("the limit", f"{gate.name} is at {gate.value} of {gate.limit}")
        return reason

    @_is_session
    def request_stop(
        self,
        reason: StopReason | str | BaseException | None = None,
        *,
        all_workers: bool = False,
    ) -> None:
        """Ask the training loop to end: every wait ends, and the next run raises StopTraining.

        From any thread or task, before or after opening.

        Args:
            reason: why, for the log and `stop_reason`; an exception leaves at the end of the block.
            all_workers: whether to end all workers of this process that share the global step, and
                those that open before the last of them has closed. An exception leaves this one.
        """
        why = reason_for(None, reason, "session.request_stop")
        logger.info("Stop requested: %s", why.why, extra=self._stop.log_fields(why))
        self._stop.request(why.error, why, all_workers=all_workers)

    def start_soon(
        self,
        fn: SideTask,
        *args: Any,
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str | None = None,
        cancel_at_end: bool = False,
    ) -> None:
        """Start `fn(*args)` as a side task: it never outlives the session.

        By default an error in it stops the session, and the block raises it. At the end, every
        wait of asynchooks in it raises StopTraining; after the grace period it is cancelled. Unlike
        a task of `coord.start_soon` in a hook, it outlives a lost raw session.

        Args:
            on_failure: `OnFailure.STOP`, `OnFailure.LOG` or a `Restart`.
            name: its name in logs and stop reasons; by default the name of `fn`.
            cancel_at_end: whether it is cancelled after `end` of all hooks, instead of after the
                grace period, which is then left for what it shields: for a task that waits for
                another library. A stop alone does not cancel it.

        Raises:
            RuntimeError: the session is not open.
            StopTraining: the session is ending, and the caller is one of its side tasks.
            TypeError: an argument is of the wrong type.
        """
        self._check_goes_on("start_soon", fn)
        self._tasks.start(fn, args, on_failure, name, cancel_at_end)

    async def or_stop(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)`, a wait of another library, until it ends or a stop is requested.

        It runs in a separate task, which has ended when this returns or raises.

        Raises:
            StopTraining: the session was asked to stop; `fn` was cancelled.
            BaseException: what `fn` raised.
        """
        self._check_goes_on("or_stop", fn)
        return await self._tasks.or_stop(fn, *args)

    def batches(self, source: Source[T]) -> Batches[T]:
        """The items of a source, for as long as training continues: `async for x in ...`.

        It reads one item ahead, or as many as the source's `prefetch` does, and ends with the
        source, or when the session should stop, even during a wait. The session opens the source if
        it is not open, and closes it at its own end; `aclose` closes it earlier. One that has not
        ended stays open for other sessions of the same `SharedSessionCreator` until the last of
        them ends. Items that no run has used are not lost: see `InputPositionHook`.

        Raises:
            TypeError: `source` is none of `asynchooks.data`.
            RuntimeError: the session is not open.
            InputError: in the loop: the source is empty, or cannot be read.
            BaseException: in the loop: what the source raised.
        """
        from .data._batches import Batches  # most sessions need none of it

        self._check_open("batches")
        if self._worker.task is not self._engine.current_task():
            self._worker.is_shared = True  # the task that reads its input is to run its steps
        step, watch_runs = self._handle.global_step, self._hooks.watch_runs
        return Batches(source, self._stop, watch_runs, step, self.should_stop)

    def log_metrics(self, values: Mapping[str, SupportsFloat | Histogram]) -> None:
        """Give numbers by name to the hooks that keep metrics, at the present step; never waits.

        From any thread or task. They go to each `MetricsHook`, `HistoryHook` and subscriber.

        Raises:
            TypeError, MetricError, RuntimeError: no mapping to numbers; the session is not open.
        """
        if self._state is not State.CLOSING:
            self._check_open("log_metrics", in_opening=True)
        self._hooks.live.log(self._handle.global_step.value, checked_values(values))

    def status(self) -> Status:
        """What the session is doing; cheap, from any thread, in any phase."""
        now = self._engine.now() if self._state in _OPEN else 0.0
        return self._board.status(self, self._hooks, self._gate, now)

    def subscribe(self, *, every_secs: float = 1.0) -> Subscription:
        """Statuses as they come: now, at each new metric or phase, and every so many seconds.

        It ends after the status "closed", or as the session is dropped; in side tasks and in the
        task that opened the session at a stop, since the end waits for these. Training never waits
        for it: of more than 64 statuses that were not taken the oldest are dropped.
        """
        return Subscription(self._board, every_secs)

    @property
    def phase(self) -> PhaseName:
        """As `Status.phase`."""
        return self._state.phase

    # --- what may be done when --------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        """Change the state, unless it opens still or closes; RuntimeError where it has closed."""
        if self._state is State.CLOSED:
            raise RuntimeError("the session was closed while a run recreated it")
        now = self._state
        if now is State.CLOSING or (now is State.OPENING and state is State.LOST):
            return
        assert state is now or state in _NEXT[now], f"a session that is {now.name} became {state}"
        self._state = state
        self._board.notify()

    def _check_open(self, what: str, *, in_opening: bool = False) -> None:
        """Raise RuntimeError unless `what` may be called now."""
        state = self._state
        if state is State.NEW or (state is State.OPENING and not in_opening):
            raise RuntimeError(
                f"{what}() before the session was opened; use it within `async with session:`"
            )
        if state in (State.CLOSING, State.CLOSED):
            raise RuntimeError(
                f"{what}() after the session was closed. Session is already closed: "
                "make a new MonitoredSession for each `async with`"
            )

    def _check_goes_on(self, what: str, fn: object) -> None:
        if self._state is State.CLOSING:  # a side task that has not ended yet
            raise StopTraining(f"the session ends, before {name_of(fn)} was called")
        self._check_open(what, in_opening=True)

    def _check_may_run(self, what: str) -> None:
        """One run at a time: hooks and the global step could not tell two apart."""
        if self._is_in_step_fn and not self._worker.is_running:
            return  # it began in time, though the session may be closing by now
        self._check_open(what)
        if self._worker.is_running:
            raise RuntimeError(
                f"{what}() while another run of this session is under way. A session runs one "
                "step at a time: give each task a session of its own (SharedSessionCreator lends "
                "them one model), and within a step_fn use step_context.run_with_hooks()"
            )

    def _check_awaited(self) -> None:
        """Raise RuntimeError if the run that was called last has not begun."""
        has_begun = inspect.getcoroutinestate(self._called) != inspect.CORO_CREATED
        self._called = None  # which the error's frames must not hold
        if not has_begun:
            raise RuntimeError(
                "run() was called, and the run() before it has not begun: each one is to be "
                'awaited, `await session.run("loss")`, before the next one is called'
            )

    # --- closing ----------------------------------------------------------------------------------

    @_is_session
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End cleanly, or clean up after an error; swallows what means a clean end.

        Raises the first error of a side task or thread, else of an `end`.
        """
        if self._state in (State.CLOSING, State.CLOSED):  # by close(), perhaps in another task
            await self._others.wait_until(lambda: self._state is State.CLOSED, "the session's end")
            return is_clean_end(exc)
        error = None if is_clean_end(exc) else exc
        self._check_open("__aexit__", in_opening=True)
        if exc is not None and error is None:
            op = getattr(exc, "op", None)  # TensorFlow's message holds the stack of its making
            why = (str(exc) or repr(exc)) if op is None else f"the input ended in {op.name!r}"
            self._stop.note(self.stop_reason or StopReason("the block", why))
        if self._worker.is_running:  # in another task: no further run begins, and its waits end
            self._enter(State.CLOSING)
            self._stop.set()
            until = self._engine.now() + self._grace_secs
            run_ends = partial(
                self._others.wait_until,
                lambda: not self._worker.is_running,
                "another task's run",
                until,
            )
            error = error or await raised_by(run_ends())
            if error is not None:  # perhaps a cancellation, just now
                with self._engine.shielded(self._grace_secs):
                    await raised_by(run_ends())
        leaving = await self._close(error)
        if leaving is not None and leaving is not exc:
            raise leaving
        return leaving is None

    @_is_session
    async def close(self) -> None:
        """End cleanly, now; leaving the block afterwards has no further effect.

        Raises what `__aexit__` does; RuntimeError if it is not open, or a run is under way.
        """
        if self._state is State.CLOSED:
            raise RuntimeError("Session is already closed.")
        self._check_open("close")
        if self._worker.is_running:
            raise RuntimeError("close() while a run is under way; close the session afterwards")
        leaving = await self._close(None)
        if leaving is not None:
            raise leaving

    async def _close(self, error: BaseException | None) -> BaseException | None:
        """The one way out: end hooks, tasks, threads and the raw session; returns what leaves."""
        stop, hooks = self._stop, self._hooks
        stop.end()
        self._enter(State.CLOSING)
        stop.reason = self.stop_reason  # a limit is forgotten with the last worker
        is_reported = False
        try:
            # on_error is called where the error is first known: a cancellation may come as late as
            # that the raw session is given back
            for end in (self._end_hooks, self._end_tasks, self._release):
                error = await end(error)
                held = stop.error or error  # one that is held goes first
                if held is not None and held is not error:
                    held.__context__ = error or held.__context__
                    error = held
                if error is not None:
                    # each time, as a side task may fail behind a cancellation, which stops no other
                    self._stop_others(error)
                if error is not None and not is_reported:
                    is_reported = True
                    error = await self._report(error)
        except GeneratorExit:  # thrown away meanwhile: `after_close` cannot be awaited
            hooks.on_drop()
            raise
        finally:
            self._runner.thread.close()
            self._handle.close()
            stop.worker = self._called = None
            self._gate.close(self._worker)
            self._state = State.CLOSED
            self._others.notify()
        if stop.input is not None:
            closing = await raised_by(stop.input.close())
            if closing is not None and error is not None:
                add_note(error, f"then, closing the input: {closing!r}")
            error = error or closing
        error = await hooks.after_close(error, self._grace_secs)
        self._runner.thread.close()  # a plain after_close may have needed its thread
        self._board.notify()
        if error is not None:
            shorten_traceback(error)
        return error

    def _stop_others(self, error: BaseException) -> None:
        """Note what leaves, and stop the workers that share the creator if it is a failure."""
        stop, reason = self._stop, StopReason("the block", repr(error), error)
        stop.note(reason)
        if not isinstance(error, GeneratorExit) and self._engine.failure_in(error) is not None:
            noted = stop.reason
            self._handle.fail(noted if noted is not None and noted.error is error else reason)

    async def _report(self, error: BaseException) -> BaseException:
        """Call on_error of hooks; returns what leaves: another error, if one interrupted that."""
        calls = self._hooks.on_error(self.raw_session(), error, self._grace_secs)
        return await raised_by(self._handle.in_session_context(calls)) or error

    async def _end_hooks(self, error: BaseException | None) -> BaseException | None:
        """At a clean end, call before_end and end of hooks; returns what leaves.

        No worker that shares the raw session closes it meanwhile.
        """
        while error is None and self._raw is not None and self._raw.is_retired:  # it was replaced
            error = await raised_by(self._recovering(self._create))
        raw, hooks = self._raw, self._hooks
        if error is not None:
            return error
        try:
            if raw is not None:
                raw.enter_run()
            try:
                calls = hooks.end(self.raw_session())
                return await self._handle.in_session_context(calls)  # type: ignore[no-any-return]
            finally:
                if raw is not None and raw.leave():
                    await close_raw(raw)
        except BaseException as raised:  # of what surrounds the hooks
            return raised

    async def _end_tasks(self, error: BaseException | None) -> BaseException | None:
        """Stop side tasks and threads, within the grace period; returns what leaves.

        However often this task is cancelled meanwhile, it goes on to the end.
        """
        engine, stop = self._engine, self._stop
        until = engine.now() + self._grace_secs
        stop.set()
        self._tasks.cancel(all_tasks=False)  # not only once the coordinator's have ended
        cancel = not isinstance(error, (Exception, NoneType))

        async def end() -> None:
            await self._end_coord(until, cancel=cancel)
            await self._tasks.end(engine, until, cancel=cancel)

        while True:  # an anyio shield does not hold a native cancellation back
            with nullcontext() if error is None else engine.shielded(math.inf):
                again = await raised_by(end())
            if again is None or (error is not None and engine.failure_in(again) is not None):
                break
            error, cancel = error or again, cancel or not isinstance(again, Exception)
        if self._preemption is not None:
            logger.error(
                "A preemption was reported while the session ended: %r",
                self._preemption,
                extra=stop.log_fields(repr(self._preemption)),
            )
        return error

    async def _release(self, error: BaseException | None) -> BaseException | None:
        """Give the raw session back, closed within the grace period; returns what leaves."""
        raw = self._raw or self._lost
        self._raw = self._lost = self._stop.coord = None
        self._steps.forget()
        raised = await raised_by(self._handle.release(raw))
        return error or raised

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        """Dropped: nothing can be awaited any more. Called in whichever thread drops it."""
        state = self.__dict__.get("_state", State.NEW)  # none where the constructor failed
        if state in (State.NEW, State.CLOSED):
            return
        self._stop.is_ending = True
        self._runner.thread.drop()
        self._hooks.on_drop()
        self._gate.drop(self._worker)
        self._handle.drop()
        if not self._engine.is_virtual:  # workers may end with a simulation
            text = (
                f"{self!r} was dropped without being closed: `end` of its hooks was not called, so "
                "nothing was saved at the end; open it by `async with`, or `await session.close()`"
            )
            _warn(text, ResourceWarning, source=self)


class _Steps:
    """Makes the steps of one session, one at a time, and calls the plain methods of its hooks.

    It holds no session, which may be dropped.
    """

    def __init__(self, runner: StepRunner, handle: SessionHandle, stop: SessionStop) -> None:
        assert stop.worker is not None
        self._worker, self._engine = stop.worker, current_engine()
        self._runner, self._handle, self._stop = runner, handle, stop
        self._gate, self._tick = handle.global_step.gate, self._engine.tick
        self._plain_times = StepTimes(forgives=False)
        self.raw: RawSession | None = None  # the present one; the session sets it
        self._last_raw: RawSession | None = None  # of the last step
        self._last_fetches: Any = None
        self._kind: CallKind  # of that step: these fetches of this raw session
        self._lock: CallLock  # of that raw session

    def forget(self) -> None:
        """Hold no raw session any more, nor what was fetched of it."""
        self.raw = self._last_raw = self._last_fetches = None

    def make(
        self,
        raw: RawSession,
        args: RunArguments,
        context: SessionRunContext | None,
        ticket: Ticket | None = None,
    ) -> Any:
        """Make the step at once if that may be, and return a tuple that begins with its outputs.

        Else return what gives the outputs when it is awaited: a coroutine costs as much as a step.
        The ticket is settled where the step is made, so that it counts also if its task has left.
        """
        if raw is not self._last_raw or args[0] is not self._last_fetches:
            self._last_raw, self._last_fetches = raw, args[0]
            key, blocks = raw.run_key(args[0]), not raw.is_async
            self._kind = self._runner.kind(raw.step_times, key, blocks=blocks)
            self._lock = NO_LOCK if raw.is_async else raw.call_lock
        begun, kind = self._tick(), self._kind
        if ticket is None:
            is_due = begun >= self._engine.turn_due_at and not kind.in_thread
            # asked for only now: a hook that waits for data must not keep others from running
            ticket = None if is_due else self._gate.take_ticket_nowait()
            if ticket is None:
                return self._make_later(raw, args, context, is_due)
        here = None if kind.in_thread else self._lock.take_here()
        if here is None:
            return self._make_apart(raw, args, ticket, context)
        try:
            result = self._make_here(raw, args, ticket, context)
        finally:
            here.end()
        if (secs := self._tick() - begun) > INLINE_SECS or kind.num_slow:
            kind.learn(secs)
        return result if type(result) is tuple else self._finish(raw, ticket, result, context)

    async def _make_later(
        self, raw: RawSession, args: RunArguments, context: Any, is_due: bool
    ) -> Any:
        """Make the step when others have had their turn, and it is this worker's."""
        if is_due:
            await self._engine.turn()
        ticket = await self._gate.take_ticket(self._stop.run_stop)
        result = self.make(raw, args, context, ticket)
        return result[0] if type(result) is tuple else await result

    def _make_here(self, raw: RawSession, args: RunArguments, ticket: Ticket, context: Any) -> Any:
        """Make the step in this thread; if it is a coroutine, `_finish` goes on with it."""
        try:
            if raw.is_retired or (raw.is_lost and self._stop.recovers):
                raise PreemptionError("the session was lost meanwhile, by another call")
            result = raw.run_and_read_step(args)
            if type(result) is not tuple:
                raw.enter_run(is_held=True)  # its thread may come back after a successor is there
        except BaseException as error:
            self._settle_failed(raw, ticket, error)
            raise
        if type(result) is tuple:
            if context is not None:
                context.step_is_made = True  # before others may be alone with the model
            made = self._gate.settle(ticket, result[1], result[2])
            if context is not None:
                context._made = made
        return result

    def _settle_failed(self, raw: RawSession, ticket: Ticket, error: BaseException) -> None:
        after: tuple[Any, ...] = ()
        if is_preemption(error):  # it still holds its ticket, so the model is not saved meanwhile
            raw.is_lost = True
        try:
            after = raw.step_after(error)
        finally:
            self._gate.settle(ticket, *after)

    async def _make_apart(
        self, raw: RawSession, args: RunArguments, ticket: Ticket, context: Any
    ) -> Any:
        """Make the step in the thread, or when another call has ended that it must not overlap."""

        def make() -> Any:
            try:
                raw.enter_run()
            except BaseException:
                self._gate.settle(ticket)
                raise
            try:
                return self._make_here(raw, args, ticket, context)
            finally:
                raw.leave_run()

        def give_up(outcome: Outcome) -> None:
            """The task that was to go on with a coroutine has left."""
            if outcome.error is None and type(outcome.value) is not tuple:
                self._gate.settle(ticket)
                raw.leave_run()
                close_unrun(outcome.value)

        kind, lock, stop = self._kind, self._lock, self._stop.run_stop
        result = await self._call(make, kind, lock, raw, stop, ticket, give_up)
        if type(result) is tuple:
            return result[0]
        return await self._finish(raw, ticket, result, context)

    async def _finish(
        self, raw: RawSession, ticket: Ticket, pending: Awaitable[Any], context: Any
    ) -> Any:
        """Go on with a step that turned out to be a coroutine, here."""
        self._worker.step = pending
        try:
            result = await pending
        except BaseException as error:
            self._settle_failed(raw, ticket, error)
            raise
        else:
            made = self._gate.settle(ticket, result[1], result[2])
            if context is not None:
                context.say_made(made)
            return result[0]
        finally:
            self._worker.step = None
            raw.leave_run()

    async def call_plain(
        self, fn: Callable[[], Any], key: Hashable, stop: Stop | None = None
    ) -> Any:
        """As `CallPlain`."""
        raw, times, lock = self.raw, self._plain_times, self._handle.creator.call_lock
        if raw is not None:
            times.always_in_thread, lock = raw.step_times.always_in_thread, raw.call_lock
        kind = self._runner.kind(times, key, blocks=key is not None)
        return await self._call(lambda: self._handle.call(fn), kind, lock, raw, stop)

    async def _call(
        self,
        fn: Callable[[], Any],
        kind: CallKind,
        lock: CallLock,
        raw: RawSession | None,
        stop: Stop | None,
        ticket: Ticket | None = None,
        when_late: WhenLate = drop,
    ) -> Any:
        """Make a call in its turn, a step's with its ticket, here or in the thread.

        Its task may leave before its turn, when the call is not made, and while it is under way in
        the thread, which is not waited for then.
        """
        hold, coord = None, self._stop.coord
        lost_peer = None if raw is None else raw.lost_peer
        if ticket is not None and coord is not None:  # a guard may say so of a step
            lost_peer = lost_peer or coord.lost_step
        try:
            hold = await lock.take(
                self._engine, self._runner.grace_secs, stop=stop, lost_peer=lost_peer
            )
            return await self._runner.call(hold.around(fn), kind, lost_peer, when_late)
        except BaseException:
            has_begun = hold is not None and hold.abandon()
            if ticket is not None and has_begun:
                self._gate.abandon(ticket)
            elif ticket is not None:
                self._gate.give_back(ticket)
            raise
