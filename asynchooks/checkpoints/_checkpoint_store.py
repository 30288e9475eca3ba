"""Checkpoints in an object store, by its five verbs.

Objects below the prefix, beside any others, which are never touched:

    lease/<generation>                          held by the run that uses the prefix
    probe/<name>                                for a moment, to ask the store something
    <serial>/<basename>-<step>/                 a checkpoint; no key in it is written twice
        <files>                                 as in a directory of checkpoints
        manifest.json                           last, and created: without it, there is none
    <serial>/rejected                           that one is never chosen again, never deleted

The serial, of ten digits, is the order of saving. An upload that broke off is closed by the next
run, with a manifest that says so: the run that began it can no longer complete it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, SupportsFloat, SupportsIndex

from .._errors import CheckpointError, CheckpointInUseError, DamagedCheckpointError
from ._files import failure, make_directories, remove_tree
from ._lease import Lease, machine
from ._manifest import MANIFEST, Checkpoint, Manifest, damaged, parse_manifest
from ._place import (
    CheckpointPlace,
    Found,
    check_extra_name,
    checked_metric,
    checked_step,
    write_files,
)
from ._retention import Retention, superfluous
from ._store import Entry, ObjectStore

logger = logging.getLogger("asynchooks")

_CLOSED = b"this upload broke off, and was closed\n"
"""In place of the manifest of a checkpoint that is none."""
_REJECTED = "rejected"
_KEEPS_CLOSED = timedelta(hours=1)
"""For as long, a run that stood still may go on with an upload."""
_ANY = re.compile(r"(\d{10})/([^/]+)-(0|[1-9]\d*)/(.+)")


@dataclass
class _Upload:
    """The objects of one checkpoint, complete or not, by the paths of its files."""

    serial: int
    step: int
    objects: dict[str, Entry] = field(default_factory=dict)
    is_rejected: bool = False

    @property
    def manifest(self) -> Entry | None:
        return self.objects.get(MANIFEST)


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
        super().__init__(self._store.name, basename, retention)
        self._lease = Lease(self._store)
        self._staging: str | None = None
        self._fetched: tuple[int, str] | None = None  # the serial of what is downloaded, and where
        self._manifests: dict[str, tuple[Entry, Manifest | None]] = {}  # read ones, by key

    def open(self) -> None:
        """Take the prefix for this run alone, and clean up what a killed run left behind.

        Raises:
            CheckpointInUseError: another run uses it, or this process does. One that has just died
                on another machine is waited for, up to 40 s.
            CheckpointVersionError: a newer asynchooks saved there.
            CheckpointError: the store cannot be used, or ignores conditions; no staging directory.
        """
        self._store.check_conditions()
        self._lease.take()
        try:
            self._clean_up()
            self._stage()
        except BaseException:
            self._lease.release()
            raise

    def close(self) -> None:
        """Let other runs use the prefix, and remove what is local; nothing when it is not open."""
        self._lease.release()
        self._remove_staging()

    def abandon(self) -> None:
        """As `close`, but without waiting for the store."""
        self._lease.release(waits=False)
        self._remove_staging()

    def address_of(self, checkpoint: Checkpoint) -> str:
        """Where it is in the store, also if it was downloaded."""
        return f"{self._where}/{checkpoint.serial:010d}/{self._basename}-{checkpoint.step}"

    @property
    def name(self) -> str:
        """The address, for messages."""
        return self._where

    @property
    def serial(self) -> int:
        """The highest that was ever given to a checkpoint there, from `open` on."""
        return self._serial

    @property
    def _is_open(self) -> bool:
        return self._lease.is_held

    def _save(
        self, draft: Manifest, write: Callable[[str], object], extra: Mapping[str, bytes]
    ) -> Checkpoint:
        self._forget_fetched()
        new = os.path.join(self._stage(), f"new-{draft.serial}")
        try:
            self._lease.check()
            manifest = write_files(new, draft, write, extra)
            return self._upload(manifest, new)
        except OSError as error:
            what = f"the checkpoint of step {draft.step} is not saved"
            raise failure(new if os.path.isdir(new) else self._stage(), what, error) from error
        finally:
            remove_tree(new)

    def _upload(self, manifest: Manifest, path: str) -> Checkpoint:
        """Store the checkpoint that is in a local directory, with its serial, and delete none.

        Raises:
            CheckpointError: the store cannot take it; another run has taken the prefix.
            OSError: a file cannot be read.
        """
        place = f"{manifest.serial:010d}/{manifest.name}"
        for name in manifest.files:
            self._store.put_file(f"{place}/{name}", os.path.join(path, name))
        encoded = manifest.encoded(self._where)
        self._lease.check()
        if not self._store.create(f"{place}/{MANIFEST}", encoded):
            raise CheckpointInUseError(
                f"{self._where}: the checkpoint of step {manifest.step} is not saved: another run "
                "has closed this upload, and uses the prefix; end one of the two runs"
            )
        self._serial = max(self._serial, manifest.serial)
        return manifest.checkpoint_at(f"{self._where}/{place}")

    def _delete_superfluous(self) -> None:
        try:
            uploads = self._uploads()
            readable = self._found_in(uploads.values()).readable
            last = {each.step: each.serial for each in readable}  # in the order of saving
            replaced = [each for each in readable if each.serial != last[each.step]]
            whole = [
                each
                for each in readable
                if each.serial == last[each.step]
                and each.serial not in self._found_damaged
                and self._looks_whole(uploads[each.serial])
            ]
            for each in [*replaced, *superfluous(whole, self._retention)]:
                self._delete(uploads[each.serial])
        except CheckpointError as error:
            logger.warning("Older checkpoints in %s are not deleted: %s", self._where, error)

    def _would_keep(self, manifest: Manifest) -> bool:
        """Whether the retention keeps this one beside those that are there."""
        known = [each for each in self.checkpoints() if each.step != manifest.step]
        own = manifest.checkpoint_at("")
        return own not in superfluous([*known, own], self._retention)

    def set_metric(self, step: SupportsIndex, metric: SupportsFloat) -> bool:
        """As of `CheckpointDirectory`."""
        self._check_is_open("set_metric(...)")
        number, value = checked_step(step), checked_metric(metric)
        found = [each for each in self._uploads().values() if each.step == number]
        for upload in sorted(found, key=lambda each: -each.serial):
            manifest = None if upload.is_rejected else self._read(upload)
            if manifest is not None and upload.manifest is not None:
                self._lease.check()
                changed = replace(manifest, metric=value).encoded(self._where)
                self._store.put(upload.manifest.key, changed)
                return True
        return False

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        """As of `CheckpointDirectory`; the object `<serial>/rejected` says so in the store."""
        self._check_is_open("reject(checkpoint, why)")
        upload = self._uploads().get(checkpoint.serial)
        newest = [each.serial for each in self.checkpoints() if each.step == checkpoint.step]
        is_damaged = upload is not None and not newest  # then no other has its step
        if (
            upload is None
            or upload.is_rejected
            or (newest != [checkpoint.serial] and not is_damaged)
        ):
            raise ValueError(
                f"{checkpoint!r} is not in {self._where} any more; give one that "
                "newest_intact(), best() or checkpoints() returned after the last save()"
            )
        self._lease.check()
        place = f"{self._where}/{checkpoint.serial:010d}"
        self._store.put(f"{checkpoint.serial:010d}/{_REJECTED}", why.encode())
        logger.warning("%s is rejected, and marked by %s/%s: %s", place, place, _REJECTED, why)

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """As of `CheckpointDirectory`."""
        check_extra_name(name, os.path.basename(checkpoint.prefix))
        upload = self._uploads().get(checkpoint.serial)
        manifest = None if upload is None else self._read(upload)
        if upload is None or manifest is None:
            raise damaged(checkpoint.path, "is gone from the store")
        if name not in manifest.files:
            return None
        content = self._store.get(self._key(upload, name))
        if content is None:
            raise damaged(checkpoint.path, f"{name} is missing")
        if (len(content), hashlib.sha256(content).hexdigest()) != manifest.files[name]:
            raise damaged(checkpoint.path, f"{name} has different content than was written")
        return content

    def _found(self, up_to_step: int | None = None) -> Found:
        uploads = self._uploads().values()
        found = self._found_in(
            each for each in uploads if up_to_step is None or each.step <= up_to_step
        )
        # one that was replaced is there until it is deleted, perhaps by a later run
        last = {each.step: each for each in found.readable}
        return replace(found, readable=[each for each in found.readable if each is last[each.step]])

    def _found_in(self, uploads: Iterable[_Upload]) -> Found:
        found = Found([], [])
        for upload in uploads:
            if upload.is_rejected:
                continue
            try:
                manifest = self._read(upload)
            except DamagedCheckpointError as error:
                found.damages.append(error)
                continue
            if manifest is not None:
                found.readable.append(manifest.checkpoint_at(self._path(upload)))
        found.readable.sort(key=lambda each: (each.serial, each.step))
        return found

    def _uploads(self) -> dict[int, _Upload]:
        """What there is of this basename, by serial."""
        return {
            serial: upload for (serial, name, _), upload in self._all().items()
            if name == self._basename
        }  # fmt: skip

    def _all(self) -> dict[tuple[int, str, int], _Upload]:
        found: dict[tuple[int, str, int], _Upload] = {}
        rejected = set()
        for entry in self._store.list():
            match = _ANY.fullmatch(entry.key)
            if match is not None:
                serial, name, step, file = match.groups()
                place = (int(serial), name, int(step))
                found.setdefault(place, _Upload(place[0], place[2])).objects[file] = entry
            elif re.fullmatch(rf"\d{{10}}/{_REJECTED}", entry.key):
                rejected.add(int(entry.key.partition("/")[0]))
        for place, upload in found.items():
            upload.is_rejected = place[0] in rejected
        return found

    def _read(self, upload: _Upload) -> Manifest | None:
        """The manifest of a checkpoint; None if it is not complete, or was closed."""
        entry = upload.manifest
        if entry is None:
            return None
        known = self._manifests.get(entry.key)
        if known is not None and known[0] == entry:
            return known[1]
        raw = self._store.get(entry.key)
        if raw is None:
            return None  # deleted since
        manifest = None if raw == _CLOSED else parse_manifest(self._path(upload), raw)
        place = (upload.step, upload.serial)
        if manifest is not None and (manifest.step, manifest.serial) != place:
            raise damaged(self._path(upload), f"its manifest is that of {manifest.name}")
        self._manifests[entry.key] = entry, manifest
        return manifest

    def _looks_whole(self, upload: _Upload) -> bool:
        """By names and sizes alone."""
        manifest = self._read(upload)
        return manifest is not None and all(
            name in upload.objects and upload.objects[name].num_bytes == num_bytes
            for name, (num_bytes, _) in manifest.files.items()
        )

    def _verified(self, checkpoint: Checkpoint) -> Checkpoint:
        upload = self._uploads().get(checkpoint.serial)
        manifest = None if upload is None else self._read(upload)
        if upload is None or upload.manifest is None or manifest is None:
            raise damaged(checkpoint.path, "is gone from the store")
        if self._fetched is None or self._fetched[0] != upload.serial:
            self._forget_fetched()
            path = os.path.join(self._stage(), f"fetched-{upload.serial}")
            try:
                self._download(upload, manifest, path)
            except OSError as error:
                what = f"the checkpoint of step {upload.step} cannot be downloaded"
                raise failure(path, what, error) from error
            finally:
                if self._fetched is None:
                    remove_tree(path)
        assert self._fetched is not None
        local = os.path.join(self._fetched[1], manifest.name)
        try:
            manifest.verify(local)
        except DamagedCheckpointError as error:
            self._forget_fetched()
            raise DamagedCheckpointError(f"{checkpoint.path}, downloaded: {error}") from error
        return manifest.checkpoint_at(local)

    def _download(self, upload: _Upload, manifest: Manifest, path: str) -> None:
        local = os.path.join(path, manifest.name)
        os.makedirs(local)
        for name in manifest.files:
            target = os.path.join(local, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not self._store.get_file(self._key(upload, name), target):
                raise damaged(self._path(upload), f"{name} is missing")
        manifest.write(local)
        self._fetched = upload.serial, path

    def _is_gone(self, checkpoint: Checkpoint) -> bool:
        upload = self._uploads().get(checkpoint.serial)
        return upload is None or upload.manifest is None or self._read(upload) is None

    def _delete(self, upload: _Upload) -> None:
        """Delete a checkpoint: the manifest first, so that half of one is none."""
        self._lease.check()
        for name in sorted(upload.objects, key=lambda each: each != MANIFEST):
            key = upload.objects[name].key
            self._manifests.pop(key, None)
            self._store.delete(key)

    def _clean_up(self) -> None:
        """Close what a run that is gone had begun to upload; find the highest serial."""
        now = self._store.now()
        for probe in self._store.list("probe"):
            if now - probe.modified > _KEEPS_CLOSED:
                self._store.delete(probe.key)
        found = self._all()
        self._serial = max((serial for serial, _, _ in found), default=0)
        for (serial, name, step), upload in found.items():
            entry = upload.manifest
            if entry is None:
                key = f"{serial:010d}/{name}-{step}/{MANIFEST}"
                is_closed = self._store.create(key, _CLOSED)  # else it was completed meanwhile
            else:
                is_closed = entry.num_bytes == len(_CLOSED)
            if is_closed:
                self._delete_closed(upload, now)
            elif name == self._basename:
                with suppress(DamagedCheckpointError):
                    self._read(upload)  # one of a newer version is refused now

    def _delete_closed(self, upload: _Upload, now: datetime) -> None:
        for file, each in upload.objects.items():
            if file != MANIFEST:
                self._store.delete(each.key)
        entry = upload.manifest
        is_old = entry is not None and now - entry.modified > _KEEPS_CLOSED
        # the next serial is counted from the highest
        if entry is not None and is_old and upload.serial < self._serial:
            self._store.delete(entry.key)

    def _key(self, upload: _Upload, file: str) -> str:
        return f"{upload.serial:010d}/{self._basename}-{upload.step}/{file}"

    def _path(self, upload: _Upload) -> str:
        """For messages."""
        return f"{self._where}/{upload.serial:010d}/{self._basename}-{upload.step}"

    def _stage(self) -> str:
        """The local directory of this object; it is made at the first use."""
        if self._staging is None or not os.path.isdir(self._staging):
            parent = self._store.staging_dir
            try:
                if parent is not None:
                    make_directories(parent)
                parent = parent or tempfile.gettempdir()
                place = hashlib.sha256(f"{self._where} {machine()}".encode())
                start = f"asynchooks-{place.hexdigest()[:12]}-"
                if self._lease.is_held:
                    _remove_old(parent, start)
                self._staging = tempfile.mkdtemp(prefix=f"{start}{os.getpid()}-", dir=parent)
            except OSError as error:
                where = parent or tempfile.gettempdir()
                what = "cannot be used to write checkpoints before they are uploaded"
                raise failure(where, what, error) from error
        return self._staging

    def _forget_fetched(self) -> None:
        if self._fetched is not None:
            remove_tree(self._fetched[1])
            self._fetched = None

    def _remove_staging(self) -> None:
        self._fetched = None
        if self._staging is not None:
            remove_tree(self._staging)
            self._staging = None

    def __del__(self) -> None:
        if getattr(self, "_staging", None) is not None:
            self._remove_staging()


def _remove_old(parent: str, start: str) -> None:
    """Remove the staging directories of processes that have ended."""
    for name in os.listdir(parent):
        pid, path = name.removeprefix(start).partition("-")[0], os.path.join(parent, name)
        is_ours = name.startswith(start) and pid.isascii() and pid.isdecimal()
        if is_ours and not _is_running(int(pid)):
            with suppress(OSError):
                if stat.S_ISDIR(os.lstat(path).st_mode):  # no link, which another user may set
                    remove_tree(path)


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":  # where the call below is no question
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no process has such a number
        return False
    except OSError:
        return True
    return True
