"""CheckpointSaverHook: checkpoints that hold one step, written beside the event loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import tensorflow as tf

from .._coordinator import Coordinator
from .._engine import current_engine
from .._global_step import GlobalStep
from .._hook import SessionRunContext, SessionRunHook, SessionRunValues
from .._raw_session import raw_session_of
from .._runner import is_async
from .._timer import SecondOrStepTimer
from .._work_thread import Outcome, run_blocking
from ._graph import check_graph_session, in_graph

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_PATIENT_SECS, _IMPATIENT_SECS = 30.0, 1.0
"""How long a save waits for runs under way: at first, and once they were seen to wait for it."""


class CheckpointSaverHook(SessionRunHook):
    """Saves checkpoints at every creation of a session, then every n steps or seconds, and at end.

    Saving happens in a thread, in `global_step.exclusive()`: no worker that shares the model runs
    a step meanwhile, so that a checkpoint holds one step. (Steps that other processes make on a
    server may mix in; and where runs that are under way do not end within 30 s, as they may wait
    for this worker, it is saved beside them, with a warning.) At the end it is saved only if that
    step is not saved yet. A cancellation waits for a save that is under way.

    Args:
        checkpoint_dir: directory for the checkpoints and an event file.
        save_secs: seconds between two saves, >= 0.
        save_steps: steps between two saves, >= 0; exactly one of the two is given.
        saver: a `tf.compat.v1.train.Saver`.
        checkpoint_basename: files are named `<basename>-<global step>`.
        scaffold: a Scaffold, whose saver is used. With neither it is the one in the graph's
            collection SAVERS.
        listeners: `CheckpointSaverListener`s, ours or TensorFlow's, told in this order. They must
            not open or run a session on the same model: it would wait for the save to end.
        save_graph_def: whether to write `graph.pbtxt` and a `.meta` file for each checkpoint.

    Raises:
        ValueError: saver and scaffold are both given, or both or neither interval.
        RuntimeError: when opening: no saver, or several in the collection; no graph session.
        tf.errors.OpError: the directory cannot be made, or a save failed (what TensorFlow says).

    Source: TensorFlow's `tf.compat.v1.train.CheckpointSaverHook`.

    Example:
        hooks = [CheckpointSaverHook("model", save_steps=1000, saver=tf.compat.v1.train.Saver())]
    """

    needs_global_step = True
    _looks_at_default_graph = False

    def __init__(
        self,
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Iterable[Any] | None = None,
        save_graph_def: bool = True,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError(f"got saver={saver!r} and scaffold={scaffold!r}; give one of them")
        self._timer = SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps)
        self._directory = os.fspath(checkpoint_dir)
        self._path = os.path.join(self._directory, checkpoint_basename)
        self._saver = saver
        self._scaffold = scaffold
        self._listeners = [_checked(listener) for listener in listeners or ()]
        self._save_graph_def = save_graph_def
        self._writer: Any = None
        self._is_writing = False
        self._patience_secs = _PATIENT_SECS
        logger.info("Create CheckpointSaverHook.")

    async def begin(self) -> None:
        check_graph_session(self)
        try:
            tf.io.gfile.makedirs(self._directory)
            self._writer = v1.summary.FileWriterCache.get(self._directory)
        except tf.errors.OpError as error:
            error.add_note(
                f"the checkpoint directory {self._directory!r} cannot be made; give "
                "CheckpointSaverHook one that may be created and written to"
            )
            raise
        for listener in self._listeners:
            result = listener.begin()
            if isinstance(result, Awaitable):
                await result

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await _blocking(session, lambda: self._write_graph(session))
        await self._save(session)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self._timer.should_trigger_for_step(run_context.global_step.value):
            return
        if await self._save(run_context.session):
            run_context.request_stop()

    async def end(self, session: Any) -> None:
        step: int = await _blocking(session, raw_session_of(session).read_step)
        if step != self._timer.last_triggered_step():
            await self._save(session)
            step = self._timer.last_triggered_step() or 0
        for listener in self._listeners:
            await _call(session, listener.end, session, step)
        await _blocking(session, self._writer.flush)

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if self._writer is not None:
            await run_blocking(current_engine(), self._writer.flush, _PATIENT_SECS, "flush")

    async def _save(self, session: Any) -> bool:
        """Save what the model is now; returns whether a listener wants training to stop."""
        release = await self._take_exclusive(session.global_step)
        self._is_writing = False
        try:
            should_stop = await self._save_alone(session, release)
        except Exception:
            release()
            raise
        except BaseException:
            if not self._is_writing:
                release()  # else the thread does, which still writes
            raise
        release()
        return should_stop

    async def _take_exclusive(self, step: GlobalStep) -> Callable[[], None]:
        try:
            return await step.take_exclusive(timeout=self._patience_secs)
        except TimeoutError:
            logger.warning(
                "Runs have been under way for %g s while a checkpoint waits for their end: %r. "
                "They may wait for this worker, so it is saved beside them, and may hold variables "
                "of more than one step. Later ones wait for %g s only.",
                self._patience_secs, step, _IMPATIENT_SECS,
            )  # fmt: skip
            self._patience_secs = _IMPATIENT_SECS
            return _nothing

    async def _save_alone(self, session: Any, release: Callable[[], None]) -> bool:
        step: int = await _blocking(session, raw_session_of(session).read_step)
        logger.info("Calling checkpoint listeners before saving checkpoint %d...", step)
        for listener in self._listeners:
            await _call(session, listener.before_save, session, step)
        logger.info("Saving checkpoints for %d into %s.", step, self._path)
        self._is_writing = True
        await _blocking(session, lambda: self._write(session, step), lambda _: release())
        self._is_writing = False
        self._timer.update_last_triggered_step(step)
        logger.info("Calling checkpoint listeners after saving checkpoint %d...", step)
        should_stop = False
        for listener in self._listeners:
            if await _call(session, listener.after_save, session, step):
                logger.info(
                    "A CheckpointSaverListener requested that training be stopped. listener: %s",
                    listener,
                )
                should_stop = True
        return should_stop

    def _write(self, session: Any, step: int) -> None:
        self._find_saver().save(
            session, self._path, global_step=step, write_meta_graph=self._save_graph_def
        )
        log = v1.SessionLog(status=v1.SessionLog.CHECKPOINT, checkpoint_path=self._path)
        self._writer.add_session_log(log, step)

    def _write_graph(self, session: Any) -> None:
        graph = session.graph
        graph_def = graph.as_graph_def(add_shapes=True)
        saver = self._find_saver()
        if self._save_graph_def:
            v1.train.write_graph(graph_def, self._directory, "graph.pbtxt")
        self._writer.add_graph(graph)
        saver_def = None if saver is None else saver.saver_def
        meta_graph = v1.train.export_meta_graph(graph_def=graph_def, saver_def=saver_def)
        self._writer.add_meta_graph(meta_graph)

    def _find_saver(self) -> Any:
        if self._saver is None and self._scaffold is not None:
            return self._scaffold.saver  # of the recreated session, too
        if self._saver is None:
            savers = v1.get_collection(v1.GraphKeys.SAVERS)
            if len(savers) != 1:
                raise RuntimeError(
                    f"the graph's collection SAVERS holds {len(savers)} savers, expected one; give "
                    "CheckpointSaverHook a saver or a scaffold"
                )
            self._saver = savers[0]
        return self._saver


def _checked(listener: Any) -> Any:
    methods = ("begin", "before_save", "after_save", "end")
    if not isinstance(listener, type) and all(hasattr(listener, each) for each in methods):
        return listener
    raise TypeError(
        f"listeners holds {listener!r}; give instances of asynchooks.CheckpointSaverListener, of "
        f"TensorFlow's, or with its methods {', '.join(methods)}"
    )


def _nothing() -> None:
    """What ends the exclusive side of the gate where it was not to be had."""


async def _blocking(
    session: Any,
    fn: Callable[[], Any],
    when_late: Callable[[Outcome], None] = lambda outcome: None,
) -> Any:
    """Call it in a thread, with the session's graph as the default one."""

    raw = raw_session_of(session)

    def call() -> Any:
        with session.graph.as_default():
            return fn()

    return await raw.call_blocking(call, when_late)


async def _call(session: Any, method: Callable[..., Any], *args: Any) -> Any:
    """Call a listener's method: a coroutine here, a plain one in a thread."""
    try:
        if is_async(method):
            return await in_graph(session.graph, method, *args)
        result = await _blocking(session, lambda: method(*args))
        return await result if isinstance(result, Awaitable) else result
    except Exception as error:
        error.add_note(f"in the listener's {getattr(method, '__qualname__', method)}")
        raise
