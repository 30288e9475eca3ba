"""Checkpoints in an object store. Objects below the prefix, beside any others, never touched:

    lease/<generation>                          held by the run that uses the prefix
    <serial>/<basename>-<step>/                 a checkpoint; no key in it is written twice
        <files>                                 as in a directory of checkpoints
        manifest.json                           last, and created: without it, there is none
    <serial>/rejected                           that one is never chosen again, never deleted

The serial, of ten digits, is the order of saving. The creation of the manifest commits a save, and
its deletion, which comes first, a deletion. An upload that broke off is deleted by the next run. A
run that stood still between its last look at the lease and the manifest may then leave a manifest
without files: a damaged checkpoint, which is passed over.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from .._errors import CheckpointInUseError
from ._files import failure, make_directories, remove_tree
from ._lease import Lease, has_ended, machine
from ._manifest import MANIFEST, Checkpoint, Manifest, damaged, parse_manifest
from ._place import CheckpointPlace, Listed
from ._retention import Retention
from ._store import ObjectStore

_REJECTED = "rejected"
_KEY = re.compile(r"(\d{10})/([^/]+)-(0|[1-9]\d*)/(.+)")
_Place = tuple[int, str, int]
"""Serial, basename and step of an upload."""


class CheckpointStore(CheckpointPlace):
    """Checkpoints in an object store, as `CheckpointDirectory` keeps them in a directory.

    All methods block; call one at a time. `save` writes locally, uploads, and returns when the
    checkpoint is complete in the store. `newest_intact` and `best` download what they return, which
    stays until the next save, download, or `close`. Reading needs no `open`. A process that was
    forked while one is open cannot use it.

    Args:
        store: an address such as "s3://bucket/run", an object of obstore, or an `ObjectStore`.
        basename, retention: as of `CheckpointDirectory`.

    Raises:
        ValueError, TypeError: an argument is not as described.
        ImportError: obstore is not installed.

    Example:
        from obstore.store import MemoryStore

        store = CheckpointStore(MemoryStore())
        store.open()
        store.save(7, lambda prefix: open(f"{prefix}.txt", "w").close())
        assert store.newest_intact().step == 7
        store.close()
    """

    def __init__(
        self,
        store: Any,
        basename: str = "model.ckpt",
        retention: Retention | None = None,
    ) -> None:
        self._store = store if isinstance(store, ObjectStore) else ObjectStore(store)
        self._lease = Lease(self._store)
        super().__init__(self._store.name, self._lease, basename, retention)
        self._staging = ""
        self._remove_staging: Callable[[], object] = lambda: None
        self._sizes: dict[_Place, dict[str, int]] = {}  # of files, by the last listing

    def open(self) -> None:
        """Take the prefix for this run alone, and clean up what a killed run left behind.

        Raises:
            CheckpointInUseError: another run uses it, or this process does. One that has just died
                on another machine is waited for, some 40 s.
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the store cannot be used, or ignores conditions; no staging directory.
        """
        self._hold.take()
        try:
            self._look()
            self._serial = max((serial for serial, _, _ in self._sizes), default=0)
            for place, sizes in self._sizes.items():
                if MANIFEST not in sizes:
                    self._delete(self._path(place))
            self._stage()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other runs use the prefix, and remove what is local; nothing when it is not open."""
        super().close()
        self._remove_staging()

    def abandon(self) -> None:
        """As `close`, but without waiting for the store."""
        self._lease.release(waits=False)
        self._remove_staging()

    def address_of(self, checkpoint: Checkpoint) -> str:
        """Where it is in the store, also if it was downloaded."""
        return self._path((checkpoint.serial, self._basename, checkpoint.step))

    def _path(self, place: _Place) -> str:
        """For messages, and as the path of a checkpoint."""
        return f"{self._where}/{place[0]:010d}/{place[1]}-{place[2]}"

    def _key(self, path: str, file: str) -> str:
        return f"{path.removeprefix(f'{self._where}/')}/{file}"

    def _listed(self) -> Iterator[Listed]:
        sizes: dict[_Place, dict[str, int]] = {}
        rejected = set()
        for entry in self._store.list():
            match = _KEY.fullmatch(entry.key)
            if match is not None:
                place = int(match[1]), match[2], int(match[3])
                sizes.setdefault(place, {})[match[4]] = entry.num_bytes
            elif re.fullmatch(rf"\d{{10}}/{_REJECTED}", entry.key):
                rejected.add(int(entry.key[:10]))
        self._sizes = sizes
        for place, files in sizes.items():
            serial, name, step = place
            if name == self._basename and serial not in rejected and MANIFEST in files:
                path = self._path(place)
                yield Listed(path, step, partial(self._fetched, path, serial))

    def _fetched(self, path: str, serial: int) -> Manifest:
        raw = self._store.get(self._key(path, MANIFEST))
        if raw is None:
            raise damaged(path, "is gone from the store")
        manifest = parse_manifest(path, raw)
        if manifest.serial != serial:
            raise damaged(path, f"its manifest is that of serial {manifest.serial}")
        return manifest

    def _is_gone(self, path: str) -> bool:
        return self._store.get(self._key(path, MANIFEST)) is None

    def _new(self, draft: Manifest) -> str:
        self._forget_fetched()
        return os.path.join(self._stage(), f"new-{draft.serial}")

    def _publish(self, new: str, manifest: Manifest) -> Checkpoint:
        path = self._path((manifest.serial, self._basename, manifest.step))
        for name in manifest.files:
            self._store.put_file(self._key(path, name), os.path.join(new, name))
        self._hold.check()
        if not self._store.create(self._key(path, MANIFEST), manifest.encoded(self._where)):
            raise CheckpointInUseError(
                f"{self._where}: the checkpoint of step {manifest.step} is not saved: another run "
                "has stored one in its place, and uses the prefix; end one of the two runs"
            )
        return manifest.checkpoint_at(path)

    def _looks_whole(self, path: str, manifest: Manifest) -> bool:
        sizes = self._sizes[manifest.serial, self._basename, manifest.step]
        return all(sizes.get(name) == size for name, (size, _) in manifest.files.items())

    def _local(self, checkpoint: Checkpoint) -> Checkpoint:
        if os.path.isdir(checkpoint.path):  # it was downloaded
            return checkpoint
        source = self.address_of(checkpoint)
        manifest = self._fetched(source, checkpoint.serial)
        self._forget_fetched()
        path = os.path.join(self._stage(), f"fetched-{manifest.serial}", manifest.name)
        try:
            os.makedirs(path)
            for name in manifest.files:
                target = os.path.join(path, name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                self._store.get_file(self._key(source, name), target)  # a missing one is found
            manifest.write(path)
        except OSError as error:
            what = f"the checkpoint of step {manifest.step} cannot be downloaded"
            raise failure(path, what, error) from error
        return manifest.checkpoint_at(path)

    def _replace_manifest(self, path: str, manifest: Manifest) -> None:
        self._store.put(self._key(path, MANIFEST), manifest.encoded(self._where))

    def _delete(self, path: str) -> None:
        """The manifest first, so that half of a checkpoint is none."""
        self._hold.check()
        self._store.delete(self._key(path, MANIFEST))
        for entry in self._store.list(self._key(path, "")[:-1]):
            self._store.delete(entry.key)

    def _set_aside(self, checkpoint: Checkpoint, why: str) -> str:
        key = f"{checkpoint.serial:010d}/{_REJECTED}"
        self._store.put(key, why.encode())
        return f"{self.address_of(checkpoint)}, marked by {self._where}/{key}"

    def _stage(self) -> str:
        """The local directory of this object; it is made at the first use, and where it is lost."""
        if not os.path.isdir(self._staging):
            parent = self._store.staging_dir or tempfile.gettempdir()
            try:
                make_directories(parent)
                place = hashlib.sha256(f"{self._where} {machine()}".encode())
                start = f"asynchooks-{place.hexdigest()[:12]}-"
                if self._hold.is_held:
                    _remove_old(parent, start)
                self._staging = tempfile.mkdtemp(prefix=f"{start}{os.getpid()}-", dir=parent)
            except OSError as error:
                what = "cannot be used to write checkpoints before they are uploaded"
                raise failure(parent, what, error) from error
            self._remove_staging = weakref.finalize(self, _remove, self._staging, os.getpid())
        return self._staging

    def _forget_fetched(self) -> None:
        """Only one checkpoint is local at a time."""
        for name in os.listdir(self._stage()):
            remove_tree(os.path.join(self._stage(), name))


def _remove(staging: str, pid: int) -> None:
    """Remove a staging directory, but not in a process that was forked from its own."""
    if os.getpid() == pid:
        remove_tree(staging)


def _remove_old(parent: str, start: str) -> None:
    """Remove the staging directories of processes that have ended."""
    for name in os.listdir(parent):
        pid, path = name.removeprefix(start).partition("-")[0], os.path.join(parent, name)
        if name.startswith(start) and has_ended(pid):
            with suppress(OSError):
                if stat.S_ISDIR(os.lstat(path).st_mode):  # no link, which another user may set
                    remove_tree(path)
