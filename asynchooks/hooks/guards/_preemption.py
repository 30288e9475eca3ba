"""PreemptionHook: an orderly stop at a signal, or by a call, and the end of the process.

It saves nothing by itself: a clean end does, where there is a CheckpointSaverHook.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from ... import _check
from ..._engine.base import TIMED_OUT, Engine, Slot
from ..._engine.current import current_engine, system_now
from ..._engine.stop import StopReason
from ..._errors import StepUnreachableError, add_note, is_preemption
from ..._hook import SessionHooks, SessionRunHook
from ..._log import fields
from ..._stopping.coordinator import Coordinator
from ...backends._raw_session import RawSession, raw_session_of
from ..checkpoint._saver_hook import CheckpointSaverHook
from ._signals import expect_exit, wake_on_signals

logger = logging.getLogger("asynchooks")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
_ACTION_BYTES = 512
"""More than C's `struct sigaction` has on any system."""
_JOIN_SECS = 1.0
"""How long the end of a session waits for the deadline's thread, which then has nothing to do."""


class PreemptionHook(SessionRunHook):
    """Stops training in an orderly way when the process gets a signal, or by `preempt`.

    All workers of the model are then asked to stop: the step in progress completes, also in a
    thread, every wait of asynchooks ends, the next run ends the block, `end` of all hooks runs, and
    a CheckpointSaverHook saves that step. When the session is closed the signal leaves the block:
    as KeyboardInterrupt for SIGINT, else as `SystemExit(128 + signal)`, the exit code that shells
    report for that signal (also out of trio's task groups, which wrap it: then through
    `sys.excepthook`). Where the block does not end by itself (it waits for another library,
    outside of `or_stop`), the step is saved after half of the time, and when the time is over the
    process ends at once, with that exit code. A later signal ends the process at once, too, by
    that signal. Signals within a second of the first are ignored: programs that stop a group of
    processes signal each, and some of these pass the signal on.

    Processes that are forked meanwhile handle signals as they would without the hook.

    One hook may be given to several sessions: all stop, and the signal leaves the last one. Put
    it first, so that it sees signals while the other hooks begin. The handlers that it replaces
    are put back when `after_close` of every hook has returned.

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
        if isinstance(signals, (int, str)) or not isinstance(signals, Iterable):
            raise TypeError(f"signals is {signals!r}; give several: [signal.SIGTERM]")
        self._signals = list(dict.fromkeys(_checked_signal(each) for each in signals))
        self._deadline_secs = _check.number(
            "deadline_secs", deadline_secs, above=0, finite=False, expected="seconds > 0"
        )
        self._same_signal_secs = _check.number(
            "same_signal_secs", same_signal_secs, least=0, finite=False, expected="seconds >= 0"
        )
        self._handlers = _SignalHandlers(self._on_signal)
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

    async def begin(self) -> None:
        shared, engine = SessionHooks.of(self), current_engine()
        is_first = self._watch is None
        if is_first:
            self._arrived = []
            if self._reason is self._past_reason:
                self._reason = self._past_reason = None
        watch = self._watch = self._watch or _Watch(engine, self._serve)
        watch.num_sessions += 1
        watch.sessions.append(shared)
        shared.leave.append(self._leave)
        if not is_first:
            return
        if self._reason is not None:  # before there was a session
            watch.wake()
        if not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "PreemptionHook sees no signals: this is the thread %r, and Python handles "
                "signals in the main thread only. Open the session there, or have the handler of "
                "the signals call the hook's preempt()", threading.current_thread().name,
                extra=fields(self),
            )  # fmt: skip
            return
        watch.deadline = None if engine.is_virtual else _Deadline(self._deadline_secs)
        watch.stop_listening = wake_on_signals(engine)
        self._handlers = _SignalHandlers(self._on_signal)  # the old ones may be in use below
        self._handlers.install(self._signals)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions: no locks, no log."""
        received = signal.Signals(number)
        arrival = received, system_now()
        self._arrived.append(arrival)
        first = self._arrived[0]
        if arrival is not first:
            if arrival[1] - first[1] >= self._same_signal_secs:
                _end_by(number)
            return
        if self._reason is None:
            self._reason = StopReason("PreemptionHook", f"the process got {received.name}")
        watch = self._watch
        if watch is not None:
            if watch.deadline is not None:
                watch.deadline.start(received)
            watch.wake()
        self._handlers.pass_on(received, frame)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        watch, raw = self._watch, raw_session_of(session)
        assert watch is not None
        if raw not in watch.raws:
            watch.raws.append(raw)
        if self._is_by_hand:
            watch.coords.append(coord)
        if self._reason is not None:  # it came before there was anything to stop
            watch.stop(self._reason)

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
                "ends the process at once",
                received.name, self._deadline_secs, self._same_signal_secs, extra=extra,
            )  # fmt: skip
        watch.stop(reason)
        half = watch.engine.now() + self._deadline_secs / 2
        if await watch.engine.park(watch.ending, half) is TIMED_OUT:
            await self._rescue(watch)

    async def _rescue(self, watch: _Watch) -> None:
        """Save while the block, which does not end by itself, goes on."""
        logger.warning(
            "The block has not ended for %g s: saving now", self._deadline_secs / 2,
            extra=watch.log_fields(None),
        )  # fmt: skip
        begun = [each for session in watch.sessions for each in session.begun]
        for saver in [each for each in begun if isinstance(each, CheckpointSaverHook)]:
            try:
                await saver.checkpointer.save_beside(timeout=self._deadline_secs / 4)
            except BaseException as error:
                if watch.engine.failure_in(error) is None:
                    raise
                extra = watch.log_fields(repr(error))
                logger.error("Saving before the end failed: %r", error, extra=extra)

    @property
    def _is_by_hand(self) -> bool:
        return self._watch is not None and any(each.is_by_hand for each in self._watch.sessions)

    async def end(self, session: Any) -> None:
        if self._is_by_hand and (left := await self._leave(None)) is not None:
            raise left

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if self._is_by_hand:
            await self._leave(exception)

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        """The session's last moment: until then a second signal must find the handlers."""
        watch = self._watch_after_last()
        if watch is None:
            return error
        if not self._arrived:
            self._handlers.is_in_use = False  # signals go to the handlers that were there before
        self._watch, self._past_reason = None, self._reason
        try:
            await self._end_watch(watch)
        except BaseException as interruption:
            error = error or interruption
        finally:
            self._handlers.put_back()
            watch.stop_listening()
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
        _exit_out_of_groups(128 + received)
        is_interrupt = received is signal.SIGINT
        left = KeyboardInterrupt() if is_interrupt else SystemExit(128 + received)
        return expect_exit(watch.engine, left)

    def on_drop(self) -> None:
        watch = self._watch_after_last()
        if watch is None:
            return
        self._watch, self._past_reason = None, self._reason
        self._handlers.is_in_use = False
        if watch.deadline is not None:
            watch.deadline.close(waits=False)
        if threading.current_thread() is threading.main_thread():
            self._handlers.put_back()
            watch.stop_listening()
        watch.engine.wake_from_signal(watch.ending)
        watch.wake()

    def _watch_after_last(self) -> _Watch | None:
        """A session has ended: the watch, if no other one is open."""
        watch = self._watch
        if watch is not None:
            watch.num_sessions -= 1
        return None if watch is None or watch.num_sessions else watch

    async def _end_watch(self, watch: _Watch) -> None:
        """End the watch, and let workers without this hook end before the signal ends them."""
        watch.ending.wake()
        watch.request.wake()
        with watch.engine.shielded(self._deadline_secs):
            await watch.task.wait()
            for raw in watch.raws if self._arrived else ():
                if raw.global_step.statistics().workers_open:
                    with contextlib.suppress(StepUnreachableError, TimeoutError):
                        await raw.global_step.wait_for(sys.maxsize, timeout=self._deadline_secs / 4)


