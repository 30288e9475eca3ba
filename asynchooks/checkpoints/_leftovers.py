"""What a run that was killed left behind: finished, put back, or removed. It writes nothing new.

`open` calls it under the lock, so that nobody else is in the middle of anything.
"""

from __future__ import annotations

import logging
import os

from .._errors import DamagedCheckpointError
from ._files import remove_tree, sync_directory
from ._manifest import Manifest, read_manifest
from ._naming import Names

logger = logging.getLogger("asynchooks")


def sweep(names: Names) -> int:
    """Clean up, and return the highest serial that was ever given here.

    Raises:
        CheckpointVersionError: a manifest is of a newer version; nothing was changed.
    """
    written, deleted = names.being_written(), names.being_deleted()
    highest = _highest_serial(names)
    for path, step, _ in sorted(written, key=lambda each: each[2]):
        others = [names.path(step), *(old for old, its_step in deleted if its_step == step)]
        manifest = _intact(path)
        # one that outlived its failed save may be older than what was saved afterwards
        if manifest is None or manifest.step != step or max(map(_serial, others)) > manifest.serial:
            remove_tree(path)
        else:
            logger.info("%s was complete, and is the checkpoint of step %d now", path, step)
            names.put_in_place(path, step)
    # the newest first: only one gets the name
    for path, step in sorted(deleted, key=lambda each: -_serial(each[0])):
        final = names.path(step)
        if os.path.lexists(final) or _intact(path) is None:
            remove_tree(path)
        else:
            logger.info("%s was not replaced, and is put back as %s", path, final)
            os.rename(path, final)
            sync_directory(names.directory)
    return highest


def _highest_serial(names: Names) -> int:
    rejected = names.rejected()
    written = names.being_written()
    paths = [path for path, _ in names.checkpoints() + names.being_deleted() + rejected]
    paths += [path for path, _, _ in written]
    # the name tells it too where the manifest is damaged
    return max([0, *(serial for _, serial in rejected), *map(_serial, paths)])


def _serial(path: str) -> int:
    """The serial in a directory's manifest; 0 where there is none that can be read."""
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
