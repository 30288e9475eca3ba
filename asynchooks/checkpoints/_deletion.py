"""Deleting what need not stay, after a save. No failure here is an error: the save is done."""

from __future__ import annotations

import logging
from collections.abc import Collection

from .._errors import CheckpointError, DamagedCheckpointError
from ._choice import Candidates
from ._files import remove_tree
from ._manifest import Checkpoint, read_manifest
from ._naming import Names
from ._retention import Retention, doomed

logger = logging.getLogger("asynchooks")


def delete_doomed(names: Names, retention: Retention, found_damaged: Collection[int]) -> None:
    """Delete what the retention dooms among those that look whole.

    A damaged checkpoint is no fallback, so it does not count, and is evidence, so it stays.

    Args:
        names: where they are.
        retention: what dooms them.
        found_damaged: serials of those whose content is known not to be as it was written.
    """
    try:
        whole = [
            each
            for each in Candidates.read(names).readable
            if each.serial not in found_damaged and _looks_whole(each)
        ]
        for each in doomed(whole, retention):
            remove_tree(names.move_aside(each.path))
    except (OSError, CheckpointError) as error:
        logger.warning("Older checkpoints in %s are not deleted: %s", names.directory, error)


def _looks_whole(checkpoint: Checkpoint) -> bool:
    try:
        # names and sizes only: reading each byte at each save would cost more than the save
        read_manifest(checkpoint.path).verify(checkpoint.path, reads_files=False)
    except DamagedCheckpointError:
        return False
    return True
