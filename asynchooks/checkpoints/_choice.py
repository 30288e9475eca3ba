"""The first intact checkpoint, in whatever order is asked for. It changes nothing on the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from .._errors import DamagedCheckpointError
from ._manifest import Checkpoint, damaged, read_manifest
from ._naming import Names

logger = logging.getLogger("asynchooks")


@dataclass(frozen=True)
class Candidates:
    """What is named like a checkpoint: those with a manifest, by serial, and each damage.

    `is_changing`: one was deleted meanwhile, by a run that saved a newer one before.
    """

    readable: list[Checkpoint]
    damages: list[DamagedCheckpointError]
    is_changing: bool = False

    @classmethod
    def read(cls, names: Names, up_to_step: int | None = None) -> Candidates:
        """Read all manifests in a directory, up to a step.

        Raises:
            CheckpointVersionError: a manifest is of a newer version.
            CheckpointError: a manifest cannot be read now.
            OSError: the directory cannot be read.
        """
        readable: list[Checkpoint] = []
        damages: list[DamagedCheckpointError] = []
        is_changing = False
        for path, step in names.checkpoints():
            if up_to_step is not None and step > up_to_step:
                continue
            try:
                readable.append(_read(names, path, step))
            except DamagedCheckpointError as error:
                if os.path.lexists(path):
                    damages.append(error)
                else:
                    is_changing = True
        by_serial = sorted(readable, key=lambda each: (each.serial, each.step))
        return cls(by_serial, damages, is_changing)


def _read(names: Names, path: str, step: int) -> Checkpoint:
    if os.path.islink(path) or not os.path.isdir(path):
        raise damaged(path, "is no directory, though it is named like a checkpoint")
    manifest = read_manifest(path)
    if manifest.name != names.name(step):
        raise damaged(path, f"its manifest is that of {manifest.name}: it was renamed")
    return manifest.checkpoint_at(path)


def first_intact(
    directory: str,
    read: Callable[[], Candidates],
    in_order: Callable[[list[Checkpoint]], list[Checkpoint]],
    what: str,
    found_damaged: set[int],
) -> Checkpoint | None:
    """The first whose files are as they were written, None where there is nothing to look at.

    The serials of those that are not are added to `found_damaged`.

    Raises:
        DamagedCheckpointError: there is something, and none of it is intact.
    """
    while True:
        candidates = read()
        damages = list(candidates.damages)
        for damage in damages:  # the newest may be among them
            logger.warning("%s; it is passed over", damage)
        is_changing = candidates.is_changing
        ordered = in_order(candidates.readable)
        for checkpoint in ordered:
            try:
                read_manifest(checkpoint.path).verify(checkpoint.path)
            except DamagedCheckpointError as error:
                if os.path.lexists(checkpoint.path):
                    damages.append(error)
                    found_damaged.add(checkpoint.serial)
                    logger.warning("%s; it is passed over", error)
                else:  # deleted by the run that saves there, after it saved a newer one
                    is_changing = True
            else:
                return checkpoint
        if not is_changing:
            break
    if not damages or (candidates.readable and not ordered):
        return None
    listed = "".join(f"\n  {damage}" for damage in damages)
    raise DamagedCheckpointError(
        f"{directory} holds no intact {what}, but damaged ones:{listed}\n"
        "start anew in another directory, or move the damaged ones away to start anew in this one"
    )
