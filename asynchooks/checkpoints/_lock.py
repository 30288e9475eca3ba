"""The lock that keeps a directory of checkpoints to one run; it does not guard against `rm`."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from importlib import import_module
from multiprocessing.util import register_after_fork
from types import ModuleType

from .._errors import CheckpointError, CheckpointInUseError
from ._files import NotAFileError, open_to_write

fcntl: ModuleType | None
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger("asynchooks")

# errors of file systems without locks
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_MAX_BYTES = 32
"""More than a process id takes."""


class DirectoryLock:
    """The lock of a directory; the system releases it when the process ends, however it ends.

    The file stays: deleting it would let two runs lock two files of the same name.
    """

    __slots__ = ("__weakref__", "_descriptor", "_directory", "_path", "_pid")

    def __init__(self, directory: str) -> None:
        self._descriptor: int | None = None
        self._directory, self._path = directory, os.path.join(directory, "lock")
        self._pid: int | None = None  # of its holder: a forked child closes, but does not unlock

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def take(self) -> None:
        """Take the lock at once, or raise CheckpointInUseError, or CheckpointError for no lock."""
        if self.is_held:
            raise _in_use(self._directory, os.getpid())
        try:
            descriptor = open_to_write(self._path)
        except NotAFileError as error:
            raise self._foreign(str(error)) from error
        try:
            self._flock(descriptor)
            self._check_is_ours(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())  # pwrite is not on Windows
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._pid = descriptor, os.getpid()
        register_after_fork(self, DirectoryLock._forget)

    def _forget(self) -> None:
        """In a process that multiprocessing has forked: close the file, and do not unlock it.

        Else the lock would outlive a run that is killed, as long as a worker that loads its data.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _check_is_ours(self, descriptor: int) -> None:
        """Truncate no user's file of that name, nor a hard link to one."""
        found = os.read(descriptor, _MAX_BYTES + 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
        pid = found.strip(b"\0 \r\n")  # zeros: the machine crashed before they were on the disk
        if len(found) > _MAX_BYTES or not (pid.isdigit() or not pid):
            raise self._foreign("it holds something else than a process id")

    def _foreign(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is not the lock of a run ({what}), and is left as it is; move it away, "
            "or give another directory"
        )

    def _flock(self, descriptor: int) -> None:
        if fcntl is None:
            return self._warn("this platform has no flock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(self._directory, _pid_in(descriptor)) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._warn(str(error))

    def _warn(self, why: str) -> None:
        logger.warning(
            "%s is not locked (%s): see to it that no second run uses it", self._directory, why
        )

    def check(self) -> None:
        """Raise CheckpointError if the locked file is no longer the one in the directory."""
        assert self._descriptor is not None
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._descriptor)):
            raise CheckpointError(
                f"{self._path} is not the file that open() locked: the directory was removed, "
                "moved or replaced while it was in use, and is not recreated here; put it back, "
                "or start again with the directory where the checkpoints are to be"
            )

    def release(self) -> None:
        """Let others take it; does nothing when it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._pid == os.getpid():
            with suppress(OSError):  # a leftover pid does no harm
                os.ftruncate(descriptor, 0)
            if fcntl is not None:
                with suppress(OSError):
                    # closing is not enough: forked children have the descriptor too
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()  # one that was dropped would be held to the end of the process


def _pid_in(descriptor: int) -> int | None:
    text = os.read(descriptor, _MAX_BYTES).strip()
    return int(text) if text.isdigit() else None


def _in_use(directory: str, pid: int | None) -> CheckpointInUseError:
    if pid == os.getpid():
        return CheckpointInUseError(
            f"{directory}: this process uses it already; one run and one CheckpointDirectory at a "
            "time: close() the other one first, or give another directory",
            pid,
        )
    holder = "another run" if pid is None else f"the run with process id {pid}"
    return CheckpointInUseError(
        f"{directory} is in use by {holder}; wait for its end, or give another directory (if that "
        "process is gone, one that it forked still holds the lock: end it)",
        pid,
    )
