"""MonitoredSession: training under hooks. A reader starts here.

Timeline of a session:

    normal   begin · create · restore_model · after_create_session ·
             (before_run · raw run · after_run · functions of finish_with)* · before_end · end ·
             side tasks and threads stop · close · after_close
    stop     should_stop() is True, and the next run raises StopTraining, which ends the block
             cleanly: normal from `end` on. A hook's request_stop lets the run it asked in complete;
             any other stop ends every wait, too
    failure  what the body, a run or a side task raised: no end, on_error in reverse order, side
             tasks and threads stop, close; the error leaves as itself
    lost     AbortedError, UnavailableError or PreemptionError in a run: side tasks and threads
             stop, close, create · restore_model · after_create_session, and the whole run again
    cancel   as failure; clean-up is shielded, for the grace period at most

Requests of hooks are merged in `_running/merge.py`; a step runs inline or in a thread by
`_running/raw_run.py` and `_engine/threads.py`; which worker may run now: `_step/gate.py`. The raw
session comes, goes and ends in `_running/lifecycle.py`; stops, side tasks, and the error that
leaves: `_stopping/session_stop.py`. Several steps in flight: `_running/in_flight.py`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsFloat, TypeVar

from ._check import instance
from ._engine.base import AsyncOnly, Engine
from ._engine.current import current_engine
from ._engine.stacks import holds_loop
from ._engine.stop import Stop, StopReason, reason_for
from ._engine.threads import StepRunner, StepRunnerName, check_runner
from ._errors import StopTraining, is_clean_end, is_input_end, shorten_traceback
from ._hook import AnyHook, SessionRunArgs, SessionRunContext
from ._running.dispatch import HookList, values_of
from ._running.hook_check import check_overlap
from ._running.in_flight import InFlight, refuse
from ._running.lifecycle import SessionLifecycle
from ._running.merge import MergedRun, wrong_feeds
from ._running.phase import OneRun, Phase
from ._running.raw_run import NOT_HERE, RawRuns, Unfinished
from ._running.status import Status, StatusBoard, Subscription
from ._running.step_context import StepContext, check_step_fn
from ._step.global_step import GlobalStep
from ._step.waiters import Worker
from ._stopping.backoff import Recovery, Restart, checked_grace_secs
from ._stopping.session_stop import interruption
from ._stopping.tasks import OnFailure, SideTask, name_of, or_stop
from .backends._creator import SessionCreator, check_creator, default_creator
from .metrics._live import checked_values

if TYPE_CHECKING:
    from .data import Batches
    from .data._sources import Source
    from .metrics import Histogram

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

_RECOVERY = Recovery()
_new_object: Callable[[type[SessionRunContext]], SessionRunContext] = object.__new__
_is_session = holds_loop(lambda session: "the session")
_NO_RESULTS: Mapping[int, Any] = {}
_OPEN = Phase.OPEN  # an enum's member costs as much as a call


class MonitoredSession(AsyncOnly):
    """A training session: hooks around every run, recovery, and an orderly end.

    Open and close it with `async with`. It holds no task group or cancel scope, so you can open and
    close several sessions in any order, from different tasks.

    Args:
        hooks: hooks of asynchooks or TensorFlow, called in this order at every moment.
        session_creator: makes the raw session; None means a `ChiefSessionCreator` on TensorFlow's
            current default graph.
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
        async with MonitoredSession([StopAtStepHook(last_step=100)], creator) as session:
            while not session.should_stop():
                loss = await session.run("loss")
    """

    _in_with = "session"
    _recovers: ClassVar[bool] = True

    def __init__(
        self,
        hooks: Iterable[AnyHook] | None = None,
        session_creator: SessionCreator | None = None,
        stop_grace_period_secs: float = 120,
        *,
        step_runner: StepRunnerName = "auto",
        recovery: Recovery | None = None,
    ) -> None:
        self._hooks = HookList(hooks, Stop())
        self._stops = self._hooks.stops
        if session_creator is None:
            session_creator = default_creator()
        check_creator(session_creator, "session_creator")
        instance("recovery", recovery, (Recovery, NoneType), "a Recovery(max_attempts=...)")
        self._grace_secs = checked_grace_secs(stop_grace_period_secs)
        self._runner_name = check_runner(step_runner)
        self._handle = session_creator.handle()
        recovery = (recovery or _RECOVERY) if self._recovers else None
        self._lifecycle = SessionLifecycle(self._handle, self._hooks, recovery, self._grace_secs)
        self._step: GlobalStep | None = None
        self._worker: Worker | None = None  # there from opening on
        self._phase = Phase.NEW
        self._runs_apart = False  # they enter the default graph, or several are in flight
        self._in_flight: InFlight | None = None
        self._last_fetches: Any = None  # of the last run, for caller and hooks
        self._one_run = OneRun()
        self._boards: list[StatusBoard] = []  # one, once a status is asked for

    def __repr__(self) -> str:
        state, step = self._phase.name.lower(), self._handle.global_step
        value = step.last_known  # the garbage collector may ask, while the step's lock is held
        if self._phase is Phase.OPEN and (step.is_at_limit or self._lifecycle.should_stop()):
            state += ", to stop"
        return (
            f"<{type(self).__name__} {state}, at step {value}, of {self._handle.creator!r}, "
            f"hooks {self._hooks.hooks!r}>"
        )

    @property
    def graph(self) -> Any:
        """The TensorFlow graph that is run; None for step functions, and outside of the block."""
        return None if self._lifecycle.raw is None else self._handle.graph

    @property
    def global_step(self) -> GlobalStep:
        """The global step, as a handle of this session: a stop of the session ends waits for it."""
        if self._step is None:
            self._step = self._handle.global_step.bound(self._stops.stop, body=self._worker)
        return self._step

    def raw_session(self) -> Any:
        """The raw session, which bypasses hooks and recovery; None outside of the block."""
        return self._lifecycle.exposed

    @holds_loop(lambda session: session._hooks.held_in_run())
    async def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Run one step with all hooks, and return what was fetched.

        A cancellation waits for a step under way, up to the grace period; that step counts. Of
        several in flight all go on, and the next run returns the first result.

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
        one_run = self._one_run
        if one_run.is_under_way or self._phase is not _OPEN:
            one_run.check(self._phase, "run")
        if self._runs_apart:
            return await self._run_apart(fetches, feed_dict, options, run_metadata)
        if feed_dict is not None and not isinstance(feed_dict, Mapping):
            raise wrong_feeds("feed_dict is", feed_dict)
        hooks, stops, failures = self._hooks, self._stops, 0
        while True:  # one attempt after the other, as long as the raw session is lost
            one_run.is_under_way = True
            raw = merged = context = call = hooks.current = None
            args = (fetches, feed_dict, options, run_metadata)
            try:
                raw = stops.ready
                if raw is None or raw.is_retired:
                    raw = None
                    raw = await self._lifecycle.revive(is_nested=one_run.is_in_step_fn)

                if options is not None or run_metadata is not None:
                    merged = MergedRun(raw, SessionRunArgs(*args[:3]), run_metadata, hooks.hooks)
                if hooks.are_in_runs:
                    context = _new_object(SessionRunContext)  # as calling it, in half the time
                    context._original_args, context._session = args, hooks.session
                    context._step, context.called_by, context._pending = self._run_step, hooks, None
                    context._is_made, context._made = False, None
                    for call, method, group in hooks.before_runs:
                        hooks.current = call
                        if group:
                            merged = await hooks.before_run_of_group(group, context, raw, merged)
                            continue
                        request = await method(context)
                        if request is not None:
                            merged = hooks.merge(call, request, context, raw, merged)
                    call = hooks.current = None
                if merged is not None:
                    args = merged.finish(self._last_fetches)
                    self._last_fetches = args[0]

                outputs = self._raw_runs.here(raw, args)
                if outputs is NOT_HERE:
                    outputs = await self._raw_runs.anywhere(raw, args, context)
                if type(outputs) is Unfinished:
                    outputs = await outputs.finish()

                if context is not None:
                    context._is_made, context._made = True, self._raw_runs.made
                values, results = hooks.unasked, _NO_RESULTS
                if merged is not None:
                    outputs, results = merged.split(outputs)
                    values = merged.unasked()
                if context is not None:
                    for call, method, group in hooks.after_runs:
                        hooks.current = call
                        if group:
                            await hooks.after_run_of_group(group, context, values, results)
                        elif results:
                            await method(context, values_of(call, values, results))
                        else:
                            await method(context, values)
                    call = hooks.current = None
                    pending = context._pending
                    if pending is not None:
                        while pending.last:
                            call, last = pending.take()
                            hooks.current = call
                            await last()
                        call = hooks.current = None
                        if pending.stop_reason is not None:
                            stops.request_by_hook(pending.stop_reason, pending.stops_all)
            except BaseException as error:
                explained: BaseException = error
                if context is not None and context._pending is not None:
                    context._pending.end_exclusive()
                if raw is not None:
                    explained = stops.judge(hooks.explained(error, merged, call), error)
                leaving = await self._lifecycle.leaving(explained, failures, one_run)
                if leaving is error:
                    raise
                if leaving is not None:
                    raise leaving from leaving.__cause__
                # else the raw session is let go of, and the next attempt creates another one
                failures += 1
            else:
                return outputs
            finally:
                one_run.is_under_way = False
                if one_run.slots:
                    one_run.notify()

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
        refuse(self._in_flight, "run_step_fn", "a step_fn runs whole steps; call run()")
        self._one_run.check(self._phase, "run_step_fn")
        self._one_run.is_under_way = self._one_run.is_in_step_fn = True
        try:
            return await self._lifecycle.recovering(lambda: self._call_step_fn(step_fn))
        except BaseException as error:
            shorten_traceback(error)
            raise
        finally:
            self._one_run.end()

    def log_metrics(self, values: Mapping[str, SupportsFloat | Histogram]) -> None:
        """Give numbers by name to the hooks that keep metrics, at the present step; never waits.

        From any thread or task. They go to each `MetricsHook`, `HistoryHook` and subscriber.

        Raises:
            TypeError, MetricError, RuntimeError: no mapping to numbers; the session is not open.
        """
        self._phase.check_open("log_metrics", in_opening=True, in_closing=True)
        self._hooks.live.log(self._handle.global_step.value, checked_values(values))

    def status(self) -> Status:
        """What the session is doing; cheap, from any thread, in any phase."""
        board, phase = StatusBoard.of(self, self._hooks, self._boards), self._phase
        now = self._engine.now() if phase is _OPEN else 0.0
        return board.status(self, phase, self._handle.global_step, now)

    def subscribe(self, *, every_secs: float = 1.0) -> Subscription:
        """Statuses as they come: now, at each new metric or phase, and every so many seconds.

        It ends after the status "closed", or as the session is dropped; in side tasks and in the
        task that opened the session at a stop, since the end waits for these. Training never waits
        for it: of more than 64 statuses that were not taken the oldest are dropped.
        """
        return Subscription(StatusBoard.of(self, self._hooks, self._boards), every_secs)

    def should_stop(self) -> bool:
        """Whether the training loop should end; never raises, never does work."""
        if self._phase in (Phase.CLOSING, Phase.CLOSED) or self._lifecycle.should_stop():
            return True
        return self._handle.global_step.is_at_limit and not self._lifecycle.has_results

    @property
    def stop_reason(self) -> StopReason | None:
        """What stopped training, and why: the first request, or what ended the block; else None."""
        step, reason = self._handle.global_step, self._stops.reason
        if reason is None and step.is_at_limit:
            reason = StopReason("the limit", f"{step.name} is at {step.value} of {step.limit}")
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
        logger.info("Stop requested: %s", why.why, extra=self._stops.log_fields(why))
        self._stops.request(why.error, why, all_workers=all_workers)

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
        self._check_ends(fn)
        self._phase.check_open("start_soon", in_opening=True)
        self._stops.tasks.start(fn, args, on_failure, name, cancel_at_end)

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

        self._phase.check_open("batches")
        refuse(self._in_flight, "batches", "feed the steps by a hook, FeedHook(source, names)")
        if self._worker is not None and self._worker.task is not self._engine.current_task():
            self._worker.is_shared = True  # the task that reads its input is to run its steps
        step, watch_runs = self._handle.global_step, self._hooks.watch_runs
        return Batches(source, self._stops, watch_runs, step, self.should_stop)

    async def or_stop(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)`, a wait of another library, until it ends or a stop is requested.

        It runs in a separate task, which has ended when this returns or raises.

        Raises:
            StopTraining: the session was asked to stop; `fn` was cancelled.
            BaseException: what `fn` raised.
        """
        self._check_ends(fn)
        self._phase.check_open("or_stop", in_opening=True)
        in_context = self._handle.in_session_context
        return await or_stop(self._engine, self._stops.stop, in_context, fn, *args)

    def _check_ends(self, fn: object) -> None:
        if self._phase is Phase.CLOSING:  # a side task that has not ended yet
            raise StopTraining(f"the session ends, before {name_of(fn)} was called")

    async def _run_apart(self, *args: Any) -> Any:
        """A run beside others in flight, or one that enters the default graph for all its hooks."""
        if self._in_flight is not None:
            return await self._in_flight.run(args)
        self._runs_apart = False  # until this run has ended
        try:
            return await self._lifecycle.call_hooks(MonitoredSession.run(self, *args))
        except BaseException as error:
            shorten_traceback(error)
            raise
        finally:
            self._runs_apart = True

    @holds_loop(lambda session: "the step_fn")
    async def _call_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        raw = await self._lifecycle.create()
        context = StepContext(raw.exposed, self._run_in_step_fn)
        call = self._raw_runs.call_step_fn(raw, step_fn, context)
        try:
            return await self._handle.in_session_context(call, lambda: f"the step_fn {step_fn!r}")
        except BaseException as error:
            if is_input_end(error):
                raise StopTraining(f"the input ended in {step_fn!r}") from error
            raise

    async def _run_in_step_fn(self, *args: Any) -> Any:
        self._one_run.is_under_way = False  # the step_fn makes room for it
        try:
            return await MonitoredSession.run(self, *args)
        except BaseException as error:
            shorten_traceback(error)
            raise
        finally:
            self._one_run.is_under_way = self._one_run.is_in_step_fn

    @_is_session
    async def __aenter__(self) -> Self:
        """Call `begin` of all hooks, create the raw session, and call `after_create_session`.

        A service may call it `open()`, and `await close()` at its end, in place of `async with`. If
        that fails or is cancelled, the raw session is closed, and `on_error` is called for every
        hook whose `begin` was called.
        """
        self._phase.check_new()
        depth = self._handle.creator.in_flight
        check_overlap(self._hooks.hooks, depth)
        self._engine: Engine = current_engine()
        self._lifecycle.engine = self._engine
        self._runner = StepRunner(self._engine, self._runner_name, self._grace_secs)
        self._enter(Phase.OPENING)
        self._worker = worker = self._stops.open_worker(self._engine)
        worker.task, worker.runs = self._engine.current_task(), self._one_run
        self._step = None  # that one knows nothing of the worker
        self._run_step = self._handle.global_step.bound(self._stops.run_stop, worker)
        self._raw_runs = RawRuns(
            self._engine, self._runner, self._run_step, self._handle, self._lifecycle
        )
        self._hooks.call_plain = self._raw_runs.call_plain
        self._runs_apart = self._hooks.needs_graph_entered and self._handle.graph is not None
        if depth > 1:
            self._in_flight = InFlight(depth, self._lifecycle, self._run_step, self._one_run)
            self._runs_apart = True
        try:
            async with self._handle.opening(self._engine, self._grace_secs):
                handle, call_begin = self._handle, self._raw_runs.call_begin
                begin = self._hooks.begin(lambda: handle.has_global_step, handle.graph, call_begin)
                await self._lifecycle.call_hooks(begin)
            await self._lifecycle.recovering(self._lifecycle.create)
        except BaseException as error:
            leaving = await self._close(error)
            if leaving is error:
                raise
            assert leaving is not None
            raise leaving from error
        self._enter(Phase.OPEN)
        return self

    open = __aenter__

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
        if self._phase in (Phase.CLOSING, Phase.CLOSED):  # by close(), perhaps in another task
            await self._one_run.wait_until(lambda: self._phase is Phase.CLOSED, "the session's end")
            return is_clean_end(exc)
        error = None if is_clean_end(exc) else exc
        if self._phase is Phase.NEW:
            self._phase.check_open("__aexit__")
        if exc is not None and error is None:
            self._stops.note(self.stop_reason)
            self._stops.note_clean_end(exc)
        if self._one_run.is_under_way:  # in another task: no further run begins, and its waits end
            self._enter(Phase.CLOSING)
            self._stops.stop.set()
            until = self._engine.now() + self._grace_secs
            if error is None:
                error = await interruption(self._one_run.wait_for_other(until))
        leaving = await self._close(error)
        if leaving is not None and leaving is not exc:
            raise leaving
        return leaving is None

    @_is_session
    async def close(self) -> None:
        """End cleanly, now; leaving the block afterwards has no further effect.

        Raises what `__aexit__` does; RuntimeError if it is not open, or a run is under way.
        """
        if self._phase is Phase.CLOSED:
            raise RuntimeError("Session is already closed.")
        self._phase.check_open("close")
        if self._one_run.is_under_way:
            raise RuntimeError("close() while a run is under way; close the session afterwards")
        leaving = await self._close(None)
        if leaving is not None:
            raise leaving

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        """Dropped: nothing can be awaited any more. Called in whichever thread drops it."""
        phase = self.__dict__.get("_phase")  # None where the constructor failed
        if phase is None or phase is Phase.NEW or phase is Phase.CLOSED:
            return
        self._runner.drop()
        self._hooks.on_drop()
        self._lifecycle.drop()
        if not self._engine.is_virtual:  # workers may end with a simulation
            _warn(
                f"{self!r} was dropped without being closed: `end` of its hooks was not called, so "
                "nothing was saved at the end; open it by `async with`, or `await session.close()`",
                ResourceWarning, source=self,
            )  # fmt: skip

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        for board in self._boards:
            board.notify()

    async def _close(self, error: BaseException | None) -> BaseException | None:
        """End hooks, tasks, threads and the raw session; returns what must leave."""
        self._stops.is_ending = True
        self._enter(Phase.CLOSING)
        self._stops.reason = self.stop_reason  # a limit is forgotten with the last worker
        try:
            error = await self._lifecycle.end(error)
        except GeneratorExit:  # thrown away meanwhile: `after_close` cannot be awaited
            self._hooks.on_drop()
            raise
        finally:
            self._last_fetches = None
            self._raw_runs.forget()
            self._runner.close()
            self._handle.close()
            self._stops.close_worker()
            self._phase = Phase.CLOSED
            self._one_run.notify()
        error = await self._stops.close_input(error)
        error = await self._hooks.after_close(error)
        self._runner.close()  # a plain after_close may have needed its thread
        self._enter(Phase.CLOSED)
        if error is not None:
            shorten_traceback(error)
        return error
