"""What is in a checkpoint: the model and all that belongs to its step, taken and brought back.

It does not decide when, and writes nothing beside training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ..._engine.base import Engine, Sentinel
from ..._engine.threads import run_blocking
from ..._errors import add_note, no_input_end
from ..._running.hook_state import (
    have_more_than_timers,
    load_hooks,
    save_hooks,
    shared_states,
    with_states,
)
from ..._timer import SecondOrStepTimer
from ...backends._creator import not_alone, take_alone
from ...backends._raw_session import RawSession, raw_session_of
from .._metrics import MetricReader
from ._listeners import Listeners
from ._saver_format import Facts, Format, Restored

logger = logging.getLogger("asynchooks")

_IMPATIENT_SECS = 1.0
"""How long a save waits for runs under way, once they were seen to wait for it."""
_NO_RUN = Sentinel("NO_RUN")
GRACE_SECS = 30.0
"""What a cancellation gives to opening, closing, flushing and the hooks' own file."""


@dataclass(frozen=True)
class Taken:
    """One checkpoint whose model others may change again.

    Args:
        step: the global step.
        write: what writes the copy, and blocks; None: it has been written already.
        should_stop: whether a listener wants training to stop; False before it is written.
    """

    step: int
    write: Callable[[], None] | None
    should_stop: bool = False


