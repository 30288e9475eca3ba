"""A worker's hold on its graph, which begins when the chief has initialised the model."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import tensorflow as tf

from .._engine import Engine, Slot
from .._errors import is_preemption
from .._raw_session import RawSession
from ._board_link import ReadyEar
from ._lease import GraphLease

if TYPE_CHECKING:
    from ._creators import WorkerSessionCreator

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.25, 10.0
"""Between a worker's tries to find its model ready."""


class WorkerLease(GraphLease):
    """A worker's hold: it waits until the chief has initialised the model."""

    _is_chief = False
    creator: WorkerSessionCreator

    async def _create(self, engine: Engine, grace_secs: float) -> tuple[RawSession, int]:
        max_wait_secs = self.creator.max_wait_secs
        deadline = engine.now() + max_wait_secs
        pause = _FIRST_PAUSE_SECS
        has_heard = False  # somebody has said that the model is ready
        while True:
            seen = 0 if self._server is None else self._server.num_chiefs_come
            try:
                return await super()._create(engine, grace_secs)
            except tf.errors.OpError as error:
                if not (is_preemption(error) or isinstance(error, tf.errors.DeadlineExceededError)):
                    raise
                reason = error.message if is_preemption(error) else "nobody has initialised it"
                cause = error
            if engine.now() >= deadline:
                raise tf.errors.DeadlineExceededError(
                    None,
                    None,
                    f"the model on {self.creator.master!r} was not ready after waiting for "
                    f"max_wait_secs={max_wait_secs:g} s: {reason}; is its chief running?",
                ) from cause
            has_chief = self._server is not None and self._server.has_chief_to_come
            until = min(deadline, engine.now() + (_LONGEST_PAUSE_SECS if has_chief else pause))
            if self._server is None:
                logger.warning(
                    "A worker with master=%r waits for its model, yet nobody else can initialise "
                    "a session within this process; give the address of the chief's server",
                    self.creator.master,
                )
            logger.info(
                "Waiting for model to be ready on %r; next look in at most %.2g s: %s",
                self.creator.master, until - engine.now(), reason,
            )  # fmt: skip
            if has_chief or has_heard or is_preemption(cause):
                await self._wait(engine, seen, until)
            else:
                has_heard = await self._hear(engine, until)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)

    async def _hear(self, engine: Engine, until: float) -> bool:
        """Suspend until a chief of any process says that the model is ready; False if none did."""
        slot = Slot(engine, f"a chief's word on {self.creator.master}")
        ear, notices = None, self._state.notices
        if self._server is not None and notices is not None:
            wake = partial(slot.wake, True)
            ear = ReadyEar(notices.place, self.creator.master, self.creator.config, wake)
        try:
            return await engine.park(slot, until) is True
        finally:
            if ear is not None:
                ear.close()

    async def _wait(self, engine: Engine, seen: int, until: float) -> None:
        if self._server is not None:
            await self._server.wait_for_chief(engine, seen, until)
        else:
            await engine.park(Slot(engine, "the model"), until)
