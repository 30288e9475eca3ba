"""sync_hook: a coroutine hook for TensorFlow's own MonitoredSession."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import tensorflow as tf

from ..._check import instance
from ..._engine.stop import Stop, StopReason
from ..._errors import add_note, is_input_end, is_stop
from ..._hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
)
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator
from ...adapters._portal import BlockingPortal, HookPortal, end_side_tasks
from ...backends._raw_session import RawSession
from ..graph._default_graph import Driven, step_name
from ..graph._session import GraphCoordinator, GraphSession

v1 = tf.compat.v1


def sync_hook(hook: SessionRunHook, *, portal: BlockingPortal | None = None) -> Any:
    """A coroutine hook as a `tf.compat.v1.train.SessionRunHook`, for TensorFlow's own sessions.

    Its coroutines run in an event loop in a thread, while TensorFlow's thread waits; the session's
    graph is their default one. The global step that it sees is read after each run, and ten times
    a second while it waits; waits end when TensorFlow's coordinator is asked to stop. Side tasks
    work, and end at `end`. TensorFlow reports no errors to hooks, and restores and closes by
    itself: `on_error`, `restore_model`, `before_end`, `after_close` and `on_drop` are not called.
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
    instance("hook", hook, SessionRunHook, "an instance of asynchooks.SessionRunHook")
    return _SyncHook(hook, HookPortal(portal))


class _BridgedContext(SessionRunContext):
    """A run of TensorFlow's session: a stop that any of its hooks asks for is one for all."""

    def __init__(self, theirs: Any, global_step: GlobalStep) -> None:
        super().__init__(SessionRunArgs(*theirs.original_args), theirs.session, global_step)
        self._theirs = theirs

    @property
    def stop_requested(self) -> bool:
        return bool(self._theirs.stop_requested)

    def request_stop(
        self, reason: StopReason | str | None = None, *, all_workers: bool = False
    ) -> None:
        super().request_stop(reason, all_workers=all_workers)
        self._theirs.request_stop()


class _SyncHook(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """The hook as TensorFlow's session calls it."""

    def __init__(self, hook: SessionRunHook, portal: HookPortal) -> None:
        self._hook, self._name = hook, type(hook).__name__
        self._portal = portal
        self._stop = Stop()
        self._raw: RawSession | None = None
        self._step: GlobalStep
        self._coord: Coordinator | None = None
        self._their_coord: Any = None

    def begin(self) -> None:
        self._graph = v1.get_default_graph()
        if self._hook.needs_global_step and v1.train.get_global_step() is None:
            raise RuntimeError(
                f"Global step should be created to use {self._name}. Create one "
                "(tf.compat.v1.train.get_or_create_global_step()) before the session."
            )
        self._call("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._end_side_tasks()
        last = None if self._raw is None else self._raw.global_step
        raw: RawSession | None = getattr(session, "asynchooks_raw", None)
        if raw is None:  # of several such hooks on one session the first one makes it
            raw = GraphSession(session)
            value = raw.read_step() or 0
            name = step_name(self._graph)
            raw.attach(last or GlobalStep(value, name=name, multi_process=True))
            if last is not None:
                last.restart(value)
        self._raw = raw
        raw.global_step.gate.reread()  # an earlier hook may have moved it
        self._stop.clear()
        self._step = raw.global_step.bound(self._stop)
        self._their_coord = coord
        self._coord = GraphCoordinator(clean_stop_exception_types=())
        self._coord.on_stop = self._coord_stopped
        self._coord.tasks.in_context = lambda coroutine: Driven(coroutine, self._graph)
        self._call("after_create_session", session, self._coord)

    def before_run(self, run_context: Any) -> Any:
        self._context = _BridgedContext(run_context, self._step)
        try:
            request = self._call("before_run", self._context)
        except Exception as error:
            if is_stop(error) or is_input_end(error):
                raise StopIteration from error
            raise
        self._stop_at_limit(run_context)
        return None if request is None else v1.train.SessionRunArgs(*request)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._step.gate.reread()  # another process may have moved it
        self._context.say_made(None)
        try:
            self._call("after_run", self._context, SessionRunValues(*run_values))
            if self._context._last:
                self._await(self._context.finish())
        except Exception as error:
            if not is_stop(error) or self._coord is None or not self._coord.should_stop():
                raise
            run_context.request_stop()  # a stop ended the wait of the hook
        self._stop_at_limit(run_context)

    def end(self, session: Any) -> None:
        try:
            try:
                self._call("end", session)
            finally:
                self._end_side_tasks()
        finally:
            self._portal.close()

    def _call(self, moment: str, *args: Any) -> Any:
        try:
            result = getattr(self._hook, moment)(*args)
            return self._await(result) if isinstance(result, Awaitable) else result
        except Exception as error:
            add_note(error, f"in {moment} of {self._name}")
            raise

    def _await(self, awaitable: Awaitable[Any]) -> Any:
        """Await it in the event loop, in the graph, and block until it has ended."""

        async def run() -> Any:
            begin_graph.set(self._graph)
            return await Driven(_awaited(awaitable), self._graph)

        return self._portal.call(run, meanwhile=self._poll)

    def _poll(self) -> None:
        """Update step and stop while the hook waits."""
        if self._raw is not None and self._step.statistics().tasks_waiting_for_step:
            self._step.gate.reread()
        if self._their_coord is not None and self._their_coord.should_stop():
            self._stop.set()
            if self._coord is not None:
                self._coord.request_stop()

    def _stop_at_limit(self, run_context: Any) -> None:
        if self._step.is_at_limit:  # TensorFlow's session has none
            run_context.request_stop()

    def _coord_stopped(
        self, error: BaseException | None, reason: StopReason, all_workers: bool
    ) -> None:
        # TensorFlow takes a bare error for the one that is being handled
        info = None if error is None else (type(error), error, error.__traceback__)
        self._their_coord.request_stop(info)

    def _end_side_tasks(self) -> None:
        coord, self._coord = self._coord, None
        if coord is not None:
            self._portal.call(end_side_tasks, coord)
            coord.raise_requested_exception()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