class CheckpointContent:
    """What the checkpoints of one session hold; its hook makes it, for a `Checkpointer`.

    Args:
        form: how the model becomes files.
        hooks: all of the session, whose state is saved with it.
        timer: is told of each save that is due, and of what is restored.
        metric: is read for each save, if there is one.
        path: for people: where the checkpoints are, up to their steps.
    """

    def __init__(
        self,
        engine: Engine,
        form: Format,
        listeners: Listeners,
        hooks: Sequence[Any],
        timer: SecondOrStepTimer,
        metric: MetricReader | None,
        path: str,
    ) -> None:
        self._engine = engine
        self._format = form
        self._listeners = listeners
        self._hooks = hooks
        self._timer = timer
        self._metric = metric
        self.path = path
        self._patience_secs: float | None = None  # as for any checkpoint
        self._is_writing = False  # a thread copies or writes, and will release the gate
        self._began_at, self._seconds_before = engine.now(), 0.0
        self._restored_metric: tuple[int, float | None] | None = None  # and its step
        self.results: Any = _NO_RUN  # of the last run, for the metric
        self.due_step: int | None = None  # of a save that is being made because it is due
        self.saved_step: int | None = None
        self.looked_at = -1  # the step at which it was last found out whether it is to be saved
        self._has_saved_hooks = False  # together with the model that was saved last
        self._shared: dict[str, Any] = {}  # of their states, what other workers change, too
        self._keeps_hooks = False  # at the end
        self.hooks_at_end: bytes | None = None  # None before, and where they could not be saved

    def keep_hooks(self) -> None:
        """What the hooks do at their end is no part of training: a resumed one would differ."""
        self.hooks_at_end = None
        self._keeps_hooks = self._are_to_be_kept()
        self.hooks_at_end = save_hooks(self._hooks)
        self._shared = shared_states(self._hooks)

    async def restore(self, raw: RawSession) -> bool:
        """Bring back what was saved last, for a new raw session; returns whether the model is."""
        self.saved_step = self._restored_metric = None
        restored = await self._restored(raw)
        if restored is None:
            return False
        facts = restored.facts
        logger.info("Going on from step %d of %s.", facts.step, restored.path)
        raw.bad_from = None
        self._restored_metric = facts.step, facts.metric
        self._timer.update_last_triggered_step(facts.step)
        if facts.hooks is not None:
            load_hooks(self._hooks, facts.hooks)
        self._began_at, self._seconds_before = self._engine.now(), facts.seconds
        if restored.is_model:
            self.saved_step = facts.step
        return restored.is_model

    async def _restored(self, raw: RawSession) -> Restored | None:
        try:
            restored: Restored | None = await raw.call_alone(lambda: self._format.restore(raw))
        except Exception as error:
            add_note(error, "in restoring, by CheckpointSaverHook")
            bug = no_input_end(error, "restoring, by CheckpointSaverHook,")
            if bug is error:
                raise
            raise bug from error
        return restored

    async def restore_best(self, session: Any) -> None:
        """Bring the model back to the best checkpoint, after every worker's last step.

        They were all stopped before.
        """
        raw = raw_session_of(session)
        session.global_step.close_gate()
        release = await self.take_exclusive(raw)
        try:
            best = await raw.call_alone(lambda: self._format.restore_best(session))
        finally:
            release()
        if best is None:
            logger.warning("No checkpoint has a metric: the model stays as it is")
        else:
            logger.info("The model is that of the best checkpoint, %s.", best)

    async def read_step(self, raw: RawSession) -> int:
        """The global step, of a variable where there is one, perhaps on a server."""
        if not raw.evaluates:
            return raw.global_step.value
        step: int = await raw.call_blocking(raw.read_step)
        return step

    async def take_exclusive(self, raw: RawSession) -> Callable[[], None]:
        """Stand alone with the model, but do not wait for ever; returns what ends it."""
        release = await take_alone(raw.global_step, raw, "saved", self._patience_secs)
        if release is not_alone:
            self._patience_secs = _IMPATIENT_SECS
        return release

    async def take(
        self, session: Any, release: Callable[[], None], *, is_due: bool
    ) -> Taken | None:
        """Take a checkpoint, then release the gate; None: there is none to be made.

        Args:
            session: the raw one.
            release: what ends the exclusive side of the gate, which the caller holds.
            is_due: whether it is one of those that the timer counts; another one is left out
                where that step is saved.
        """
        self._is_writing = False
        is_alone = release is not not_alone
        held = (
            session.global_step.admission.held_here("a save of a checkpoint")
            if is_alone
            else nullcontext()
        )
        try:
            with held:
                taken = await self._take(session, release, is_due=is_due)
        except Exception:
            release()
            raise
        except BaseException:
            if not self._is_writing:
                release()  # else the thread does, which still writes
            raise
        release()
        return taken

    async def _take(
        self, session: Any, release: Callable[[], None], *, is_due: bool
    ) -> Taken | None:
        raw, form = raw_session_of(session), self._format
        step = await self.read_step(raw)
        if raw.bad_from is not None and not form.is_immediate:  # TensorFlow saves what there is
            logger.warning("Step %d is not saved: from %d on the loss was NaN", step, raw.bad_from)
            self._timer.update_last_triggered_step(step)
            return None
        if not is_due and step == self.saved_step:
            return None
        await self._listeners.before_save(session, step)
        logger.info("Saving checkpoints for %d into %s.", step, self.path)
        metric = None if self._metric is None else self._read_metric(self._metric, step)
        hooks = self._save_hooks(step, is_due=is_due)
        self._has_saved_hooks = hooks is not None
        seconds = self._seconds_before + self._engine.now() - self._began_at
        facts = Facts(step, seconds, hooks, metric)
        self._is_writing = True
        write = await raw.call_alone(lambda: self._copy(session, facts), lambda _: release())
        self.saved_step = step
        if is_due or form.is_immediate:
            self._timer.update_last_triggered_step(step)
        if write is None:
            return Taken(step, None, await self._listeners.after_save(session, step))
        return Taken(step, write)

    def _save_hooks(self, step: int, *, is_due: bool) -> bytes | None:
        at_end = None if is_due else self.hooks_at_end
        if at_end is not None and self._keeps_hooks:
            self._shared = shared_states(self._hooks, self._shared)
            return with_states(at_end, self._shared)
        if at_end is not None or not self._are_to_be_kept():
            return None
        self._shared = shared_states(self._hooks)
        self.due_step = step if is_due else None
        try:
            return save_hooks(self._hooks)
        finally:
            self.due_step = None

    def _are_to_be_kept(self) -> bool:
        """Whether the hooks' states belong beside the model.

        TensorFlow saves nothing of its hooks. So timers alone, which count anew there, too, leave
        no file beside its own.
        """
        return not self._format.is_immediate or have_more_than_timers(self._hooks)

    def _copy(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        try:
            return self._format.take(session, facts)
        finally:
            self._is_writing = False

    def _read_metric(self, metric: MetricReader, step: int) -> float | None:
        known = self._restored_metric
        restored = known[1] if known is not None and known[0] == step else None
        if metric.evaluation is not None:
            value = metric.at(step)
            return restored if value is None else value
        if metric.args is not None and self.results is _NO_RUN:
            return restored
        taken = metric.read(self.results, step)
        return None if taken is None else taken[1]

    def is_evaluated(self, step: int) -> bool:
        """Whether the last evaluation was of this step."""
        return self._metric is not None and self._metric.at(step) is not None

    async def is_better(self, step: int) -> bool:
        """Whether this step was evaluated, better than the best checkpoints that are there."""
        value = None if self._metric is None else self._metric.at(step)
        self.looked_at = step
        if value is None or step == self.saved_step:
            return False
        return await self.would_stay(value)

    async def would_stay(self, metric: float) -> bool:
        """Whether a checkpoint with this metric would be one of the best."""
        found: bool = await run_blocking(
            self._engine, lambda: self._format.is_better(metric), math.inf, "asynchooks-best"
        )
        return found

    async def write(self, session: Any, step: int, write: Callable[[], None]) -> bool:
        """Write what was taken; returns whether a listener wants training to stop."""
        await run_blocking(self._engine, write, math.inf, "asynchooks-save")
        return await self._listeners.after_save(session, step)

    async def save_hooks_late(self, at_end: bytes | None = None) -> None:
        """Where the model was saved before all hooks had seen the step: now they have.

        What other workers change as well stays as it was when the model was saved.
        """
        step = self.saved_step
        if not (self._format.is_immediate and self._has_saved_hooks) or step is None:
            return
        late = save_hooks(self._hooks) if at_end is None else at_end
        hooks = with_states(late, self._shared)

        def write() -> None:
            self._format.save_hooks(step, hooks)

        await run_blocking(self._engine, write, GRACE_SECS, "asynchooks-save")
