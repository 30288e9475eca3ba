"""in_child: a function in a fork of this process, whose clocks show virtual time.

A planned program may do what it likes to its process: it is a copy, which ends with the plan. What
it does outside of it, such as writing a file, it really does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

from .._errors import PlanError
from ..simulation import Simulation

T = TypeVar("T")

STALL_SECS = 30.0
"""Real seconds in which nothing happens in virtual time: then the plan is given up."""
_TICKS = 5
"""How often in these seconds the child looks whether virtual time goes on, and says so."""
_CAN_FORK = sys.platform != "darwin"
"""The libraries of macOS may crash in a fork."""
_children: set[int] = set()
"""The process ids of those that live."""
_lock = threading.Lock()
"""Of those; and a child is made with it, which would else have the ends of another one's pipe."""


class Watch:
    """Which simulation runs in a child, so that clocks and a stall can be told by it."""

    simulation: Simulation | None = None

    def now(self) -> float:
        """Virtual seconds; 0.0 while no simulation runs."""
        return 0.0 if self.simulation is None else self.simulation.now

    def progress(self) -> object:
        """What differs from one look to the next, unless virtual time stands."""
        kernel = None if self.simulation is None else self.simulation.kernel_or_none
        return object() if kernel is None else (id(kernel), kernel.progress)


def in_child(work: Callable[[], T], watch: Watch) -> T:
    """What `work` returns, or raises, in a fork of this process.

    A fork need not import anything again, and the program may be any function. On Windows, which
    has no fork, and on macOS, all is done here, and clocks show real time. Errors have the
    traceback of the child in a note.

    A class of multiprocessing would not do: its pools have daemons, which must not start any.

    Args:
        work: what to do; its result can be pickled.
        watch: is told by it which simulation runs.

    Raises:
        PlanError: the child has died, or nothing happens in virtual time.
        BaseException: what `work` raises; a PlanError in place of what cannot be pickled.
    """
    if sys.platform == "win32" or not _CAN_FORK:
        return work()
    _flush()  # or the child would write it as well
    # the warning is of threads, which the child has none of, and needs none
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if pid:
            theirs.close()
            _children.add(pid)
    if not pid:
        ours.close()  # so that it sees that its parent has died
        _work_in_child(work, watch, theirs)
    answer, status = None, 0
    try:
        while answer is None:
            if not ours.poll(2 * STALL_SECS):
                raise PlanError(
                    f"the planned program has not come back to Python for {2 * STALL_SECS:g} s. It "
                    "runs in a fork of this process, which has no threads of libraries: make what "
                    "calls them `timed`"
                )
            answer = ours.recv()
    except EOFError:
        pass  # it has died
    finally:
        with _lock:
            _children.discard(pid)
        with suppress(ChildProcessError, ProcessLookupError):  # another thread has waited for it
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        ours.close()
    if answer is None:
        raise PlanError(
            f"the process of the plan has died (exit code {os.waitstatus_to_exitcode(status)}): "
            "perhaps it ran out of memory, or the program ended it"
        )
    failure, result = answer
    if failure is not None:
        raise failure
    return cast(T, result)


def kill_children() -> None:
    """End all children, which other threads wait for: each raises a PlanError there."""
    if sys.platform != "win32":  # where there are none
        with _lock:
            for pid in _children:
                os.kill(pid, signal.SIGKILL)


def _work_in_child(work: Callable[[], Any], watch: Watch, theirs: Connection) -> NoReturn:
    """Do the work, and send (its error, its result)."""
    try:
        _children.clear()
        # the event loop of the parent has the other end, and its handlers are not for this copy
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which kills this
        _show_virtual_time(watch)
        _look_for_stalls(watch, theirs)
        answer: tuple[BaseException | None, Any]
        try:
            answer = None, work()
        except BaseException as error:
            answer = _sendable(error), None
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0)
        _flush()
        theirs.send(answer)
    finally:
        os._exit(0)  # without what the parent does at its end


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # there is none, or it is closed
            stream.flush()


def _show_virtual_time(watch: Watch) -> None:
    """Let the clocks of the module `time` go as virtual time does, from now on."""
    for name in ("time", "monotonic", "perf_counter"):
        began = getattr(time, name)()
        setattr(time, name, lambda began=began: began + watch.now())
        setattr(time, f"{name}_ns", lambda began=began: int((began + watch.now()) * 1e9))


def _look_for_stalls(watch: Watch, theirs: Connection) -> None:
    """From now on give up where virtual time stands, and tell the parent where it does not.

    A signal comes even where the program blocks or spins, and is handled between two of its lines.
    The child ends at once, so that the program cannot catch what it is given up by.
    """
    last, num = watch.progress(), 0

    def look(signum: int, frame: FrameType | None) -> None:
        nonlocal last, num
        now = watch.progress()
        last, num = now, (num + 1 if now == last else 0)
        try:
            theirs.send(None if num < _TICKS else (_stall(watch, frame), None))
        except OSError:  # the parent has died
            os._exit(1)
        if num >= _TICKS:
            os._exit(0)

    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, STALL_SECS / _TICKS, STALL_SECS / _TICKS)


def _stall(watch: Watch, frame: FrameType | None) -> PlanError:
    """That nothing happens, and where the event loop and threads of blocking calls are."""
    error = PlanError(
        f"the program has run for {STALL_SECS:g} s without an event in virtual time, which stands "
        f"at {watch.now()!r} s. Virtual time passes in `timed` functions and in sleeps: make what "
        "waits, or computes, `timed`"
    )
    frames = sys._current_frames() | {threading.get_ident(): frame}
    places = ("".join(traceback.format_stack(each, limit=10)) for each in frames.values())
    error.add_note("it was here:\n" + "\nand in a thread:\n".join(places))
    return error


def _sendable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, as a parent can get it."""
    text = "in the process of the plan:\n" + "".join(traceback.format_exception(error))
    error.add_note(text)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = PlanError(f"{type(error).__name__}: {error}")
        error.add_note(text)
    return error
