"""One process of a cluster, and its children. The launcher decides when it ends.

Each has a session and a process group of its own: the terminal's Ctrl-C reaches the launcher
alone, and the children of a process end with it. Windows has neither; the command refuses it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.lowlevel

from ._cluster import Task

assert sys.platform != "win32", "Windows has no process groups"

_GUARD = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_guard.py"))]
_CHUNK = 1 << 16
"""Bytes: the size of a pipe on Linux."""
_POLL_SECS = 0.01
_KILLED_SECS = 1.0
"""A group of zombies looks alive; the launcher cannot reap those that it has not adopted."""
_PR_SET_CHILD_SUBREAPER = 36
NUM_LAST_LINES, _LONGEST_LAST_LINE = 40, 4096
"""Kept of stderr; the length in bytes."""


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Within the block, children that a process left become the launcher's, on Linux.

    They must be reaped before their group is seen to be empty. The machine's first process does it
    late: seconds were seen in a container, and some never do.
    """
    if sys.platform != "linux":
        yield
        return
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


class Guard:
    """Kills all processes that it knows of when the launcher has ended; the launcher closes it."""

    def __init__(self) -> None:
        read, self._pipe = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [*_GUARD, "watch"],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read)

    def start(self, task: Task) -> Process:
        """Start a process that writes its id to the guard first."""
        popen = subprocess.Popen(
            [*_GUARD, "start", str(self._pipe), *task.command],
            stdin=subprocess.DEVNULL,  # one terminal, many readers
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**task.defaults, **os.environ, **task.environment},
            start_new_session=True,
            pass_fds=[self._pipe],
        )
        return Process(task.name, popen)

    def forget(self, process: Process) -> None:
        """Stop guarding a process whose id may be reused from now on."""
        with suppress(BrokenPipeError):  # the guard was ended
            os.write(self._pipe, b"-%d\n" % process.pid)

    def close(self) -> None:
        """Kill the processes that were not forgotten, and end."""
        os.close(self._pipe)
        self._popen.wait()


class Process:
    """A process that runs; `Guard.start` makes it. Call `clear`, then `close`."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.name = name
        self.pid = popen.pid
        self.stdout, self.stderr = popen.stdout, popen.stderr
        self.status: int | None = None
        """Its exit code, or minus the signal that ended it; None while it runs."""
        self.is_cleared = False
        """Whether it is reaped and nothing of its group is left, so that its id may be reused."""
        self.last_lines: deque[bytes] = deque(maxlen=NUM_LAST_LINES)
        """Of its stderr."""
        self._popen = popen
        self._waits: set[anyio.CancelScope] = set()
        for pipe in (self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    async def wait(self) -> int:
        """Wait until it has ended; return its status.

        It stays a zombie, where the system allows that, so that its id is not reused.

        anyio's and asyncio's own processes are not used: on Python 3.11 their `wait` ends when
        the pipes are closed, which a process's children may hold open for ever.
        """
        if sys.platform == "linux":
            with suppress(OSError):  # an old kernel, or no file left
                end = os.pidfd_open(self.pid)
                try:
                    await anyio.wait_readable(end)
                finally:
                    os.close(end)
        # elsewhere there is no event before a process is reaped; this does not block
        while (status := self._ended()) is None:  # noqa: ASYNC110
            await anyio.sleep(_POLL_SECS)
        self.status = status
        return status

    def _ended(self) -> int | None:
        """Its status; None while it runs. Where it can be, it is not reaped."""
        waitid: Any = getattr(os, "waitid", None)
        if waitid is None:  # macOS before Python 3.13: `clear` comes at once, its id is still free
            return self._popen.poll()
        ended = waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        status: int = ended.si_status
        return status if ended.si_code == os.CLD_EXITED else -status

    def signal(self, number: int) -> None:
        """Send a signal to it and to its children."""
        if not self.is_cleared:
            with suppress(ProcessLookupError, PermissionError):  # on macOS for zombies
                os.killpg(self.pid, number)

    async def clear(self, grace_secs: float) -> None:
        """After its end: end the children that it left, and reap it."""
        self.signal(signal.SIGTERM)
        self._popen.wait()
        for number, secs in ((0, grace_secs), (signal.SIGKILL, _KILLED_SECS)):
            self.signal(number)
            with anyio.move_on_after(secs):
                while not self._is_gone():  # noqa: ASYNC110 - there is no event for the end of a group
                    await anyio.sleep(_POLL_SECS)
                break
        self.is_cleared = True
        for scope in self._waits:
            scope.cancel()

    def _is_gone(self) -> bool:
        try:
            # adopted children; as process 1 of a container it adopts them on any system
            while os.waitpid(-self.pid, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    async def read(self, pipe: IO[bytes]) -> bytes:
        """Its next output, at most 64 KiB; empty at the end.

        Once the process is cleared, all that it wrote is in the pipe. The end of the pipe is not
        waited for then: a child in a session of its own could hold it open.
        """
        await anyio.lowlevel.checkpoint()
        while True:
            with suppress(BlockingIOError):
                return os.read(pipe.fileno(), _CHUNK)
            if self.is_cleared:
                return b""
            with anyio.CancelScope() as scope:
                self._waits.add(scope)
                try:
                    await anyio.wait_readable(pipe)
                finally:
                    self._waits.discard(scope)

    def keep(self, lines: bytes) -> None:
        """Remember the last lines of its stderr."""
        for line in lines[:-1].rsplit(b"\n", NUM_LAST_LINES)[-NUM_LAST_LINES:]:
            self.last_lines.append(line[:_LONGEST_LAST_LINE])

    def close(self) -> None:
        """Close its pipes."""
        self.stdout.close()
        self.stderr.close()
