"""Signals of the process: one handler for all hooks that heed some, and what event loops need."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..._engine.base import Engine
from ..._log import fields

logger = logging.getLogger("asynchooks")


Take = Callable[[signal.Signals], bool]
"""Called with a signal that came, in a handler: no locks and no log. Whether it is dealt with."""


class _Handler:
    """The one handler of the process; where no hook takes a signal, it does what it did before.

    Only the main thread can set handlers. A handler that was put over this one meanwhile stays.
    """

    def __init__(self) -> None:
        # of each hook; replaced as a whole, as a signal may come anywhere
        self._takes: dict[Take, list[signal.Signals]] = {}
        self._found: dict[signal.Signals, Any] = {}
        self._stop_waking: Callable[[], object] = bool
        self._of_thread = threading.local()  # the signals that it blocked before it forked

    def add(self, take: Take, signals: list[signal.Signals], engine: Engine) -> None:
        """Have `take` called at these signals from now on; in the main thread."""
        if not self._takes:
            self._stop_waking = wake_on_signals(engine)
        self._takes = {**self._takes, take: signals}
        for each in signals:
            found = signal.getsignal(each)
            if found is None:
                logger.warning(
                    "%s has a handler that is not Python's, and could not be put back: it stays",
                    each.name,
                    extra=fields("PreemptionHook"),
                )
            elif found != self._handle:
                self._found[each] = found  # first, as the signal may come at once
                signal.signal(each, self._handle)

    def remove(self, *takes: Take) -> None:
        """Put back what no other hook needs; may be called again, and should be in the main thread.

        In another one the handlers stay, and do what those did that they replaced.
        """
        self._takes = {take: of for take, of in self._takes.items() if take not in takes}
        if threading.current_thread() is not threading.main_thread():
            return
        for each in self._found.keys() - set().union(*self._takes.values()):
            if signal.getsignal(each) == self._handle:  # else another one was put over it
                signal.signal(each, self._found[each])
            del self._found[each]
        if not self._takes:
            self._stop_waking()
            self._stop_waking = bool

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions."""
        received = signal.Signals(number)
        answers = [take(received) for take, of in self._takes.items() if received in of]
        if any(answers):
            return
        found = self._found.get(received, signal.SIG_DFL)
        if callable(found):
            found(number, frame)
        elif found is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if sys.platform != "win32":  # which does not fork

        def block(self) -> None:
            """Before a fork: a signal that came before the child's handlers are back would be lost.

            Python drops what has come to a child by then: 300 of 300 that were sent at once.
            """
            self._of_thread.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._found)

        def unblock(self) -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._of_thread.blocked)

        def put_back_in_child(self) -> None:
            """After a fork: no session goes on in the child, so signals do there what they did."""
            if self._takes:
                self._stop_waking = bool  # it would look at the parent's event loop,
                self.remove(*self._takes)
                signal.set_wakeup_fd(-1)  # which a signal would wake
            self.unblock()


HANDLER = _Handler()
if sys.platform != "win32":
    os.register_at_fork(
        before=HANDLER.block,
        after_in_parent=HANDLER.unblock,
        after_in_child=HANDLER.put_back_in_child,
    )


def checked_signals(signals: Iterable[object]) -> list[signal.Signals]:
    """They as signals that a program can handle, each once."""
    if isinstance(signals, (int, str)) or not isinstance(signals, Iterable):
        raise TypeError(f"signals is {signals!r}; give several: [signal.SIGTERM]")
    return list(dict.fromkeys(map(_checked, signals)))


def _checked(number: object) -> signal.Signals:
    try:
        checked = signal.Signals(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"signals holds {number!r}; give signals, such as signal.SIGTERM") from None
    if checked.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"signals holds {checked.name}, which no program can handle; leave it out")
    return checked


def wake_on_signals(engine: Engine) -> Callable[[], object]:
    """Let a signal wake asyncio's loop at once; returns what ends that.

    Else a signal that comes while the loop falls asleep, or to another thread, is seen at the next
    timer only, as Python's handlers wait for the main thread. asyncio's loop watches for signals
    while it has a handler of any: SIGURG serves for that, which nothing else uses. trio and uvloop
    always watch, and Windows' loop does by itself.
    """
    loop, unused = engine.event_loop, getattr(signal, "SIGURG", None)
    if loop is None or unused is None or signal.getsignal(unused) is not signal.SIG_DFL:
        return bool
    present = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(present)
    if present != -1:
        return bool
    loop.add_signal_handler(unused, bool)
    return lambda: loop.remove_signal_handler(unused)


def expect_exit(engine: Engine, error: BaseException) -> BaseException:
    """The exit, which may then pass through tasks of the loop without a report of a bug.

    asyncio's loop is left by an exit at once, so that none asks the tasks that it has passed
    through for their errors; each task would be reported when it is freed.
    """
    loop = engine.event_loop
    if loop is None:
        return error
    report = loop.get_exception_handler() or type(loop).default_exception_handler

    def handle(loop: Any, context: dict[str, Any]) -> None:
        found = context.get("exception")
        is_exit = found is error or (
            isinstance(found, BaseExceptionGroup) and found.split(lambda e: e is error)[1] is None
        )
        if not is_exit:
            report(loop, context)

    loop.set_exception_handler(handle)
    return error
