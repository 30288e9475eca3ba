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

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from ._connection import Connection
from ._engine import Engine, current_engine
from ._errors import is_clean_end
from ._global_step import GlobalStep
from ._hook import SessionRunArgs, SessionRunContext
from ._hook_list import HookList
from ._merge import MergedRun
from ._or_stop import or_stop
from ._phase import OneRun, Onlookers, Phase
from ._raw_run import run_raw
from ._raw_session import RawSession, SessionCreator, check_creator, close_raw, default_creator
from ._recovery import Recovery
from ._runner import StepRunner, StepRunnerName, StepTimes, check_runner
from ._step_fn import StepContext, call_step_fn, check_step_fn
from ._stop import Stop

logger = logging.getLogger("asynchooks")

T = TypeVar("T")


class MonitoredSession:
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
        self._hooks = HookList(hooks, is_stopping=lambda: stop.is_set)
        if session_creator is None:
            session_creator = default_creator()
        check_creator(session_creator, "session_creator")
        if recovery is not None and not isinstance(recovery, Recovery):
            raise TypeError(f"recovery is {recovery!r}; give a Recovery(max_attempts=...)")
        is_number = isinstance(stop_grace_period_secs, (int, float))
        if not (is_number and stop_grace_period_secs >= 0):
            raise ValueError(
                f"stop_grace_period_secs is {stop_grace_period_secs!r}; give seconds >= 0 "
                "(step_runner and recovery are given by keyword)"
            )
        self._grace_secs = float(stop_grace_period_secs)
        self._runner_name = check_runner(step_runner)
        self._lease = session_creator.lease()
        self._connection = Connection(
            self._lease,
            self._hooks,
            (recovery or Recovery()) if self._recovers else None,
            self._grace_secs,
            stop,
        )
        self._stop = stop
        self._plain_times = StepTimes(forgives=False)
        self._step = self._lease.global_step.bound(stop)
        self._phase = Phase.NEW
        self._onlookers = Onlookers()
        self._one_run = OneRun(self._onlookers)

    @property
    def graph(self) -> Any:
        """The TensorFlow graph that is run; None for step functions, and outside of the block."""
        return None if self._connection.raw is None else self._lease.graph

    @property
    def global_step(self) -> GlobalStep:
        """The step, as this session sees it: waiting for it ends when the session is stopped."""
        return self._step

    def raw_session(self) -> Any:
        """The raw session, which bypasses hooks and recovery; None outside of the block."""
        return self._connection.exposed

    def should_stop(self) -> bool:
        """Whether the training loop should end; never raises, never does work."""
        limit = self._step.limit
        is_at_limit = limit is not None and self._step.value >= limit
        is_over = self._phase in (Phase.CLOSING, Phase.CLOSED)
        return is_over or is_at_limit or self._connection.should_stop()

    def request_stop(self, reason: str | BaseException | None = None) -> None:
        """Ask the training loop to end: should_stop() turns True and every wait ends.

        From any thread or task, before or after opening.

        Args:
            reason: what to say in the log; an exception leaves at the end of the block.
        """
        if not isinstance(reason, (str, BaseException, type(None))):
            raise TypeError(f"reason is {reason!r}; give a text, an exception, or nothing")
        logger.info("Stop requested: %s", "no reason given" if reason is None else reason)
        self._connection.request_stop(reason if isinstance(reason, BaseException) else None)

    async def or_stop(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)`, a wait of another library, but no longer than until a stop.

        It runs in a task of its own, which has ended when this returns or raises.

        Raises:
            StopTraining: the session was asked to stop; `fn` was cancelled.
            BaseException: what `fn` raised.
        """
        self._phase.check_open("or_stop", in_opening=True)
        return await or_stop(self._engine, self._stop, self._lease.drive_call, fn, *args)

    async def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
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
        with self._one_run.begin(self._phase, "run"):
            if feed_dict is not None and not isinstance(feed_dict, Mapping):
                raise TypeError(f"feed_dict is {feed_dict!r}; give a mapping of feeds to values")
            args = SessionRunArgs(fetches, feed_dict, options)
            return await self._connection.recovering(lambda: self._run(args, run_metadata))

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
        with self._one_run.begin(self._phase, "run_step_fn"):
            return await self._connection.recovering(lambda: self._call_step_fn(step_fn))

    async def _run(self, args: SessionRunArgs, run_metadata: Any) -> Any:
        """One run, top to bottom, on whatever raw session there is."""
        raw = await self._connection.create()
        if self._connection.hook_asked_stop:
            raise RuntimeError(
                "Run called even after should_stop requested. "
                "Look at session.should_stop() before each run."
            )
        coroutine = self._run_hooked(raw, args, run_metadata)
        if self._hooks.needs_graph_entered:
            return await self._lease.drive(coroutine, self._hooks.culprit)
        return await coroutine

    async def _run_hooked(self, raw: RawSession, args: SessionRunArgs, run_metadata: Any) -> Any:
        original = SessionRunArgs(args.fetches, args.feed_dict)
        context = SessionRunContext(original, raw.exposed, self._run_step)
        merged = MergedRun(raw, args, run_metadata, self._hooks.hooks)
        try:
            await self._hooks.before_run(context, merged)
            options = merged.finish_options(has_hooks=bool(self._hooks.hooks))
            key = raw.run_key(merged.fetches)
            if not raw.is_async and self._runner.is_new(raw.step_times, key):
                await self._runner.wait_for_first(raw.step_times, key)
            await self._engine.turn()
            # asked for only now: a hook that waits for data must not keep others from running
            ticket = self._run_step.take_ticket_nowait() or await self._run_step.take_ticket()
            outputs = await run_raw(self._runner, raw, merged, options, key, self._run_step, ticket)
            mine, results = merged.split(outputs)
            await self._hooks.after_run(context, merged, results, options)
        except Exception as error:
            leaving = self._connection.judge(error)
            if leaving is error:
                raise
            raise leaving from error
        if context.stop_requested:
            self._connection.hook_asked_stop = True
        return mine

    async def _call_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        raw = await self._connection.create()
        context = StepContext(raw.exposed, self._run)
        return await call_step_fn(step_fn, context, raw, self._runner, self._lease)

    async def _call_plain(self, fn: Callable[[], Any], kind: Hashable) -> Any:
        """Call plain methods of hooks where steps run."""
        raw = self._connection.raw
        if raw is not None:
            self._plain_times.always_in_thread = raw.step_times.always_in_thread
        loss = None if raw is None else raw.loss
        return await self._runner.run(lambda: self._lease.call(fn), self._plain_times, kind, loss)

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
        self._hooks.call_plain = self._call_plain
        self._worker = self._lease.global_step.open_worker()
        self._run_step = self._lease.global_step.bound(self._connection.run_stop, self._worker)
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
            await self._onlookers.wait_until(
                lambda: self._phase is Phase.CLOSED, "the session's end"
            )
            return is_clean_end(exc)
        error = None if is_clean_end(exc) else exc
        if self._phase is Phase.NEW:
            self._phase.check_open("__aexit__")
        if self._one_run.is_under_way:  # in another task: no further run begins, and its waits end
            self._phase = Phase.CLOSING
            self._stop.set()
            until = self._engine.now() + self._grace_secs
            try:
                await self._onlookers.wait_until(
                    lambda: not self._one_run.is_under_way, "another task's run", until
                )
            except BaseException as interruption:
                error = error or interruption
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
        self._phase = Phase.CLOSING
        session = self._connection.exposed
        try:
            if error is None:
                error = await self._connection.catch_up()
                session = self._connection.exposed
            if error is None:
                error = await self._end_hooks(session)
            if error is not None:
                error = self._connection.first_error(error)
            told = error
            error = await self._tell(session, told) or error
            error = await self._connection.end(error)
            if told is None:
                told = error
                error = await self._tell(session, told) or error
            try:
                await self._connection.release()
            except BaseException as interruption:
                error = error or interruption
            if told is None:
                error = await self._tell(None, error) or error
        finally:
            self._runner.close()
            self._lease.close()
            self._lease.global_step.close_worker(self._worker)
            self._phase = Phase.CLOSED
            self._onlookers.tell()
        return error

    async def _tell(self, session: Any, error: BaseException | None) -> BaseException | None:
        """Call on_error of all hooks, if there is an error; returns what interrupted that."""
        if error is None:
            return None
        told = self._hooks.on_error(session, error, self._engine, self._grace_secs)
        try:
            await self._lease.drive(told, self._hooks.culprit)
        except BaseException as interruption:
            return interruption
        return None

    async def _end_hooks(self, session: Any) -> BaseException | None:
        raw = self._connection.raw
        try:
            if raw is not None:
                raw.enter_run()  # no worker that shares it closes it meanwhile
            try:
                first: BaseException | None = await self._lease.drive(
                    self._hooks.end(session), self._hooks.culprit
                )
            finally:
                if raw is not None and raw.leave():
                    await close_raw(raw, self._engine, self._grace_secs)
        except BaseException as error:  # of what surrounds the hooks
            return error
        return first
