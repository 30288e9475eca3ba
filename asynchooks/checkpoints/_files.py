"""Files of a checkpoint: opening, hashing, syncing and removing them; what a system's error means.

It does not know what a checkpoint is.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO

from .._errors import CheckpointError

logger = logging.getLogger("asynchooks")

CHUNK_BYTES = 1 << 20


class NotAFileError(OSError):
    """A symlink, directory, FIFO, socket or device stands where a file was written."""


def walk(root: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """(posix path below root, its lstat) of everything in a directory, itself not included."""
    with os.scandir(os.path.join(root, below)) as entries:
        found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
    for name, status in found:
        path = f"{below}/{name}" if below else name
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            yield from walk(root, path)


def kind_of(status: os.stat_result) -> str:
    """The kind of a path, for errors; "file" and "directory" are the allowed ones."""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    return kinds.get(stat.S_IFMT(status.st_mode), "special file")


def open_file(path: str, *, follows_link: bool = False) -> FileIO:
    """Open a regular file for reading, else NotAFileError: a FIFO may block or never end."""
    _check_is_file(path, os.stat(path) if follows_link else os.lstat(path))
    return FileIO(path)


def open_to_write(path: str) -> int:
    """A descriptor of an existing or new regular file, else NotAFileError; it is not truncated."""
    with suppress(FileNotFoundError):
        _check_is_file(path, os.lstat(path))
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _check_is_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        name = os.path.basename(path)
        raise NotAFileError(f"{name} is a {kind_of(status)} where a file was written")


def digest(path: str) -> tuple[int, str]:
    """(number of bytes, sha256 in hex) of a file; hashlib releases the GIL."""
    sha256, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_file(path) as file:
        while num_read := file.readinto(buffer):
            sha256.update(buffer[:num_read])
            num_bytes += num_read
    return num_bytes, sha256.hexdigest()


def sync_file(path: str) -> None:
    """Wait until a file's content is on the disk."""
    # Windows syncs only what is open for writing
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str) -> None:
    """Wait until a directory's names are on the disk."""
    if sys.platform != "win32":  # which opens no directories
        sync_file(path)


def sync_tree(root: str, below: Iterable[tuple[str, os.stat_result]]) -> None:
    """Wait until a directory, and what `walk` has found below it, are on the disk."""
    for path, status in below:
        sync = sync_directory if stat.S_ISDIR(status.st_mode) else sync_file
        sync(os.path.join(root, path))
    sync_directory(root)


def make_directories(path: str) -> None:
    """Make a directory and its missing parents; they outlive a crash."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        os.makedirs(each, exist_ok=True)  # another run may make it at the same time
        with suppress(PermissionError):  # a parent that may be written to, but not be listed
            sync_directory(os.path.dirname(each))


def remove_tree(root: str) -> None:
    """Remove a directory as far as possible; the rest is logged, and removed by a later open."""
    if not os.path.lexists(root):
        return
    try:
        shutil.rmtree(root)
    except (OSError, RecursionError) as error:
        with suppress(RecursionError):  # before Python 3.13, for directories a thousand deep
            shutil.rmtree(root, ignore_errors=True)  # the first pass ends at the first failure
        if os.path.lexists(root):
            logger.warning("%s could not be removed: %s; remove it by hand", root, error)


# Errors of reading that mean lost data. All others (no descriptor left, no permission, a network
# that is down) say nothing about the checkpoint: to take them for damage would silently resume
# from an older one.
_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", errno.EIO),  # Linux only: a file system's structure is damaged
}

_ELSEWHERE = "or give another directory"
_ADVICE = {
    errno.ENOSPC: "free space there, or keep fewer with Retention(max_to_keep=...)",
    errno.EDQUOT: "raise the quota, or keep fewer with Retention(max_to_keep=...)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOENT: f"see that the path that it names is there, {_ELSEWHERE}",
    errno.EROFS: f"mount it for writing, {_ELSEWHERE}",
    errno.EACCES: f"give this process's user the right to write there, {_ELSEWHERE}",
    errno.EPERM: f"give this process's user the right to write there, {_ELSEWHERE}",
    errno.ENOTDIR: f"move away the file that stands where a directory should, {_ELSEWHERE}",
    errno.EEXIST: f"move away the file that stands where a directory should, {_ELSEWHERE}",
    errno.ENAMETOOLONG: f"give a shorter basename, {_ELSEWHERE}",
    errno.EMFILE: "close files, or raise the limit on open ones (ulimit -n)",
}


def is_damage(error: OSError) -> bool:
    """Whether an error of reading means damage, rather than a passing fault of the machine."""
    return error.errno in _DAMAGE or isinstance(error, NotAFileError)


def failure(path: str, what: str, error: OSError) -> CheckpointError:
    """The error for the user of the directory; raise it from the system's."""
    reason = str(error)
    advice = _ADVICE.get(
        error.errno or 0, f"make the directory readable and writable, {_ELSEWHERE}"
    )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            reason += f" ({shutil.disk_usage(path).free:,} bytes are free)"
    if error.errno == errno.ENOENT and not os.path.isdir(path):
        advice = "the directory is gone and is not recreated: put it back, or start again elsewhere"
    return CheckpointError(f"{path}: {what}: {reason}; older checkpoints are untouched; {advice}")
