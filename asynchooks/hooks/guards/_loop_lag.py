"""LoopLagHook: logs which code held the event loop, and for how long."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType
from typing import Any

from ... import _check
from ..._engine.base import STOPPED, Engine, Slot
from ..._engine.current import current_engine
from ..._engine.stacks import holder_in, walk
from ..._engine.stop import EndsAtStop
from ..._hook import SessionRunHook
from ..._log import fields
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator
from ._thread import GuardThread

logger = logging.getLogger("asynchooks")

_MAX_LAGS = 100
_LONGEST_PAUSE_SECS = 1.0
_UNSEEN = "code that let no other thread run", ""
LOOP_ITSELF = "the event loop itself"

# never the place that holds the loop: what drives all tasks, and what they wait by
_DRIVERS = {
    "anyio",
    "asynchooks",
    "asyncio",
    "outcome",
    "queue",
    "selectors",
    "sniffio",
    "threading",
    "trio",
}


@dataclass(frozen=True)
class LoopLag:
    """One time that the event loop was held. Made by `LoopLagHook`, for its `lags`.

    Args:
        secs: seconds from the ping to its answer: short of the whole time by at most half of
            `max_lag_secs`.
        culprit: what held it for the largest part, as far as was seen: "after_run of SlowHook",
            "the step", "the step_fn", "the side task 'name'", "the session", "code outside of a
            run", "the event loop itself" or "code that let no other thread run".
        where: the innermost code outside of event loops: "slow.py:12 in compute"; may be "".

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


@_check.names_options
class LoopLagHook(SessionRunHook):
    """Warns of code that holds the event loop, so that no other task can run.

    A daemon thread pings the event loop, with one wake-up per `max_lag_secs` / 2 at most, and
    samples the stack of the loop's thread until the answer comes. Then it logs one line: "the event
    loop was held for 0.35 s by after_run of SlowHook (slow.py:12 in compute)". The duration is
    measured from the ping to the answer, so it may be short by up to `max_lag_secs` / 2. Code that
    holds the GIL, so that no thread runs, may remain unseen.

    It watches from the creation of the raw session to a stop or the end. One such hook per event
    loop is enough, as it sees the code of other sessions, too. In virtual time it does nothing.
    Give it to one session at a time.

    Args:
        max_lag_secs: seconds that the event loop may be held without a warning, > 0.

    Raises:
        TypeError: `max_lag_secs` is not a number.
        ValueError: `max_lag_secs` is not above 0, or not finite.

    Example:
        watchdog = LoopLagHook(max_lag_secs=0.1)
        async with MonitoredSession([watchdog], creator) as session:
            await session.run("loss")
        for lag in watchdog.lags:
            print(lag)
    """

    acts_outside = True
    uses_default_graph = False
    needs_session_in_begin = False
    _shown = (("max_lag_secs", "_max_lag_secs"),)

    def __init__(self, max_lag_secs: float = 0.1) -> None:
        self._max_lag_secs = _check.seconds("max_lag_secs", max_lag_secs)
        self.lags: deque[LoopLag] = deque(maxlen=_MAX_LAGS)
        """The latest hundred lags since `begin`, in order."""

    async def begin(self) -> None:
        self.lags.clear()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        engine = current_engine()
        if engine.is_virtual:
            return
        watch = _Watch(engine, self._max_lag_secs, self.lags, session.global_step)
        coord.start_soon(watch.answer, name="LoopLagHook")
        # not in the side task: it has not run yet, and the first step may hold the event loop
        watch.thread = GuardThread(watch.look, self._max_lag_secs / 2, "asynchooks-lag")


@dataclass
class _Ping:
    """A ping of the event loop, and the seconds for which each code was seen to hold it since."""

    sent_at: float
    looked_at: float
    secs_by_holder: dict[tuple[str, str], float] = field(default_factory=dict)


class _Watch:
    """Pings of a thread, and their answers by a side task, over one raw session."""

    def __init__(
        self, engine: Engine, max_lag_secs: float, lags: deque[LoopLag], step: GlobalStep
    ) -> None:
        self._engine = engine
        self._max_lag_secs = max_lag_secs
        self._lags = lags
        self._step = step
        self._loop_thread = threading.get_ident()
        # The thread sends a ping only while there is none, to the slot of that moment; the event
        # loop first replaces the slot, then removes the ping. So neither needs a lock.
        self._slot = Slot(engine, "a ping")
        self.ping: _Ping | None = None
        self.thread: GuardThread | None = None

    async def answer(self) -> None:
        """The side task: it answers by running."""
        try:
            value = None
            while value is not STOPPED:
                with EndsAtStop(self._slot, None):
                    value = await self._engine.park(self._slot)
                self._take_answer()
        finally:
            self._take_answer()  # of the last ping
            if self.thread is not None:
                self.thread.close()

    def look(self) -> float:
        """In the thread: ping, or sample what holds the event loop; returns the next pause."""
        now, ping = self._engine.now(), self.ping
        if ping is None:
            self.ping = _Ping(now, now)
            self._engine.wake(self._slot)
            return self._max_lag_secs / 2
        # also before the lag is too long: when it becomes so, the answer may come first
        holder = holder_of(sys._current_frames().get(self._loop_thread))
        held = ping.secs_by_holder
        held[holder] = held.get(holder, 0.0) + now - ping.looked_at
        ping.looked_at = now
        # a loop that is held for long, or for ever, is sampled less often
        return max(self._max_lag_secs / 2, min((now - ping.sent_at) / 4, _LONGEST_PAUSE_SECS))

    def _take_answer(self) -> None:
        ping = self.ping
        if ping is None:
            return
        secs = self._engine.now() - ping.sent_at
        if secs > self._max_lag_secs:
            held = list(ping.secs_by_holder.items())  # in one piece: the thread may be looking
            holder = max(held, key=lambda each: each[1], default=(_UNSEEN, 0.0))[0]
            lag = LoopLag(secs, *holder)
            self._lags.append(lag)
            extra = fields("LoopLagHook", step=self._step.last_known, reason=lag)
            logger.warning("the event loop was held for %s", lag, extra=extra)
        self._slot = Slot(self._engine, "a ping")
        self.ping = None


def holder_of(frame: FrameType | None) -> tuple[str, str]:
    """(`culprit`, `where`) of a `LoopLag`, on the stack of the event loop's thread.

    What is outside of the outermost coroutine is the event loop and its callers.

    Args:
        frame: the innermost frame of that thread.
    """
    frames = [
        (
            each,
            f"{PurePath(each.f_code.co_filename).name}:{line} in {each.f_code.co_name}",
        )
        for each, line in walk(frame)
    ]
    num_of_task = len(frames)
    while num_of_task and not frames[num_of_task - 1][0].f_code.co_flags & inspect.CO_COROUTINE:
        num_of_task -= 1
    where = ""
    for each, place in frames[:num_of_task]:
        module = each.f_globals.get("__name__") or ""
        if not where and module.partition(".")[0] not in _DRIVERS:
            where = place
        if culprit := holder_in(each):
            return culprit, where or frames[0][1]
    innermost = frames[0][1] if frames else ""
    return ("code outside of a run", where) if where else (LOOP_ITSELF, innermost)
