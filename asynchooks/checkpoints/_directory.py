"""The directory of checkpoints: saving into it, and finding the one to go on from.

It does not know what savers write, decides nothing by the time of day, and starts no threads.
Layout, beside whatever else is there, which is never touched:

    lock                                who uses the directory
    <basename>-<step>/                  a checkpoint: complete, or not there at all
        <basename>-<step>*              what the saver wrote
        <name of an extra file>
        manifest.json                   sizes and hashes of all that
    <basename>-<step>.rejected-<serial>/   never chosen again, never deleted
    .new-<basename>-<step>-<serial>/    being written
    .old-<basename>-<step>-<number>/    being deleted
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import SupportsFloat, SupportsIndex

from . import _arguments as arguments
from ._choice import Candidates, first_intact
from ._deletion import delete_doomed
from ._faults import failure
from ._files import make_directories, sync_directory
from ._leftovers import sweep
from ._lock import DirectoryLock
from ._manifest import Checkpoint, Manifest, read_file, read_manifest
from ._naming import Names
from ._retention import Mode, Retention, best_first
from ._writing import save_checkpoint, write_metric

logger = logging.getLogger("asynchooks")


class CheckpointDirectory:
    """Checkpoints in one directory; made and closed by whoever saves there.

    All methods block; call one at a time. Reading needs no `open`, changes nothing, and may be
    done by other processes while a run saves, except that a step saved a second time is missing
    for a moment. A save that fails leaves all older checkpoints as they were. After a crash at
    any point, the last checkpoint whose `save` returned is there, or a newer one.

    Args:
        directory: made by `open`, with its parents; a path that does not change with `chdir`.
        basename: each checkpoint is named `<basename>-<step>`; no separators, no leading dot.
        retention: which ones stay after a save; None means Retention().

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
        self._path = os.path.abspath(os.fspath(directory))
        self._basename = arguments.checked_basename(basename)
        self._retention = arguments.checked_retention(retention)
        self._names = Names(self._path, self._basename)
        self._lock = DirectoryLock(self._path)
        self._found_damaged: set[int] = set()  # serials
        self._serial = 0  # the highest ever given here; a failed save leaves a gap

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
            self._serial = self._prepare()
        except OSError as error:
            raise failure(self._path, "cannot be used for checkpoints", error) from error

    def _prepare(self) -> int:
        try:
            highest = sweep(self._names)
            # find out now, not hours later, whether one can be written
            probe = self._names.new(0, highest + 1)
            os.mkdir(probe)
            os.rmdir(probe)
        except BaseException:
            self._lock.give_back()
            raise
        return highest

    def close(self) -> None:
        """Let other runs use the directory; does nothing when it is not open."""
        self._lock.give_back()

    def save(
        self,
        step: SupportsIndex,
        write: Callable[[str], object],
        *,
        seconds: SupportsFloat = 0.0,
        metric: SupportsFloat | None = None,
        extra: Mapping[str, bytes] | None = None,
    ) -> Checkpoint:
        """Save one checkpoint, replacing that of the same step, and delete what need not stay.

        Returns once it is on the disk. What cannot be deleted is logged, and is no error.

        Args:
            step: >= 0; may be lower than that of an earlier save.
            write: gets a path in a fresh directory, and makes a file or a directory there, or
                several that begin with it; what it returns is ignored.
            seconds: seconds of training until now, >= 0; goes on where the restored checkpoint's
                stood.
            metric: what `Retention.keep_best` compares; infinities count, NaN does not. None:
                not known, and never the best.
            extra: content of further files, by name.

        Raises:
            CheckpointError: the disk is full, read-only, gone, or `write` wrote what it must not.
            MetricError: the metric is NaN.
            RuntimeError: the directory is not open.
            ValueError, TypeError: an argument is not as described.
            Exception: whatever `write` raises leaves as itself, but OSError as CheckpointError.
        """
        self._check_is_open("save(...)")
        draft = Manifest(
            basename=self._basename,
            step=arguments.checked_step(step),
            serial=self._serial + 1,
            seconds=arguments.checked_seconds(seconds),
            metric=arguments.checked_metric(metric),
            files={},
        )
        files = arguments.checked_extra(extra, draft.name)
        self._serial += 1
        manifest = save_checkpoint(self._names, self._lock, draft, write, files)
        delete_doomed(self._names, self._retention, self._found_damaged)
        return manifest.checkpoint_at(self._names.path(draft.step))

    def set_metric(self, step: SupportsIndex, metric: SupportsFloat) -> bool:
        """Give the checkpoint of a step its metric, which was found after it had been saved.

        Returns:
            Whether there is a checkpoint of that step; what stays is decided by the next `save`.

        Raises:
            CheckpointError: the disk is full, read-only or gone; the checkpoint is as it was.
            MetricError: the metric is NaN.
            RuntimeError: the directory is not open.
            ValueError, TypeError: an argument is not as described.
        """
        self._check_is_open("set_metric(...)")
        number, found = arguments.checked_step(step), arguments.checked_metric(metric)
        self._serial += 1
        return write_metric(self._names, self._lock, number, self._serial, found)

    def checkpoints(self) -> list[Checkpoint]:
        """All whose manifest can be read, in the order in which they were saved.

        Raises:
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the directory cannot be read.
        """
        return self._candidates().readable

    def newest_intact(self, *, up_to_step: SupportsIndex | None = None) -> Checkpoint | None:
        """The one that was saved last of those whose files are as they were written.

        A damaged one is passed over, with a warning in the log.

        Args:
            up_to_step: look at no checkpoint of a greater step; None looks at all.

        Returns:
            None if there are no checkpoints, or no directory.

        Raises:
            DamagedCheckpointError: there are checkpoints, and none is intact.
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: one cannot be read now, which says nothing about its files.
        """
        limit = arguments.checked_limit(up_to_step)
        return first_intact(
            self._path,
            lambda: self._candidates(limit),
            lambda found: found[::-1],
            "checkpoint",
            self._found_damaged,
        )

    def best(self) -> Checkpoint | None:
        """The intact one with the best metric, of equal ones the newest; otherwise `newest_intact`.

        Returns:
            None if there are no checkpoints, or none with a metric.
        """
        return first_intact(
            self._path,
            self._candidates,
            lambda found: best_first(found, self._retention.mode),
            "checkpoint with a metric",
            self._found_damaged,
        )

    def is_better(self, metric: float) -> bool:
        """Whether one with this metric would be among the `keep_best` ones, and equal none.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        retention = self._retention
        best = best_first(self.checkpoints(), retention.mode)[: retention.keep_best]
        if len(best) < retention.keep_best:
            return True
        worst = best[-1].metric if best else None
        if worst is None:  # none is kept for that
            return False
        return metric < worst if retention.mode is Mode.MIN else metric > worst

    def _candidates(self, up_to_step: int | None = None) -> Candidates:
        try:
            return Candidates.read(self._names, up_to_step)
        except FileNotFoundError:
            return Candidates([], [])
        except OSError as error:
            raise failure(self._path, "cannot be read", error) from error

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        """Move one aside for good, as one from which training does not go on well.

        Its directory is renamed to end in `.rejected-<serial>`, and stays until somebody removes
        it; `why` is logged as a warning.

        Raises:
            CheckpointError: it cannot be renamed.
            ValueError: it is of another directory, or its step was saved again since.
            RuntimeError: the directory is not open.
        """
        self._check_is_open("reject(checkpoint, why)")
        path, serial = self._names.path(checkpoint.step), checkpoint.serial
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
        arguments.checked_extra_name(name, os.path.basename(checkpoint.prefix))
        return read_file(checkpoint.path, read_manifest(checkpoint.path), name)

    def _check_is_open(self, call: str) -> None:
        if not self._lock.is_held:
            raise RuntimeError(
                f"{self._path} is not open\n  wrong: directory.{call}\n"
                f"  right: directory.open(), then directory.{call}"
            )
