"""What directories and object stores of checkpoints have in common.

That is the order of writing, and which checkpoint is chosen, kept, rejected or damaged. A save
takes these steps, and a kill between any two of them leaves the checkpoint complete or absent:
the hold on the place is checked; the saver writes into a new local directory; extra files are
added; everything is synced, where a full disk may show; all files are read back and hashed; the
manifest is written, last; the hold is checked again; the place publishes the checkpoint at once;
and only then is deleted what the retention does not keep.

Nothing here knows what savers write, decides by the time of day, or starts a thread.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError, MetricError, add_note
from ._files import digest, failure, kind_of, remove_tree, sync_tree, walk
from ._manifest import MANIFEST, Checkpoint, Manifest, damaged, read_file, read_manifest
from ._mode import ask_for_mode, checked_mode
from ._retention import Retention, best_first, superfluous

if TYPE_CHECKING:
    from ._lease import Lease
    from ._lock import DirectoryLock

logger = logging.getLogger("asynchooks")

ADDED_BYTES = 80
"""What may be appended to a basename: a step of 20 digits, and what savers add, the longest of
which is TensorFlow's `.data-00000-of-00001.tempstate` with a number."""


class RankFiles(NamedTuple):
    """The extra files of one name in a checkpoint of several ranks."""

    num_saved: int  # ranks that saved it
    num_here: int
    contents: list[bytes]  # of those ranks that have such a file


class Listed(NamedTuple):
    """What is named like a checkpoint; `read` gives its manifest, or raises."""

    path: str
    step: int
    read: Callable[[], Manifest]