class _Watch:
    """All sessions of one hook that overlap, and the task that waits for a signal for them."""

    def __init__(self, engine: Engine, serve: Callable[[_Watch], Awaitable[None]]) -> None:
        self.engine = engine
        self.request = Slot(engine, "a signal, or preempt()")
        self.ending = Slot(engine, "the end of the session")
        self.deadline: _Deadline | None = None
        self.stop_listening: Callable[[], None] = lambda: None
        self.num_sessions = 0  # that are open; the lists below keep those that have ended
        self.sessions: list[SessionHooks] = []
        self.coords: list[Coordinator] = []  # where the hook is called by hand
        self.raws: list[RawSession] = []
        self.task = engine.start(serve, self)

    def log_fields(self, reason: object) -> dict[str, Any]:
        """For records; the step of the first model, the only one as a rule."""
        step = self.raws[0].global_step.last_known if self.raws else None
        return fields("PreemptionHook", step=step, reason=reason)

    def wake(self) -> None:
        """A stop was requested, in any thread, or in a signal handler."""
        self.engine.wake_from_signal(self.request)

    def stop(self, reason: StopReason) -> None:
        for session in self.sessions:
            if session.stop is not None:
                session.stop.request(None, reason, all_workers=True)
        for coord in self.coords:
            coord.request_stop(reason=reason, all_workers=True)


