"""The directory of checkpoints: saving into it, finding the one to resume from, deleting old ones.

It does not know what savers write, decides nothing by the time of day, and starts no threads.
Layout, beside any other files there, which are never touched:

    lock                                held by the run that uses the directory
    <basename>-<step>/                  a checkpoint: complete, or not there at all
        <basename>-<step>*              what the saver wrote
        <name of an extra file>
        manifest.json                   sizes and hashes of all of them
    <basename>-<step>.rejected-<serial>/   never chosen again, never deleted
    .new-<basename>-<step>-<serial>/    being written
    .old-<basename>-<step>-<number>/    being deleted
    .copy-<basename>-<step>-<serial>/   links to its files, while it is copied to a mirror
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import SupportsFloat, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError
from ._files import (
    failure,
    make_directories,
    remove_tree,
    sync_directory,
)
from ._layout import Layout
from ._lock import DirectoryLock
from ._manifest import (
    MANIFEST,
    Checkpoint,
    Manifest,
    damaged,
    read_file,
    read_manifest,
)
from ._place import (
    CheckpointPlace,
    Found,
    check_extra_name,
    checked_metric,
    checked_step,
    write_files,
)
from ._retention import Retention, superfluous

logger = logging.getLogger("asynchooks")


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
        address = re.match(r"([A-Za-z][\w+.-]+):/", path)
        if address is not None and address[1].lower() == "file":
            raise ValueError(
                f"the directory of checkpoints is {path!r}, an address; give the path alone"
            )
        if address is not None and ("://" in path or not isinstance(directory, str)):
            raise ValueError(
                f"the directory of checkpoints is {path!r}, an address; give the path of a local "
                "directory, or the address of an object store, as text, to CheckpointSaverHook or "
                "CheckpointStore"
            )
        self._path = _check.place("directory", path)
        super().__init__(self._path, basename, retention)
        self._layout = Layout(self._path, self._basename)
        self._lock = DirectoryLock(self._path)

    def open(self) -> None:
        """Make the directory, lock it, and clean up what a killed run left behind.

        Raises:
            CheckpointInUseError: another run uses it, or this process does.
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the directory cannot be made, or not be written to.
        """
        try:
            make_directories(self._path)
            self._lock.take()
            try:
                self._serial = self._layout.clean_up()
                # find out now, not hours later, whether one can be written
                probe = self._layout.probe()
                os.mkdir(probe)
                os.rmdir(probe)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise failure(self._path, "cannot be used for checkpoints", error) from error

    def close(self) -> None:
        """Let other runs use the directory; does nothing when it is not open."""
        self._lock.release()

    def _save(
        self, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
    ) -> Checkpoint:
        new = self._layout.new(draft.step, draft.serial)
        try:
            self._lock.check()
            self._layout.check_is_free(draft.step)
            manifest = write_files(new, draft, write, extra)
            self._lock.check()  # `write` may have recreated a lost directory
            self._layout.put_in_place(new, draft.step)
        except OSError as error:
            what = f"the checkpoint of step {draft.step} is not saved"
            explained = failure(self._path, what, error)  # before the removal frees bytes
            remove_tree(new)
            raise explained from error
        except BaseException:
            remove_tree(new)
            raise
        return manifest.checkpoint_at(self._layout.path(draft.step))

    def _delete_superfluous(self) -> None:
        """Delete what the retention does not keep. A failure is logged: the save is done.

        A damaged checkpoint does not count as one to resume from, and stays as evidence.
        """
        try:
            whole = [
                each
                for each in self.checkpoints()
                if each.serial not in self._found_damaged and _looks_whole(each)
            ]
            for each in superfluous(whole, self._retention):
                remove_tree(self._layout.move_aside(each.path))
        except (OSError, CheckpointError) as error:
            logger.warning("Older checkpoints in %s are not deleted: %s", self._path, error)

    def set_metric(self, step: SupportsIndex, metric: SupportsFloat) -> bool:
        """Set the metric of the checkpoint of a step, which was found after it was saved.

        Returns:
            Whether there is a checkpoint of that step; what stays is decided by the next `save`.

        Raises:
            CheckpointError: the disk is full, read-only or gone; the checkpoint is as it was.
            MetricError: the metric is NaN.
            RuntimeError: the directory is not open.
            ValueError, TypeError: an argument is not as described.
        """
        self._check_is_open("set_metric(...)")
        number, found = checked_step(step), checked_metric(metric)
        self._serial += 1
        path, new = self._layout.path(number), self._layout.new(number, self._serial)
        try:
            manifest = read_manifest(path)
        except DamagedCheckpointError:
            return False
        try:
            self._lock.check()
            os.mkdir(new)
            replace(manifest, metric=found).write(new)
            os.rename(os.path.join(new, MANIFEST), os.path.join(path, MANIFEST))
            sync_directory(path)
        except OSError as error:
            what = f"the metric of step {number} is not saved"
            raise failure(self._path, what, error) from error
        finally:
            remove_tree(new)
        return True

    def _found(self, up_to_step: int | None = None) -> Found:
        """Read all manifests, up to a step."""
        found = Found([], [])
        try:
            for path, step in self._layout.checkpoints():
                if up_to_step is not None and step > up_to_step:
                    continue
                try:
                    found.readable.append(self._read(path, step))
                except DamagedCheckpointError as error:
                    if os.path.lexists(path):
                        found.damages.append(error)
                    else:
                        found.is_changing = True
        except FileNotFoundError:
            return Found([], [])
        except OSError as error:
            raise failure(self._path, "cannot be read", error) from error
        found.readable.sort(key=lambda each: (each.serial, each.step))
        return found

    def _read(self, path: str, step: int) -> Checkpoint:
        if os.path.islink(path) or not os.path.isdir(path):
            raise damaged(path, "is no directory, though it is named like a checkpoint")
        manifest = read_manifest(path)
        if manifest.name != self._layout.name(step):
            raise damaged(path, f"its manifest is that of {manifest.name}: it was renamed")
        return manifest.checkpoint_at(path)

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        """Move one aside for good: training does not continue well from it.

        Its directory is renamed to end in `.rejected-<serial>`, and is never deleted; `why` is
        logged as a warning.

        Raises:
            CheckpointError: it cannot be renamed.
            ValueError: it is of another directory, or its step was saved again since.
            RuntimeError: the directory is not open.
        """
        self._check_is_open("reject(checkpoint, why)")
        path, serial = self._layout.path(checkpoint.step), checkpoint.serial
        newer = [each for each in self.checkpoints() if each.path == path and each.serial != serial]
        if checkpoint.path != path or newer:
            raise ValueError(
                f"{checkpoint!r} is not in {self._path} any more; give one that "
                "newest_intact(), best() or checkpoints() returned after the last save()"
            )
        target = f"{path}.rejected-{serial}"
        try:
            self._lock.check()
            os.rename(path, target)
            sync_directory(self._path)
        except OSError as error:
            raise failure(self._path, f"{path} cannot be moved to {target}", error) from error
        logger.warning("%s is rejected and kept as %s: %s", path, target, why)

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """The content of an extra file, None if the checkpoint has none of that name.

        Raises:
            DamagedCheckpointError: it is not what was written, or the checkpoint is gone.
        """
        check_extra_name(name, os.path.basename(checkpoint.prefix))
        return read_file(checkpoint.path, read_manifest(checkpoint.path), name)

    @property
    def _is_open(self) -> bool:
        return self._lock.is_held

    def _verified(self, checkpoint: Checkpoint) -> Checkpoint:
        read_manifest(checkpoint.path).verify(checkpoint.path)
        return checkpoint

    def _is_gone(self, checkpoint: Checkpoint) -> bool:
        return not os.path.lexists(checkpoint.path)


def _looks_whole(checkpoint: Checkpoint) -> bool:
    try:
        # names and sizes only: reading each byte at each save would cost more than the save
        read_manifest(checkpoint.path).verify(checkpoint.path, reads_files=False)
    except DamagedCheckpointError:
        return False
    return True
