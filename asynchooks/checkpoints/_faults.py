"""What an operating system's error means for checkpoints, in words. It raises nothing."""

from __future__ import annotations

import errno
import os
import shutil

from .._errors import CheckpointError
from ._files import NotAFileError

# What says that the disk lost something. All other errors of reading (no descriptor left, no
# permission, a network that is down) say nothing about the checkpoint: taking them for damage
# would silently train on from an older one.
DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", errno.EIO),  # Linux only: a file system's structure is damaged
}

ELSEWHERE = "or give another directory"
ADVICE = {
    errno.ENOSPC: "free space there, or keep fewer with Retention(max_to_keep=...)",
    errno.EDQUOT: "raise the quota, or keep fewer with Retention(max_to_keep=...)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOENT: f"see that the path that it names is there, {ELSEWHERE}",
    errno.EROFS: f"mount it for writing, {ELSEWHERE}",
    errno.EACCES: f"give this process's user the right to write there, {ELSEWHERE}",
    errno.EPERM: f"give this process's user the right to write there, {ELSEWHERE}",
    errno.ENOTDIR: f"move away the file that stands where a directory should, {ELSEWHERE}",
    errno.EEXIST: f"move away the file that stands where a directory should, {ELSEWHERE}",
    errno.EMFILE: "close files, or raise the limit on open ones (ulimit -n)",
}


def is_damage(error: OSError) -> bool:
    """Whether an error of reading is the checkpoint's, rather than the machine's of the moment."""
    return error.errno in DAMAGE or isinstance(error, NotAFileError)


def failure(path: str, what: str, error: OSError) -> CheckpointError:
    """The error for whoever uses the directory; raise it from the system's."""
    return CheckpointError(
        f"{path}: {what}: {_reason(error, path)}; older checkpoints are untouched; "
        f"{_advice(error, path)}"
    )


def _reason(error: OSError, directory: str) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return str(error)
    try:
        num_free = shutil.disk_usage(directory).free
    except OSError:
        return str(error)
    return f"{error} ({num_free:,} bytes are free)"


def _advice(error: OSError, directory: str) -> str:
    if not os.path.isdir(directory) and error.errno == errno.ENOENT:
        return "the directory is gone and is not made anew: put it back, or start again elsewhere"
    return ADVICE.get(error.errno or 0, f"make the directory readable and writable, {ELSEWHERE}")
