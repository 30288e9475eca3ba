"""LoopLagHook: says who held the event loop, and for how long."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..._engine.base import STOPPED, Engine, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop
from ..._hook import SessionRunHook
from ..._stopping.coordinator import Coordinator
from .._arguments import as_secs
from ._holder import holder_of, loop_code
from ._thread import GuardThread

logger = logging.getLogger("asynchooks")

_MAX_LAGS = 100
_LONGEST_PAUSE_SECS = 1.0
_UNSEEN = "code that let no other thread run", ""


@dataclass(frozen=True)
class LoopLag:
    """One time that the event loop was held. Made by `LoopLagHook`, for its `lags`.

    Args:
        secs: seconds from the ping to its answer: less than the whole, by half of `max_lag_secs`
            at most.
        culprit: who held it for the largest part, as far as was seen: "after_run of SlowHook",
            "the step", "the step_fn", "the side task 'name'", "the session", "code outside of a
            run", "the event loop itself" or "code that let no other thread run".
        where: the innermost code that belongs to no event loop: "slow.py:12 in compute"; may be "".

    Example:
        lag = LoopLag(0.35, "after_run of SlowHook", "slow.py:12 in compute")
        print(lag)  # 0.35 s by after_run of SlowHook (slow.py:12 in compute)
    """

    secs: float
    culprit: str
    where: str

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.secs:.2f} s by {self.culprit}{place}"


class LoopLagHook(SessionRunHook):
    """Warns of code that holds the event loop, so that nobody else runs meanwhile.

    A daemon thread pings the event loop, one wake-up each `max_lag_secs` / 2 at most, and looks at
    the stack of the loop's thread while no answer comes. When it comes, there is one line in the
    log: "the event loop was held for 0.35 s by after_run of SlowHook (slow.py:12 in compute)". The
    duration is measured from the ping to the answer, so it may be short by up to `max_lag_secs`
    / 2. What holds Python's own lock, so that no thread runs, may go unseen.

    It watches from the creation of the raw session to a stop or the end: one such hook on an event
    loop is enough, as it sees what other sessions do, too. In virtual time it does nothing.

    You make it and give it to one session at a time; nothing needs to be closed.

    Args:
        max_lag_secs: seconds that the event loop may be held without a word, > 0.

    Raises:
        TypeError: `max_lag_secs` is no number.
        ValueError: `max_lag_secs` is not above 0, or not finite.

    Example:
        watchdog = LoopLagHook(max_lag_secs=0.1)
        async with MonitoredSession([watchdog], creator) as session:
            await session.run("loss")
        for lag in watchdog.lags:
            print(lag)
    """

    _looks_at_default_graph = False
    _joins_session = False
    _shown = (("max_lag_secs", "_max_lag_secs"),)

    def __init__(self, max_lag_secs: float = 0.1) -> None:
        self._max_lag_secs = as_secs("max_lag_secs", max_lag_secs)
        self.lags: deque[LoopLag] = deque(maxlen=_MAX_LAGS)
        """The latest hundred lags since `begin`, in order."""

    async def begin(self) -> None:
        self.lags.clear()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        engine = current_engine()
        if engine.is_virtual:
            return
        watch = _Watch(engine, self._max_lag_secs, self.lags)
        coord.start_soon(watch.answer, name="LoopLagHook")
        # not in the side task: it has not run yet, and the first step may hold the event loop
        watch.start_thread()


class _Ping:
    """One question to the event loop, and who was seen to hold it since, for how many seconds."""

    __slots__ = ("looked_at", "secs_by_holder", "sent_at")

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.looked_at = sent_at
        self.secs_by_holder: dict[tuple[str, str], float] = {}


class _Watch:
    """Pings of a thread, and their answers by a side task, over one raw session."""

    __slots__ = (
        "_engine",
        "_lags",
        "_loop_code",
        "_loop_thread",
        "_max_lag_secs",
        "_ping",
        "_slot",
        "_thread",
    )

    def __init__(self, engine: Engine, max_lag_secs: float, lags: deque[LoopLag]) -> None:
        self._engine = engine
        self._max_lag_secs = max_lag_secs
        self._lags = lags
        self._loop_thread = threading.get_ident()
        self._loop_code = loop_code()
        # The thread sends a ping only while there is none, to the slot of that moment; the event
        # loop changes the slot first and takes the ping away then. So neither needs a lock.
        self._slot = Slot(engine, "a ping")
        self._ping: _Ping | None = None
        self._thread: GuardThread | None = None

    def start_thread(self) -> None:
        self._thread = GuardThread(self._look, self._max_lag_secs / 2, "asynchooks-lag")

    def close(self) -> None:
        """In the event loop's thread: note what was held until now, then end the thread."""
        self._take_answer()
        if self._thread is not None:
            self._thread.close()

    async def answer(self) -> None:
        """The side task: its answer is that it runs."""
        try:
            value = None
            while value is not STOPPED:
                with EndsAtStop(self._slot, None):
                    value = await self._engine.park(self._slot)
                self._take_answer()
        finally:
            self.close()

    def _look(self) -> float:
        """In the thread: ping, or look who holds the event loop; returns the pause after that."""
        now, ping = self._engine.now(), self._ping
        if ping is None:
            self._ping = _Ping(now)
            self._engine.wake(self._slot)
            return self._max_lag_secs / 2
        # before it is too long already: when it becomes so, the answer may come first
        holder = holder_of(sys._current_frames().get(self._loop_thread), self._loop_code)
        held = ping.secs_by_holder
        held[holder] = held.get(holder, 0.0) + now - ping.looked_at
        ping.looked_at = now
        # a loop that is held for long, or for good, is looked at less often
        return max(self._max_lag_secs / 2, min((now - ping.sent_at) / 4, _LONGEST_PAUSE_SECS))

    def _take_answer(self) -> None:
        ping = self._ping
        if ping is None:
            return
        secs = self._engine.now() - ping.sent_at
        if secs > self._max_lag_secs:
            held = list(ping.secs_by_holder.items())  # in one piece: the thread may be looking
            holder = max(held, key=lambda each: each[1], default=(_UNSEEN, 0.0))[0]
            lag = LoopLag(secs, *holder)
            self._lags.append(lag)
            logger.warning("the event loop was held for %s", lag)
        self._slot = Slot(self._engine, "a ping")
        self._ping = None
