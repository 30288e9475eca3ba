"""What a plan keeps a program from: files, sockets, processes, threads, and real waits.

Virtual time sees neither. What the program does outside is refused where it does it, by Python's
audit events; a wait or a loop that takes real time is found by a thread that looks whether virtual
time goes on. Clocks of the module `time` show the program virtual time.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from .._errors import PlanError
from ..simulation import Simulation

STALL_SECS = 5.0
"""Real seconds in which nothing happens in virtual time: then the plan is given up."""
_SIGNAL: Any = getattr(signal, "SIGURG", None)
"""What gives up the thread of the program; None: there is none, on Windows."""
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {*(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib"))}
)
_STANDARD = tuple({sysconfig.get_path(each) for each in ("stdlib", "platstdlib")})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = {
    "socket.__new__": "opens a socket",
    "socket.connect": "connects a socket",
    "socket.bind": "binds a socket",
    "socket.getaddrinfo": "asks for an address of the network",
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.fork": "forks the process",
    "os.forkpty": "forks the process",
    "os.exec": "replaces its process",
    "os.chmod": "changes a file's mode",
    "os.chown": "changes a file's owner",
    "os.utime": "changes a file's times",
    "os.mkdir": "makes a directory",
    "os.remove": "removes a file",
    "os.rmdir": "removes a directory",
    "os.rename": "renames a file",
    "os.link": "links a file",
    "os.symlink": "links a file",
    "os.truncate": "cuts a file off",
    "sqlite3.connect": "opens a database",
}
"""Audit events, and what the program does."""
_TODO = (
    "A plan does nothing outside: make what does this a `timed` function, which a plan does not "
    "call, or do it before or after the plan"
)
_guard: ContextVar[Guard | None] = ContextVar("asynchooks_plan_guard", default=None)


class Guard:
    """Watches over one run of a program in virtual time.

    Args:
        simulation: that the program runs in.
        blocked_in: the number of the thread that the event loop waits for, if it does.
    """

    def __init__(self, simulation: Simulation, blocked_in: Callable[[], int | None]) -> None:
        self._simulation, self._blocked_in = simulation, blocked_in
        self._thread = threading.get_ident()
        self.began = {name: clock() for name, clock in _CLOCKS.items()}  # of the real clocks
        self.error: PlanError | None = None
        """The first refusal; the program may have caught it."""
        self._stall: PlanError | None = None
        self._done = _thread.allocate_lock()
        self._is_active = False

    @staticmethod
    def current() -> Guard | None:
        """That of the running code, if there is one and its program has begun."""
        guard = _guard.get()
        return guard if guard is not None and guard._is_active else None

    def now(self) -> float:
        """Virtual seconds."""
        return self._simulation.now

    def refuse(self, what: str) -> None:
        """Raise that the program does this."""
        error = PlanError(f"the program {what}{place_of(sys._getframe(1))}. {_TODO}")
        self.error = self.error or error
        raise error

    @contextmanager
    def within(self) -> Iterator[None]:
        """Guard what the block starts from `begin` on.

        The variable is set here, as tasks of one context run faster.
        """
        token = _guard.set(self)
        try:
            with _virtual_clocks():
                yield
        finally:
            self._is_active = False
            _guard.reset(token)

    def begin(self) -> None:
        """The program begins: the event loop has what it needs."""
        self._is_active = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Give the block up when virtual time does not go on; in the thread of the program."""
        is_main = threading.current_thread() is threading.main_thread()
        can_signal = is_main and _SIGNAL is not None
        previous = signal.signal(_SIGNAL, self._interrupt) if can_signal else None
        self._done.acquire()
        # no threading.Thread: while there are several the kernels count those of anyio's pool
        _thread.start_new_thread(self._watch, (can_signal,))
        try:
            yield
        finally:
            self._done.release()
            if can_signal:
                signal.signal(_SIGNAL, previous)

    def _watch(self, can_signal: bool) -> None:
        last, since = None, time.monotonic()
        while not self._done.acquire(timeout=STALL_SECS / 5):
            kernel = self._simulation.kernel_or_none
            # one that takes turns without spending time is refused by the kernel, which counts them
            progress, now = kernel and kernel.progress, _CLOCKS["monotonic"]()
            if progress != last or kernel is None:
                last, since = progress, now
            elif now - since > STALL_SECS:
                if self._give_up(can_signal):
                    return
                since = now

    def _give_up(self, can_signal: bool) -> bool:
        """Whether it did; it does not while a module is being imported."""
        thread = self._blocked_in() or self._thread
        frame = sys._current_frames().get(thread)
        if frame is None or _is_importing(frame):
            return False
        where = place_of(frame)
        self._stall = self.error = self.error or PlanError(
            f"the program has run for {STALL_SECS:g} s without an event in virtual time, which "
            f"stands at {self._simulation.now!r} s{where}. Virtual time passes in `timed` "
            "functions and in sleeps: make what waits, or computes, here `timed`"
        )
        if can_signal and sys.platform != "win32":
            signal.pthread_kill(self._thread, _SIGNAL)
        else:
            _raise_in(self._thread)
        return True

    def _interrupt(self, *_: object) -> None:
        """The handler of the signal, in the program's thread."""
        if self._stall is not None:
            stall, self._stall = self._stall, None
            kernel = self._simulation.kernel_or_none
            if kernel is not None:
                kernel.end(stall)
            raise stall


