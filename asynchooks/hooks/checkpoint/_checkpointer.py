"""How one session's checkpoints are made: alone with the model, told to listeners, written.

It does not decide when. What is in one stands in `_checkpoint_content.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ..._engine.base import Engine
from ..._engine.stop import StopReason
from ..._engine.sync import Lock
from ..._engine.threads import run_blocking
from ..._errors import add_note, no_input_end
from ..._stopping.coordinator import Coordinator
from ...backends._raw_session import RawSession, raw_session_of
from ._background import BackgroundWriter, WhenBusy
from ._content import GRACE_SECS, CheckpointContent
from ._saver_format import Format

logger = logging.getLogger("asynchooks")


class Checkpointer:
    """Saves the checkpoints of one session; its hook makes it in begin, and closes it.

    Args:
        form: how the model becomes files.
        content: what they hold.
        is_background: whether to write beside training.
        when_busy: what a save does that is due while another is being written.
    """

    def __init__(
        self,
        engine: Engine,
        form: Format,
        content: CheckpointContent,
        *,
        is_background: bool,
        when_busy: WhenBusy,
    ) -> None:
        self._engine = engine
        self._format = form
        self._is_background = is_background
        self._when_busy = when_busy
        # Saves take turns; one that has its turn waits for the model, and then takes the lock. So
        # whoever stands alone with the model may wait for the lock: a restore for another worker.
        self._turn = Lock("a checkpoint")
        self._lock = Lock("the files of a checkpoint")
        self._coord: Coordinator | None = None
        self._session: Any = None  # the raw one, as hooks see it
        # of which model, from which step on, what was saved is moved aside: looking reads the files
        self._moved: tuple[RawSession, int] | None = None
        self._restores_best = False
        self.content = content
        self.is_immediate = form.is_immediate
        self.writer = BackgroundWriter(engine, self._on_failed_write)
        self.is_closed = False
        self.is_just_restored = False  # nothing has changed since

    async def open(self) -> None:
        form = self._format
        await run_blocking(
            self._engine, form.open, GRACE_SECS, "asynchooks-open", lambda _: form.close()
        )

    async def restore(self, raw: RawSession) -> int | None:
        """Bring model and hooks back, for a new raw session; returns the model's step, if so."""
        async with self._lock:
            await self.writer.wait_idle()  # what is being written is the newest
            await self._move_bad_aside()
            self.is_just_restored = False
            self.is_just_restored = await self.content.restore(raw)
        return self.content.saved_step

    async def describe(self, session: Any, coord: Coordinator) -> None:
        """Write what all checkpoints of a new raw session have in common."""
        self._coord, self._session = coord, session
        raw = raw_session_of(session)
        raw.is_saved = not self.is_immediate
        await raw.call_blocking(lambda: self._format.describe(session))

    @property
    def is_to_be_skipped(self) -> bool:
        """Whether a save that is due now is left out."""
        return self.writer.is_busy and self._when_busy is WhenBusy.SKIP

    async def save(
        self,
        session: Any,
        *,
        may_stop: bool,
        is_due: bool = True,
        release: Callable[[], None] | None = None,
    ) -> bool:
        """Save what the model is now; returns whether a listener wants a stop.

        In the background the write is only begun, and with `may_stop` training is asked to stop.

        Args:
            is_due: by the timer; else it is saved because it is better than the best.
            release: what ends the exclusive side of the gate, where it is held already.
        """
        if release is not None:  # whoever has the turn may wait for the model
            waits = not is_due or self._when_busy is not WhenBusy.SUPERSEDE
            return await self._save_locked(
                session, release, is_due=is_due, may_stop=may_stop, waits=waits
            )
        return await self._save_alone(
            session, is_due=is_due, may_stop=may_stop, only_better=not is_due
        )

    async def save_at_end(self, session: Any) -> int:
        """Save what the model is now, unless it is saved; returns the global step."""
        content = self.content
        step = await content.read_step(raw_session_of(session))
        if step != content.saved_step and content.hooks_at_end is not None:
            await self._save_alone(session, is_due=False)
            await content.save_hooks_late(content.hooks_at_end)
        return step

    async def _save_alone(
        self, session: Any, *, is_due: bool, may_stop: bool = False, only_better: bool = False
    ) -> bool:
        async with self._turn:
            if only_better or self._when_busy is not WhenBusy.SUPERSEDE:
                await self.writer.wait_idle()
            raw = raw_session_of(session)
            release = await self.content.take_exclusive(raw)
            if only_better and not self.content.is_evaluated(raw.global_step.value):
                release()  # another worker has moved the model meanwhile
                return False
            return await self._save_locked(session, release, is_due=is_due, may_stop=may_stop)

    async def set_metric(self, step: int, metric: float) -> bool:
        """Give the checkpoint of a step the metric that was found meanwhile.

        Returns whether the metric is lost: it is one of the best, and there is no checkpoint.
        """
        is_past = self.content.looked_at >= step  # else the run will save it with its metric
        while not self.is_closed:
            await self.writer.wait_idle()  # it may be the one that is being written
            async with self._lock:
                if self.writer.is_busy or self.is_closed:
                    continue
                found: bool = await run_blocking(
                    self._engine,
                    lambda: self._format.set_metric(step, metric),
                    math.inf,
                    "asynchooks-metric",
                )
                return not found and is_past and await self.content.would_stay(metric)
        return False

    async def save_beside(self, *, timeout: float) -> None:
        """Save whatever the session does meanwhile, and return when it is written.

        Nothing where that step is saved, and before a session is created and after its end.

        Args:
            timeout: seconds, >= 0, to wait for runs that are under way.

        Raises:
            TimeoutError: they have not ended; nothing was saved.
        """
        async with self._turn:
            if self._session is None or self.is_closed:  # looked at last: the end may come first
                return
            await self.writer.wait_idle()
            release = await self._session.global_step.take_exclusive(timeout=timeout)
            await self._save_locked(self._session, release, is_due=False)
            await self.writer.wait_idle()

    async def reject(self, raw: RawSession) -> str | None:
        """Move the checkpoints of a bad model aside; returns the path of the newest that is left.

        TensorFlow's own files are left as they are.
        """
        async with self._lock:
            await self.writer.wait_idle()
            return await self._reject(raw)

    async def _reject(self, raw: RawSession) -> str | None:
        bad_from = raw.bad_from
        assert bad_from is not None
        newest: str | None = await run_blocking(
            self._engine,
            lambda: self._format.reject(bad_from, "the loss was NaN soon afterwards"),
            math.inf,
            "asynchooks-reject",
        )
        self._moved = raw, bad_from
        return newest

    async def _move_bad_aside(self) -> None:
        """What another worker that shares the model has found to be bad goes, too."""
        if self._session is None or self.is_immediate:
            return
        raw = raw_session_of(self._session)
        if raw.bad_from is not None and self._moved != (raw, raw.bad_from):
            await self._reject(raw)

    def restore_best_at_end(self) -> None:
        """At a clean end, after the last save, bring the model back to the best checkpoint."""
        self._restores_best = True

    async def _save_locked(
        self,
        session: Any,
        release: Callable[[], None],
        *,
        is_due: bool,
        may_stop: bool = False,
        waits: bool = False,
    ) -> bool:
        try:
            await self._lock.__aenter__()
        except BaseException:
            release()
            raise
        try:
            if waits:
                await self._wait_idle(release)
            return await self._save(session, release, is_due=is_due, may_stop=may_stop)
        finally:
            self._lock.leave()

    async def _wait_idle(self, release: Callable[[], None]) -> None:
        try:
            await self.writer.wait_idle()
        except BaseException:
            release()
            raise

    async def _save(
        self, session: Any, release: Callable[[], None], *, is_due: bool, may_stop: bool = False
    ) -> bool:
        try:
            taken = await self.content.take(session, release, is_due=is_due)
            if taken is None or taken.write is None:
                return taken is not None and taken.should_stop
            step, write = taken.step, taken.write
            if self._is_background:
                self.writer.submit(lambda: self._write_beside(session, step, write, may_stop))
                return False
            try:
                return await self.content.write(session, step, write)
            except BaseException:
                self.content.saved_step = None
                raise
        except Exception as error:
            bug = error if self.is_immediate else no_input_end(error, "a save of a checkpoint")
            if bug is error:  # TensorFlow's own way to save has its own way to end, too
                raise
            raise bug from error

    async def _write_beside(
        self, session: Any, step: int, write: Callable[[], None], may_stop: bool
    ) -> None:
        should_stop = await self.content.write(session, step, write)
        if should_stop and may_stop and self._coord is not None:
            reason = StopReason("CheckpointSaverHook", "a CheckpointSaverListener asked for it")
            self._coord.request_stop(reason=reason)

    def _on_failed_write(self, error: BaseException) -> None:
        self.content.saved_step = None  # the end tries again
        add_note(error, "in a checkpoint that was written in the background")
        logger.error("A checkpoint could not be written: %r", error)
        if self._coord is not None:
            reason = StopReason("CheckpointSaverHook", f"a checkpoint failed: {error!r}", error)
            self._coord.request_stop(reason=reason)

    async def finish(self, session: Any) -> None:
        """Wait for what is being written; `session` is the raw one at a clean end, else None.

        Raises:
            BaseException: what a write failed with, unless a run has raised it.
        """
        await self.writer.wait_idle()
        async with self._turn, self._lock:
            await self._move_bad_aside()
        self.writer.raise_error()
        if session is not None and self._restores_best:
            await self.content.restore_best(session)

    async def close(self) -> None:
        """Give the directory back: at once, or when what is being saved or written has been.

        Cancellation safe: what is begun goes on.
        """
        self.is_closed = True
        if self._is_free():
            await self._close_when_written()
        else:  # a save beside the end of the block
            await self._engine.start(self._close_when_saved).wait()

    def abandon(self) -> None:
        """The session was dropped: give the directory back, once what is being written has been."""
        self.is_closed = True
        if self.writer.is_busy:
            self.writer.finish_with(self._close)
        else:
            self._format.abandon()

    def _is_free(self) -> bool:
        """Whether nothing is being saved or restored."""
        for each in (self._turn, self._lock):
            if not each.enter_now():
                return False
            each.leave()
        return True

    async def _close_when_saved(self) -> None:
        async with self._turn, self._lock:
            try:
                await self._close_when_written()
            except BaseException as error:
                if self._engine.failure_in(error) is None:
                    raise
                logger.error("Closing %s failed: %r", self.content.path, error)

    async def _close_when_written(self) -> None:
        if self.writer.is_busy:
            logger.warning("A checkpoint is still being written into %s", self.content.path)
            self.writer.finish_with(self._close)
        else:
            await self._close()

    async def _close(self) -> None:

        def close() -> None:
            try:
                self._format.flush()
            finally:
                self._format.close()

        await run_blocking(self._engine, close, GRACE_SECS, "asynchooks-close")
