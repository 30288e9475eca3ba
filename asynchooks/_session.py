"""MonitoredSession: training under hooks. A reader starts here.

Timeline of a session:

    normal   begin · create · after_create_session · (before_run · raw run · after_run)* · end ·
             side tasks and threads stop · close
    stop     a hook's request_stop: the run it asked in still completes, the next one is refused.
             Any other stop: should_stop() is True and every wait ends; runs still work
    failure  what the body, a run or a side task raised: no end, on_error in reverse order, side
             tasks and threads stop, close; the error leaves as itself
    lost     AbortedError, UnavailableError or PreemptionError in a run: side tasks and threads
             stop, close, create · after_create_session, and the whole run again
    cancel   as failure; clean-up is shielded, for the grace period at most

Where a step runs, how requests are merged and who may run now stand in other files.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from ._connection import Connection
from ._ending import end_all
from ._engine import Engine, current_engine
from ._errors import is_clean_end
from ._global_step import GlobalStep
from ._hook import SessionRunArgs, SessionRunContext
from ._hook_list import HookList, values_of
from ._merge import MergedRun
from ._phase import OneRun, Phase
from ._raw_run import NOT_HERE, RawRuns, Unfinished
from ._recovery import Recovery, check_recovery, checked_grace_secs
from ._runner import StepRunner, StepRunnerName, check_runner
from ._session_creator import SessionCreator, check_creator, default_creator
from ._step_fn import StepContext, call_step_fn, check_step_fn
from ._stop import Stop
from ._supervised import Supervised

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

_RECOVERY = Recovery()
_new_object: Callable[[type[SessionRunContext]], SessionRunContext] = object.__new__
_NO_RESULTS: Mapping[int, Any] = {}
_OPEN = Phase.OPEN  # an enum's member costs as much as a call


class MonitoredSession(Supervised):
    """A training session: hooks around every run, recovery, and an orderly end.

    You make it, `async with` opens and closes it. It holds no task group or cancel scope, so that
    several may be opened and closed in any order, from different tasks.

    Args:
        hooks: an iterable of `SessionRunHook`, ours and TensorFlow's as you like; called in this
            order at every moment.
        session_creator: makes the raw session; None means TensorFlow's `ChiefSessionCreator` on
            the graph that is the default one now.
        stop_grace_period_secs: seconds, >= 0, that threads and side tasks get to stop at the end,
            and a step in a thread when it is cancelled.
        step_runner: where a blocking step runs: "auto" measures and chooses, "inline" is the event
            loop, "thread" a thread of the session's own.
        recovery: how often and after which pauses a lost raw session is recreated.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        ImportError: no creator was given and TensorFlow is not installed.

    Source: TensorFlow's `tf.compat.v1.train.MonitoredSession`.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=100)], creator) as session:
            while not session.should_stop():
                loss = await session.run("loss")
    """

    _recovers: ClassVar[bool] = True

    def __init__(
        self,
        hooks: Iterable[Any] | None = None,
        session_creator: SessionCreator | None = None,
        stop_grace_period_secs: float = 120,
        *,
        step_runner: StepRunnerName = "auto",
        recovery: Recovery | None = None,
    ) -> None:
        stop = Stop()
        self._hooks = HookList(hooks, stop)
        if session_creator is None:
            session_creator = default_creator()
        check_creator(session_creator, "session_creator")
        check_recovery(recovery)
        self._grace_secs = checked_grace_secs(stop_grace_period_secs)
        self._runner_name = check_runner(step_runner)
        self._lease = session_creator.lease()
        recovery = (recovery or _RECOVERY) if self._recovers else None
        self._connection = Connection(self._lease, self._hooks, recovery, self._grace_secs)
        self._stop = stop
        self._step: GlobalStep | None = None
        self._phase = Phase.NEW
        self._is_driven = False
        self._asked: Any = None  # what the last run fetched for caller and hooks
        self._one_run = OneRun()

    @property
    def graph(self) -> Any:
        """The TensorFlow graph that is run; None for step functions, and outside of the block."""
        return None if self._connection.raw is None else self._lease.graph

    @property
    def global_step(self) -> GlobalStep:
        """The step, as this session sees it: waiting for it ends when the session is stopped."""
        if self._step is None:
            self._step = self._lease.global_step.bound(self._stop)
        return self._step

    def raw_session(self) -> Any:
        """The raw session, which bypasses hooks and recovery; None outside of the block."""
        return self._connection.exposed

    async def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
        *,
        _failures: int | None = 0,
        _entered: bool = False,
    ) -> Any:
        """Run one step with all hooks, and return what was fetched.

        Cancellation waits for a step that is under way, for the grace period at most; its step
        counts.

        Args:
            fetches: what to compute: as for `tf.compat.v1.Session.run` on a graph; names of
                outputs, nested as you like, on a step function.
            feed_dict: values by tensor or name; never changed.
            options: `tf.compat.v1.RunOptions`, for graphs; never changed.
            run_metadata: `tf.compat.v1.RunMetadata` to fill, for graphs.

        Raises:
            StopTraining: the input or the training has ended; the block ends cleanly by it.
            RuntimeError: the session is not open, runs already, or a hook asked it to stop.
            BaseException: what a hook or the step raised, with a note of which it was.
        """
        # _failures: how often this run has failed; None in a step_fn, which is tried again itself.
        # _entered: it is `_enter_run` that calls
        one_run = self._one_run
        if not _entered and (
            self._is_driven
            or (_failures == 0 and (one_run.is_under_way or self._phase is not _OPEN))
        ):
            return await self._enter_run(_failures, fetches, feed_dict, options, run_metadata)
        if feed_dict is not None and not isinstance(feed_dict, Mapping):
            raise TypeError(f"feed_dict is {feed_dict!r}; give a mapping of feeds to values")
        one_run.is_under_way = True
        hooks, connection = self._hooks, self._connection
        raw = merged = context = call = hooks.current = None
        args = (fetches, feed_dict, options, run_metadata)
        try:
            raw = connection.ready
            if raw is None or raw.is_retired:
                raw = None
                raw = await connection.revive(is_nested=_failures is None)
            if options is not None or run_metadata is not None:
                merged = MergedRun(raw, SessionRunArgs(*args[:3]), run_metadata, hooks.hooks)
            if hooks.are_in_runs:
                context = _new_object(SessionRunContext)  # as calling it, in half the time
                context._original_args, context._session = args, connection.session
                context._step, context._hooks, context._pending = self._run_step, hooks, None
                for call, method, group in hooks.asks:
                    hooks.current = call
                    if group:
                        merged = await hooks.ask_group(group, context, raw, merged)
                        continue
                    request = await method(context)
                    if request is not None:
                        merged = hooks.merge(call, request, context, raw, merged)
                call = hooks.current = None
            if merged is not None:
                args = merged.finish(self._asked)
                self._asked = args[0]
            outputs = self._raw_runs.here(raw, args)
            if outputs is NOT_HERE:
                outputs = await self._raw_runs.anywhere(raw, args)
            if type(outputs) is Unfinished:
                outputs = await outputs.finish()
            values, results = connection.unasked, _NO_RESULTS
            if merged is not None:
                outputs, results = merged.split(outputs)
                values = merged.values(None)
            if context is not None:
                for call, method, group in hooks.tells:
                    hooks.current = call
                    if group:
                        await hooks.tell_group(group, context, values, results)
                    elif results:
                        await method(context, values_of(call, values, results))
                    else:
                        await method(context, values)
                call = hooks.current = None
                if context._pending is not None:
                    for call, last in context._pending.last:
                        hooks.current = call
                        await last()
                    call = hooks.current = None
                    connection.stop_by_hook(context._pending.stop_reason)
        except BaseException as error:
            leaving = error
            if raw is not None:
                leaving = connection.judge(hooks.explained(error, merged, call), error)
            if _failures is None or not isinstance(leaving, Exception):
                if leaving is error:
                    raise
                raise leaving from leaving.__cause__
            failures = await connection.recover(leaving, _failures)
            raw = merged = context = None
            del leaving
        else:
            return outputs
        finally:
            if _failures is not None:
                one_run.is_under_way = False
                if one_run.slots:
                    one_run.tell()
        # a subclass's own `run` surrounds the whole of it, not each attempt
        caller = (fetches, feed_dict, options, run_metadata)
        return await MonitoredSession.run(self, *caller, _failures=failures, _entered=_entered)

    async def run_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        """Call a function that runs steps on the raw session, with or without hooks.

        Args:
            step_fn: takes exactly `step_context` (plus `self`), sync or async; its value is
                returned. A sync one runs where steps run. After a recovery it is called again.

        Raises:
            ValueError: it takes something else.
            StopTraining: it called `step_context.request_stop()`, or its input ended.
        """
        check_step_fn(step_fn)
        self._one_run.check(self._phase, "run_step_fn")
        self._one_run.is_under_way = True
        try:
            return await self._connection.recovering(lambda: self._call_step_fn(step_fn))
        finally:
            self._one_run.end()

    async def _enter_run(self, failures: int | None, *args: Any) -> Any:
        """A run that may not begin now, or whose hooks may look at the default graph.

        The graph is entered once for the run, not once for each hook.
        """
        if failures == 0:
            self._one_run.check(self._phase, "run")
        run = MonitoredSession.run(self, *args, _failures=failures, _entered=True)
        return await self._lease.drive(run, self._hooks.culprit)

    async def _call_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        raw = await self._connection.create()
        run_nested = functools.partial(MonitoredSession.run, self, _failures=None)
        context = StepContext(raw.exposed, run_nested)
        return await call_step_fn(step_fn, context, raw, self._runner, self._lease)

    async def __aenter__(self) -> Self:
        """Call begin of all hooks, create the raw session, call their after_create_session.

        When that fails or is cancelled, the raw session is closed and every hook whose begin was
        called is told by on_error.
        """
        self._phase.check_new()
        self._phase = Phase.OPENING
        self._engine: Engine = current_engine()
        self._connection.engine = self._engine
        self._runner = StepRunner(self._engine, self._runner_name, self._grace_secs)
        self._worker = self._lease.global_step.open_worker(self._engine)
        self._run_step = self._lease.global_step.bound(
            self._connection.stops.run_stop, self._worker
        )
        self._raw_runs = RawRuns(
            self._engine, self._runner, self._run_step, self._lease, self._connection
        )
        self._hooks.call_plain = self._raw_runs.call_plain
        self._is_driven = self._hooks.needs_graph_entered and self._lease.graph is not None
        try:
            async with self._lease.opening(self._engine, self._grace_secs):
                await self._lease.drive(
                    self._hooks.begin(lambda: self._lease.has_global_step, self._lease.graph),
                    self._hooks.culprit,
                )
            await self._connection.recovering(self._connection.create)
        except BaseException as error:
            leaving = await self._close(error)
            if leaving is error:
                raise
            assert leaving is not None
            raise leaving from error
        self._phase = Phase.OPEN
        return self

    def __enter__(self) -> NoReturn:
        raise TypeError("this session is opened by `async with session:`, not by `with session:`")

    def __exit__(self, *_: object) -> None:
        """Python asks for it before it calls `__enter__`."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End cleanly, or clean up after an error; swallows what only says that training is over.

        Raises:
            BaseException: the first error of a side task or thread, else of an `end`.
        """
        if self._phase in (Phase.CLOSING, Phase.CLOSED):  # by close(), perhaps in another task
            await self._one_run.wait_until(lambda: self._phase is Phase.CLOSED, "the session's end")
            return is_clean_end(exc)
        error = None if is_clean_end(exc) else exc
        if exc is not None and error is None:
            self._connection.note_end(exc)
        if self._phase is Phase.NEW:
            self._phase.check_open("__aexit__")
        if self._one_run.is_under_way:  # in another task: no further run begins, and its waits end
            self._phase = Phase.CLOSING
            self._stop.set()
            until = self._engine.now() + self._grace_secs
            error = error or await self._one_run.outlast(until)
        leaving = await self._close(error)
        if leaving is not None and leaving is not exc:
            raise leaving
        return leaving is None

    async def close(self) -> None:
        """End cleanly, now; leaving the block afterwards does nothing more.

        Raises:
            RuntimeError: the session is not open, or a run is under way.
            BaseException: as `__aexit__`.
        """
        if self._phase is Phase.CLOSED:
            raise RuntimeError("Session is already closed.")
        self._phase.check_open("close")
        if self._one_run.is_under_way:
            raise RuntimeError("close() while a run is under way; close the session afterwards")
        leaving = await self._close(None)
        if leaving is not None:
            raise leaving

    async def _close(self, error: BaseException | None) -> BaseException | None:
        """Leave no hook untold, no task, thread or raw session behind; returns what must leave."""
        self._phase, stops = Phase.CLOSING, self._connection.stops
        stops.is_ending = True
        stops.reason = self.stop_reason  # a limit is forgotten with the last worker
        try:
            error = await end_all(
                self._connection, self._hooks, self._lease, self._engine, self._grace_secs, error
            )
        finally:
            self._asked = None
            self._raw_runs.forget()
            self._runner.close()
            self._lease.close()
            self._lease.global_step.close_worker(self._worker)
            self._phase = Phase.CLOSED
            self._one_run.tell()
        error = await self._connection.stops.close_inputs(error)
        return await self._hooks.leave(error)
