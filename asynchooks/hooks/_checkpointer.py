"""How one session's checkpoints are made: alone with the model, told to listeners, written.

It does not decide when.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .._coordinator import Coordinator
from .._engine import Engine
from .._errors import no_input_end
from .._global_step import GlobalStep
from .._hook_state import have_more_than_timers, load_hooks, save_hooks
from .._lock import Lock
from .._raw_session import RawSession, raw_session_of
from .._signal import Signal
from .._stop_reason import StopReason
from .._timer import SecondOrStepTimer
from .._work_thread import run_blocking
from ._background import BackgroundWriter, WhenBusy
from ._listeners import Listeners
from ._metrics import MetricReader
from ._saver_format import Facts, Format, Restored

logger = logging.getLogger("asynchooks")

_PATIENT_SECS, _IMPATIENT_SECS = 30.0, 1.0
"""How long a save waits for runs under way: at first, and once they were seen to wait for it."""
_NO_RUN = Signal("NO_RUN")
_GRACE_SECS = 30.0
"""What a cancellation gives to opening, closing and flushing."""


class Checkpointer:
    """Saves the checkpoints of one session; its hook makes it in begin, and closes it.

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
        *,
        is_background: bool,
        when_busy: WhenBusy,
    ) -> None:
        self._engine = engine
        self._format = form
        self._listeners = listeners
        self._hooks = hooks
        self._timer = timer
        self._metric = metric
        self._path = path
        self._is_background = is_background
        self._when_busy = when_busy
        self._lock = Lock("a checkpoint")
        self._patience_secs = _PATIENT_SECS
        self._is_writing = False  # a thread copies or writes, and will release the gate
        self._began_at, self._seconds_before = engine.now(), 0.0
        self._coord: Coordinator | None = None
        self._session: Any = None  # the raw one, as hooks see it
        self._restores_best = False
        self.is_immediate = form.is_immediate
        self.writer = BackgroundWriter(engine, self._on_failed_write)
        self.is_closed = False
        self.is_rejected = False  # the model as it is now is not to be saved any more
        self.is_just_restored = False  # nothing has changed since
        self.saved_step: int | None = None
        self.results: Any = _NO_RUN  # of the last run, for the metric
        self._restored_metric: tuple[int, float | None] | None = None  # and its step
        self.due_step: int | None = None  # of a save that is being made because it is due

    async def open(self) -> None:
        form = self._format
        await run_blocking(
            self._engine, form.open, _GRACE_SECS, "asynchooks-open", lambda _: form.close()
        )

    async def restore(self, raw: RawSession) -> int | None:
        """Bring model and hooks back, for a new raw session; returns the model's step, if so."""
        async with self._lock:
            await self.writer.wait_idle()  # what is being written is the newest
            self.saved_step, self.is_just_restored = None, False
            self.is_rejected = False
            restored = await self._restored(raw)
        self._restored_metric = None
        if restored is None:
            return None
        self._restored_metric = restored.facts.step, restored.facts.metric
        facts = restored.facts
        logger.info("Going on from step %d of %s.", facts.step, restored.path)
        self._timer.update_last_triggered_step(facts.step)
        if facts.hooks is not None:
            load_hooks(self._hooks, facts.hooks)
        self._began_at, self._seconds_before = self._engine.now(), facts.seconds
        if restored.is_model:
            self.saved_step, self.is_just_restored = facts.step, True
        return self.saved_step

    async def _restored(self, raw: RawSession) -> Restored | None:
        try:
            restored: Restored | None = await raw.call_blocking(lambda: self._format.restore(raw))
        except Exception as error:
            error.add_note("in restoring, by CheckpointSaverHook")
            bug = no_input_end(error, "restoring, by CheckpointSaverHook,")
            if bug is error:
                raise
            raise bug from error
        return restored

    async def describe(self, session: Any, coord: Coordinator) -> None:
        """Write what all checkpoints of a new raw session have in common."""
        self._coord, self._session = coord, session
        raw = raw_session_of(session)
        await raw.call_blocking(lambda: self._format.describe(session))

    async def read_step(self, raw: RawSession) -> int:
        """The global step, of a variable where there is one, perhaps on a server."""
        if not raw.evaluates:
            return raw.global_step.value
        step: int = await raw.call_blocking(raw.read_step)
        return step

    @property
    def is_to_be_skipped(self) -> bool:
        """Whether a save that is due now is left out."""
        return self.writer.is_busy and self._when_busy is WhenBusy.SKIP

    async def save(self, session: Any, hooks: bytes | None = None) -> bool:
        """Save what the model is now; returns whether a listener wants training to stop.

        In the background the write is only begun.

        Args:
            hooks: the state of the hooks, for a save at the end; None takes it now, for one that
                is due.
        """
        async with self._lock:
            if self._when_busy is not WhenBusy.SUPERSEDE:
                await self.writer.wait_idle()
            release = await self._take_exclusive(session.global_step)
            return await self._save(session, release, hooks, is_due=hooks is None)

    async def save_beside(self, *, timeout: float) -> None:
        """Save whatever the session does meanwhile, and return when it is written.

        Args:
            timeout: seconds, >= 0, to wait for runs that are under way.

        Raises:
            TimeoutError: they have not ended; nothing was saved.
        """
        if self._session is None or self.is_closed:
            return
        async with self._lock:
            await self.writer.wait_idle()
            release = await self._session.global_step.take_exclusive(timeout=timeout)
            await self._save(self._session, release, None, is_due=False)
            await self.writer.wait_idle()

    async def reject(self, from_step: int, why: str) -> str | None:
        """Have no checkpoint of that step or a later one chosen any more: they are moved aside.

        TensorFlow's own files are left as they are.

        Returns:
            The path of the newest of those that are left, None if there is none.
        """
        self.is_rejected = not self.is_immediate  # TensorFlow saves what there is
        async with self._lock:
            await self.writer.wait_idle()
            newest: str | None = await run_blocking(
                self._engine,
                lambda: self._format.reject(from_step, why),
                math.inf,
                "asynchooks-reject",
            )
            return newest

    def restore_best_at_end(self) -> None:
        """At a clean end, after the last save, bring the model back to the best checkpoint."""
        self._restores_best = True

    async def _save(
        self, session: Any, release: Callable[[], None], hooks: bytes | None, *, is_due: bool
    ) -> bool:
        try:
            return await self._save_and_release(session, release, hooks, is_due=is_due)
        except Exception as error:
            bug = error if self.is_immediate else no_input_end(error, "a save of a checkpoint")
            if bug is error:  # TensorFlow's own way to save has its own way to end, too
                raise
            raise bug from error

    async def _save_and_release(
        self, session: Any, release: Callable[[], None], hooks: bytes | None, *, is_due: bool
    ) -> bool:
        self._is_writing = False
        try:
            finish = await self._save_alone(session, release, hooks, is_due=is_due)
        except Exception:
            release()
            raise
        except BaseException:
            if not self._is_writing:
                release()  # else the thread does, which still writes
            raise
        release()
        if isinstance(finish, bool):
            return finish
        if self._is_background:
            self.writer.submit(finish)
            return False
        try:
            return await finish()
        except BaseException:
            self.saved_step = None
            raise

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

    async def _save_alone(
        self, session: Any, release: Callable[[], None], hooks: bytes | None, *, is_due: bool
    ) -> bool | Callable[[], Awaitable[bool]]:
        """Returns what is left to be done beside training, or whether to stop."""
        raw, form = raw_session_of(session), self._format
        step = await self.read_step(raw)
        await self._listeners.before_save(session, step)
        logger.info("Saving checkpoints for %d into %s.", step, self._path)
        metric = None if self._metric is None else self._read_metric(self._metric, step)
        if hooks is None and not form.is_immediate:
            self.due_step = step if is_due else None
            try:
                hooks = save_hooks(self._hooks)
            finally:
                self.due_step = None
        seconds = self._seconds_before + self._engine.now() - self._began_at
        facts = Facts(step, seconds, hooks, metric)
        self._is_writing = True
        write = await raw.call_blocking(lambda: self._take(session, facts), lambda _: release())
        self.saved_step = step
        if is_due or form.is_immediate:
            self._timer.update_last_triggered_step(step)
        if write is None:
            return await self._listeners.after_save(session, step)
        return lambda: self._write(session, step, write)

    def _take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        try:
            return self._format.take(session, facts)
        finally:
            self._is_writing = False

    def _read_metric(self, metric: MetricReader, step: int) -> float | None:
        if metric.args is not None and self.results is _NO_RUN:
            known = self._restored_metric
            return known[1] if known is not None and known[0] == step else None
        taken = metric.read(self.results, step)
        return None if taken is None else taken[1]

    async def _write(self, session: Any, step: int, write: Callable[[], None]) -> bool:
        await run_blocking(self._engine, write, math.inf, "asynchooks-save")
        should_stop = await self._listeners.after_save(session, step)
        if should_stop and self._is_background and self._coord is not None:
            reason = StopReason("CheckpointSaverHook", "a CheckpointSaverListener asked for it")
            self._coord.request_stop(reason=reason)
        return should_stop

    def _on_failed_write(self, error: BaseException) -> None:
        self.saved_step = None  # the end tries again
        error.add_note("in a checkpoint that was written in the background")
        logger.error("A checkpoint could not be written: %r", error)
        if self._coord is not None:
            reason = StopReason("CheckpointSaverHook", f"a checkpoint failed: {error!r}", error)
            self._coord.request_stop(reason=reason)

    async def save_hooks_late(self, at_end: bytes | None = None) -> None:
        """Where the model was saved before all hooks had seen the step: now they have.

        TensorFlow saves nothing of its hooks. So timers alone, which count anew there, too, leave
        no file beside its own.
        """
        step = self.saved_step
        if not self.is_immediate or step is None or not have_more_than_timers(self._hooks):
            return
        hooks = save_hooks(self._hooks) if at_end is None else at_end

        def write() -> None:
            self._format.save_hooks(step, hooks)

        await run_blocking(self._engine, write, _GRACE_SECS, "asynchooks-save")

    async def finish(self, session: Any) -> None:
        """Wait for what is being written; `session` is the raw one at a clean end, else None.

        Raises:
            BaseException: what a write failed with, unless a run has raised it.
        """
        await self.writer.wait_idle()
        self.writer.raise_error()
        if session is not None and self._restores_best:
            raw = raw_session_of(session)
            async with session.global_step.exclusive():
                best = await raw.call_blocking(lambda: self._format.restore_best(session))
            if best is None:
                logger.warning("No checkpoint has a metric: the model stays as it is")
            else:
                logger.info("The model is that of the best checkpoint, %s.", best)

    async def close(self) -> None:
        """Give the directory back: at once, or when what is being written has been."""
        self.is_closed = True
        if self.writer.is_busy:
            logger.warning("A checkpoint is still being written into %s", self._path)
            self.writer.finish_with(self._close)
        else:
            await self._close()

    async def _close(self) -> None:

        def close() -> None:
            try:
                self._format.flush()
            finally:
                self._format.close()

        await run_blocking(self._engine, close, _GRACE_SECS, "asynchooks-close")


def _nothing() -> None:
    """What ends the exclusive side of the gate where it was not to be had."""
