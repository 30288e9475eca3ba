"""Names of the directories of checkpoints, renames between them, and recovery after a kill."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass

from .._errors import CheckpointError, DamagedCheckpointError
from ._files import remove_tree, sync_directory
from ._manifest import Manifest, read_manifest

ADDED_BYTES = 80
"""What may be appended to a basename: a step of 20 digits, and what savers add, the longest of
which is TensorFlow's `.data-00000-of-00001.tempstate` with a number."""

logger = logging.getLogger("asynchooks")

# counted, not random: nothing else writes here while the lock is held
_NUMBER = "(0|[1-9][0-9]*)"


@dataclass(frozen=True)
class Layout:
    """The names for one basename in one directory, an absolute path."""

    directory: str
    basename: str

    def name(self, step: int) -> str:
        return f"{self.basename}-{step}"

    def path(self, step: int) -> str:
        return os.path.join(self.directory, self.name(step))

    def new(self, step: int, serial: int) -> str:
        """Where a checkpoint is while it is being written."""
        return os.path.join(self.directory, f".new-{self.name(step)}-{serial}")

    def probe(self) -> str:
        """A name as long as any that may be needed; `clean_up` removes what is left of it."""
        return self.new(10 ** (ADDED_BYTES - 9), 1)

    def copy(self, step: int, serial: int) -> str:
        """Where a checkpoint's files are linked to while they are copied elsewhere."""
        return os.path.join(self.directory, f".copy-{self.name(step)}-{serial}")

    def checkpoints(self) -> list[tuple[str, int]]:
        """(path, step) of everything that is named like a checkpoint."""
        return [(path, numbers[0]) for path, numbers in self._matching("", _NUMBER)]

    def rejected(self) -> list[int]:
        """The serials of those that were rejected."""
        found = self._matching("", rf"{_NUMBER}\.rejected-{_NUMBER}")
        return [numbers[1] for _, numbers in found]

    def _matching(self, before: str, after: str) -> list[tuple[str, list[int]]]:
        """Path and numbers of every name of this form."""
        pattern = re.compile(f"{before}{re.escape(self.basename)}-{after}")
        matches = [pattern.fullmatch(name) for name in sorted(os.listdir(self.directory))]
        return [
            (os.path.join(self.directory, each.string), [int(number) for number in each.groups()])
            for each in matches
            if each
        ]

    def move_aside(self, path: str) -> str:
        """Rename a checkpoint that is to be removed; returns its new path."""
        number, name = 0, os.path.basename(path)
        while os.path.lexists(old := os.path.join(self.directory, f".old-{name}-{number}")):
            number += 1
        os.rename(path, old)
        return old

    def put_in_place(self, new: str, step: int) -> None:
        """Replace a step's checkpoint; always the old or the new one is there, by some name."""
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
                "have that name: move it away, or give another basename"
            )

    def clean_up(self) -> int:
        """Finish, put back or remove what a killed run left; returns the highest serial ever given.

        Only under the lock. CheckpointVersionError leaves all as it was.
        """
        for path, _ in self._matching(r"\.copy-", f"{_NUMBER}-{_NUMBER}"):
            remove_tree(path)
        written = self._matching(r"\.new-", f"{_NUMBER}-{_NUMBER}")
        deleted = self._matching(r"\.old-", f"{_NUMBER}-{_NUMBER}")
        rejected = self._matching("", rf"{_NUMBER}\.rejected-{_NUMBER}")
        paths = [path for path, _ in [*self.checkpoints(), *rejected, *written, *deleted]]
        # the name of a rejected one has it, too, where the manifest is damaged
        highest = max([0, *(serial for _, (_, serial) in rejected), *map(_serial, paths)])
        for path, (step, _) in sorted(written, key=lambda each: each[1][1]):
            others = [self.path(step), *(old for old, (its_step, _) in deleted if its_step == step)]
            manifest = _intact(path)
            is_whole = manifest is not None and manifest.step == step
            # one that outlived its failed save may be older than what was saved afterwards
            if is_whole and _serial(path) >= max(map(_serial, others)):
                logger.info("%s was complete, and is the checkpoint of step %d now", path, step)
                self.put_in_place(path, step)
            else:
                remove_tree(path)
        # the newest first: only one gets the name
        for path, (step, _) in sorted(deleted, key=lambda each: -_serial(each[0])):
            final = self.path(step)
            if os.path.lexists(final) or _intact(path) is None:
                remove_tree(path)
            else:
                logger.info("%s was not replaced, and is put back as %s", path, final)
                os.rename(path, final)
                sync_directory(self.directory)
        return highest


def _serial(path: str) -> int:
    """The serial in a directory's manifest; 0 where none can be read."""
    try:
        return read_manifest(path).serial
    except DamagedCheckpointError:
        return 0


def _intact(path: str) -> Manifest | None:
    if os.path.islink(path):
        return None
    try:
        manifest = read_manifest(path)
        manifest.verify(path)
    except DamagedCheckpointError:
        return None
    return manifest
