"""What directories and object stores of checkpoints have in common: which one is chosen, and why.

It does not know what savers write, decides nothing by the time of day, and starts no threads.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, SupportsFloat, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError, MetricError, add_note
from ._files import digest, kind_of, sync_tree, walk
from ._layout import ADDED_BYTES
from ._manifest import MANIFEST, Checkpoint, Manifest
from ._mode import ask_for_mode, checked_mode
from ._retention import Retention, best_first

logger = logging.getLogger("asynchooks")


class RankFiles(NamedTuple):
    """The extra files of one name in a checkpoint of several ranks."""

    num_saved: int  # ranks that saved it
    num_here: int
    contents: list[bytes]  # of those ranks that have such a file


class CheckpointPlace:
    """Checkpoints of one basename in one place; all methods block, one call at a time.

    Args:
        where: the place, for messages.
    """

    def __init__(self, where: str, basename: str, retention: Retention | None) -> None:
        self._where = where
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

    def open(self) -> None:
        """Take the place for this run alone, and clean up what a killed run left behind."""
        raise NotImplementedError

    def close(self) -> None:
        """Let other runs use the place; does nothing when it is not open."""
        raise NotImplementedError

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
            step=checked_step(step),
            serial=self._serial + 1,
            seconds=_check.seconds(
                "seconds", seconds, zero=True, expected="the seconds of training so far, >= 0"
            ),
            metric=checked_metric(metric),
            files={},
            mode=checked_mode(self._retention.mode),
        )
        files = _checked_extra(extra, draft.name)
        self._serial += 1
        checkpoint = self._save(draft, write, files)
        self._delete_superfluous()
        return checkpoint

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
        limit = None if up_to_step is None else checked_step(up_to_step)
        return self._first_intact("checkpoint", lambda found: found[::-1], limit)

    def best(self) -> Checkpoint | None:
        """As `newest_intact`, but the one with the best metric, of equal ones the first.

        Which metric is better is what the `retention` says, or else the run that saved them.

        Returns:
            None if there are no checkpoints, or none with a metric.

        Raises:
            ValueError: metrics differ, and neither says which one is better.
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
                    intact = self._verified(checkpoint)
                except DamagedCheckpointError as error:
                    if self._is_gone(checkpoint):
                        is_changing = True
                        continue
                    found.damages.append(error)
                    self._found_damaged.add(checkpoint.serial)
                    logger.warning("%s; it is passed over", error)
                else:
                    return intact
        if not found.damages or (found.readable and not ordered):
            return None
        listed = "".join(f"\n  {damage}" for damage in found.damages)
        raise DamagedCheckpointError(
            f"{self._where} holds no intact {what}, but damaged ones:{listed}\n"
            "start over in another directory, or move the damaged ones away to start over here"
        )

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        """Move one aside for good: training does not continue well from it.

        It is never chosen again and never deleted; `why` is logged as a warning.

        Raises:
            CheckpointError: it cannot be moved.
            ValueError: it is of another place, or its step was saved again since.
            RuntimeError: the place is not open.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """The content of an extra file, None if the checkpoint has none of that name.

        Raises:
            DamagedCheckpointError: it is not what was written, or the checkpoint is gone.
        """
        raise NotImplementedError

    def ranks_of(self, checkpoint: Checkpoint, name: str) -> RankFiles | None:
        """Where another number of ranks saved it than there are: what each has in such a file."""
        return None

    def together(self, fn: Callable[[], object]) -> None:
        """Call it on all ranks that use the place; its error on one is raised on all."""
        fn()

    def _save(
        self, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
    ) -> Checkpoint:
        raise NotImplementedError

    def _delete_superfluous(self) -> None:
        """Delete what the retention does not keep. A failure is logged: the save is done."""
        raise NotImplementedError

    def _found(self, up_to_step: int | None = None) -> Found:
        """Read all manifests, up to a step."""
        raise NotImplementedError

    def _verified(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint, whose files are here and as they were written, or an error."""
        raise NotImplementedError

    def _is_gone(self, checkpoint: Checkpoint) -> bool:
        """Whether it was deleted since it was found."""
        raise NotImplementedError

    @property
    def _is_open(self) -> bool:
        raise NotImplementedError

    def _check_is_open(self, call: str) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"{self._where} is not open\n  wrong: directory.{call}\n"
                f"  right: directory.open(), then directory.{call}"
            )


@dataclass
class Found:
    """What is named like a checkpoint: by serial, those with a manifest; and each damage.

    `is_changing`: one was deleted meanwhile, by the run that saves there.
    """

    readable: list[Checkpoint]
    damages: list[DamagedCheckpointError]
    is_changing: bool = False


def write_files(
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
    written = _found_in(new)
    for path, status in written:
        if kind_of(status) not in ("file", "directory"):
            raise _misuse(
                new, f"{path} is a {kind_of(status)}, which cannot be kept; write files", name
            )
        if not path.startswith(name):
            raise _misuse(new, f"{path} does not begin with the path that it was given", name)
    if not any(kind_of(status) == "file" for _, status in written):
        raise _misuse(new, "no file is at the path that it was given", name)


def _found_in(new: str) -> list[tuple[str, os.stat_result]]:
    """What is in a checkpoint's directory, without what other programs have put there meanwhile.

    Those names begin with a dot, as .DS_Store and .nfs0042 do; no basename does.
    """
    return [each for each in walk(new) if not each[0].startswith(".")]


def _misuse(new: str, what: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{os.path.dirname(new)}: the checkpoint {name} is not saved, for what `write` wrote: "
        f"{what}; older checkpoints are untouched\n"
        f'  wrong: save(step, lambda path: open("/elsewhere/{name}", "wb").write(state))\n'
        '  right: save(step, lambda path: open(f"{path}.state", "wb").write(state))'
    )


def checked_step(step: SupportsIndex) -> int:
    return _check.integer("step", step, least=0)


def checked_metric(metric: SupportsFloat | None) -> float | None:
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
    _check.name_of_file("basename", basename, suffix=ADDED_BYTES)
    return basename


def _checked_extra(extra: Mapping[str, bytes] | None, prefix_name: str) -> dict[str, bytes]:
    files = dict(extra or {})
    for name, content in files.items():
        check_extra_name(name, prefix_name)
        _check.instance(
            f"the extra file {name!r}", content, (bytes, bytearray, memoryview), "bytes"
        )
    return files


def check_extra_name(name: str, prefix_name: str) -> None:
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
