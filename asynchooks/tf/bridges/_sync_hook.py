"""sync_hook: a coroutine hook for TensorFlow's own MonitoredSession."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import tensorflow as tf

from .._coordinator import Coordinator
from .._engine import current_engine
from .._errors import StopTraining, is_input_end
from .._global_step import GlobalStep
from .._hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
    finish_run,
)
from .._hook_calls import needs_global_step
from .._portal import BlockingPortal, HookPortal
from .._raw_session import RawSession
from .._runner import is_async
from .._stop import Stop
from ._coordinator import GraphCoordinator
from ._graph import Driven
from ._graph_session import GraphSession

v1 = tf.compat.v1

_GRACE_SECS = 120.0
"""What side tasks get to stop at the end."""


def sync_hook(hook: SessionRunHook, *, portal: BlockingPortal | None = None) -> Any:
    """A coroutine hook as a `tf.compat.v1.train.SessionRunHook`, for TensorFlow's own sessions.

    Its coroutines run in an event loop in a thread, while TensorFlow's thread waits; the session's
    graph is their default one. The global step that it sees is read after each run, and ten times
    a second while it waits; waits end when TensorFlow's coordinator is asked to stop. Side tasks
    work, and end at `end`. TensorFlow tells hooks nothing of errors, so `on_error` is not called.
    Each moment runs in a task of its own: a task group or scope cannot be held from one to another.

    Args:
        hook: the hook, of asynchooks.
        portal: anyio's blocking portal to an event loop of yours; None starts one (asyncio) for
            this hook, which ends with `end` or with the hook.

    Raises:
        TypeError: `hook` is no hook of asynchooks.

    Example:
        hooks = [sync_hook(UploadMetrics())]
        with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)
    """
    if not isinstance(hook, SessionRunHook):
        raise TypeError(f"sync_hook got {hook!r}; give an instance of asynchooks.SessionRunHook")
    return _SyncHook(hook, HookPortal(portal))


class _SyncHook(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    def __init__(self, hook: SessionRunHook, portal: HookPortal) -> None:
        self._hook = hook
        self._portal = portal
        self._stop = Stop()
        self._raw: RawSession | None = None
        self._step: GlobalStep
        self._coord: Coordinator | None = None
        self._their_coord: Any = None

    def begin(self) -> None:
        self._graph = v1.get_default_graph()
        if needs_global_step(self._hook) and v1.train.get_global_step() is None:
            raise RuntimeError(
                f"Global step should be created to use {type(self._hook).__name__}. Create one "
                "(tf.compat.v1.train.get_or_create_global_step()) before the session."
            )
        self._call("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._end_side_tasks()
        last = None if self._raw is None else self._raw.global_step
        raw: RawSession | None = getattr(session, "asynchooks_raw", None)
        if raw is None:  # of several such hooks on one session the first one comes here
            raw = GraphSession(session)
            value = raw.read_step() or 0
            raw.attach(last or GlobalStep(value, moved_elsewhere=True))
            if last is not None:
                last.restart(value)
        self._raw = raw
        self._stop.clear()
        self._step = raw.global_step.bound(self._stop)
        self._their_coord = coord
        self._coord = GraphCoordinator(clean_stop_exception_types=())
        self._coord.attach(self._tell_theirs, lambda task: Driven(task, self._graph, self._name))
        self._call("after_create_session", session, self._coord)

    def before_run(self, run_context: Any) -> Any:
        args = SessionRunArgs(*run_context.original_args)
        self._context = SessionRunContext(args, run_context.session, self._step)
        try:
            request = self._call("before_run", self._context)
        except Exception as error:
            if isinstance(error, StopTraining) or is_input_end(error):
                raise StopIteration from error
            raise
        self._pass_on_stop(run_context)
        return None if request is None else v1.train.SessionRunArgs(*request)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._read_step()
        try:
            self._call("after_run", self._context, SessionRunValues(*run_values))
            if self._context._pending is not None:
                self._portal.call(self._drive, finish_run, (self._context,), meanwhile=self._look)
        except StopTraining:
            if self._coord is None or not self._coord.should_stop():
                raise
            run_context.request_stop()  # it was told to stop while it waited
        self._pass_on_stop(run_context)

    def end(self, session: Any) -> None:
        try:
            try:
                self._hook._ending()
                self._call("end", session)
            finally:
                self._end_side_tasks()
        finally:
            self._portal.close()

    def _call(self, moment: str, *args: Any) -> Any:
        method = getattr(self._hook, moment)
        try:
            if is_async(method):
                return self._portal.call(self._drive, method, args, meanwhile=self._look)
            result = method(*args)
            if isinstance(result, Awaitable):
                return self._portal.call(self._drive, _itself, (result,), meanwhile=self._look)
        except Exception as error:
            error.add_note(f"in {moment} of {type(self._hook).__name__}")
            raise
        return result

    async def _drive(self, method: Any, args: tuple[Any, ...]) -> Any:
        begin_graph.set(self._graph)
        return await Driven(method(*args), self._graph, self._name)

    def _look(self) -> None:
        """The hook waits, perhaps for a step or for a stop."""
        if self._raw is not None and self._step.statistics().tasks_waiting_for_step:
            self._read_step()
        if self._their_coord is not None and self._their_coord.should_stop():
            self._stop.set()
            if self._coord is not None:
                self._coord.request_stop()

    def _read_step(self) -> None:
        step = None if self._raw is None else self._raw.read_step()
        if step is not None:
            self._step.publish(step)

    def _pass_on_stop(self, run_context: Any) -> None:
        # TensorFlow's session knows of no limit
        is_at_limit = self._step.limit is not None and self._step.value >= self._step.limit
        if self._context.stop_requested or is_at_limit:
            run_context.request_stop()

    def _tell_theirs(self, is_set: bool) -> None:
        if is_set and self._coord is not None and self._their_coord is not None:
            error = self._coord.error
            # a bare error is taken to be the one that is being handled just now
            told = None if error is None else (type(error), error, error.__traceback__)
            self._their_coord.request_stop(told)

    def _end_side_tasks(self) -> None:
        coord, self._coord = self._coord, None
        if coord is None:
            return
        coord.detach()
        self._portal.call(self._end_coord, coord)
        coord.raise_requested_exception()

    async def _end_coord(self, coord: Coordinator) -> None:
        engine = current_engine()
        await coord.end(engine, engine.now() + _GRACE_SECS, cancel_tasks=False)

    def _name(self) -> str:
        return type(self._hook).__name__


async def _itself(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
