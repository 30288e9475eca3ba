"""Files that are written completely or not at all. Nothing is synced against power failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path next to `path` to write to; the file is renamed at the end of the block.

    After any error the new file is removed, and the file at `path` is untouched. An OSError says
    why it cannot be written there.
    """
    place, new = _places(path)
    try:
        yield new
        os.replace(new, place)
    except BaseException as error:
        with suppress(OSError):
            new.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise _explained(path, error) from error
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise what `whole_file` would raise at this path, before any work is done for it."""
    _, new = _places(path)
    try:
        # permissions alone do not show read-only file systems, quotas and names too long
        new.touch()
        new.unlink()
    except OSError as error:
        raise _explained(path, error) from error


def _places(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The path with links resolved, so that a link stays one, and a new file's beside it."""
    place = Path(os.path.realpath(path))
    if os.path.isdir(place):  # unlike Path.is_dir, never an error
        raise IsADirectoryError(
            errno.EISDIR, "cannot be written, it is a directory; name a file", os.fspath(path)
        )
    if os.path.exists(place) and not os.path.isfile(place):
        # this would replace a device such as /dev/null
        raise FileExistsError(
            errno.EEXIST, "cannot be written whole, it is no regular file; name one", str(path)
        )
    # with the process's id, so that two runs never write one file
    return place, place.with_name(f".{place.name}.{os.getpid()}.new")


def _explained(path: str | os.PathLike[str], error: OSError) -> OSError:
    """The error with the path that was asked for, and what to do."""
    if isinstance(error, FileNotFoundError):
        what = f"cannot be written, there is no directory {os.path.dirname(os.fspath(path))!r}"
        return FileNotFoundError(error.errno, f"{what}; make it", os.fspath(path))
    what = f"cannot be written ({error.strerror}); name another file, or free its place"
    return type(error)(error.errno, what, os.fspath(path))
