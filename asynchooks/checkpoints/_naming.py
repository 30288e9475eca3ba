"""How directories of checkpoints are named, and what is moved where. It reads no manifest."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from .._errors import CheckpointError
from ._files import remove_tree, sync_directory

# counted, not random: nothing else writes here while the lock is held
NUMBER = "(0|[1-9][0-9]*)"


class Names:
    """The names for one basename in one directory; made by `CheckpointDirectory`.

    Args:
        directory: absolute path.
        basename: the first part of each checkpoint's name; no separators, no leading dot.
    """

    __slots__ = ("_basename", "directory")

    def __init__(self, directory: str, basename: str) -> None:
        self.directory = directory
        self._basename = basename

    def name(self, step: int) -> str:
        return f"{self._basename}-{step}"

    def path(self, step: int) -> str:
        return os.path.join(self.directory, self.name(step))

    def new(self, step: int, serial: int) -> str:
        """Where a checkpoint is while it is being written."""
        return os.path.join(self.directory, f".new-{self.name(step)}-{serial}")

    def checkpoints(self) -> list[tuple[str, int]]:
        """(path, step) of all that is named like a checkpoint."""
        return [(path, numbers[0]) for path, numbers in self._matching("", NUMBER)]

    def being_written(self) -> list[tuple[str, int, int]]:
        """(path, step, serial) of all that was being written."""
        found = self._matching(r"\.new-", f"{NUMBER}-{NUMBER}")
        return [(path, step, serial) for path, (step, serial) in found]

    def being_deleted(self) -> list[tuple[str, int]]:
        """(path, step) of all that was being deleted."""
        found = self._matching(r"\.old-", f"{NUMBER}-{NUMBER}")
        return [(path, step) for path, (step, _) in found]

    def rejected(self) -> list[tuple[str, int]]:
        """(path, serial) of all that was rejected."""
        found = self._matching("", rf"{NUMBER}\.rejected-{NUMBER}")
        return [(path, serial) for path, (_, serial) in found]

    def _matching(self, before: str, after: str) -> list[tuple[str, list[int]]]:
        pattern = re.compile(f"{before}{re.escape(self._basename)}-{after}")
        matches = [pattern.fullmatch(name) for name in sorted(os.listdir(self.directory))]
        return [
            (os.path.join(self.directory, each.string), [int(number) for number in each.groups()])
            for each in matches
            if each
        ]

    def move_aside(self, path: str) -> str:
        """Rename a checkpoint such that it is none any more, to be removed; return its new path."""
        number = 0
        while os.path.lexists(old := self._old(path, number)):
            number += 1
        os.rename(path, old)
        return old

    def _old(self, path: str, number: int) -> str:
        return os.path.join(self.directory, f".old-{os.path.basename(path)}-{number}")

    def put_in_place(self, new: str, step: int) -> None:
        """Make a complete directory the checkpoint of a step, and remove the one before it.

        At each moment the old or the new one is there whole, though maybe by another name.
        """
        final = self.path(step)
        self.check_is_free(step)
        old = self.move_aside(final) if os.path.lexists(final) else None
        try:
            os.rename(new, final)
        except BaseException:
            if old is not None:
                with suppress(OSError):  # the next open() puts it back
                    os.rename(old, final)
            raise
        sync_directory(self.directory)
        if old is not None:
            remove_tree(old)

    def check_is_free(self, step: int) -> None:
        """Raise CheckpointError where something stands that no checkpoint may replace."""
        path = self.path(step)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            raise CheckpointError(
                f"{path} is no directory, and was not made here; a checkpoint of step {step} must "
                "bear that name: move it away, or give another basename"
            )
