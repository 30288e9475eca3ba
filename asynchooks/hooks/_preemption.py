"""PreemptionHook: a signal becomes an orderly stop, and the process ends as it was told to.

It saves nothing by itself: a clean end does, where there is a CheckpointSaverHook.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from .._coordinator import Coordinator
from .._engine import TIMED_OUT, Engine, EngineTask, Slot, current_engine
from .._errors import StepUnreachableError, is_preemption
from .._hook import SessionRunHook
from .._raw_session import RawSession, raw_session_of
from .._session_stop import SessionStop
from .._stop_reason import StopReason
from .._timer import is_number
from ._checkpoint_saver import CheckpointSaverHook
from ._signal_handlers import (
    Deadline,
    SignalHandlers,
    checked_signal,
    end_by,
    exit_out_of_groups,
)

logger = logging.getLogger("asynchooks")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class PreemptionHook(SessionRunHook):
    """Stops training in an orderly way when the process gets a signal, at whatever moment.

    The session is asked to stop: the step under way completes, also in a thread, every wait of
    asynchooks ends, `end` of all hooks runs, and a CheckpointSaverHook saves that step. When the
    session is closed the signal leaves the block: as KeyboardInterrupt for SIGINT, else as
    `SystemExit(128 + signal)`, which is what a shell says of a process that a signal ended (also
    out of trio's task groups, which wrap it: then through `sys.excepthook`). Where
    the block does not end by itself (it waits for another library, outside of `or_stop`), the
    step is saved after half of the time, and when the time is over the process ends at once, with
    that exit code. A second signal ends it at once, too, by that signal.

    One hook may be given to several sessions: all stop, and the signal leaves the last one. Put
    it first, so that it hears of signals while the others begin. Handlers that were there before
    are put back at the end.

    Outside of the main thread no program can handle signals: then the log says so, and nothing
    else happens.

    Args:
        signals: which ones, such as `signal.SIGTERM`.
        deadline_secs: seconds, > 0, from the first signal to the end of the process.

    Raises:
        TypeError, ValueError: `signals` holds what is no signal; `deadline_secs` is not > 0.
        KeyboardInterrupt, SystemExit: at the end of the block: a signal came.

    Example:
        hooks = [PreemptionHook(deadline_secs=20), StopAtStepHook(last_step=100)]
    """

    _looks_at_default_graph = False

    def __init__(
        self, signals: Iterable[signal.Signals] = _SIGNALS, *, deadline_secs: float = 25.0
    ) -> None:
        if isinstance(signals, (int, str)) or not isinstance(signals, Iterable):
            raise TypeError(f"signals is {signals!r}; give several: [signal.SIGTERM]")
        if not is_number(deadline_secs):
            raise TypeError(f"deadline_secs is {deadline_secs!r}; give seconds > 0")
        if not deadline_secs > 0:
            raise ValueError(f"deadline_secs is {deadline_secs!r}; give seconds > 0")
        self._signals = list(dict.fromkeys(checked_signal(each) for each in signals))
        self._deadline_secs = deadline_secs
        self._num_sessions = 0
        self._handlers = SignalHandlers(self._on_signal)
        self._received: signal.Signals | None = None
        self._savers: list[CheckpointSaverHook] = []
        self._stops: list[SessionStop] = []
        self._raws: list[RawSession] = []
        self._watch: _Watch | None = None  # there while a session is open and signals are handled
        self._deadline: Deadline | None = None

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came, None before."""
        return self._received

    def _meet(self, hooks: Sequence[Any], stops: SessionStop) -> None:
        self._savers += [each for each in hooks if isinstance(each, CheckpointSaverHook)]
        self._stops.append(stops)

    async def begin(self) -> None:
        self._num_sessions += 1
        if self._num_sessions > 1:
            return
        self._received = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "PreemptionHook sees no signals: this is the thread %r, and Python handles "
                "signals in the main thread only. Open the session there, or ask it to stop: "
                "session.request_stop()", threading.current_thread().name,
            )  # fmt: skip
            return
        engine = current_engine()
        self._deadline = None if engine.is_virtual else Deadline(self._deadline_secs)
        self._watch = _Watch(engine)
        self._watch.task = engine.start(self._serve, self._watch)
        self._watch.stop_hearing = engine.hear_signals()
        self._handlers = SignalHandlers(self._on_signal)  # those of before may be in use below
        self._handlers.install(self._signals)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions: no locks, no log."""
        received = signal.Signals(number)
        watch = self._watch
        if watch is None or self._received is not None:
            end_by(number)
            return
        self._received = received
        if self._deadline is not None:
            self._deadline.begin(received)
        watch.engine.wake_from_signal(watch.news, received)
        self._handlers.pass_on(received, frame)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        raw = raw_session_of(session)
        if raw not in self._raws:
            self._raws.append(raw)
        if self._received is not None:  # before there was anything to stop
            self._stop(self._received)

    def _stop(self, received: signal.Signals) -> None:
        reason = StopReason("PreemptionHook", f"the process got {received.name}")
        for stops in self._stops:
            stops.request(None, reason)
        for raw in self._raws:
            raw.stop_workers(reason)

    async def _serve(self, watch: _Watch) -> None:
        """Wait for a signal, or for the end of all sessions, and act."""
        received = await watch.engine.park(watch.news)
        if received is None:
            return
        logger.warning(
            "%s: training stops, and what there is to save is saved, within %g s. A second signal "
            "ends the process at once", received.name, self._deadline_secs,
        )  # fmt: skip
        self._stop(received)
        half = watch.engine.now() + self._deadline_secs / 2
        if await watch.engine.park(watch.ending, half) is TIMED_OUT:
            await self._rescue()

    async def _rescue(self) -> None:
        """A block does not end by itself: save beside it."""
        logger.warning("The block has not ended for %g s: saving now", self._deadline_secs / 2)
        for saver in self._savers:
            try:
                await saver.checkpointer.save_beside(timeout=self._deadline_secs / 4)
            except Exception as error:
                logger.error("Saving before the end failed: %r", error)

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        self._num_sessions -= 1
        if self._num_sessions > 0:
            return error
        watch, self._watch = self._watch, None
        self._handlers.is_in_use = False  # signals go to whoever was there before
        raws, self._raws = self._raws, []
        self._savers, self._stops = [], []
        if watch is None:
            return error
        try:
            await self._see_off(watch, raws)
        except BaseException as interruption:
            error = error or interruption
        finally:
            self._handlers.put_back()
            watch.stop_hearing()
            if self._deadline is not None:
                self._deadline.lift()
        if self._received is None:
            return error
        if error is not None and not is_preemption(error):  # that one, a recovery would have cured
            error.add_note(f"after the process got {self._received.name}")
            return error
        exit_out_of_groups(128 + self._received)
        if self._received is signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(128 + self._received)

    async def _see_off(self, watch: _Watch, raws: list[RawSession]) -> None:
        """End the watch, and let workers without this hook end before the signal ends them."""
        watch.ending.wake()
        watch.news.wake()
        with watch.engine.shielded(self._deadline_secs):
            if watch.task is not None:
                await watch.task.wait()
            for raw in raws if self._received is not None else ():
                if raw.global_step.statistics().workers_open:
                    with contextlib.suppress(StepUnreachableError, TimeoutError):
                        await raw.global_step.wait_for(sys.maxsize, timeout=self._deadline_secs / 4)


class _Watch:
    """What waits for a signal, for all sessions of one hook."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.news = Slot(engine, "a signal")
        self.ending = Slot(engine, "the end of the session")
        self.task: EngineTask | None = None
        self.stop_hearing: Callable[[], None] = lambda: None
