"""A worker's hold on its graph, which begins when the chief has initialised the model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import tensorflow as tf

from .._engine import Engine, Slot
from .._errors import is_preemption
from .._raw_session import RawSession
from .._work_thread import run_blocking
from ._board_link import ReadyEar
from ._board_pieces import Place
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
            can_hear = not (has_chief or has_heard or is_preemption(cause)) and self._place
            is_told = has_chief or can_hear
            until = min(deadline, engine.now() + (_LONGEST_PAUSE_SECS if is_told else pause))
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
            if can_hear:
                has_heard = await self._hear(engine, can_hear, until)
                continue
            await self._wait(engine, seen, until)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)

    @property
    def _place(self) -> Place | None:
        """Where a chief of another process says that the model is ready."""
        notices = None if self._server is None else self._state.notices
        return None if notices is None else notices.place

    async def _hear(self, engine: Engine, place: Place, until: float) -> bool:
        """Suspend until a chief has said so, in whichever process; False if the time has come."""
        ear = ReadyEar(place, self.creator.master, self.creator.config)
        try:
            heard = await run_blocking(engine, ear.wait, 0.0, "asynchooks-ready", until=until)
            return heard is True  # None: the time has come
        finally:
            ear.close()

    async def _wait(self, engine: Engine, seen: int, until: float) -> None:
        if self._server is not None:
            await self._server.wait_for_chief(engine, seen, until)
        else:
            await engine.park(Slot(engine, "the model"), until)
