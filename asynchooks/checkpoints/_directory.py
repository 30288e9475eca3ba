"""The directory of checkpoints. Layout, beside any other files there, which are never touched:

    lock                                held by the run that uses the directory
    <basename>-<step>/                  a checkpoint: complete, or not there at all
        <basename>-<step>*              what the saver wrote
        <name of an extra file>
        manifest.json                   sizes and hashes of all of them
    <basename>-<step>.rejected-<serial>/   never chosen again, never deleted
    .new-<basename>-<step>-<number>/    being written, or being deleted
    .old-<basename>-<step>-<number>/    being replaced by another one of its step

The rename of `.new-` commits a save, and a deletion begins with the rename to it: so what a killed
run leaves under that name is removed by the next one, whatever is in it. What it leaves as `.old-`
is put back, if its step is missing. Names are counted, not random: nothing else writes here while
the lock is held.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError
from ._files import failure, make_directories, remove_tree, sync_directory
from ._lock import DirectoryLock
from ._manifest import Checkpoint, Manifest, damaged, read_manifest
from ._place import ADDED_BYTES, CheckpointPlace, Listed
from ._retention import Retention

logger = logging.getLogger("asynchooks")

_NUMBER = "(0|[1-9][0-9]*)"


class CheckpointDirectory(CheckpointPlace):
    """Checkpoints in one directory; make one to save or read there, and close it.

    All methods block; call one at a time. Reading needs no `open`, changes nothing, and may be
    done by other processes while a run saves, except that a step saved a second time is missing
    for a moment. A save that fails leaves all older checkpoints as they were. After a crash at
    any point, the last checkpoint whose `save` returned is there, or a newer one.

    Args:
        directory: made by `open`, with its parents; a path that does not change with `chdir`.
        basename: each checkpoint is named `<basename>-<step>`; no separators, no leading dot, and
            at most 175 bytes.
        retention: which ones stay after a save; with `keep_best` it needs a `mode`. None means
            Retention().

    Raises:
        ValueError, TypeError: an argument is not as described.

    Example:
        directory = CheckpointDirectory("checkpoints", retention=Retention(max_to_keep=3))
        directory.open()
        directory.save(7, lambda prefix: open(f"{prefix}.txt", "w").close())
        assert directory.newest_intact().step == 7
        directory.close()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        basename: str = "model.ckpt",
        retention: Retention | None = None,
    ) -> None:
        path = _check.path("directory", directory)
        # pathlib makes one slash of two; a drive of Windows is one letter
        if re.match(r"[A-Za-z][\w+.-]+:/", path):
            advice = (
                "give the path of a local directory, or the address of an object store, as text, "
                "to CheckpointSaverHook or CheckpointStore"
            )
            if path.lower().startswith("file:"):
                advice = "give the path alone"
            raise ValueError(f"the directory of checkpoints is {path!r}, an address; {advice}")
        place = _check.place("directory", path)
        super().__init__(place, DirectoryLock(place), basename, retention)

    def open(self) -> None:
        """Make the directory, lock it, and clean up what a killed run left behind.

        Raises:
            CheckpointInUseError: another run uses it, or this process does.
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the directory cannot be made, or not be written to.
        """
        try:
            make_directories(self._where)
            self._hold.take()
            try:
                self._clean_up()
                # find out now, not hours later, whether one can be written: this name is as long
                # as any that may be needed
                probe = self._path(f".new-{self._basename}-{10 ** (ADDED_BYTES - 9)}-1")
                os.mkdir(probe)
                os.rmdir(probe)
            except BaseException:
                self._hold.release()
                raise
        except OSError as error:
            raise failure(self._where, "cannot be used for checkpoints", error) from error

    def _clean_up(self) -> None:
        """Put back or remove what a killed run left; find the highest serial ever given."""
        self._look()  # first: CheckpointVersionError leaves all as it was
        # the newest first: only one gets the name
        for path, (step, _) in reversed(self._matching(r"\.old-", f"{_NUMBER}-{_NUMBER}")):
            final = self._path(f"{self._basename}-{step}")
            if os.path.lexists(final) or os.path.islink(path):
                remove_tree(path)
            else:
                logger.info("%s was not replaced, and is put back as %s", path, final)
                os.rename(path, final)
                sync_directory(self._where)
        written = self._matching(r"\.new-", f"{_NUMBER}-{_NUMBER}")
        for path, _ in written:
            remove_tree(path)
        rejected = self._matching("", rf"{_NUMBER}\.rejected-{_NUMBER}")
        serials = [serial for _, (_, serial) in [*written, *rejected]]
        self._serial = max([0, *serials, *(each.serial for _, each in self._look()[0])])

    def _listed(self) -> Iterator[Listed]:
        try:
            found = self._matching("", _NUMBER)
        except FileNotFoundError:
            return
        except OSError as error:
            raise failure(self._where, "cannot be read", error) from error
        for path, (step,) in found:
            yield Listed(path, step, partial(_read, path))

    def _is_gone(self, path: str) -> bool:
        return not os.path.lexists(path)

    def _new(self, draft: Manifest) -> str:
        path = self._path(draft.name)
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            raise CheckpointError(
                f"{path} is no directory, and was not made here; a checkpoint of step {draft.step} "
                "must have that name: move it away, or give another basename"
            )
        return self._path(f".new-{draft.name}-{draft.serial}")

    def _publish(self, new: str, manifest: Manifest) -> Checkpoint:
        """Rename it; always the old or the new one of its step is there, by some name."""
        final = self._path(manifest.name)
        old = self._renamed(final, ".old") if os.path.lexists(final) else None
        try:
            os.rename(new, final)
        except BaseException:
            if old is not None:
                with suppress(OSError):  # the next open() puts it back
                    os.rename(old, final)
            raise
        sync_directory(self._where)
        if old is not None:
            remove_tree(old)
        return manifest.checkpoint_at(final)

    def _renamed(self, path: str, start: str) -> str:
        """Rename a checkpoint that is to be removed; returns its new path."""
        number, name = 0, os.path.basename(path)
        while os.path.lexists(new := self._path(f"{start}-{name}-{number}")):
            number += 1
        os.rename(path, new)
        return new

    def _looks_whole(self, path: str, manifest: Manifest) -> bool:
        try:
            manifest.verify(path, reads_files=False)
        except DamagedCheckpointError:
            return False
        return True

    def _replace_manifest(self, path: str, manifest: Manifest) -> None:
        manifest.write(path)

    def _delete(self, path: str) -> None:
        remove_tree(self._renamed(path, ".new"))

    def _set_aside(self, checkpoint: Checkpoint, why: str) -> str:
        path, target = checkpoint.path, f"{checkpoint.path}.rejected-{checkpoint.serial}"
        try:
            os.rename(path, target)
            sync_directory(self._where)
        except OSError as error:
            raise failure(self._where, f"{path} cannot be moved to {target}", error) from error
        return target

    def _path(self, name: str) -> str:
        return os.path.join(self._where, name)

    def _matching(self, before: str, after: str) -> list[tuple[str, list[int]]]:
        """Path and numbers of every name of this form, in the order of the numbers."""
        pattern = re.compile(f"{before}{re.escape(self._basename)}-{after}")
        matches = [each for name in os.listdir(self._where) if (each := pattern.fullmatch(name))]
        found = [(self._path(each.string), list(map(int, each.groups()))) for each in matches]
        return sorted(found, key=lambda each: each[1])


def _read(path: str) -> Manifest:
    if os.path.islink(path) or not os.path.isdir(path):
        raise damaged(path, "is no directory, though it is named like a checkpoint")
    return read_manifest(path)
