"""PreemptionHook: a signal, or a call, becomes an orderly stop, and the process ends accordingly.

It saves nothing by itself: a clean end does, where there is a CheckpointSaverHook.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..._engine.base import TIMED_OUT, Engine, EngineTask, Slot
from ..._engine.current import current_engine, system_now
from ..._engine.stop import StopReason
from ..._errors import StepUnreachableError, add_note, is_preemption
from ..._hook import SessionHooks, SessionRunHook
from ..._stopping.coordinator import Coordinator
from ..._timer import is_number
from ...backends._raw_session import RawSession, raw_session_of
from ..checkpoint._saver_hook import CheckpointSaverHook
from ._signal_handlers import Deadline, SignalHandlers, checked_signal, end_by, exit_out_of_groups

logger = logging.getLogger("asynchooks")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class PreemptionHook(SessionRunHook):
    """Stops training in an orderly way when the process gets a signal, or by `preempt`.

    At whatever moment it comes, all workers of the model are asked to stop: the step under way
    completes, also in a thread, every wait of asynchooks ends, the next run ends the block, `end`
    of all hooks runs, and a CheckpointSaverHook saves that step. When the session is closed the
    signal leaves the block: as KeyboardInterrupt for SIGINT, else as `SystemExit(128 + signal)`,
    which is what a shell says of a process that a signal ended (also out of trio's task groups,
    which wrap it: then through `sys.excepthook`). Where the block does not end by itself (it waits
    for another library, outside of `or_stop`), the step is saved after half of the time, and when
    the time is over the process ends at once, with that exit code. A later signal ends it at once,
    too, by that signal; but not within a second: who stops a group of processes signals each, and
    some of them pass the signal on.

    One hook may be given to several sessions: all stop, and the signal leaves the last one. Put
    it first, so that it sees signals while the others begin. Handlers that were there before
    are put back at the end.

    Where the signals are a host's (a web server, a notebook), give `signals=()` and have the host
    call `preempt`, from any thread or signal handler: the same orderly stop, after which the block
    ends cleanly. Then nothing ends the process. Outside of the main thread no program can handle
    signals: the log says so, and `preempt` works.

    Args:
        signals: which ones, such as `signal.SIGTERM`; none where a host has the handlers.
        deadline_secs: seconds, > 0, from the first signal to the end of the process.
        same_signal_secs: seconds, >= 0, from the first signal, within which further ones, also of
            other kinds, are taken for the same; on the system's clock.

    Raises:
        TypeError, ValueError: `signals` holds what is no signal; `deadline_secs` is not > 0, or
            `same_signal_secs` not >= 0.
        KeyboardInterrupt, SystemExit: at the end of the block: a signal came.

    Example:
        hooks = [PreemptionHook(deadline_secs=20), StopAtStepHook(last_step=100)]
    """

    _looks_at_default_graph = False
    _shown = (("signals", "_signals"),)

    def __init__(
        self,
        signals: Iterable[signal.Signals] = _SIGNALS,
        *,
        deadline_secs: float = 25.0,
        same_signal_secs: float = 1.0,
    ) -> None:
        if isinstance(signals, (int, str)) or not isinstance(signals, Iterable):
            raise TypeError(f"signals is {signals!r}; give several: [signal.SIGTERM]")
        if not is_number(deadline_secs):
            raise TypeError(f"deadline_secs is {deadline_secs!r}; give seconds > 0")
        if not deadline_secs > 0:
            raise ValueError(f"deadline_secs is {deadline_secs!r}; give seconds > 0")
        if not is_number(same_signal_secs):
            raise TypeError(f"same_signal_secs is {same_signal_secs!r}; give seconds >= 0")
        if not same_signal_secs >= 0:
            raise ValueError(f"same_signal_secs is {same_signal_secs!r}; give seconds >= 0")
        self._signals = list(dict.fromkeys(checked_signal(each) for each in signals))
        self._deadline_secs = deadline_secs
        self._same_signal_secs = same_signal_secs
        self._num_sessions = 0
        self._handlers = SignalHandlers(self._on_signal)
        # signals, each with its time; appended to, as one handler may interrupt another anywhere
        self._arrived: list[tuple[signal.Signals, float]] = []
        self._reason: StopReason | None = None  # the first signal's, or the first call's
        self._past_reason: StopReason | None = None  # that of sessions that have ended
        self._sessions: list[SessionHooks] = []
        self._coords: list[Coordinator] = []  # where it is called by hand
        self._raws: list[RawSession] = []
        self._watch: _Watch | None = None  # there while a session is open
        self._deadline: Deadline | None = None

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came, None before, and where `preempt` was called instead."""
        return self._arrived[0][0] if self._arrived else None

    @property
    def is_preempted(self) -> bool:
        """Whether a signal came, or `preempt` was called; from any thread.

        Like `received` it stays true after the session, and is false again when the next begins.
        """
        return self._reason is not None

    def preempt(self, reason: str | None = None) -> None:
        """Stop as at a signal, but end the block cleanly: no SystemExit, no end of the process.

        For hosts that have the signals. Returns at once; call it from any thread, or in a signal
        handler. Only the first call counts. Where no session is open, the next one stops as soon
        as it is. A block that does not end is saved beside it after half of `deadline_secs`.

        Args:
            reason: why, for the log and the session's `stop_reason`.
        """
        if self._reason is self._past_reason:
            self._reason = StopReason("PreemptionHook", reason or "preempt() was called")
        watch = self._watch  # looked at last: `begin` looks at the reason last
        if watch is not None:
            watch.wake()

    async def begin(self) -> None:
        shared = SessionHooks.of(self)
        self._sessions.append(shared)
        self._num_sessions += 1
        if self._num_sessions > 1:
            return
        self._arrived = []
        if self._reason is self._past_reason:
            self._reason = self._past_reason = None
        engine = current_engine()
        self._watch = _Watch(engine)
        self._watch.task = engine.start(self._serve, self._watch)
        if self._reason is not None:  # before there was a session
            self._watch.wake()
        if self._signals:
            self._handle_signals(engine, self._watch)

    def _handle_signals(self, engine: Engine, watch: _Watch) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "PreemptionHook sees no signals: this is the thread %r, and Python handles "
                "signals in the main thread only. Open the session there, or have whatever "
                "handles signals call the hook's preempt()", threading.current_thread().name,
            )  # fmt: skip
            return
        self._deadline = None if engine.is_virtual else Deadline(self._deadline_secs)
        watch.stop_hearing = engine.wake_on_signals()
        self._handlers = SignalHandlers(self._on_signal)  # those of before may be in use below
        self._handlers.install(self._signals)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions: no locks, no log."""
        received = signal.Signals(number)
        arrival = received, system_now()
        self._arrived.append(arrival)
        first = self._arrived[0]
        if arrival is not first:
            if arrival[1] - first[1] >= self._same_signal_secs:
                end_by(number)
            return
        if self._reason is None:
            self._reason = StopReason("PreemptionHook", f"the process got {received.name}")
        if self._deadline is not None:
            self._deadline.begin(received)
        if self._watch is not None:
            self._watch.wake()
        self._handlers.pass_on(received, frame)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        raw = raw_session_of(session)
        if raw not in self._raws:
            self._raws.append(raw)
        if self._is_by_hand:
            self._coords.append(coord)
        if self._reason is not None:  # before there was anything to stop
            self._stop(self._reason)

    def _stop(self, reason: StopReason) -> None:
        for session in self._sessions:
            if session.stops is not None:
                session.stops.request(None, reason, all_workers=True)
        for coord in self._coords:
            coord.request_stop(reason=reason, all_workers=True)

    async def _serve(self, watch: _Watch) -> None:
        """Wait for a signal, a call, or the end of all sessions, and act."""
        await watch.engine.park(watch.news)
        reason = self._reason
        if watch.ending.is_woken or reason is None:
            return
        received = self.received
        if received is None:
            logger.warning("%s: training stops, and what there is to save is saved", reason)
        else:
            logger.warning(
                "%s: training stops, and what there is to save is saved, within %g s. Another "
                "signal, after %g s, ends the process at once",
                received.name, self._deadline_secs, self._same_signal_secs,
            )  # fmt: skip
        self._stop(reason)
        half = watch.engine.now() + self._deadline_secs / 2
        if await watch.engine.park(watch.ending, half) is TIMED_OUT:
            await self._rescue()

    async def _rescue(self) -> None:
        """A block does not end by itself: save beside it."""
        logger.warning("The block has not ended for %g s: saving now", self._deadline_secs / 2)
        begun = [each for session in self._sessions for each in session.begun]
        for saver in [each for each in begun if isinstance(each, CheckpointSaverHook)]:
            try:
                await saver.checkpointer.save_beside(timeout=self._deadline_secs / 4)
            except BaseException as error:
                if current_engine().failure_in(error) is None:
                    raise
                logger.error("Saving before the end failed: %r", error)

    @property
    def _is_by_hand(self) -> bool:
        return any(session.is_by_hand for session in self._sessions)

    async def end(self, session: Any) -> None:
        if self._is_by_hand:
            error = await self._leave(None)
            if error is not None:
                raise error

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if self._is_by_hand:
            await self._leave(exception)

    async def after_close(self, exception: BaseException | None) -> bool:
        left = await self._leave(exception)
        if left is not None and left is not exception:
            raise left
        return left is None

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        self._num_sessions -= 1
        if self._num_sessions > 0:
            return error
        watch, self._watch = self._watch, None
        if not self._arrived:
            self._handlers.is_in_use = False  # signals go to whatever was there before
        raws, self._raws = self._raws, []
        self._sessions, self._coords = [], []
        self._past_reason = self._reason
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
                self._deadline = None
        if self._past_reason is None:
            return error
        if is_preemption(error):
            logger.warning("While training stopped, the session was lost: %r", error)
        elif error is not None:
            add_note(error, f"after {self._past_reason.why}")
            return error
        received = self.received
        if received is None:
            return None
        exit_out_of_groups(128 + received)
        is_interrupt = received is signal.SIGINT
        left = KeyboardInterrupt() if is_interrupt else SystemExit(128 + received)
        return watch.engine.expect_exit(left)

    def on_drop(self) -> None:
        self._num_sessions -= 1
        if self._num_sessions > 0:
            return
        watch, self._watch = self._watch, None
        self._past_reason = self._reason
        self._handlers.is_in_use = False
        self._sessions, self._coords, self._raws = [], [], []
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.drop()
        if threading.current_thread() is threading.main_thread():
            self._handlers.put_back()
            if watch is not None:
                watch.stop_hearing()
        if watch is not None:
            watch.engine.wake_from_signal(watch.ending)
            watch.wake()

    async def _see_off(self, watch: _Watch, raws: list[RawSession]) -> None:
        """End the watch, and let workers without this hook end before the signal ends them."""
        watch.ending.wake()
        watch.news.wake()
        with watch.engine.shielded(self._deadline_secs):
            if watch.task is not None:
                await watch.task.wait()
            for raw in raws if self._arrived else ():
                if raw.global_step.statistics().workers_open:
                    with contextlib.suppress(StepUnreachableError, TimeoutError):
                        await raw.global_step.wait_for(sys.maxsize, timeout=self._deadline_secs / 4)


class _Watch:
    """What waits for a signal, for all sessions of one hook."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.news = Slot(engine, "a signal, or preempt()")
        self.ending = Slot(engine, "the end of the session")
        self.task: EngineTask | None = None
        self.stop_hearing: Callable[[], None] = lambda: None

    def wake(self) -> None:
        """There is news; in any thread, or in a signal handler."""
        self.engine.wake_from_signal(self.news)
