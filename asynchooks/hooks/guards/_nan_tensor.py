"""NanTensorHook: ends training when the loss is NaN, or goes back to a good checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from ... import _check
from ..._engine.stop import StopReason
from ..._errors import NanLossDuringTrainingError, PreemptionError
from ..._hook import (
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    worker_of,
)
from ..._log import fields
from ..._running.hook_state import HookState
from ..._stopping.coordinator import Coordinator
from ...backends._raw_session import RawSession, raw_session_of
from ...metrics._live import described
from .._feed import FeedHook
from .._feed_fn import FeedFnHook
from .._metrics import named, text_of
from ..checkpoint._saver_hook import CheckpointSaverHook

logger = logging.getLogger("asynchooks")


@_check.names_options
class NanTensorHook(SessionRunHook):
    """Checks the loss of each run; NaN fails the training, or stops it. Infinity does neither.

    Where the session has a CheckpointSaverHook, checkpoints that are not known to be good are moved
    aside: those saved since the last run but one whose loss was a number (the loss of a run belongs
    to the weights before it). The error names the newest good one, from which the next session
    goes on; with `max_rollbacks` this one does so at once, by a recovery. Until then no worker that
    shares the model saves it. (This does not apply to TensorFlow's own files, on a graph without
    `background=True`.)

    Args:
        loss_tensor: what to fetch, a scalar of any floating dtype: a tensor or its name ("x:0"),
            on a step function the name of an output.
        fail_on_nan_loss: whether to raise; otherwise the hook only asks to stop.
        max_rollbacks: how often training goes back to the last good checkpoint instead, >= 0. What
            a `FeedHook`, or a `FeedFnHook` with a state, has fed to the run that diverged is not
            fed again, also after a resume; so is what other workers, without such a hook, used of
            the same input since the last good run. An input without a position goes on, and what
            the caller feeds comes again.

    Raises:
        NanLossDuringTrainingError: out of `run`: the loss is NaN.
        ValueError: out of `run`: the loss is not a scalar.
        RuntimeError: when opening: `max_rollbacks` without a CheckpointSaverHook.

    Source: TensorFlow's `tf.compat.v1.train.NanTensorHook`; what concerns checkpoints is ours.

    Example:
        hooks = [NanTensorHook("loss", fail_on_nan_loss=False)]
    """

    uses_default_graph = False
    _fetches_are = "the loss"
    _shown = (("loss_tensor", "_args.fetches"),)

    def __init__(
        self, loss_tensor: Any, fail_on_nan_loss: bool = True, *, max_rollbacks: int = 0
    ) -> None:
        self._args = SessionRunArgs(loss_tensor)
        self._fails = fail_on_nan_loss
        self._max_rollbacks = _check.integer("max_rollbacks", max_rollbacks, least=0)
        self._saver: CheckpointSaverHook | None = None
        self._raw: RawSession | None = None
        self._good_step: int | None = None  # after the last run whose loss was a number
        self._first_step = 0  # where the raw session began
        self._num_rollbacks = 0
        self._feeders: list[FeedHook | FeedFnHook] = []

    async def begin(self) -> None:
        self._num_rollbacks, self._saver = 0, None
        shared = SessionHooks.of(self)
        shared.checks.append(lambda: self._find_saver(shared.begun))

    def _find_saver(self, hooks: Sequence[Any]) -> None:
        self._saver = next((each for each in hooks if isinstance(each, CheckpointSaverHook)), None)
        self._feeders = [each for each in hooks if isinstance(each, (FeedHook, FeedFnHook))]
        if self._max_rollbacks and self._saver is None:
            raise RuntimeError(
                f"NanTensorHook(max_rollbacks={self._max_rollbacks}) has no checkpoints to go back "
                "to: give the session a CheckpointSaverHook"
            )

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._raw = raw_session_of(session)
        self._good_step, self._first_step = None, session.global_step.value

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        loss = run_values.results
        shape = getattr(loss, "shape", None)
        if shape is None and isinstance(loss, Number):
            shape = ()
        if shape is None or (shape and math.prod(shape) != 1):
            raise ValueError(
                f"the loss {named(self._args.fetches)} is {described(loss)}; give one number, on a "
                "graph a tensor rather than an op (by name: 'loss:0')"
            )
        if loss == loss:  # only NaN differs from itself
            if self._raw is not None and self._raw.is_saved:  # else reading the step has no use
                self._good_step = run_context.global_step.value
                for each in self._feeders:
                    each.vouch()
            return
        level = logging.ERROR if self._fails else logging.WARNING
        step = run_context.step
        loss_is_nan = f"the loss {named(self._args.fetches)} is NaN at step {step}"
        extra = fields(self, step=step, worker=worker_of(run_context), reason=loss_is_nan)
        logger.log(level, "Model diverged with loss = NaN.", extra=extra)
        left_out = [] if self._raw is None else self._leave_out(self._raw, step)
        hooks = run_context.called_by
        is_held = hooks is not None and hooks.stop.held is not None  # until all ranks stop
        # other ranks reject checkpoints with this one, as they end
        saver = None if is_held and not self._max_rollbacks else self._saver
        good = None if self._raw is None else await self._reject(self._raw, saver)
        if good is not None and self._num_rollbacks < self._max_rollbacks:
            self._num_rollbacks += 1
            if left_out:
                logger.warning(
                    "Training goes on without what step %d was fed by %s.",
                    step,
                    ", ".join(map(repr, left_out)),
                    extra=extra,
                )
            raise _RollbackError(
                f"{loss_is_nan}: back to {good}, rollback {self._num_rollbacks} of "
                f"{self._max_rollbacks}",
                good,
            )
        if not self._fails:
            run_context.request_stop(loss_is_nan)
            return
        message = f"NaN loss during training: {loss_is_nan}."
        if good is not None:
            message += f" The last good checkpoint is {good}: the next session goes on from there"
        error = NanLossDuringTrainingError(message, good)
        if not is_held:
            raise error
        run_context.request_stop(StopReason("NanTensorHook", loss_is_nan, error))

    def _leave_out(self, raw: RawSession, step: int) -> list[FeedHook | FeedFnHook]:
        """If a checkpoint is restored, go on without what this run was fed; returns who fed it.

        A run that came after one that gave NaN is not to blame: it used what that one has left.
        """
        if raw.nan_step is not None and raw.nan_step <= step:
            return []
        raw.nan_step = step
        return [each for each in self._feeders if each.leave_out()]

    async def _reject(self, raw: RawSession, saver: CheckpointSaverHook | None) -> str | None:
        """Have no checkpoint made or chosen whose weights may be bad; returns the newest good one.

        Where another worker's hook saves the model, that hook moves its checkpoints aside.
        """
        # where no run was good, the weights that the session began with may be bad
        first_bad = self._first_step if self._good_step is None else self._good_step
        bad_from = first_bad or 1  # a new model has no better checkpoint
        raw.bad_from = bad_from if raw.bad_from is None else min(bad_from, raw.bad_from)
        newest = None if saver is None else await saver.checkpointer.reject()
        return newest if first_bad else None

    def state_dict(self) -> dict[str, Any]:
        state = {"num_rollbacks": self._num_rollbacks} if self._num_rollbacks else {}
        return HookState(state, name=text_of(self._args.fetches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # a rollback restores a checkpoint from before it, which holds a smaller number
        saved = _check.integer("the saved num_rollbacks", state["num_rollbacks"], least=0)
        self._num_rollbacks = max(self._num_rollbacks, saved)


class _RollbackError(NanLossDuringTrainingError, PreemptionError):
    """Has the session recreated; where that is not possible, it leaves the session."""