class CheckpointPlace:
    """Checkpoints of one basename in one place; all methods block, one call at a time.

    A kind of place says how checkpoints are listed, published and deleted there. What a checkpoint
    is, the order of writing, and which one is chosen or deleted is said here, for all kinds.

    Args:
        where: the place, for messages.
        hold: what keeps the place to one run.
    """

    def __init__(
        self, where: str, hold: DirectoryLock | Lease, basename: str, retention: Retention | None
    ) -> None:
        self._where, self._hold = where, hold
        self._basename = _checked_basename(basename)
        self._retention = _check.instance(
            "retention",
            Retention() if retention is None else retention,
            Retention,
            "a Retention(max_to_keep=...)",
        )
        if self._retention.keep_best and self._retention.mode is None:
            advice = "Give mode=Mode.MIN if smaller is better, else mode=Mode.MAX"
            mode = ask_for_mode(repr(self._retention), advice)
            self._retention = replace(self._retention, mode=mode)
        self._found_damaged: set[int] = set()  # serials
        self._serial = 0  # the highest ever given here; a failed save leaves a gap

    # What a kind of place adds.

    def open(self) -> None:
        """Take the place for this run alone, and clean up what a killed run left behind."""
        raise NotImplementedError

    def _listed(self) -> Iterable[Listed]:
        """Everything that is named like a checkpoint, and was not rejected."""
        raise NotImplementedError

    def _is_gone(self, path: str) -> bool:
        """Whether a checkpoint was deleted since it was listed, by the run that saves there."""
        raise NotImplementedError

    def _new(self, draft: Manifest) -> str:
        """A local path at which nothing is, for the files of a new checkpoint."""
        raise NotImplementedError

    def _publish(self, new: str, manifest: Manifest) -> Checkpoint:
        """Make the files in `new` a checkpoint, all at once; after an error they are none."""
        raise NotImplementedError

    def _looks_whole(self, path: str, manifest: Manifest) -> bool:
        """Whether all its files are there, by names and sizes alone."""
        raise NotImplementedError

    def _local(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint in a local directory, with its manifest, and not compared yet."""
        return checkpoint

    def _replace_manifest(self, path: str, manifest: Manifest) -> None:
        """Give a checkpoint another manifest; a kill leaves the old one or the new one."""
        raise NotImplementedError

    def _delete(self, path: str) -> None:
        """Delete a checkpoint; a kill leaves no half of one."""
        raise NotImplementedError

    def _set_aside(self, checkpoint: Checkpoint, why: str) -> str:
        """Have it never listed again; returns where it is, for the log."""
        raise NotImplementedError

    # What all kinds have.

    def close(self) -> None:
        """Let other runs use the place; does nothing when it is not open."""
        self._hold.release()

    def abandon(self) -> None:
        """As `close`, but without waiting for anything."""
        self.close()

    def address_of(self, checkpoint: Checkpoint) -> str:
        """Where a checkpoint is kept, for messages; it may be read elsewhere."""
        return checkpoint.path

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

        Returns once it is on the disk, or in the store. What cannot be deleted is logged, and is
        no error.

        Args:
            step: >= 0; may be lower than that of an earlier save.
            write: gets a path in a fresh directory, and makes a file or a directory there, or
                several that begin with it; what it returns is ignored.
            seconds: seconds of training until now, those before a restore included, >= 0.
            metric: what `Retention.keep_best` compares; infinities count, NaN does not. None:
                not known, and never the best.
            extra: content of further files, by name.

        Raises:
            CheckpointError: the disk or the store cannot take it, or `write` wrote what it must
                not.
            MetricError: the metric is NaN.
            RuntimeError: the place is not open.
            ValueError, TypeError: an argument is not as described.
            Exception: any error of `write`, as it is; but OSError as CheckpointError.
        """
        self._check_is_open("save(...)")
        draft = Manifest(
            basename=self._basename,
            step=_check.integer("step", step, least=0),
            serial=self._serial + 1,
            seconds=_check.seconds(
                "seconds", seconds, zero=True, expected="the seconds of training so far, >= 0"
            ),
            metric=_checked_metric(metric),
            files={},
            mode=checked_mode(self._retention.mode),
        )
        files = extra or {}
        for name, content in files.items():
            _check_extra_name(name, draft.name)
            kinds = (bytes, bytearray, memoryview)
            _check.instance(f"the extra file {name!r}", content, kinds, "bytes")
        self._serial = draft.serial
        new = self._new(draft)
        try:
            manifest = _write_files(new, draft, write, files)
            self._hold.check()  # `write` may have taken long, or recreated a lost directory
            checkpoint = self._publish(new, manifest)
        except OSError as error:  # explained before the removal frees bytes
            what = f"the checkpoint of step {draft.step} is not saved"
            raise failure(os.path.dirname(new), what, error) from error
        finally:
            remove_tree(new)
        self._delete_superfluous()
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """All whose manifest can be read, in the order in which they were saved.

        Raises:
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the directory cannot be read.
        """
        return _last_of_each_step(self._look()[0])

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
        limit = math.inf if up_to_step is None else _check.integer("step", up_to_step, least=0)
        return self._first_intact("checkpoint", lambda found: found[::-1], limit)

    def best(self) -> Checkpoint | None:
        """As `newest_intact`, but the one with the best metric, of equal ones the first.

        Which metric is better is what the `retention` says, or else the run that saved them. Where
        neither does, it is the smaller one, and a warning asks.

        Returns:
            None if there are no checkpoints, or none with a metric.
        """
        return self._first_intact(
            "checkpoint with a metric", lambda found: best_first(found, self._retention)
        )

    def is_better(self, metric: float) -> bool:
        """Whether one with this metric would be among the `keep_best` ones, and equal none.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        retention = self._retention
        mode = checked_mode(retention.mode)
        if mode is None or not retention.keep_best:  # none is kept for that
            return False
        best = best_first(self.checkpoints(), retention)[: retention.keep_best]
        worst = best[-1].metric if len(best) == retention.keep_best else None
        return worst is None or mode.is_better(metric, worst)

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        """Move one aside for good: training does not continue well from it.

        It is never chosen again and never deleted; `why` is logged as a warning. In a directory
        its name then ends in `.rejected-<serial>`.

        Raises:
            CheckpointError: it cannot be moved.
            ValueError: it is of another place, or its step was saved again since.
            RuntimeError: the place is not open.
        """
        self._check_is_open("reject(checkpoint, why)")
        address = self.address_of(checkpoint)
        known = {self.address_of(each): each.serial for each in self.checkpoints()}
        if known.get(address) != checkpoint.serial:
            raise ValueError(
                f"{checkpoint!r} is not in {self._where} any more; give one that "
                "newest_intact(), best() or checkpoints() returned after the last save()"
            )
        target = self._set_aside(checkpoint, why)
        logger.warning("%s is rejected and kept as %s: %s", address, target, why)

    def set_metric(self, step: SupportsIndex, metric: SupportsFloat) -> bool:
        """Set the metric of the checkpoint of a step, which was found after it was saved.

        Returns:
            Whether there is a checkpoint of that step; what stays is decided by the next `save`.

        Raises:
            CheckpointError: it cannot be written; the checkpoint is as it was.
            MetricError: the metric is NaN.
            RuntimeError: the place is not open.
            ValueError, TypeError: an argument is not as described.
        """
        self._check_is_open("set_metric(...)")
        number, value = _check.integer("step", step, least=0), _checked_metric(metric)
        found = [each for each in self._look()[0] if each[1].step == number]
        if not found:
            return False
        path, manifest = found[-1]
        try:
            self._replace_manifest(path, replace(manifest, metric=value))
        except OSError as error:
            raise failure(
                self._where, f"the metric of step {number} is not saved", error
            ) from error
        return True

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """The content of an extra file, None if the checkpoint has none of that name.

        Raises:
            DamagedCheckpointError: it is not what was written, or the checkpoint is gone.
        """
        path = self._local(checkpoint).path
        return read_file(path, read_manifest(path), name)

    def ranks_of(self, checkpoint: Checkpoint, name: str) -> RankFiles | None:
        """Where another number of ranks saved it than there are: what each has in such a file."""
        return None

    def together(self, fn: Callable[[], object]) -> None:
        """Call it on all ranks that use the place; its error on one is raised on all."""
        fn()

    def _delete_superfluous(self) -> None:
        """Delete what the retention does not keep. A failure is logged: the save is done.

        A damaged checkpoint does not count as one to resume from, and stays as evidence. In a
        store, one that was replaced is there until it is deleted, perhaps by a later run.
        """
        try:
            manifests = dict(self._look()[0])  # by path: a copied checkpoint may have any serial
            kept = _last_of_each_step(list(manifests.items()))
            replaced = manifests.keys() - {each.path for each in kept}
            # reading each byte at each save would cost more than the save
            whole = [
                each
                for each in kept
                if each.serial not in self._found_damaged
                and self._looks_whole(each.path, manifests[each.path])
            ]
            surplus = [each.path for each in superfluous(whole, self._retention)]
            for path in [*sorted(replaced), *surplus]:
                self._delete(path)
        except (OSError, CheckpointError) as error:
            logger.warning("Older checkpoints in %s are not deleted: %s", self._where, error)

    def _look(
        self, up_to_step: float = math.inf
    ) -> tuple[list[tuple[str, Manifest]], list[DamagedCheckpointError]]:
        """(path, manifest) of all that can be read, in the order of saving; and each damage."""
        is_changing = True
        while is_changing:
            is_changing, readable, damages = False, [], []
            for path, step, read in self._listed():
                if step > up_to_step:
                    continue
                try:
                    manifest = read()
                    if manifest.name != f"{self._basename}-{step}":
                        raise damaged(
                            path, f"its manifest is that of {manifest.name}: it was renamed"
                        )
                    readable.append((path, manifest))
                except DamagedCheckpointError as error:
                    # the run that saves here may delete it while this one looks: gone is not
                    # damaged, and what was saved meanwhile is not listed yet
                    if self._is_gone(path):
                        is_changing = True
                    else:
                        damages.append(error)
        return sorted(readable, key=lambda each: (each[1].serial, each[1].step)), damages

    def _first_intact(
        self,
        what: str,
        in_order: Callable[[list[Checkpoint]], list[Checkpoint]],
        up_to_step: float = math.inf,
    ) -> Checkpoint | None:
        """The first in this order whose files are intact; None where there are none at all."""
        ahead: list[Checkpoint] | None = None
        while ahead is None:
            readable, damages = self._look(up_to_step)
            for damage in damages:  # the newest may be among them
                logger.warning("%s; it is passed over", damage)
            ahead = in_order(_last_of_each_step(readable))
            has_some = bool(ahead)
            for checkpoint in ahead:
                try:
                    local = self._local(checkpoint)
                    read_manifest(local.path).verify(local.path, self.address_of(checkpoint))
                except DamagedCheckpointError as error:
                    if self._is_gone(checkpoint.path):
                        ahead = None  # look again: the others may be gone as well
                        break
                    damages.append(error)
                    self._found_damaged.add(checkpoint.serial)
                    logger.warning("%s; it is passed over", error)
                else:
                    return local
        if not damages or (readable and not has_some):
            return None
        listed = "".join(f"\n  {damage}" for damage in damages)
        raise DamagedCheckpointError(
            f"{self._where} holds no intact {what}, but damaged ones:{listed}\n"
            "start over in another directory, or move the damaged ones away to start over here"
        )

    def _check_is_open(self, call: str) -> None:
        """Raise RuntimeError unless it is open, CheckpointError if another run has it by now."""
        if not self._hold.is_held:
            raise RuntimeError(
                f"{self._where} is not open\n  wrong: directory.{call}\n"
                f"  right: directory.open(), then directory.{call}"
            )
        self._hold.check()


def _last_of_each_step(readable: list[tuple[str, Manifest]]) -> list[Checkpoint]:
    last = {manifest.step: manifest for _, manifest in readable}
    return [each.checkpoint_at(path) for path, each in readable if each is last[each.step]]


def _write_files(
    new: str, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
) -> Manifest:
    """Write all files of a checkpoint into a new local directory, the manifest last.

    OSError: the disk's. CheckpointError: `write` has written what it must not.
    """
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
    written = _found_in(new)
    # before the hashes: a full disk may show only now
    sync_tree(new, written)
    files = [path for path, status in written if kind_of(status) == "file"]
    manifest = replace(draft, files={path: digest(os.path.join(new, path)) for path in files})
    # last: a directory with a manifest is complete
    manifest.write(new)
    return manifest


def _check_written(new: str, name: str) -> None:
    """Raise CheckpointError unless there are files, all of names that begin with this."""
    what = "no file is at the path that it was given"
    for path, status in _found_in(new):
        kind = kind_of(status)
        if kind not in ("file", "directory"):
            what = f"{path} is a {kind}, which cannot be kept; write files"
            break
        if not path.startswith(name):
            what = f"{path} does not begin with the path that it was given"
            break
        if kind == "file":
            what = ""
    if what:
        raise CheckpointError(
            f"{os.path.dirname(new)}: the checkpoint {name} is not saved, for what `write` wrote: "
            f"{what}; older checkpoints are untouched\n"
            f'  wrong: save(step, lambda path: open("/elsewhere/{name}", "wb").write(state))\n'
            '  right: save(step, lambda path: open(f"{path}.state", "wb").write(state))'
        )


def _found_in(new: str) -> list[tuple[str, os.stat_result]]:
    """What is in a checkpoint's directory, without what other programs have put there meanwhile.

    Those names begin with a dot, as .DS_Store and .nfs0042 do; no basename does.
    """
    return [each for each in walk(new) if not each[0].startswith(".")]


def _checked_metric(metric: SupportsFloat | None) -> float | None:
    number = None if metric is None else _check.real("metric", metric)
    if number != number:
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
    _check.name_of_file("basename", basename, suffix=ADDED_BYTES)
    return basename


def _check_extra_name(name: str, prefix_name: str) -> None:
    """A file's name beside the saver's files: no separators, not the saver's, not ours."""
    _check.instance("the name of an extra file", name, str, 'a string, as "hooks.json"')
    if os.path.basename(name) != name or name[:1] in ("", ".") or any(c in name for c in "\\\0"):
        raise ValueError(f"{name!r} is no name of an extra file; give one as in 'hooks.json'")
    if name.startswith((prefix_name, MANIFEST)):
        raise ValueError(
            f"{name!r} is taken: names that begin with {prefix_name!r} are the saver's, and "
            f"{MANIFEST} is the checkpoint's own; give another name for the extra file"
        )
