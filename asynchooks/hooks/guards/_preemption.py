"""PreemptionHook: an orderly stop at a signal, or by a call, and the end of the process.

It saves nothing by itself: a clean end does, where there is a CheckpointSaverHook.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ... import _check
from ..._engine.base import TIMED_OUT, Engine, Slot
from ..._engine.current import current_engine, system_now
from ..._engine.stop import StopReason
from ..._errors import StepUnreachableError, add_note, is_preemption
from ..._hook import SessionHooks, SessionRunHook
from ..._log import fields
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator
from ..._stopping.session_stop import SessionStop
from ..checkpoint._saver_hook import CheckpointSaverHook
from ._signals import HANDLER, checked_signals, expect_exit
from ._thread import GuardThread

logger = logging.getLogger("asynchooks")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


@_check.names_options
class PreemptionHook(SessionRunHook):
    """Stops training in an orderly way when the process gets a signal, or by `preempt`.

    All workers of the model are then asked to stop: the step in progress completes, also in a
    thread, every wait of asynchooks ends, the next run ends the block, `end` of all hooks runs, and
    a CheckpointSaverHook saves that step. When the session is closed the signal leaves the block:
    as KeyboardInterrupt for SIGINT, else as `SystemExit(128 + signal)`, the exit code that shells
    report for that signal. Task groups of trio wrap what leaves them: catch it around `trio.run`,
    with `except*`, or the exit code is 1. Where the block does not end by itself (it waits for
    another library, outside of `or_stop`), the step is saved after half of the time, and when the
    time is over the process ends at once, with that exit code. Signals within a second of the first
    are ignored: programs that stop a group of processes signal each, and some of these pass the
    signal on. A later one does what it did before the hook: SIGTERM, as a rule, ends the process.

    Processes that are forked meanwhile handle signals as they would without the hook.

    One hook may be given to several sessions: all stop, and the signal leaves the last one. Put
    it first, so that it sees signals while the other hooks begin. The handlers that it replaces
    are put back when `after_close` of every hook has returned, unless another one was put over
    them. A handler that is not Python's, as faulthandler's, is not put back.

    Where a host handles the signals (a web server, a notebook), give `signals=()` and have the host
    call `preempt`, from any thread or signal handler: the same orderly stop, after which the block
    ends cleanly and the process goes on. Outside of the main thread no program can handle signals:
    a warning says so, and `preempt` works.

    Args:
        signals: such as `signal.SIGTERM`; none where a host has the handlers.
        deadline_secs: seconds, > 0, from the first signal to the end of the process.
        same_signal_secs: seconds, >= 0, from the first signal, within which further ones, also of
            other kinds, count as the same; on the system's clock.

    Raises:
        RuntimeError: in begin: no session calls the hook.
        TypeError, ValueError: an element of `signals` is not a signal; `deadline_secs` is not > 0,
            or `same_signal_secs` not >= 0.
        KeyboardInterrupt, SystemExit: at the end of the block: a signal came.

    Example:
        hooks = [PreemptionHook(deadline_secs=20), StopAtStepHook(last_step=100)]
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("signals", "_signals"),)

    def __init__(
        self,
        signals: Iterable[signal.Signals] = _SIGNALS,
        *,
        deadline_secs: float = 25.0,
        same_signal_secs: float = 1.0,
    ) -> None:
        self._signals = checked_signals(signals)
        self._deadline_secs = _check.number(
            "deadline_secs", deadline_secs, above=0, finite=False, expected="seconds > 0"
        )
        self._same_signal_secs = _check.number(
            "same_signal_secs", same_signal_secs, least=0, finite=False, expected="seconds >= 0"
        )
        # signals, each with its time; appended to, as one handler may interrupt another anywhere
        self._arrived: list[tuple[signal.Signals, float]] = []
        self._reason: StopReason | None = None  # the first signal's, or the first call's
        self._past_reason: StopReason | None = None  # of sessions that have ended
        self._watch: _Watch | None = None  # there while a session is open

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came; None before, and where `preempt` was called instead."""
        return self._arrived[0][0] if self._arrived else None

    @property
    def is_preempted(self) -> bool:
        """Whether a signal came, or `preempt` was called; from any thread.

        Like `received` it stays after the session, and is reset when the next one begins.
        """
        return self._reason is not None

    def preempt(self, reason: str | None = None) -> None:
        """Stop as at a signal, but end the block cleanly: no SystemExit, no end of the process.

        For hosts that handle signals. Returns at once; call it from any thread, or in a signal
        handler. Only the first call counts. Where no session is open, the next one stops as soon
        as it is. If the block does not end, the step is saved after half of `deadline_secs`.

        Args:
            reason: why, for the log and the session's `stop_reason`.
        """
        if self._reason is self._past_reason:
            self._reason = StopReason("PreemptionHook", reason or "preempt() was called")
        watch = self._watch  # read last: `begin` reads the reason last
        if watch is not None:
            watch.wake()

    def _take(self, received: signal.Signals) -> bool:
        """For the handler of signals: begin to stop; returns whether the signal is no later one."""
        arrival = received, system_now()
        self._arrived.append(arrival)
        first = self._arrived[0]
        if arrival is not first:
            return arrival[1] - first[1] < self._same_signal_secs
        if self._reason is None:
            self._reason = StopReason("PreemptionHook", f"the process got {received.name}")
        watch = self._watch
        if watch is not None:
            if watch.deadline is not None:
                watch.deadline.look_now()
            watch.wake()
        return True

    async def begin(self) -> None:
        shared = SessionHooks.of(self)
        if shared.stop is None:
            raise RuntimeError(
                "PreemptionHook has no session that it could stop: give it to a MonitoredSession, "
                "rather than call its begin()"
            )
        if self._watch is None:
            self._begin_watch(current_engine())
        assert self._watch is not None
        self._watch.num_open += 1
        self._watch.stops.append(shared.stop)
        self._watch.begun.append(shared.begun)
        shared.leave.append(self._leave)

    def _begin_watch(self, engine: Engine) -> None:
        self._arrived = []
        if self._reason is self._past_reason:
            self._reason = self._past_reason = None
        watch = self._watch = _Watch(engine, self._serve)
        if self._reason is not None:  # before there was a session
            watch.wake()
        if not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "PreemptionHook sees no signals: this is the thread %r, and Python handles "
                "signals in the main thread only. Open the session there, or have the handler of "
                "the signals call the hook's preempt()",
                threading.current_thread().name,
                extra=fields(self),
            )
            return
        if not engine.is_virtual:
            watch.deadline = GuardThread(self._end_process, math.inf, "asynchooks-deadline")
        HANDLER.add(self._take, self._signals, engine)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        assert self._watch is not None
        self._watch.steps[session.global_step] = None
        if self._reason is not None:  # it came before there was anything to stop
            self._watch.stop(self._reason)

    async def _serve(self, watch: _Watch) -> None:
        """Wait for a signal, a call, or the end of all sessions, and act."""
        await watch.engine.park(watch.request)
        reason = self._reason
        if watch.ending.is_woken or reason is None:
            return
        received, extra = self.received, watch.log_fields(reason.why)
        if received is None:
            logger.warning("%s: training stops, and its hooks end", reason, extra=extra)
        else:
            logger.warning(
                "%s: training stops, and its hooks end, within %g s. Another signal, after %g s, "
                "does what it did without the hook",
                received.name,
                self._deadline_secs,
                self._same_signal_secs,
                extra=extra,
            )
        watch.stop(reason)
        half = watch.engine.now() + self._deadline_secs / 2
        if await watch.engine.park(watch.ending, half) is TIMED_OUT:
            await self._rescue(watch)

    async def _rescue(self, watch: _Watch) -> None:
        """Save while the block, which does not end by itself, goes on."""
        logger.warning(
            "The block has not ended for %g s: saving now",
            self._deadline_secs / 2,
            extra=watch.log_fields(None),
        )
        hooks = [each for begun in watch.begun for each in begun]
        for saver in [each for each in hooks if isinstance(each, CheckpointSaverHook)]:
            try:
                await saver.checkpointer.save_beside(timeout=self._deadline_secs / 4)
            except BaseException as error:
                if watch.engine.failure_in(error) is None:
                    raise
                extra = watch.log_fields(repr(error))
                logger.error("Saving before the end failed: %r", error, extra=extra)

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        """A session is closed; returns what leaves it, which of the last one is the signal."""
        watch = self._watch_after_last()
        if watch is None:
            return error
        if not self._arrived:  # else further ones within the time are the same until the end
            HANDLER.remove(self._take)
        try:
            await self._end_watch(watch)
        except BaseException as interruption:
            error = error or interruption
        finally:
            HANDLER.remove(self._take)
            if watch.deadline is not None:
                watch.deadline.close()
        if self._past_reason is None:
            return error
        if is_preemption(error):
            extra = watch.log_fields(repr(error))
            logger.warning("While training stopped, the session was lost: %r", error, extra=extra)
        elif error is not None:
            add_note(error, f"after {self._past_reason.why}")
            return error
        received = self.received
        if received is None:
            return None
        is_interrupt = received is signal.SIGINT
        left = KeyboardInterrupt() if is_interrupt else SystemExit(128 + received)
        return expect_exit(watch.engine, left)

    def on_drop(self) -> None:
        watch = self._watch_after_last()
        if watch is None:
            return
        HANDLER.remove(self._take)
        if watch.deadline is not None:
            watch.deadline.let_go()
        watch.engine.wake_from_signal(watch.ending)
        watch.wake()

    def _watch_after_last(self) -> _Watch | None:
        """A session has ended: the watch, which is over, if no other one is open."""
        watch = self._watch
        assert watch is not None
        watch.num_open -= 1
        if watch.num_open:
            return None
        self._watch, self._past_reason = None, self._reason
        return watch

    async def _end_watch(self, watch: _Watch) -> None:
        """End the watch, and let workers without this hook end before the signal ends them."""
        watch.ending.wake()
        watch.request.wake()
        with watch.engine.shielded(self._deadline_secs):
            await watch.task.wait()
            for step in watch.steps if self._arrived else ():
                if step.statistics().workers_open:
                    with contextlib.suppress(StepUnreachableError, TimeoutError):
                        await step.wait_for(sys.maxsize, timeout=self._deadline_secs / 4)

    def _end_process(self) -> float:
        """In the deadline's thread: end the process when the time is over; else how long that is.

        The line is logged in a thread of its own, which a pipe without a reader holds for ever.
        """
        if not self._arrived:
            return math.inf
        received, since = self._arrived[0]
        left = since + self._deadline_secs - system_now()
        if left > 0:
            return left
        log = threading.Thread(target=self._log_end, args=(received,), daemon=True)
        log.start()
        log.join(0.5)
        os._exit(128 + received)

    def _log_end(self, received: signal.Signals) -> None:
        logger.critical(
            "The process did not end within %g s of %s: ended",
            self._deadline_secs,
            received.name,
            extra=fields(self, reason=f"the process got {received.name}"),
        )
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(Exception):
                stream.flush()


class _Watch:
    """All sessions of one hook that overlap, and the task that waits for a signal for them."""

    def __init__(self, engine: Engine, serve: Callable[[_Watch], Awaitable[None]]) -> None:
        self.engine = engine
        self.request = Slot(engine, "a signal, or preempt()")
        self.ending = Slot(engine, "the end of the session")
        self.deadline: GuardThread | None = None
        self.num_open = 0  # of the sessions; the three below keep those that have ended
        self.stops: list[SessionStop] = []
        self.begun: list[list[Any]] = []  # the hooks of each that have begun
        self.steps: dict[GlobalStep, None] = {}  # of the models, in order
        self.task = engine.start(serve, self)

    def log_fields(self, reason: object) -> dict[str, Any]:
        """For records; the step of the first model, the only one as a rule."""
        step = next((each.last_known for each in self.steps), None)
        return fields("PreemptionHook", step=step, reason=reason)

    def wake(self) -> None:
        """A stop was requested, in any thread, or in a signal handler."""
        self.engine.wake_from_signal(self.request)

    def stop(self, reason: StopReason) -> None:
        for stop in self.stops:
            stop.request(None, reason, all_workers=True)
