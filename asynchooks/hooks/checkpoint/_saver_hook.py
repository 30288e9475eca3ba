"""CheckpointSaverHook: checkpoints that hold one step, written beside training."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._coordinator import Coordinator
from .._engine import current_engine
from .._hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
)
from .._raw_session import RawSession
from .._session_stop import SessionStop
from .._timer import SecondOrStepTimer
from ..checkpoints import CheckpointDirectory, Mode, Retention, check_saver
from ._background import WhenBusy
from ._checkpoint_content import CheckpointContent
from ._checkpointer import Checkpointer
from ._listeners import Listeners
from ._metrics import MetricReader
from ._saver_format import Format, SaverFormat

logger = logging.getLogger("asynchooks")


class CheckpointSaverHook(SessionRunHook):
    """Saves checkpoints at every creation of a session, then every n steps or seconds, and at end.

    On a step function it also resumes: a new session goes on from the newest intact checkpoint in
    the directory, its hooks from the state they had (`state_dict`), and so does one that replaces
    a lost one. On a graph `ChiefSessionCreator(checkpoint_dir=...)` restores the model.

    What is saved is copied in a thread, in `global_step.exclusive()`: no worker that shares the
    model runs a step meanwhile, so that a checkpoint holds one step. (Steps that other processes
    make on a server may mix in; and where runs that are under way do not end within 30 s, as they
    may wait for this worker, it is saved beside them, with a warning.) With `background=True` the
    copy is written while training goes on; an error then leaves the next run, or `end`, and
    training is asked to stop. At the end it is saved only if that step is not saved yet, and every
    write is waited for. A cancellation waits for a save that is under way.

    Except for TensorFlow's own files (on a graph, without `background`), each checkpoint is a
    directory of its own that is complete or not there, with sizes and hashes of all its files;
    and one run at a time may use `checkpoint_dir`. Two hooks must not share it.

    Args:
        checkpoint_dir: directory for the checkpoints (and, on a graph, an event file).
        save_secs: seconds between two saves, >= 0.
        save_steps: steps between two saves, >= 0; exactly one of the two is given.
        saver: on a graph a `tf.compat.v1.train.Saver`; on a step function any object with
            `save(path)` and `restore(path)`, such as `StateDictSaver(model=model)`. One that has
            no `snapshot()` writes while training stands still, also with `background`.
        checkpoint_basename: checkpoints are named `<basename>-<global step>`.
        scaffold: on a graph, a Scaffold, whose saver is used. With neither it is the one in the
            graph's collection SAVERS.
        listeners: `CheckpointSaverListener`s, ours or TensorFlow's, told in this order. They must
            not open or run a session on the same model: it would wait for the save to end.
        save_graph_def: whether to write `graph.pbtxt` and a `.meta` file for each checkpoint.
        background: whether to write beside training.
        when_busy: what a save does that is due while another is being written.
        retention: which checkpoints stay; None keeps the newest five, and on a graph without
            `background` leaves that to the saver.
        metric: what `retention.keep_best` compares: fetches of one number,
            `evaluation.metric("accuracy")`, or a function that returns it (None: not known).

    Raises:
        ValueError: saver and scaffold are both given, or both or neither interval.
        TypeError: `saver` is none; `metric` is missing; `retention` is no Retention.
        RuntimeError: when opening: no saver, or several in the collection; the EvaluationHook of
            `metric` is not in the session; another session has this hook now.
        CheckpointInUseError: when opening: another run uses the directory.
        CheckpointError: the directory cannot be used, a checkpoint cannot be written, or none of
            those that are there is intact.
        MetricError: out of `run`: the metric is no number.
        tf.errors.OpError: what TensorFlow says of its own files.

    Source: TensorFlow's `tf.compat.v1.train.CheckpointSaverHook`; all but its arguments is ours.

    Example:
        saver = StateDictSaver(weights={"w": weights})
        hooks = [CheckpointSaverHook("model", save_steps=1000, saver=saver, background=True)]
    """

    needs_global_step = True
    _looks_at_default_graph = False
    _has_only_timers = True

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Iterable[Any] | None = None,
        save_graph_def: bool = True,
        *,
        background: bool = False,
        when_busy: WhenBusy = WhenBusy.WAIT,
        retention: Retention | None = None,
        metric: Any = None,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError(f"got saver={saver!r} and scaffold={scaffold!r}; give one of them")
        if not isinstance(when_busy, WhenBusy):
            raise TypeError(f"when_busy is {when_busy!r}; give WhenBusy.WAIT, SKIP or SUPERSEDE")
        if not isinstance(retention, (Retention, type(None))):
            raise TypeError(f"retention is {retention!r}; give Retention(max_to_keep=3), or None")
        if retention is not None and retention.keep_best and metric is None:
            raise TypeError(f'{retention!r} needs a metric; give metric="loss", or a function')
        self._timer = SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps)
        self._directory = os.fspath(checkpoint_dir)
        self._basename = checkpoint_basename
        self._saver = saver
        self._scaffold = scaffold
        self._listeners = Listeners(listeners)
        self._save_graph_def = save_graph_def
        self._is_background = background
        self._when_busy = when_busy
        self._retention = retention
        self._metric = None if metric is None else MetricReader(metric)
        # of the session that is to begin next
        self._hooks: Sequence[Any] = ()
        self._stops: SessionStop | None = None
        self._open: Checkpointer | None = None  # from begin to the session's end
        self._refusals: list[BaseException] = []  # of sessions whose on_error is yet to come
        logger.info("Create CheckpointSaverHook.")

    def _meet(self, hooks: Sequence[Any], stops: SessionStop) -> None:
        self._hooks, self._stops = hooks, stops

    @property
    def best_mode(self) -> Mode | None:
        """By which the best checkpoints stay; None if they do not."""
        keeps = self._retention is not None and self._retention.keep_best > 0
        return self._retention.mode if keeps and self._retention is not None else None

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves, for other hooks, from begin on."""
        if self._open is None:
            raise RuntimeError("CheckpointSaverHook saves from its begin to its end only")
        return self._open

    async def begin(self) -> None:
        if self._open is not None and not (self._open.is_closed or self._open.is_immediate):
            refusal = RuntimeError(
                "this CheckpointSaverHook is in use already; give each session one of its own, and "
                "list it once"
            )
            self._refusals.append(refusal)
            raise refusal
        self._open = None
        if self._metric is not None:
            self._metric.check_is_taken(self._hooks, "CheckpointSaverHook")
        path = os.path.join(self._directory, self._basename)
        engine, form = current_engine(), self._choose_format()
        content = CheckpointContent(
            engine, form, self._listeners, self._hooks, self._timer, self._metric, path
        )
        self._open = Checkpointer(
            engine, form, content, is_background=self._is_background, when_busy=self._when_busy
        )
        stops = self._stops  # another session may be refused meanwhile
        await self._open.open()
        await self._listeners.begin(stops)

    def _choose_format(self) -> Format:
        if begin_graph.get() is not None:
            # where the session runs a graph, this part of the package is loaded
            tf = importlib.import_module("..tf._graph_format", __package__)
            form: Format = tf.graph_format(
                self._directory, self._basename, self._saver, self._scaffold, self._save_graph_def,
                self._retention, background=self._is_background,
            )  # fmt: skip
            return form
        if self._saver is None:
            raise RuntimeError(
                "CheckpointSaverHook on a step function has nothing to save; give it "
                "saver=StateDictSaver(model=model), or any object with save(path) and "
                "restore(path). (On a TensorFlow graph it finds the graph's saver: "
                "MonitoredSession(hooks, ChiefSessionCreator()))"
            )
        check_saver(self._saver)
        directory = CheckpointDirectory(self._directory, self._basename, self._retention)
        return SaverFormat(directory, self._saver)

    async def _restore(self, raw: RawSession) -> int | None:
        return await self.checkpointer.restore(raw)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        checkpointer = self.checkpointer
        await checkpointer.describe(session, coord)
        if not checkpointer.is_just_restored:
            await checkpointer.save(session, may_stop=False)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.checkpointer.writer.raise_error()
        return None if self._metric is None else self._metric.args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step, checkpointer = run_context.global_step.value, self.checkpointer
        checkpointer.content.results = run_values.results
        if not self._timer.should_trigger_for_step(step):
            return
        if checkpointer.is_to_be_skipped:
            logger.info("The checkpoint of step %d is skipped: one is being written", step)
            self._timer.update_last_triggered_step(step)
        elif checkpointer.is_immediate:
            await self._save_in_run(run_context)
            run_context._finish(2, checkpointer.content.save_hooks_late)
        else:
            run_context._finish(2, lambda: self._save_in_run(run_context))

    async def _save_in_run(self, run_context: SessionRunContext) -> None:
        if await self.checkpointer.save(run_context.session, may_stop=True):
            run_context.request_stop("a CheckpointSaverListener asked for it")

    def state_dict(self) -> dict[str, Any]:
        due = None if self._open is None else self._open.content.due_step
        timer = self._timer.state_dict()
        if due is not None:  # what is being saved is a save that was due
            timer = {"last_step": due, "secs_since_last": 0.0}
        metric = None if self._metric is None else self._metric.state_dict()
        return {"timer": timer, "metric": metric}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timer.load_state_dict(state["timer"])
        if self._metric is not None and state["metric"] is not None:
            self._metric.load_state_dict(state["metric"])

    def _owns(self, error: BaseException) -> bool:
        return self._open is not None and self._open.writer.raised is error

    def _ending(self) -> None:
        self.checkpointer.content.keep_hooks()

    async def end(self, session: Any) -> None:
        checkpointer = self.checkpointer
        step = await checkpointer.save_at_end(session)
        await checkpointer.finish(session)
        await self._listeners.end(session, step)
        await checkpointer.close()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        checkpointer = None if self._was_refused(exception) else self._open
        if checkpointer is not None:
            try:
                await checkpointer.finish(None)
            finally:
                await checkpointer.close()

    def _was_refused(self, error: BaseException) -> bool:
        """Whether this is the session whose begin was refused, which has taken nothing.

        Only once for each: its error may leave the other session's block, too.
        """
        for refusal in self._refusals:
            if refusal is error or refusal is error.__context__:
                self._refusals.remove(refusal)
                return True
        return False
