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
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import SupportsFloat, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError, MetricError, add_note
from ._files import (
    failure,
    kind_of,
    make_directories,
    remove_tree,
    sync_directory,
    sync_tree,
    walk,
)
from ._layout import Layout
from ._lock import DirectoryLock
from ._manifest import (
    MANIFEST,
    Checkpoint,
    Manifest,
    damaged,
    describe,
    read_file,
    read_manifest,
)
from ._retention import Mode, Retention, best_first, superfluous

logger = logging.getLogger("asynchooks")


class CheckpointDirectory:
    """Checkpoints in one directory; make one to save or read there, and close it.

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
        path = _check.path("directory", directory)
        # pathlib makes one slash of two; a drive of Windows is one letter
        address = re.match(r"([A-Za-z][\w+.-]+):/", path)
        if address is not None and address[1].lower() == "file":
            raise ValueError(
                f"the directory of checkpoints is {path!r}, an address; give the path alone"
            )
        if address is not None and ("://" in path or not isinstance(directory, str)):
            raise ValueError(
                f"the directory of checkpoints is {path!r}, the address of an object store; give "
                "the path of a local directory, and copy its checkpoints to the store in a "
                "CheckpointSaverListener"
            )
        self._path = os.path.abspath(path)
        self._layout = Layout(self._path, _checked_basename(basename))
        self._retention = _check.instance(
            "retention",
            Retention() if retention is None else retention,
            Retention,
            "a Retention(max_to_keep=...)",
        )
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
            try:
                self._serial = self._layout.clean_up()
                # find out now, not hours later, whether one can be written
                probe = self._layout.new(0, self._serial + 1)
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
            seconds: seconds of training until now, those before a restore included, >= 0.
            metric: what `Retention.keep_best` compares; infinities count, NaN does not. None:
                not known, and never the best.
            extra: content of further files, by name.

        Raises:
            CheckpointError: the disk is full, read-only, gone, or `write` wrote what it must not.
            MetricError: the metric is NaN.
            RuntimeError: the directory is not open.
            ValueError, TypeError: an argument is not as described.
            Exception: any error of `write`, as it is; but OSError as CheckpointError.
        """
        self._check_is_open("save(...)")
        draft = Manifest(
            basename=self._layout.basename,
            step=_checked_step(step),
            serial=self._serial + 1,
            seconds=_check.seconds(
                "seconds", seconds, zero=True, expected="the seconds of training so far, >= 0"
            ),
            metric=_checked_metric(metric),
            files={},
        )
        files = _checked_extra(extra, draft.name)
        self._serial += 1
        manifest = self._save(draft, write, files)
        self._delete_superfluous()
        return manifest.checkpoint_at(self._layout.path(draft.step))

    def _save(
        self, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
    ) -> Manifest:
        new = self._layout.new(draft.step, draft.serial)
        try:
            self._lock.check()
            self._layout.check_is_free(draft.step)
            manifest = _write(new, draft, write, extra)
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
        return manifest

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
        number, found = _checked_step(step), _checked_metric(metric)
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

    def checkpoints(self) -> list[Checkpoint]:
        """All whose manifest can be read, in the order in which they were saved.

        Raises:
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the directory cannot be read.
        """
        return self._found().readable

    def newest_intact(self, *, up_to_step: SupportsIndex | None = None) -> Checkpoint | None:
        """The last saved one of those whose files are as they were written.

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
        limit = None if up_to_step is None else _checked_step(up_to_step)
        return self._first_intact("checkpoint", lambda found: found[::-1], limit)

    def best(self) -> Checkpoint | None:
        """As `newest_intact`, but the one with the best metric, of equal ones the newest.

        Returns:
            None if there are no checkpoints, or none with a metric.
        """
        return self._first_intact(
            "checkpoint with a metric", lambda found: best_first(found, self._retention.mode)
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

    def _first_intact(
        self,
        what: str,
        in_order: Callable[[list[Checkpoint]], list[Checkpoint]],
        up_to_step: int | None = None,
    ) -> Checkpoint | None:
        """The first in this order whose files are intact; None where there are none at all."""
        is_changing = True
        while is_changing:
            found = self._found(up_to_step)
            is_changing = found.is_changing
            for damage in found.damages:  # the newest may be among them
                logger.warning("%s; it is passed over", damage)
            ordered = in_order(found.readable)
            for checkpoint in ordered:
                try:
                    read_manifest(checkpoint.path).verify(checkpoint.path)
                except DamagedCheckpointError as error:
                    if not os.path.lexists(checkpoint.path):
                        is_changing = True
                        continue
                    found.damages.append(error)
                    self._found_damaged.add(checkpoint.serial)
                    logger.warning("%s; it is passed over", error)
                else:
                    return checkpoint
        if not found.damages or (found.readable and not ordered):
            return None
        listed = "".join(f"\n  {damage}" for damage in found.damages)
        raise DamagedCheckpointError(
            f"{self._path} holds no intact {what}, but damaged ones:{listed}\n"
            "start over in another directory, or move the damaged ones away to start over here"
        )

    def _found(self, up_to_step: int | None = None) -> _Found:
        """Read all manifests, up to a step."""
        found = _Found([], [])
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
            return _Found([], [])
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
        _check_extra_name(name, os.path.basename(checkpoint.prefix))
        return read_file(checkpoint.path, read_manifest(checkpoint.path), name)

    def _check_is_open(self, call: str) -> None:
        if not self._lock.is_held:
            raise RuntimeError(
                f"{self._path} is not open\n  wrong: directory.{call}\n"
                f"  right: directory.open(), then directory.{call}"
            )


@dataclass
class _Found:
    """The directories named like checkpoints: by serial, those with a manifest; and each damage.

    `is_changing`: one was deleted meanwhile, by the run that saves there.
    """

    readable: list[Checkpoint]
    damages: list[DamagedCheckpointError]
    is_changing: bool = False


def _looks_whole(checkpoint: Checkpoint) -> bool:
    try:
        # names and sizes only: reading each byte at each save would cost more than the save
        read_manifest(checkpoint.path).verify(checkpoint.path, reads_files=False)
    except DamagedCheckpointError:
        return False
    return True


def _write(
    new: str, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
) -> Manifest:
    os.mkdir(new)
    try:
        write(os.path.join(new, draft.name))
    except OSError:  # the caller explains it
        raise
    except BaseException as error:
        add_note(
            error,
            f"raised while the checkpoint of step {draft.step} was written in "
            f"{os.path.dirname(new)}; it is not saved, older checkpoints are untouched",
        )
        raise
    _check_written(new, draft.name)
    for name, content in extra.items():
        with open(os.path.join(new, name), "xb") as file:
            file.write(content)
    # before the hashes: a full disk may show only now
    sync_tree(new)
    manifest = replace(draft, files=describe(new))
    # last: a directory with a manifest is complete
    manifest.write(new)
    return manifest


def _check_written(new: str, name: str) -> None:
    written = list(walk(new))
    for path, status in written:
        if kind_of(status) not in ("file", "directory"):
            raise _misuse(
                new, f"{path} is a {kind_of(status)}, which cannot be kept; write files", name
            )
        if not path.startswith(name):
            raise _misuse(new, f"{path} does not begin with the path that it was given", name)
    if not any(kind_of(status) == "file" for _, status in written):
        raise _misuse(new, "no file is at the path that it was given", name)


def _misuse(new: str, what: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{os.path.dirname(new)}: the checkpoint {name} is not saved, for what `write` wrote: "
        f"{what}; older checkpoints are untouched\n"
        f'  wrong: save(step, lambda path: open("/elsewhere/{name}", "wb").write(state))\n'
        '  right: save(step, lambda path: open(f"{path}.state", "wb").write(state))'
    )


def _checked_step(step: SupportsIndex) -> int:
    return _check.integer("step", step, least=0)


def _checked_metric(metric: SupportsFloat | None) -> float | None:
    if metric is None:
        return None
    if not isinstance(metric, SupportsFloat | SupportsIndex) or isinstance(metric, (str, bytes)):
        raise TypeError(f"metric is {metric!r}; give a number, or None")
    number = float(metric)
    if math.isnan(number):
        raise MetricError(
            "metric is NaN, which is neither better nor worse than any other; give a number, or "
            "find out what made it NaN"
        )
    return number


def _checked_basename(basename: str) -> str:
    _check.instance("basename", basename, str, 'a string, as in basename="model.ckpt"')
    if not basename or basename.startswith(".") or any(each in basename for each in "/\\\0"):
        raise ValueError(
            f"basename is {basename!r}; give a name without separators and without a leading dot, "
            "and the directory as the directory"
        )
    return basename


def _checked_extra(extra: Mapping[str, bytes] | None, prefix_name: str) -> dict[str, bytes]:
    files = dict(extra or {})
    for name, content in files.items():
        _check_extra_name(name, prefix_name)
        _check.instance(
            f"the extra file {name!r}", content, (bytes, bytearray, memoryview), "bytes"
        )
    return files


def _check_extra_name(name: str, prefix_name: str) -> None:
    """A file's name beside the saver's files: no separators, not the saver's, not ours."""
    _check.instance("the name of an extra file", name, str, 'a string, as "hooks.json"')
    is_plain = bool(name) and os.path.basename(name) == name and not name.startswith(".")
    if not is_plain or any(each in name for each in "\\\0"):
        raise ValueError(f"{name!r} is no name of an extra file; give one as in 'hooks.json'")
    if name.startswith(prefix_name) or name in (MANIFEST, f"{MANIFEST}.new"):
        raise ValueError(
            f"{name!r} is taken: names that begin with {prefix_name!r} are the saver's, and "
            f"{MANIFEST} is the checkpoint's own; give another name for the extra file"
        )
