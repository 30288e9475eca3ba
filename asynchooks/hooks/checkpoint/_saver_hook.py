"""CheckpointSaverHook: when checkpoints are saved; a `Checkpointer` says what and how."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from ... import _check
from ..._hook import (
    FinishPhase,
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
    worker_of,
)
from ..._log import fields
from ..._running.hook_state import TimerState
from ..._stopping.coordinator import Coordinator
from ..._timer import timer_of
from ...backends._raw_session import raw_session_of
from ...checkpoints import CheckpointDirectory, CheckpointStore, Retention, check_saver
from ...checkpoints._place import ADDED_BYTES, CheckpointPlace
from ...checkpoints._ranks import RankedPlace
from ...checkpoints._store import object_store_of
from .._evaluation import EvaluationHook
from .._metrics import METRIC_FETCHES, Metric
from . import _format
from ._checkpointer import Checkpointer
from ._format import CheckpointFormat, SaverFormat
from ._listeners import Listeners
from ._unsaved import warn_of_unsaved

logger = logging.getLogger("asynchooks")


class WhenBusy(Enum):
    """What a save does that is due while an earlier one is still being written.

    Example:
        hook = CheckpointSaverHook(
            "ckpt", save_secs=10, saver=saver, background=True, when_busy=WhenBusy.SKIP
        )
    """

    WAIT = auto()
    """It waits, and this worker with it: nothing is left out."""
    SKIP = auto()
    """It is left out; the next one is due an interval later."""


@_check.names_options
class CheckpointSaverHook(SessionRunHook):
    """Saves checkpoints when a session is created, every n steps or seconds, and at the end.

    On a step function it also resumes: a new session continues from the newest intact checkpoint
    in the directory, and its hooks from their saved states (`state_dict`). So does a raw session
    that replaces a lost one. On a graph, `ChiefSessionCreator(checkpoint_dir=...)` restores the
    model.

    The model is copied in a thread, within `global_step.exclusive()`: no worker that shares it runs
    a step during the copy, so a checkpoint holds exactly one step. There are two exceptions. Steps
    that other processes make on a server may be partly in the checkpoint. And if runs under way do
    not end within 30 s, for example because they wait for this worker, the model is saved while
    they run, with a warning; but for calls of a sync step function that is not thread-safe, the
    save keeps waiting, with another warning.

    With `background=True`, the copy is written while training continues. An error of the write
    requests a stop, and is raised at the end of the block. At the end, the model is saved only if
    the current step is not saved yet, and the hook waits for all writes. That checkpoint holds the
    steps made until its own worker ended. Items that other workers are still processing count as
    unused, so a session that resumes from it trains on them. A cancellation waits for a save under
    way. It makes no last checkpoint, nor does an error: a warning says how many steps are not
    saved.

    Except for TensorFlow's own files (on a graph, without `background`), each checkpoint is a
    separate directory that is either complete or absent, with sizes and hashes of all its files.
    Only one run at a time may use `checkpoint_dir`, and two hooks must not share it. Of several
    hooks of one model, which have one saver in common, the newest checkpoint is restored.

    Args:
        checkpoint_dir: directory for the checkpoints (and, on a graph, an event file); a relative
            one belongs to the working directory of now. On a step function also an object store:
            an address such as "s3://bucket/run", an object of obstore, or an `ObjectStore`, with
            the same guarantees.
        save_secs: seconds between two saves, >= 0; also called `every_n_secs`.
        save_steps: steps between two saves, >= 0; also called `every_n_steps`. Exactly one of the
            two is given.
        saver: on a graph a `tf.compat.v1.train.Saver`; on a step function any object with
            `save(path)` and `restore(path)`, such as `StateDictSaver(model=model)`. One that has
            no `snapshot()` pauses training while it writes, even with `background`.
        checkpoint_basename: checkpoints are named `<basename>-<global step>`; at most 175 bytes.
        scaffold: on a graph, a Scaffold, whose saver is used. With neither, the saver is the one
            in the graph's collection SAVERS.
        listeners: `CheckpointSaverListener`s, ours or TensorFlow's, called in this order. They must
            not open or run a session on the same model: it would wait for the save to end (within
            the coroutine's own task, that raises a RuntimeError).
        save_graph_def: whether to write `graph.pbtxt` and a `.meta` file for each checkpoint.
        background: whether to write while training continues.
        when_busy: what a save does if it becomes due while another one is being written.
        retention: which checkpoints to keep; None keeps the newest five, or on a graph without
            `background` leaves this to the saver.
        metric: what `retention.keep_best` compares: fetches of one number,
            `evaluation.metric("accuracy")`, or a function that returns it (None: not known). A
            checkpoint has the metric of the run or the evaluation of its own step, whichever worker
            ran it. It has none if that is not known, and none, with a warning, if that is NaN. (On
            a graph it is known for runs of this worker that overlap with no other.) A
            `Metric(..., mode=...)` says which one is better, as do `retention.mode`, or a plain
            name such as "loss"; otherwise a warning asks for it. With `keep_best`, the model is
            saved immediately, whatever the intervals, after an exclusive evaluation that beats the
            best ones kept. A concurrent evaluation ranks the checkpoint of the step at which it
            began; if that was not saved or is gone, a warning is logged.

    Raises:
        ValueError: both saver and scaffold are given, or both or neither of the intervals; metric
            and retention disagree about the mode; a name in the directory, or the basename, is too
            long.
        TypeError: `checkpoint_dir` is not a path; `saver` is not a saver; `metric` is missing;
            `retention` is not a Retention.
        RuntimeError: when opening: no saver, or several in the collection; the EvaluationHook of
            `metric` is not in the session; another session has this hook now.
        CheckpointInUseError: when opening: another run uses the directory.
        CheckpointError: the directory cannot be used, a checkpoint cannot be written, none there is
            intact, or which of several hooks' is the newest is not known; when opening: other
            workers have begun to train the model, another hook of the model saves other objects, or
            the model is saved by several sessions whose hooks have states.
        MetricError: from `run`: the metric is not a number.
        tf.errors.OpError: TensorFlow's own files cannot be read or written.

    Source: TensorFlow's `tf.compat.v1.train.CheckpointSaverHook`; all but the arguments is new.

    Example:
        saver = StateDictSaver(weights={"w": weights})
        hooks = [CheckpointSaverHook("model", save_steps=1000, saver=saver, background=True)]
    """

    acts_outside = True
    needs_global_step = True
    uses_default_graph = False
    _fetches_are = METRIC_FETCHES
    _shown = (
        ("checkpoint_dir", "_given"),
        ("save_secs", "_timer._every_secs"),
        ("save_steps", "_timer._every_steps"),
        ("saver", "_saver"),
    )

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | Any,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Iterable[Any] | None = None,
        save_graph_def: bool = True,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        background: bool = False,
        when_busy: WhenBusy = WhenBusy.WAIT,
        retention: Retention | None = None,
        metric: Any = None,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError(f"got saver={saver!r} and scaffold={scaffold!r}; give one of them")
        _check.instance("when_busy", when_busy, WhenBusy, "WhenBusy.WAIT or SKIP")
        if retention is not None:
            expected = "Retention(max_to_keep=3), or None"
            _check.instance("retention", retention, Retention, expected)
        if retention is not None and retention.keep_best and metric is None:
            raise TypeError(f'{retention!r} needs a metric; give metric="loss", or a function')
        self._timer = timer_of(
            every_n_steps=every_n_steps,
            every_n_secs=every_n_secs,
            save_steps=save_steps,
            save_secs=save_secs,
        )
        self._saves_by_steps = save_secs is None and every_n_secs is None
        self._store = object_store_of(checkpoint_dir)
        if self._store is None:
            self._given = _check.path("checkpoint_dir", checkpoint_dir)
            self._directory = _check.place("checkpoint_dir", checkpoint_dir)
        else:
            self._given = self._directory = self._store.name
        if isinstance(checkpoint_basename, str):  # else its place says so
            _check.name_of_file("checkpoint_basename", checkpoint_basename, suffix=ADDED_BYTES)
        self._basename = checkpoint_basename
        self._saver = saver
        self._scaffold = scaffold
        self._listeners = Listeners(listeners)
        self._save_graph_def = save_graph_def
        self._is_background = background
        self._when_busy = when_busy
        self._retention = retention
        mode = None if retention is None else retention.mode
        self._metric = None if metric is None else Metric.of(metric, mode, repr(retention))
        self.best_by: Metric | None = None
        """The metric by which the best checkpoints are kept; None if they are not."""
        if retention is not None and retention.keep_best and self._metric is not None:
            self.best_by = self._metric
            self._retention = replace(retention, mode=self._metric.mode)
        self._is_by_hand = False
        self._open: Checkpointer | None = None  # from begin to the session's end
        self._begun: list[Any] = []  # the hooks of the session
        self._refusals: list[BaseException] = []  # of sessions whose on_error is yet to come
        logger.info("Create CheckpointSaverHook.", extra=fields(self))

    @property
    def checkpointer(self) -> Checkpointer:
        """Saves and restores, also for other hooks, from begin on."""
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
        shared = SessionHooks.of(self)
        self._begun = shared.begun or [self]  # by hand there is no list
        if self._metric is not None:
            shared.checks.append(partial(self._check_metric, self._metric, shared))
        self._open = Checkpointer(
            form=self._choose_format(),
            listeners=self._listeners,
            hooks=shared.hooks,
            timer=self._timer,
            metric=self._metric,
            path=f"{self._directory}/{self._basename}",
            is_background=self._is_background,
            savers=_savers_of(shared),
        )
        self._is_by_hand = shared.is_by_hand
        await self._open.open()
        await self._listeners.begin(shared.stop)

    def _check_metric(self, metric: Metric, shared: SessionHooks) -> None:
        metric.check_is_taken([*shared.hooks, *shared.begun], "CheckpointSaverHook")
        if self.best_by is not None and self.best_by.result is not None:
            self.best_by.result.owner.followers.append(partial(self._set_metric, metric.source.key))

    async def _set_metric(self, key: str, step: int, results: Mapping[str, float]) -> None:
        """A concurrent evaluation has ended: its step may have been saved meanwhile."""
        value = results.get(key)
        value = self.checkpointer.ranking.checked(value, step)
        if value is None or not await self.checkpointer.set_metric(step, value):
            return
        logger.warning(
            "Step %d is not among the best checkpoints, though a concurrent evaluation gave %g, "
            "which is better: it was not saved, or its checkpoint was deleted. Save the steps that "
            "are evaluated, and keep them until then (save_steps, Retention(max_to_keep=...)), or "
            "give EvaluationHook mode=Evaluate.EXCLUSIVE",
            step,
            value,
            extra=fields(self, step=step),
        )

    def _choose_format(self) -> CheckpointFormat:
        if begin_graph.get() is not None:
            if self._store is not None:
                raise ValueError(
                    f"checkpoint_dir is the object store {self._store.name}, and the model is a "
                    "TensorFlow graph, which is restored from a local directory; give one, and "
                    "copy its checkpoints to the store by a CheckpointSaverListener"
                )
            return _format.make_graph_format(
                # TensorFlow knows files and writers by the name that it was given
                _check.same_place(self._given, self._directory),
                self._basename,
                self._saver,
                self._scaffold,
                self._save_graph_def,
                self._retention,
                background=self._is_background,
            )
        if self._saver is None:
            raise RuntimeError(
                "CheckpointSaverHook on a step function has nothing to save; give it "
                "saver=StateDictSaver(model=model), or any object with save(path) and "
                "restore(path). (On a TensorFlow graph it finds the graph's saver: "
                "MonitoredSession(hooks, ChiefSessionCreator()))"
            )
        check_saver(self._saver)
        options = self._basename, self._retention
        place: CheckpointPlace
        if self._store is not None:
            place = CheckpointStore(self._store, *options)
        else:
            place = CheckpointDirectory(self._directory, *options)
        return SaverFormat(self._shared_by_ranks(place), self._saver)

    def _shared_by_ranks(self, place: CheckpointPlace) -> CheckpointPlace:
        """The place as all ranks of a `DistributedCheckpointSaver` use it together."""
        ranks = getattr(self._saver, "ranks", None)
        if ranks is None:
            return place
        has_others = ranks.size > 1
        if has_others and not (self._saves_by_steps and self._when_busy is WhenBusy.WAIT):
            raise ValueError(
                f"CheckpointSaverHook has save_secs, or {self._when_busy}, on {ranks.size} ranks, "
                "which would save different steps; give save_steps and WhenBusy.WAIT"
            )
        return cast(CheckpointPlace, RankedPlace(ranks, place))  # it has the methods of one

    async def restore_model(self, session: Any) -> int | None:
        return await self.checkpointer.restore(raw_session_of(session))

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        checkpointer = self.checkpointer
        if self._is_by_hand:
            await self._restore_by_hand(session)
        await checkpointer.describe(session, coord)
        if not checkpointer.is_just_restored:
            await checkpointer.save(session, may_stop=False)

    async def _restore_by_hand(self, session: Any) -> None:
        """What a session does before its hooks see the raw one."""
        raw = raw_session_of(session)
        if (restored := await self.restore_model(raw)) is not None:
            raw.global_step.restart(restored)
            raw.attach(raw.global_step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.checkpointer.raise_write_error()
        self.checkpointer.ranking.before_run(run_context)
        return None if self._metric is None else self._metric.args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step, checkpointer = run_context.global_step.value, self.checkpointer
        checkpointer.ranking.note_run(run_context, run_values.results)
        is_due = self._timer.should_trigger_for_step(step)
        if is_due and checkpointer.is_writing and self._when_busy is WhenBusy.SKIP:
            text = "The checkpoint of step %d is skipped: one is being written"
            logger.info(text, step, extra=fields(self, step=step, worker=worker_of(run_context)))
            self._timer.update_last_triggered_step(step)
            is_due = False
        if is_due and checkpointer.is_immediate:
            await self._save_in_run(run_context, is_due=True)
            run_context.finish_with(checkpointer.save_hooks_late, phase=FinishPhase.SAVE)
        elif is_due or (self.best_by is not None and self.best_by.result is not None):
            # an evaluation between the steps ends after every after_run
            run_context.finish_with(
                lambda: self._save_in_run(run_context, is_due=is_due), phase=FinishPhase.SAVE
            )

    async def _save_in_run(self, run_context: SessionRunContext, *, is_due: bool) -> None:
        session, checkpointer = run_context.session, self.checkpointer
        if not is_due and not await checkpointer.is_better(run_context.global_step.value):
            return
        release = run_context.take_over_exclusive()
        if await checkpointer.save(session, may_stop=True, is_due=is_due, release=release):
            run_context.request_stop("a CheckpointSaverListener asked for it")

    def state_dict(self) -> dict[str, Any]:
        timer = self._timer.state_dict()
        if self._open is not None and self._open.due_step is not None:  # it is being saved
            timer = {"last_step": self._open.due_step, "secs_since_last": 0.0}
        place = f"{self._directory}/{self._basename}"
        return TimerState({"timer": timer}, place=place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timer.load_state_dict(state["timer"])

    async def before_end(self, session: Any) -> None:
        self.checkpointer.states.keep_for_end()

    def on_drop(self) -> None:
        if self._open is not None:
            if not self._open.is_virtual:  # workers may end with a simulation
                self._warn_of_unsaved(None)
            self._open.abandon()

    async def end(self, session: Any) -> None:
        checkpointer = self.checkpointer
        failure: Exception | None = None
        if self._is_by_hand:
            await self.before_end(session)
        # the last evaluations come before the last save, and before the best model comes back, in
        # whatever order the hooks are
        for each in self._begun:
            try:
                if isinstance(each, EvaluationHook):
                    await each.evaluate_last(session)
            except Exception as error:
                failure = failure or error  # what was trained is saved all the same
        step = await checkpointer.save_at_end(session)
        await checkpointer.finish(session)
        await self._listeners.end(session, step)
        await checkpointer.close()
        if failure is not None:
            raise failure

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if not self._was_refused(exception) and self._open is not None:
            try:
                await self._open.finish(None)
            finally:
                self._warn_of_unsaved(exception)
                await self._open.close()

    def _warn_of_unsaved(self, error: BaseException | None) -> None:
        """Say what is lost as training ends without `end`; the last saver of the model says it."""
        own = self.checkpointer
        if own.savers != [own]:
            return
        saved, directory = max(
            (each.checkpointer.newest_step, each._directory)
            for each in self._begun
            if isinstance(each, CheckpointSaverHook) and each._open is not None
        )
        step = own.trained_step
        if step is not None and step > saved >= 0:
            warn_of_unsaved(directory, saved, step, error)

    def _was_refused(self, error: BaseException) -> bool:
        """Whether this is the session whose begin was refused, which has taken nothing.

        Only once for each: its error may leave the other session's block, too.
        """
        for refusal in self._refusals:
            if refusal is error or refusal is error.__context__:
                self._refusals.remove(refusal)
                return True
        return False


def _savers_of(shared: SessionHooks) -> list[Checkpointer]:
    """The savers of the session's model; by hand there is no other."""
    handle = None if shared.stop is None else shared.stop.handle
    return [] if handle is None else handle.savers
