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

import logging
import warnings
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from enum import Enum, auto
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsFloat, TypeVar, cast

from ._check import instance
from ._engine.base import STOPPED, AsyncOnly, Engine, Slot
from ._engine.current import current_engine
from ._engine.stacks import holds_loop
from ._engine.stop import EndsAtStop, LostPeer, StopReason, reason_for
from ._engine.sync import NO_LOCK, CallLock, Condition, Hold
from ._engine.threads import (
    INLINE_SECS,
    CallKind,
    Outcome,
    StepRunner,
    StepRunnerName,
    StepTimes,
    check_runner,
    close_unrun,
    is_async,
)
from ._errors import (
    PreemptionError,
    StopTraining,
    add_note,
    is_clean_end,
    is_input_end,
    is_preemption,
    is_stop,
    leaves_as_itself,
    leaves_of,
    raised_by,
    shorten_traceback,
)
from ._hook import AnyHook, SessionRunContext, SessionRunValues
from ._running.hooks import NOTHING, HookList, MergedRun, RunArguments, wrong_feeds
from ._running.status import PhaseName, Status, StatusBoard, Subscription
from ._running.step_context import StepContext, check_step_fn
from ._step.gate import Gate, Ticket
from ._step.global_step import GlobalStep
from ._stopping.backoff import Recovery, Restart, checked_grace_secs
from ._stopping.session_stop import SessionStop
from ._stopping.tasks import OnFailure, SideTask, TaskGroup, name_of
from .backends._creator import (
    Restore,
    SessionCreator,
    SessionHandle,
    close_raw,
    default_creator,
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

_is_session = holds_loop(lambda session: "the session")


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
    State.CLOSED: (),
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

    _in_with = "session"
    _recovers: ClassVar[bool] = True

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
        creator = default_creator() if session_creator is None else session_creator
        creator = checked_creator(creator, "session_creator")
        instance("recovery", recovery, (Recovery, NoneType), "a Recovery(max_attempts=...)")
        self._recovery = recovery or Recovery()
        self._grace_secs = checked_grace_secs(stop_grace_period_secs)
        self._runner_name = check_runner(step_runner)
        self._handle = creator.handle()
        self._handle.grace_secs = self._grace_secs
        self._gate = self._handle.global_step.gate
        self._stop = self._hooks.stop
        self._stop.handle, self._stop.recovers = self._handle, self._recovers
        self._stop.tasks = self._tasks = _side_tasks(self._stop, self._handle)
        self._state = State.NEW
        self._raw: RawSession | None = None
        self._lost: RawSession | None = None  # what the next one replaces
        self._step: GlobalStep | None = None
        self._is_in_step_fn = False
        self._others = Condition()  # of tasks that wait for this one's run, or the session's end
        self._has_ended = False  # a run has said so
        self._last_fetches: Any = None  # of all in the last run: equal ones are the same object
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

    @property
    def global_step(self) -> GlobalStep:
        """The global step, as a handle of this session: a stop of the session ends waits for it."""
        if self._step is None:
            self._step = self._handle.global_step.bound(self._stop, body=self._stop.worker)
        return self._step

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
        self._step = None  # that one knows nothing of the worker
        self._steps = _Steps(self._engine, self._runner, self._gate, handle, stop)
        hooks.call_plain = self._steps.call_plain
        self._enters_graph = hooks.needs_graph_entered and handle.graph is not None
        try:
            async with handle.opening():
                begin = hooks.begin(handle.has_global_step, handle.graph, self._steps.call_begin)
                await handle.in_session_context(begin, hooks.culprit)
            await self._recovering(self._create)
        except BaseException as error:
            leaving = await self._close(error)
            if leaving is error:
                raise
            assert leaving is not None
            raise leaving from error
        return self

    open = __aenter__

    async def _create(self) -> RawSession:
        """Have a raw session with a coordinator, of use to all hooks."""
        hooks, handle, stop = self._hooks, self._handle, self._stop
        if self._raw is not None and stop.coord is not None:  # its hooks were not all called
            await self._drop()
        try:
            raw = self._raw = self._steps.raw = await self._acquire()
            stop.coord = coord = handle.new_coordinator()
            coord.attach(stop, stop.coord_stopped, handle.in_session_context)
            handle.start_threads(raw, coord)
            created = hooks.after_create_session(raw, coord)
            await handle.in_session_context(created, hooks.culprit)
        except Exception as error:
            if not is_preemption(error):
                self._enter(State.BROKEN)
            raise
        self._run_stop, gate_step = coord.stop, handle.global_step
        self._run_step = gate_step.bound(coord.stop, self._worker)
        self._unasked = SessionRunValues(None, *raw.no_options)
        self._enter(State.READY)
        return raw

    async def _acquire(self) -> RawSession:
        """Have a raw session, before after_create_session of hooks."""
        lost, self._lost = self._lost, None
        hooks, handle, restore = self._hooks, self._handle, None
        if names := hooks.names_of_restoring():
            restore = Restore(
                names, lambda raw: handle.in_session_context(hooks.restore(raw), hooks.culprit)
            )
        raw = await handle.acquire(lost, restore)
        if self._state is State.CLOSED:
            await handle.release(raw)
            self._check_not_closed()
        return raw

    # --- running ----------------------------------------------------------------------------------

    @holds_loop(lambda session: session._hooks.held_in_run())
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
            RuntimeError: the session is not open, or a run is already under way.
            BaseException: what a hook or the step raised, with a note that says which one.
        """
        if self._state not in _OPEN or self._worker.is_running:
            self._check_may_run("run")
        if feed_dict is not None and not isinstance(feed_dict, Mapping):
            raise wrong_feeds("feed_dict is", feed_dict)
        args, failures = (fetches, feed_dict, options, run_metadata), 0
        worker = self._worker
        worker.is_running = True
        worker.num_runs += 1
        try:
            while True:  # one attempt after the other, as long as the raw session is lost
                try:
                    if not self._enters_graph or self._is_in_step_fn:
                        return await self._run_once(args)
                    run = self._run_once(args)
                    return await self._handle.in_session_context(run, self._hooks.culprit)
                except Exception as error:
                    failures = await self._recover(error, failures)
        except BaseException as error:
            if type(error) is StopTraining:
                await self._note_end()
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
            raw = await self._revive()
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
                args = merged.finish(self._last_fetches)
                self._last_fetches = args[0]

            outputs = await self._steps.make(raw, args, context)

            values, asked = self._unasked, NOTHING
            if merged is not None:
                outputs, values, asked = merged.split(outputs, values)
            if context is not None:
                for call in hooks.after_runs:
                    hooks.current = call
                    await call.fn(context, asked.get(call.place, values) if asked else values)
                if context._last is not None:
                    await context.finish()
                hooks.current = None
                if context.stop_reason is not None:
                    stop.request_by_hook(context.stop_reason, context.stops_all)
        except BaseException as error:
            if context is not None:
                context.end_exclusive()
            explained = self._judged(hooks.explained(error, hooks.current, merged))
            if explained is error:
                raise
            raise explained from explained.__cause__ or error
        return outputs

    async def _revive(self) -> RawSession:
        """Have a raw session for a run, a new one if the last was lost; StopTraining after a stop.

        Not within a step_fn: that has the old one in its hands, and is called again itself.
        """
        stop = self._stop
        # a session that another task closes lets a step_fn end: that stop has no reason
        if self._raw is not None and stop.is_for_good and stop.reason is not None:
            raise self._refusal()  # a session that is to end need not be recreated before
        if not self._is_in_step_fn and self._is_lost:
            await self._drop()
        raw = self._raw
        if raw is None or self._state in (State.LOST, State.BROKEN):
            raw = await self._create()
        if stop.hook_reason is not None or (stop.is_set and stop.reason is not None):
            raise self._refusal()
        if raw.is_retired:
            raise PreemptionError("the shared session was lost and replaced meanwhile")
        return raw

    @property
    def _is_lost(self) -> bool:
        """Whether the raw session was given up by another worker, or is reported as lost."""
        coord, raw = self._stop.coord, self._raw
        if not self._recovers or coord is None:
            return False
        return is_preemption(coord.error) or (raw is not None and raw.is_retired)

    def _refusal(self) -> StopTraining:
        """What a run raises that would begin after a stop."""
        return StopTraining(f"no run begins after a stop, by {self._stop.reason}")

    async def _note_end(self) -> None:
        """A run has raised StopTraining: a loop that swallows it would hold the event loop."""
        has_ended, self._has_ended = self._has_ended, True
        if has_ended:
            await self._engine.checkpoint()

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
        was_replaced = self._raw is not None and self._raw.is_retired
        is_final = is_stop(lost) or leaves_as_itself(lost) or not was_replaced
        if not self._recovers or (not is_preemption(lost) and is_final) or self._is_in_step_fn:
            raise error
        if not is_preemption(lost):
            # another worker has closed it under this one's hook: whatever that made of it
            lost = PreemptionError(f"the shared session was replaced: {error!r}")
            lost.__cause__ = error
        self._check_not_closed()
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
        stop, coord = self._stop, self._stop.coord
        held = None if coord is None else coord.error
        if not isinstance(held, Exception) or not stop.is_curable(held):
            return error
        if is_preemption(error) or not isinstance(error, Exception):
            return error
        # a preemption ends the waits of a run, and no other ones
        if type(error) is StopTraining and stop.is_set:
            return error
        if held.__cause__ is None and held is not error:
            held.__cause__ = error
        return held

    async def _drop(self) -> None:
        """Let go of a raw session: join the threads and side tasks of its coordinator.

        Raises what the coordinator holds, if that is no preemption.
        """
        stop, coord = self._stop, self._stop.coord
        self._enter(State.LOST)
        if coord is not None:
            coord.detach()
            until = self._engine.now() + self._grace_secs
            await coord.end(self._engine, until, cancel_tasks=False, lost_peer=self._lost_peer)
            if coord.error is not None and not is_preemption(coord.error):
                self._enter(State.BROKEN)
                raise coord.error
        self._lost = self._raw or self._lost
        self._raw = self._steps.raw = stop.coord = None
        stop.forget()

    @property
    def _lost_peer(self) -> LostPeer | None:
        return None if self._raw is None else self._raw.lost_peer

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
        if self._is_lost:
            await self._drop()
        raw = self._raw if self._state is State.READY else await self._create()
        assert raw is not None
        context = StepContext(raw.exposed, self._run_in_step_fn)
        call = self._steps.call_step_fn(raw, step_fn, context)
        self._is_in_step_fn = True
        try:
            return await self._handle.in_session_context(call, lambda: f"the step_fn {step_fn!r}")
        except BaseException as error:
            if is_input_end(error):
                raise StopTraining(f"the input ended in {step_fn!r}") from error
            raise
        finally:
            self._is_in_step_fn = False

    async def _run_in_step_fn(self, *args: Any) -> Any:
        self._worker.is_running = False  # the step_fn makes room for it
        try:
            return await MonitoredSession.run(self, *args)
        except BaseException as error:
            shorten_traceback(error)
            raise

    # --- stopping, and work beside the runs -------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether the training loop should end; never raises, never does work."""
        stop, state = self._stop, self._state
        if state in (State.CLOSING, State.CLOSED, State.BROKEN):
            return True
        coord = stop.coord
        if state is State.LOST or (coord is not None and stop.is_curable(coord.error)):
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
        """Change the state, unless the session closes; RuntimeError where it has closed."""
        self._check_not_closed()
        now = self._state
        is_kept = state is now or (now is State.CLOSING and state is not State.CLOSED)
        if is_kept or (now is State.OPENING and state is State.LOST):  # it opens still
            return
        if state not in _NEXT[now]:
            raise RuntimeError(
                f"a session that is {now.name} became {state.name}; expected one of "
                f"{[each.name for each in _NEXT[now]]}. Please report it"
            )
        self._state = state
        self._board.notify()

    def _check_not_closed(self) -> None:
        if self._state is State.CLOSED:
            raise RuntimeError("the session was closed while a run recreated it")

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
        if self._state is State.NEW:
            self._check_open("__aexit__")
        if exc is not None and error is None:
            self._note_clean_end(exc)
        if self._worker.is_running:  # in another task: no further run begins, and its waits end
            self._enter(State.CLOSING)
            self._stop.set()
            until = self._engine.now() + self._grace_secs
            run = self._others.wait_until(
                lambda: not self._worker.is_running, "another task's run", until
            )
            error = error or await raised_by(run)
        leaving = await self._close(error)
        if leaving is not None and leaving is not exc:
            raise leaving
        return leaving is None

    def _note_clean_end(self, error: BaseException) -> None:
        """What ended the block cleanly."""
        op = getattr(error, "op", None)  # TensorFlow's message holds the stack of its making
        why = (str(error) or repr(error)) if op is None else f"the input ended in {op.name!r}"
        self._stop.note(self.stop_reason or StopReason("the block", why))

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
        stop.is_ending = True
        self._enter(State.CLOSING)
        stop.reason = self.stop_reason  # a limit is forgotten with the last worker
        try:
            error = await self._end(error)
        except GeneratorExit:  # thrown away meanwhile: `after_close` cannot be awaited
            hooks.on_drop()
            raise
        finally:
            self._last_fetches = None
            self._steps.forget()
            self._runner.close()
            self._handle.close()
            worker, stop.worker = self._worker, None
            self._gate.close(worker)
            self._state = State.CLOSED
            self._others.notify()
        if stop.input is not None:
            closing = await raised_by(stop.input.close())
            if closing is not None and error is not None:
                add_note(error, f"then, closing the input: {closing!r}")
            error = error or closing
        error = await hooks.after_close(error)
        self._runner.close()  # a plain after_close may have needed its thread
        self._board.notify()
        if error is not None:
            shorten_traceback(error)
        return error

    async def _end(self, error: BaseException | None) -> BaseException | None:
        """End hooks, side tasks and threads, and give the raw session back; returns what leaves.

        on_error is called where the error is first known: a cancellation may come as late as that
        the raw session is given back.
        """
        self._fail_others(error)
        if error is None and self._raw is not None and self._raw.is_retired:  # it was replaced
            error = await raised_by(self._recovering(self._succeed))
        session = self.raw_session()
        if error is None:
            error = await self._end_hooks(session)
        if error is not None:
            error = self._first_error(error)
        reported = error
        error = await self._report(session, error) or error
        error = self._first_error(await self._end_tasks(error))
        if reported is None:
            reported = error
            error = await self._report(session, error) or error
        released = await raised_by(self._release())
        error = error or released
        if reported is None:
            error = await self._report(None, error) or error
        return error

    async def _succeed(self) -> None:
        """Have the successor of a raw session that another worker has replaced, for `end`."""
        await self._drop()
        await self._create()

    async def _end_hooks(self, session: Any) -> BaseException | None:
        """Call before_end and end of hooks; no worker that shares the raw session closes it."""
        raw = self._raw
        try:
            if raw is not None:
                raw.enter_run()
            try:
                calls = self._hooks.end(session)
                return await self._handle.in_session_context(calls, self._hooks.culprit)  # type: ignore[no-any-return]
            finally:
                if raw is not None and raw.leave():
                    await close_raw(raw)
        except BaseException as error:  # of what surrounds the hooks
            return error

    def _first_error(self, error: BaseException | None) -> BaseException | None:
        """The error that leaves: one that is held goes first."""
        held = self._stop.error
        if held is None or held is error:
            return error
        if error is not None:
            held.__context__ = error
        return held

    def _fail_others(self, error: BaseException | None) -> None:
        """An error leaves the session: note it, and stop the workers that share its creator."""
        if error is None:
            return
        stop, reason = self._stop, StopReason("the block", repr(error), error)
        stop.note(reason)
        if not isinstance(error, GeneratorExit) and self._engine.failure_in(error) is not None:
            noted = stop.reason
            self._handle.fail(noted if noted is not None and noted.error is error else reason)

    async def _report(self, session: Any, error: BaseException | None) -> BaseException | None:
        """Call on_error of hooks, if there is an error; returns what interrupted that."""
        self._fail_others(error)
        if error is None:
            return None
        calls = self._hooks.on_error(session, error, self._engine, self._grace_secs)
        return await raised_by(self._handle.in_session_context(calls, self._hooks.culprit))

    async def _end_tasks(self, error: BaseException | None) -> BaseException | None:
        """Stop side tasks and threads, within the grace period; returns what leaves.

        However often this task is cancelled meanwhile, it goes on to the end.
        """
        engine, stop = self._engine, self._stop
        coord, until = stop.coord, engine.now() + self._grace_secs
        stop.set()
        if coord is not None:
            coord.detach()
        self._tasks.cancel(all_tasks=False)  # not only once the coordinator's have ended
        cancel = not isinstance(error, (Exception, NoneType))
        is_ended = False
        if error is None:
            error = await raised_by(self._end_all_tasks(until, cancel=False))
            is_ended, cancel = error is None, not isinstance(error, (Exception, NoneType))
        while not is_ended:  # an anyio shield does not hold a native cancellation back
            with engine.shielded(float("inf")):
                again = await raised_by(self._end_all_tasks(until, cancel=cancel))
            error = error or again
            is_ended = again is None or engine.failure_in(again) is not None
            cancel = True
        if coord is not None and stop.is_curable(coord.error):
            logger.error(
                "A preemption was reported while the session ended: %r",
                coord.error,
                extra=stop.log_fields(repr(coord.error)),
            )
        return error

    async def _end_all_tasks(self, until: float, *, cancel: bool) -> None:
        coord, engine, lost_peer = self._stop.coord, self._engine, self._lost_peer
        if coord is not None and not coord.joined:
            await coord.end(engine, until, cancel_tasks=cancel, lost_peer=lost_peer)
        await self._tasks.end(engine, until, cancel=cancel)

    async def _release(self) -> None:
        """Give the raw session back, closed within the grace period."""
        raw = self._raw or self._lost
        self._raw = self._lost = self._steps.raw = self._stop.coord = None
        await self._handle.release(raw)

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        """Dropped: nothing can be awaited any more. Called in whichever thread drops it."""
        state = self.__dict__.get("_state", State.NEW)  # none where the constructor failed
        if state in (State.NEW, State.CLOSED):
            return
        self._runner.drop()
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

    def __init__(
        self,
        engine: Engine,
        runner: StepRunner,
        gate: Gate,
        handle: SessionHandle,
        stop: SessionStop,
    ) -> None:
        self._engine, self._runner = engine, runner
        self._gate, self._handle, self._stop = gate, handle, stop
        self._tick = engine.tick
        self._plain_times = StepTimes(forgives=False)
        self.raw: RawSession | None = None  # the present one; the session sets it
        self._last_raw: RawSession | None = None  # of the last step
        self._last_fetches: Any = None
        self._kind: CallKind  # of that step: these fetches of this raw session
        self._lock: CallLock  # of that raw session

    def forget(self) -> None:
        """Hold no raw session any more, nor what was fetched of it."""
        self._last_raw = self._last_fetches = None

    async def make(
        self, raw: RawSession, args: RunArguments, context: SessionRunContext | None
    ) -> Any:
        """Make the step, here or in the thread, when it is this worker's turn.

        The ticket is settled where the step is made, so that it counts also if its task has left.
        """
        engine, gate = self._engine, self._gate
        if raw is not self._last_raw or args[0] is not self._last_fetches:
            self._last_raw, self._last_fetches = raw, args[0]
            key, blocks = raw.run_key(args[0]), not raw.is_async
            self._kind = self._runner.kind(raw.step_times, key, blocks=blocks)
            self._lock = NO_LOCK if raw.is_async else raw.call_lock
        kind = self._kind
        begun = self._tick()
        if not kind.in_thread and begun >= engine.turn_due_at:
            await engine.turn()
            begun = self._tick()
        # asked for only now: a hook that waits for data must not keep others from running
        ticket = gate.take_ticket_nowait() or await gate.take_ticket(self._stop.run_stop)
        if kind.in_thread:
            result = await self._make_in_thread(raw, args, ticket, context)
        else:
            hold = self._lock.take_here() or await self._take_lock(raw, ticket, begins=True)
            try:
                result = self._make(raw, args, ticket, context)
            finally:
                hold.end()
            if (secs := self._tick() - begun) > INLINE_SECS or kind.num_slow:
                kind.learn(secs)
        if type(result) is tuple:
            return result[0]
        return await self._finish(raw, ticket, result, context)

    async def _take_lock(self, raw: RawSession, ticket: Ticket, *, begins: bool) -> Hold:
        """Wait for the end of another call that the step must not overlap."""
        stop, lost, grace_secs = self._stop.run_stop, self._lost_step(raw), self._runner.grace_secs
        try:
            hold = await self._lock.take(self._engine, grace_secs, stop=stop, lost_peer=lost)
        except BaseException:
            self._gate.give_back(ticket)
            raise
        if begins:
            hold.begin()
        return hold

    def _make(self, raw: RawSession, args: RunArguments, ticket: Ticket, context: Any) -> Any:
        """Make the step in this thread; if it is a coroutine, `_finish` goes on with it."""
        try:
            if raw.is_retired:
                raise PreemptionError("the shared session was lost and replaced meanwhile")
            result = raw.run_and_read_step(args)
        except BaseException as error:
            self._settle_failed(raw, ticket, error)
            raise
        if type(result) is tuple:
            if context is not None:
                context._is_made = True  # before others may be alone with the model
            made = self._gate.settle(ticket, *result[1:])
            if context is not None:
                context._made = made
        else:
            raw.enter_run()
        return result

    def _settle_failed(self, raw: RawSession, ticket: Ticket, error: BaseException) -> None:
        after: tuple[Any, ...] = ()
        if is_preemption(error):  # it still holds its ticket: nobody saves the model meanwhile
            raw.is_lost = True
        try:
            after = raw.step_after(error)
        finally:
            self._gate.settle(ticket, *after)

    async def _make_in_thread(
        self, raw: RawSession, args: RunArguments, ticket: Ticket, context: Any
    ) -> Any:
        hold = await self._take_lock(raw, ticket, begins=False)

        def make() -> Any:
            try:
                raw.enter_run()
            except BaseException:
                self._gate.settle(ticket)
                raise
            try:
                return self._make(raw, args, ticket, context)
            finally:
                raw.leave_run()

        def give_up(outcome: Outcome) -> None:
            """The task that was to go on with a coroutine has left."""
            if outcome.error is None and type(outcome.value) is not tuple:
                self._gate.settle(ticket)
                raw.leave_run()
                close_unrun(outcome.value)

        try:
            return await self._runner.call(
                hold.around(make), self._kind, self._lost_step(raw), give_up
            )
        except BaseException:
            if hold.abandon():
                self._gate.abandon(ticket)
            else:
                self._gate.give_back(ticket)
            raise

    async def _finish(
        self, raw: RawSession, ticket: Ticket, pending: Awaitable[Any], context: Any
    ) -> Any:
        """Go on with a step that turned out to be a coroutine, here."""
        worker = self._stop.worker
        if worker is not None:
            worker.step = pending
        try:
            result = await pending
        except BaseException as error:
            self._settle_failed(raw, ticket, error)
            raise
        else:
            made = self._gate.settle(ticket, *result[1:])
            if context is not None:
                context.say_made(made)
            return result[0]
        finally:
            if worker is not None:
                worker.step = None
            raw.leave_run()

    def _lost_step(self, raw: RawSession) -> LostPeer | None:
        """What ends the wait for a step in a thread: its backend's silence, else a guard."""
        coord = self._stop.coord
        return raw.lost_peer or (None if coord is None else coord.lost_step)

    async def call_plain(
        self, fn: Callable[[], Any], key: Hashable, ends_at_stop: bool = False
    ) -> Any:
        """As `hooks.CallPlain`."""
        raw = self.raw
        times, lock = self._plain_times, self._handle.creator.call_lock
        if raw is not None:
            times.always_in_thread, lock = raw.step_times.always_in_thread, raw.call_lock
        kind = self._runner.kind(times, key)
        stop = self._stop.run_stop if ends_at_stop else None
        return await self._call_alone(lambda: self._handle.call(fn), kind, lock, raw, stop)

    async def call_step_fn(self, raw: RawSession, step_fn: Callable[..., Any], arg: Any) -> Any:
        """Call a step_fn, a sync one where steps run; a stop ends the wait for another call."""
        if is_async(step_fn):
            return await step_fn(arg)
        key: Any = getattr(step_fn, "__code__", type(step_fn))  # itself it may not be hashable
        kind, call = (
            self._runner.kind(raw.step_times, key),
            lambda: self._handle.call(lambda: step_fn(arg)),
        )
        result = await self._call_alone(call, kind, raw.call_lock, raw, self._stop)
        return await result if isinstance(result, Awaitable) else result

    async def _call_alone(
        self, fn: Callable[[], Any], kind: CallKind, lock: Any, raw: RawSession | None, stop: Any
    ) -> Any:
        lost = None if raw is None else raw.lost_peer
        grace_secs = self._runner.grace_secs
        hold = await lock.take(self._engine, grace_secs, stop=stop, lost_peer=lost)
        if not kind.in_thread:
            hold.begin()
            try:
                return self._runner.call_here(fn, kind)
            finally:
                hold.end()
        try:
            return await self._runner.call(hold.around(fn), kind, lost)
        finally:
            hold.abandon()  # unless it has ended

    async def call_begin(self, fn: Callable[[], Any]) -> Any:
        """Call a plain `begin` on the event loop, before there is a raw session."""
        lock = self._handle.creator.call_lock
        hold = await lock.take(self._engine, self._runner.grace_secs)
        return hold.around(fn)()


def _side_tasks(stop: SessionStop, handle: SessionHandle) -> TaskGroup:
    """Those of a session; they do not hold it, as it may be dropped."""
    return TaskGroup(
        stop, lambda error, reason: stop.request(error, reason), handle.in_session_context
    )
