"""A directory of checkpoints whose content is copied to an object store, in a thread of its own."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from .._errors import CheckpointError, DamagedCheckpointError
from ._checkpoint_store import CheckpointStore
from ._directory import CheckpointDirectory
from ._files import failure, remove_tree, sync_tree, walk
from ._manifest import Checkpoint, Manifest, read_manifest
from ._retention import Retention

logger = logging.getLogger("asynchooks")

_TRIED_AGAIN_SECS = 30.0


class MirroredDirectory(CheckpointDirectory):
    """A directory of checkpoints that are copied to a store once they are saved.

    Saves return as those of a `CheckpointDirectory`, before the copy. The newest is copied first;
    one that the directory has deleted before its turn comes is left out. A copy that fails is
    logged and tried again, and stops nothing. `open` brings back the newest checkpoint of the store
    if the directory has none that is as new; `close` waits for the copies.

    Args:
        directory, basename, retention: as of `CheckpointDirectory`; the retention holds in the
            store as well.
        store: as of `CheckpointStore`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        store: Any,
        basename: str = "model.ckpt",
        retention: Retention | None = None,
    ) -> None:
        super().__init__(directory, basename, retention)
        self._store = CheckpointStore(store, basename, retention)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards what follows
        self._is_due = False
        self._is_closing = False
        self._rejected: list[tuple[Checkpoint, str]] = []

    def open(self) -> None:
        """As of `CheckpointDirectory`, and of `CheckpointStore`, whose newest may be brought back.

        Raises:
            CheckpointInUseError: another run uses the directory or the prefix.
            CheckpointError: one of them cannot be used; or the store has checkpoints of another
                training.
        """
        super().open()
        try:
            self._store.open()
            try:
                self._bring_newest()
            except BaseException:
                self._store.close()
                raise
        except BaseException:
            super().close()
            raise
        self._is_closing, self._is_due = False, True  # copies may be due from an earlier run
        self._thread = threading.Thread(
            target=self._copy_all, name="asynchooks-checkpoint-mirror", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait for the copies, then let other runs use the directory and the prefix."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._notify(is_closing=True)
            thread.join()
        super().close()

    def abandon(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._notify(is_closing=True)
        super().close()

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        super().reject(checkpoint, why)
        with self._changed:
            self._rejected.append((checkpoint, why))
        self._notify()

    def set_metric(self, step: SupportsIndex, metric: SupportsFloat) -> bool:
        is_set = super().set_metric(step, metric)
        self._notify()
        return is_set

    def _save(
        self, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
    ) -> Checkpoint:
        checkpoint = super()._save(draft, write, extra)
        self._notify()
        return checkpoint

    def _notify(self, *, is_closing: bool = False) -> None:
        with self._changed:
            self._is_due = True
            self._is_closing |= is_closing
            self._changed.notify()

    def _bring_newest(self) -> None:
        """Take over the newest checkpoint of the store, if it was saved after all local ones."""
        here = {each.serial: each for each in self.checkpoints()}
        rejected = self._layout.rejected()
        for each in self._store.checkpoints():
            if each.serial in rejected:  # a kill came before the store was told
                self._store.reject(each, "it is rejected in the directory")
        there = self._store.checkpoints()
        for each in there:
            if each.serial in here and _differs(each, here[each.serial]):
                raise CheckpointError(
                    f"{self._store.name} has checkpoints of another training than {self._path}: "
                    f"that of step {each.step} has the place of step {here[each.serial].step}; "
                    "give another prefix, or another directory"
                )
        if there and there[-1].serial > self._serial:
            self._take_over_newest()
        self._serial = max(self._serial, self._store.serial)

    def _take_over_newest(self) -> None:
        newest = self._store.newest_intact()
        if newest is None or newest.serial <= self._serial:
            return
        new = self._layout.new(newest.step, newest.serial)
        try:
            shutil.copytree(newest.path, new)
            sync_tree(new, walk(new))
            self._layout.put_in_place(new, newest.step)
        except OSError as error:
            remove_tree(new)
            what = f"the checkpoint of step {newest.step} of {self._store.name} is not copied"
            raise failure(self._path, what, error) from error
        logger.info(
            "The checkpoint of step %d is copied from %s to %s",
            newest.step, self._store.name, self._path,
        )  # fmt: skip

    def _copy_all(self) -> None:
        """The thread: copy what the directory has and the store has not, until it is closed."""
        pause: float | None = None
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_due, pause)
                    self._is_due, is_last = False, self._is_closing
                try:
                    while self._copy_one():
                        pass
                except CheckpointError as error:
                    log = logger.error if is_last else logger.warning
                    log(
                        "Checkpoints of %s are not copied to %s%s: %s", self._path,
                        self._store.name, "" if is_last else "; this is tried again", error,
                    )  # fmt: skip
                    pause = _TRIED_AGAIN_SECS
                else:
                    pause = None
                if is_last:
                    return
        finally:
            self._store.close()

    def _copy_one(self) -> bool:
        """Bring one thing in the store up to date; returns whether there may be more."""
        with self._changed:
            rejected = self._rejected[:1]
        there = {each.serial: each for each in self._store.checkpoints()}
        for checkpoint, why in rejected:
            if checkpoint.serial in there:
                self._store.reject(there[checkpoint.serial], why)
            with self._changed:
                self._rejected.pop(0)
            return True
        for checkpoint in reversed(self.checkpoints()):
            copied = there.get(checkpoint.serial)
            if copied is None:
                if self._copy(checkpoint):
                    self._store._delete_superfluous()
                    return True
            elif checkpoint.metric is not None and copied.metric != checkpoint.metric:
                return self._store.set_metric(checkpoint.step, checkpoint.metric)
        return False

    def _copy(self, checkpoint: Checkpoint) -> bool:
        """Copy one checkpoint; returns whether it was, and not deleted meanwhile, or damaged."""
        links = self._layout.copy(checkpoint.step, checkpoint.serial)
        try:
            manifest = read_manifest(checkpoint.path)
            if manifest.serial != checkpoint.serial or not self._store._would_keep(manifest):
                return False
            _link_files(manifest, checkpoint.path, links)
            manifest.verify(links)
            self._store._upload(manifest, links)
        except FileNotFoundError:
            return False
        except DamagedCheckpointError as error:
            if os.path.isdir(checkpoint.path):
                logger.warning("%s; it is not copied to %s", error, self._store.name)
            return False
        except OSError as error:
            raise failure(self._path, "cannot be read", error) from error
        finally:
            remove_tree(links)
        return True


def _link_files(manifest: Manifest, path: str, links: str) -> None:
    """Link the files of a checkpoint, so that it may be deleted while it is copied."""
    for name in manifest.files:
        source, target = os.path.join(path, name), os.path.join(links, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(source, target)


def _differs(one: Checkpoint, other: Checkpoint) -> bool:
    facts = ((each.step, each.seconds, each.num_bytes) for each in (one, other))
    return next(facts) != next(facts)
