"""The end of training in a cluster: processes that train tell each ps, and each ps waits for it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress

import tensorflow as tf

from .._engine import Engine, Slot, current_engine
from .._work_thread import Outcome, run_blocking
from ._cluster_board import BoardSession, tell_end

logger = logging.getLogger("asynchooks")

_TELL_SECS = 5.0
"""How long a process that has ended tries to say so to each ps."""
_GRACE_SECS = 1.0


async def tell_all(me: str, targets: dict[str, str]) -> set[str]:
    """Tell servers that this task's training has ended; which of them know it now.

    It ends within some five seconds, whatever the servers do.

    Args:
        me: the name of this task.
        targets: name of the ps -> "grpc://host:port".
    """
    engine = current_engine()
    until = engine.now() + _TELL_SECS
    told: set[str] = set()
    telling = [engine.start(_tell, me, ps, targets[ps], told, until) for ps in targets]
    try:
        for each in telling:  # side by side: a silent one does not take the others' time
            await each.wait(until + _GRACE_SECS)
    finally:
        for each in telling:
            each.cancel()
    return told


async def _tell(me: str, ps: str, target: str, told: set[str], until: float) -> None:
    problem = "it does not answer"
    try:
        has_told = await run_blocking(
            current_engine(),
            lambda: tell_end(target, _queue(ps), me),
            0,
            "asynchooks-end",
            until=until,
        )
    except Exception as error:  # TensorFlow's mostly; nobody could catch it
        # a ps that has heard it may end before its answer is here
        has_told, problem = False, str(error)
    if has_told:
        told.add(ps)
    else:
        logger.info("%s could not tell %s that it has ended: %s", me, ps, problem)


def _queue(ps: str) -> str:
    return f"asynchooks/done:{ps}"


class EndOfTraining:
    """At a ps: who has ended, as far as it was told. The task makes it; nobody need close it.

    Args:
        name: the ps.
        trainers: the names of the tasks that train.
        chief: one of them.
    """

    def __init__(self, name: str, trainers: set[str], chief: str) -> None:
        self._name = name
        self._trainers = trainers
        self._chief = chief
        self._ended: set[str] = set()
        self._chief_ended_at = math.inf
        self._is_awaited = False

    async def wait(self, start: Callable[[], str], linger_secs: float) -> None:
        """Suspend until training has ended. Cancellation safe: who has ended is remembered.

        Args:
            start: starts the server, unless it runs, and returns its address; blocks.
            linger_secs: seconds to wait for the others once the chief has ended.

        Raises:
            RuntimeError: somebody waits already.
        """
        if self._is_awaited:
            raise RuntimeError(f"{self._name} is being served already; call serve() once")
        self._is_awaited = True
        engine = current_engine()
        receiver: _Receiver | None = None
        try:
            receiver = await run_blocking(
                engine,
                lambda: _Receiver(start(), _queue(self._name), self._ended),
                _GRACE_SECS,
                "asynchooks-start",
                _close_late,
            )
            await self._wait(engine, receiver, linger_secs)
        finally:
            self._is_awaited = False
            if receiver is not None:
                with engine.shielded(_GRACE_SECS):
                    await run_blocking(engine, receiver.close, 0, "asynchooks-serve-end")

    async def _wait(self, engine: Engine, receiver: _Receiver, linger_secs: float) -> None:
        while True:
            slot = Slot(engine, "the end of training")
            receiver.notify(slot)
            if receiver.error is not None:
                raise receiver.error
            if self._chief in self._ended:
                self._chief_ended_at = min(self._chief_ended_at, engine.now())
            missing = sorted(self._trainers - self._ended)
            if not missing:
                logger.info("Training has ended everywhere; %s ends", self._name)
                return
            until = self._chief_ended_at + linger_secs
            if engine.now() >= until:
                logger.warning(
                    "The chief ended %g s ago, and nothing was heard of the end of %s; %s ends",
                    linger_secs, ", ".join(missing), self._name,
                )  # fmt: skip
                return
            await engine.park(slot, until)


class _Receiver:
    """Takes from a server of this process who has ended, by one blocked dequeue in a thread.

    Making and closing it blocks for some milliseconds.

    Args:
        target: the server's address.
        queue: the name of the queue there.
        ended: where to add the names.
    """

    def __init__(self, target: str, queue: str, ended: set[str]) -> None:
        self.error: BaseException | None = None
        self._ended = ended
        self._slot: Slot | None = None
        self._is_closing = False
        self._session = BoardSession(target, queue, may_wait=True)
        self._thread = threading.Thread(target=self._receive, name="asynchooks-serve", daemon=True)
        self._thread.start()

    def notify(self, slot: Slot) -> None:
        """Wake the slot at the next name; whoever looks after this, not before, misses none."""
        self._slot = slot

    def _receive(self) -> None:
        try:
            while not self._is_closing:
                name = self._session.run(self._session.dequeue).decode()
                if name:  # else it is `close` that ends the wait
                    self._ended.add(name)
                    self._wake()
        except BaseException as error:
            self.error = error
            self._wake()

    def _wake(self) -> None:
        if self._slot is not None:
            self._slot.wake()

    def close(self) -> None:
        """End the thread: one that the end of the process meets in TensorFlow may abort it."""
        self._is_closing = True
        with suppress(tf.errors.OpError):
            self._session.run(self._session.enqueue, "")
        self._thread.join(_GRACE_SECS)
        self._session.close()


def _close_late(outcome: Outcome) -> None:
    """A receiver that came after its task was cancelled belongs to nobody."""
    if outcome.error is None:
        outcome.value.close()
