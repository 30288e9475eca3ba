"""Signal handlers that are borrowed and put back, and the end of a process at its deadline."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

logger = logging.getLogger("asynchooks")

OnSignal = Callable[[int, FrameType | None], None]

_ACTION_BYTES = 512
"""More than C's `struct sigaction` has on any system."""

_JOIN_SECS = 1.0
"""What the end of a session gives to a thread that has nothing more to do but to end."""


def checked_signal(number: object) -> signal.Signals:
    """The signal, if it is one that a program can handle."""
    try:
        checked = signal.Signals(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"signals holds {number!r}; give signals, such as signal.SIGTERM") from None
    if checked.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"signals holds {checked.name}, which no program can handle; leave it out")
    return checked


class SignalHandlers:
    """One handler for several signals, in place of those that are there, which are put back.

    Where somebody put a handler over ours meanwhile, it stays, and ours below it passes the signal
    on to what was there before.
    """

    def __init__(self, on_signal: OnSignal) -> None:
        self._on_signal = on_signal
        self.is_in_use = False
        self._found: dict[signal.Signals, Any] = {}
        self._actions: dict[signal.Signals, ctypes.Array[ctypes.c_char]] = {}

    def install(self, signals: Sequence[signal.Signals]) -> None:
        """Take the signals over; only in the main thread."""
        self.is_in_use = True
        for each in signals:
            if signal.getsignal(each) is None:
                logger.warning(
                    "%s is handled by something that is not Python, and could not be put back: it "
                    "is left alone", each.name,
                )  # fmt: skip
                continue
            action = _read_action(each)
            found = signal.signal(each, self._handle)
            self._found[each] = found
            if action is not None and not callable(found):
                self._actions[each] = action  # perhaps one that Python knows nothing of

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_in_use:
            self._on_signal(number, frame)
        else:  # ours stayed because somebody else had put theirs over it
            _call(self._found.get(signal.Signals(number)), number, frame)

    def pass_on(self, received: signal.Signals, frame: FrameType | None) -> None:
        """Tell handlers of ours that others are using, below this one."""
        below = _original(self._found.get(received), received)
        if _handlers_of(below) is not None:
            _call(below, received, frame)

    def put_back(self) -> None:
        """Give back what was found; only in the main thread."""
        self.is_in_use = False
        for each, found in list(self._found.items()):
            if signal.getsignal(each) != self._handle:
                continue
            signal.signal(each, _original(found, each))
            if (action := self._actions.pop(each, None)) is not None:
                ctypes.CDLL(None).sigaction(int(each), action, None)
            del self._found[each]


def _read_action(number: signal.Signals) -> ctypes.Array[ctypes.c_char] | None:
    """C's own handler, such as faulthandler's; None where the system has no such thing."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    try:
        failed = ctypes.CDLL(None).sigaction(int(number), None, action)
    except (AttributeError, OSError, TypeError):
        return None
    return None if failed else action


def _handlers_of(handler: Any) -> SignalHandlers | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, SignalHandlers) else None


def _original(handler: Any, number: signal.Signals) -> Any:
    """The handler, or what was there before it, if it is one of ours that is not in use now."""
    while (ours := _handlers_of(handler)) is not None and not ours.is_in_use:
        handler = ours._found.get(number, signal.SIG_DFL)
    return handler


def _call(handler: Any, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler is not signal.SIG_IGN:
        end_by(number)


def end_by(number: int) -> None:
    """End the process as the signal does where nobody handles it."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class Deadline:
    """Ends the process when its time after a signal is over, out of a thread of its own."""

    def __init__(self, deadline_secs: float) -> None:
        self._secs = deadline_secs
        self._news: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        name = "asynchooks-deadline"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def begin(self, received: signal.Signals) -> None:
        """From now on time passes; in a signal handler."""
        self._news.put(received)

    def lift(self) -> None:
        """The process goes on, or ends by itself: end the thread, and wait until it has."""
        self.drop()
        self._thread.join(_JOIN_SECS)

    def drop(self) -> None:
        """As `lift`, without waiting."""
        self._news.put(None)

    def _watch(self) -> None:
        received = self._news.get()
        if received is None:
            return
        with contextlib.suppress(queue.Empty):
            if self._news.get(timeout=min(self._secs, threading.TIMEOUT_MAX)) is None:
                return
        words = threading.Thread(target=self._say, args=(received,), daemon=True)
        words.start()
        words.join(0.5)  # a pipe that nobody reads would hold it for ever
        os._exit(128 + received)

    def _say(self, received: signal.Signals) -> None:
        logger.critical(
            "The process did not end within %g s of %s: ended", self._secs, received.name
        )
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(Exception):
                stream.flush()


def exit_out_of_groups(code: int) -> None:
    """Where task groups wrap the exit, and nobody unwraps it, let its code be the process's.

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
