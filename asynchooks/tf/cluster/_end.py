"""The end of training in a cluster: processes that train report it, and each ps waits for it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress

import tensorflow as tf

from ..._engine.base import Engine, Slot
from ..._engine.current import current_engine
from ..._engine.threads import Outcome, run_blocking
from ._messages import ServerSession, write_end

logger = logging.getLogger("asynchooks")

_REPORT_SECS = 5.0
"""How long a process tries to report its end to each ps."""
_GRACE_SECS = 1.0


async def report_end(name: str, targets: dict[str, str]) -> set[str]:
    """Report the end of this task's training to each ps, by name; returns those that have it.

    It ends within some five seconds, also where a server does not answer.
    """
    engine = current_engine()
    until = engine.now() + _REPORT_SECS
    reported: set[str] = set()
    tasks = [engine.start(_report, name, ps, targets[ps], reported, until) for ps in targets]
    try:
        for each in tasks:  # concurrently: a silent server does not use up the others' time
            await each.wait(until + _GRACE_SECS)
    finally:
        for each in tasks:
            each.cancel()
    return reported


async def _report(name: str, ps: str, target: str, reported: set[str], until: float) -> None:
    problem = "it does not answer"
    try:
        is_reported = await run_blocking(
            current_engine(),
            lambda: write_end(target, _queue(ps), name),
            0,
            "asynchooks-end",
            until=until,
        )
    except Exception as error:  # TensorFlow's mostly; it would end in a task of its own
        # a ps that has the message may end before its answer is here
        is_reported, problem = False, str(error)
    if is_reported:
        reported.add(ps)
    else:
        logger.info("%s could not report its end to %s: %s", name, ps, problem)


def _queue(ps: str) -> str:
    return f"asynchooks/done:{ps}"


class EndOfTraining:
    """At a ps: the tasks that have reported their end, of those that train. Needs no close."""

    def __init__(self, name: str, trainers: set[str], chief: str) -> None:
        self._name = name
        self._trainers = trainers
        self._chief = chief
        self._ended: set[str] = set()
        self._chief_ended_at = math.inf
        self._is_awaited = False

    async def wait(self, start: Callable[[], str], linger_secs: float) -> None:
        """Suspend until training has ended. Cancellation safe: reported ends are kept.

        `start` starts the server, unless it runs, and returns its address; it blocks. Once the
        chief has ended, the others have `linger_secs`.
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
                    "The chief ended %g s ago, and the end of %s was not reported; %s ends",
                    linger_secs, ", ".join(missing), self._name,
                )  # fmt: skip
                return
            await engine.park(slot, until)


class _Receiver:
    """Adds the reported ends to `ended`, by one blocked dequeue on the server, in a thread.

    The constructor and `close` block for some milliseconds.
    """

    def __init__(self, target: str, queue: str, ended: set[str]) -> None:
        self.error: BaseException | None = None
        self._ended = ended
        self._slot: Slot | None = None
        self._is_closing = False
        self._session = ServerSession(target, queue, may_wait=True)
        self._thread = threading.Thread(target=self._receive, name="asynchooks-serve", daemon=True)
        self._thread.start()

    def notify(self, slot: Slot) -> None:
        """Wake the slot at the next name; read the names after this call, and none is missed."""
        self._slot = slot

    def _receive(self) -> None:
        try:
            while not self._is_closing:
                name = self._session.run(self._session.dequeue).decode()
                if name:  # "" is sent by `close`
                    self._ended.add(name)
                    self._wake()
        except BaseException as error:
            self.error = error
            self._wake()

    def _wake(self) -> None:
        if self._slot is not None:
            self._slot.wake()

    def close(self) -> None:
        """End the thread: one within TensorFlow when the process exits may abort the process."""
        self._is_closing = True
        with suppress(tf.errors.OpError):
            self._session.run(self._session.enqueue, "")
        self._thread.join(_GRACE_SECS)
        self._session.close()


def _close_late(outcome: Outcome) -> None:
    """Close a receiver that was created after its task had been cancelled."""
    if outcome.error is None:
        outcome.value.close()