class StalledError(PlanError):
    """Raised in a thread that is not the main one, where no message can be given."""


def _raise_in(thread: int) -> None:
    import ctypes

    error = ctypes.py_object(StalledError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def place_of(frame: FrameType | None) -> str:
    """Where in the program's own code this is, as text; '' if nowhere."""
    while frame is not None and not is_programs(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" at {place(frame, frame.f_lineno)}"


def place(frame: FrameType, line: int) -> str:
    """File, line and function."""
    code = frame.f_code
    return f"{code.co_filename}:{line} in {code.co_qualname}"


@cache
def is_programs(path: str) -> bool:
    """Whether a file is the program's own, and no library's."""
    return not path.startswith((_PACKAGE, "<frozen", *_LIBRARIES))


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_started_by_program(frame: FrameType | None) -> bool:
    """Whether it was the program's own code, perhaps by Python's modules."""
    while frame is not None and frame.f_code.co_filename.startswith(_STANDARD):
        if f"{os.sep}site-packages{os.sep}" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame is not None and is_programs(frame.f_code.co_filename)


# The process's: audit hooks cannot be removed, and there is one clock of each name, which other
# code of the process reads too while a plan runs

_CLOCKS: dict[str, Callable[[], float]] = {
    name: getattr(time, name)
    for name in ("time", "monotonic", "perf_counter")
}  # fmt: skip
_IN_NS: dict[str, Callable[[], int]] = {name: getattr(time, f"{name}_ns") for name in _CLOCKS}
_lock = threading.Lock()
_plans: list[object] = []
"""A mark for each plan that runs, in any thread."""
_audited: list[object] = []


@contextmanager
def _virtual_clocks() -> Iterator[None]:
    """Let the programs of plans read virtual time, and audit them, within the block."""
    mark = object()
    with _lock:
        if not _audited:
            _audited.append(mark)
            sys.addaudithook(_audit)
        if not _plans:
            for name, clock in _CLOCKS.items():
                setattr(time, name, _clock(name, clock))
                setattr(time, f"{name}_ns", _clock(name, _IN_NS[name], 1e9))
            threading.Thread.start = _start  # type: ignore[method-assign, assignment]
        _plans.append(mark)
    try:
        yield
    finally:
        with _lock:
            _plans.remove(mark)
            if not _plans:
                for name, clock in _CLOCKS.items():
                    setattr(time, name, clock)
                    setattr(time, f"{name}_ns", _IN_NS[name])
                threading.Thread.start = _start_really  # type: ignore[method-assign]


def _clock(name: str, real: Callable[[], Any], per_sec: float | None = None) -> Callable[[], Any]:
    """The clock, which shows the code of a planned program virtual time."""

    def read() -> Any:
        guard = Guard.current()
        if guard is None or not is_programs(sys._getframe(1).f_code.co_filename):
            return real()
        secs = guard.began[name] + guard.now()
        return secs if per_sec is None else int(secs * per_sec)

    return read


_start_really = threading.Thread.start


def _start(thread: threading.Thread) -> None:
    """Start the thread, unless a planned program does: what it did there would not be seen.

    Python 3.11 has no audit event of it. Libraries may start threads for what they are used for.
    """
    guard = Guard.current()
    if guard is not None and _is_started_by_program(sys._getframe(1)):
        guard.refuse("starts a thread")
    _start_really(thread)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, flags = args
        if isinstance(path, int) or not (flags & _WRITES if flags else "r" not in (mode or "r")):
            return
        guard = Guard.current()
        if guard is None or path == os.devnull or _is_importing(sys._getframe(1)):
            return
        guard.refuse(f"opens the file {os.fspath(path)!r} for writing")
    elif event in _REFUSED:
        guard = Guard.current()
        if guard is not None and not _is_importing(sys._getframe(1)):
            guard.refuse(_REFUSED[event])