def _checked_signal(number: object) -> signal.Signals:
    """The value as a signal that a program can handle."""
    try:
        checked = signal.Signals(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"signals holds {number!r}; give signals, such as signal.SIGTERM") from None
    if checked.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"signals holds {checked.name}, which no program can handle; leave it out")
    return checked


class _SignalHandlers:
    """One handler for several signals; those that it replaces are put back.

    A handler that was put over ours meanwhile stays, and ours below it passes the signal on to the
    one that was there before.
    """

    def __init__(self, on_signal: Callable[[int, FrameType | None], None]) -> None:
        self._on_signal = on_signal
        self.is_in_use = False
        self._found: dict[signal.Signals, Any] = {}
        self._actions: dict[signal.Signals, ctypes.Array[ctypes.c_char]] = {}

    def install(self, signals: Sequence[signal.Signals]) -> None:
        """Handle the signals; only in the main thread."""
        self.is_in_use = True
        _FORKS.handlers.append(self)
        for each in signals:
            if signal.getsignal(each) is None:
                logger.warning(
                    "%s has a handler that is not Python's, and could not be put back: it stays",
                    each.name, extra=fields("PreemptionHook"),
                )  # fmt: skip
                continue
            action = _read_action(each)
            found = signal.signal(each, self._handle)
            self._found[each] = found
            if action is not None and not callable(found):
                self._actions[each] = action  # perhaps one that Python does not know

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_in_use:
            self._on_signal(number, frame)
        else:  # ours stayed because another one had been put over it
            _call(self._found.get(signal.Signals(number)), number, frame)

    def pass_on(self, received: signal.Signals, frame: FrameType | None) -> None:
        """Call the handler of another PreemptionHook below this one, if it is in use."""
        below = _original(self._found.get(received), received)
        if _handlers_of(below) is not None:
            _call(below, received, frame)

    def put_back(self) -> None:
        """Put the replaced handlers back; only in the main thread."""
        self.is_in_use = False
        for each, found in list(self._found.items()):
            if signal.getsignal(each) != self._handle:
                continue
            signal.signal(each, _original(found, each))
            if (action := self._actions.pop(each, None)) is not None:
                ctypes.CDLL(None).sigaction(int(each), action, None)
            del self._found[each]
        if not self._found and self in _FORKS.handlers:
            _FORKS.handlers.remove(self)

    @property
    def signals(self) -> set[signal.Signals]:
        """Those that have this handler, perhaps below another one."""
        return set(self._found)


