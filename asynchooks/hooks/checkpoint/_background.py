"""Writes while training continues: one at a time, and at most one more in line."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto

from ..._engine.base import Engine
from ..._engine.sync import Condition
from ..._errors import add_note, leave_as_itself, no_input_end
from ..._log import fields

logger = logging.getLogger("asynchooks")

Write = Callable[[], Awaitable[object]]


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
    SUPERSEDE = auto()
    """It is written next, in place of one in line; up to three copies of the model."""


class BackgroundWriter:
    """The writes of one hook; `on_failure` gets the error of each, kept until `raise_error`."""

    def __init__(self, engine: Engine, on_failure: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._next: Write | None = None
        self._idle = Condition()
        self.is_busy = False
        self.error: BaseException | None = None
        self._last: Write | None = None

    def finish_with(self, last: Write) -> None:
        """Have this awaited after the writes; only while `is_busy`."""
        self._last = last

    def submit(self, write: Write) -> None:
        """Write this now, or next, in place of the write in line."""
        if self._next is not None:
            logger.info(
                "A checkpoint that was in line to be written is superseded by a newer one",
                extra=fields("CheckpointSaverHook"),
            )
        self._next = write
        if not self.is_busy:
            self.is_busy = True
            self._engine.start(self._run)

    async def wait_idle(self) -> None:
        """Return when all is written, or has failed. Cancellation safe: writing goes on."""
        await self._idle.wait_until(lambda: not self.is_busy, "a checkpoint to be written")

    def raise_error(self) -> None:
        """Raise the error of a failed write, once."""
        error, self.error = self.error, None
        if error is not None:
            raise leave_as_itself(error)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                write, self._next = self._next, None
                try:
                    await write()
                except BaseException as error:
                    failure = self._engine.failure_in(error)
                    if failure is None:
                        raise
                    self._fail(failure)  # for the session: no caller could catch it here
            if self._last is not None:
                await self._last()
        finally:
            self.is_busy = False
            self._idle.notify()

    def _fail(self, raised: BaseException) -> None:
        error = no_input_end(raised, "a checkpoint that was being written")
        if self.error is None:
            self.error = error
        else:
            add_note(self.error, f"then, writing the next one: {error!r}")
        self._on_failure(error)
