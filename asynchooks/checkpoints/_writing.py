"""One new checkpoint, from its directory to its name. Older ones are left as they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from .._errors import CheckpointError, DamagedCheckpointError, add_note
from ._faults import failure
from ._files import kind_of, remove_tree, sync_directory, sync_tree, walk
from ._lock import DirectoryLock
from ._manifest import MANIFEST, Manifest, describe, read_manifest
from ._naming import Names


def save_checkpoint(
    names: Names,
    lock: DirectoryLock,
    draft: Manifest,
    write: Callable[[str], object],
    extra: Mapping[str, bytes],
) -> Manifest:
    """Write the checkpoint that the draft describes; return it with the files that there are.

    Raises:
        CheckpointError: `write` wrote nothing, or what it must not, or the system refused.
        Exception: whatever else `write` raises, with a note.
    """
    new = names.new(draft.step, draft.serial)
    try:
        lock.check()
        names.check_is_free(draft.step)
        manifest = _write(new, draft, write, extra)
        lock.check()  # `write` may have made a lost directory anew
        names.put_in_place(new, draft.step)
    except OSError as error:
        what = f"the checkpoint of step {draft.step} is not saved"
        explained = failure(names.directory, what, error)  # before the removal frees bytes
        remove_tree(new)
        raise explained from error
    except BaseException:
        remove_tree(new)
        raise
    return manifest


def write_metric(
    names: Names, lock: DirectoryLock, step: int, serial: int, metric: float | None
) -> bool:
    """Replace the manifest of a step's checkpoint by one with this metric, whole or not at all.

    Args:
        serial: of the directory in which the new manifest is written.

    Returns:
        Whether there is such a checkpoint.
    """
    path, new = names.path(step), names.new(step, serial)
    try:
        manifest = read_manifest(path)
    except DamagedCheckpointError:
        return False
    try:
        lock.check()
        os.mkdir(new)
        replace(manifest, metric=metric).write(new)
        os.rename(os.path.join(new, MANIFEST), os.path.join(path, MANIFEST))
        sync_directory(path)
    except OSError as error:
        raise failure(names.directory, f"the metric of step {step} is not saved", error) from error
    finally:
        remove_tree(new)
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