class _Forks:
    """Signals do in a forked child what they did before: no session goes on there.

    They are blocked during the fork. One that the child gets before its handlers are back would be
    lost: Python drops what has come to a child by then (300 of 300 that were sent at once).
    """

    def __init__(self) -> None:
        self.handlers: list[_SignalHandlers] = []  # that are installed
        self._before = threading.local()  # the signals that this thread blocks

    def block(self) -> None:
        if sys.platform != "win32":  # where nothing forks
            signals = set[signal.Signals]().union(*(each.signals for each in self.handlers))
            self._before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def unblock(self) -> None:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)

    def put_back_in_child(self) -> None:
        handlers, self.handlers = self.handlers, []
        for each in handlers:
            each.is_in_use = False
        for each in handlers:
            each.put_back()
        if handlers:
            signal.set_wakeup_fd(-1)  # it would wake the parent's event loop
        self.unblock()


_FORKS = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_FORKS.block,
        after_in_parent=_FORKS.unblock,
        after_in_child=_FORKS.put_back_in_child,
    )


def _read_action(number: signal.Signals) -> ctypes.Array[ctypes.c_char] | None:
    """C's own handler, such as faulthandler's; None where the system has no such thing."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    try:
        failed = ctypes.CDLL(None).sigaction(int(number), None, action)
    except (AttributeError, OSError, TypeError):
        return None
    return None if failed else action


def _handlers_of(handler: Any) -> _SignalHandlers | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, _SignalHandlers) else None


def _original(handler: Any, number: signal.Signals) -> Any:
    """The handler, or the one that it replaced, if it is ours and not in use now."""
    while (ours := _handlers_of(handler)) is not None and not ours.is_in_use:
        handler = ours._found.get(number, signal.SIG_DFL)
    return handler


def _call(handler: Any, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler is not signal.SIG_IGN:
        _end_by(number)


def _end_by(number: int) -> None:
    """End the process as the signal does where it has no handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class _Deadline:
    """Ends the process a time after a signal, from a thread of its own."""

    def __init__(self, deadline_secs: float) -> None:
        self._secs = deadline_secs
        self._messages: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        name = "asynchooks-deadline"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def start(self, received: signal.Signals) -> None:
        """Start the time; in a signal handler."""
        self._messages.put(received)

    def close(self, *, waits: bool = True) -> None:
        """The process goes on, or ends by itself: end the thread, and wait for it or not."""
        self._messages.put(None)
        if waits:
            self._thread.join(_JOIN_SECS)

    def _watch(self) -> None:
        received = self._messages.get()
        if received is None:
            return
        with contextlib.suppress(queue.Empty):
            if self._messages.get(timeout=min(self._secs, threading.TIMEOUT_MAX)) is None:
                return
        log = threading.Thread(target=self._log, args=(received,), daemon=True)
        log.start()
        log.join(0.5)  # a pipe without a reader would block it for ever
        os._exit(128 + received)

    def _log(self, received: signal.Signals) -> None:
        logger.critical(
            "The process did not end within %g s of %s: ended", self._secs, received.name,
            extra=fields("PreemptionHook", reason=f"the process got {received.name}"),
        )  # fmt: skip
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(Exception):
                stream.flush()


def _exit_out_of_groups(code: int) -> None:
    """Let the process exit with the code also where the exit leaves it wrapped by task groups.

    Python takes the code of a SystemExit that the hook for uncaught exceptions raises.
    """
    found = getattr(sys.excepthook, "below", sys.excepthook)  # ours is there once only
    exits = (SystemExit, KeyboardInterrupt)

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, BaseExceptionGroup) and error.split(exits)[1] is None:
            raise SystemExit(code)
        found(kind, error, traceback)

    hook.below = found  # type: ignore[attr-defined]

    sys.excepthook = hook
