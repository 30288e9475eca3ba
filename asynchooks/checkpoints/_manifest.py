"""The manifest of one checkpoint: written with it, read back, and compared with its files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .._errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from ._files import digest, is_damage, kind_of, open_file, sync_directory, sync_file
from ._mode import Mode

MANIFEST = "manifest.json"
_FORMAT = "asynchooks checkpoint"
_VERSION = 1
MAX_BYTES = 16 << 20
"""Largest manifest, of some 100,000 files. Reading a crafted one takes up to 30 times as much."""
_END_OF_NUMBERS, _END_OF_STEPS = 1 << 63, 10**255
"""A step is in the name of a directory, which has at most 255 characters."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, as its manifest describes it; made by `CheckpointDirectory`.

    Args:
        path: its directory.
        prefix: the path that its saver was given, and restores from.
        step: the global step, >= 0.
        serial: the order of saving, >= 1. Unlike `step` it never goes back.
        seconds: seconds of training until then, >= 0.
        metric: what `Retention.keep_best` compares, or None.
        num_bytes: bytes of all files but the manifest.
        mode: which metric is better, as the run that saved it had it; None if it did not say.

    Example:
        hook = CheckpointSaverHook("ckpt", save_steps=1, saver=saver)
        async with MonitoredSession([hook], creator) as session:
            await session.run("loss")

        directory = CheckpointDirectory("ckpt")
        directory.open()
        newest = directory.newest_intact()
        directory.close()
        assert newest.step == 1
    """

    path: str
    prefix: str
    step: int
    serial: int
    seconds: float
    metric: float | None
    num_bytes: int
    mode: Mode | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest; `files` maps a posix path to (bytes, sha256 in hex)."""

    basename: str
    step: int
    serial: int
    seconds: float
    metric: float | None
    files: Mapping[str, tuple[int, str]]
    mode: Mode | None = None

    @property
    def name(self) -> str:
        return f"{self.basename}-{self.step}"

    def checkpoint_at(self, path: str) -> Checkpoint:
        """The checkpoint in this directory."""
        prefix = os.path.join(path, self.name)
        num_bytes = sum(size for size, _ in self.files.values())
        return Checkpoint(
            path, prefix, self.step, self.serial, self.seconds, self.metric, num_bytes, self.mode
        )

    def encoded(self, where: str) -> bytes:
        """What the file holds; `where` the checkpoint is to be, for an error."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "basename": self.basename,
            "step": self.step,
            "serial": self.serial,
            "seconds": self.seconds.hex(),
            "metric": None if self.metric is None else self.metric.hex(),
            "files": {
                name: {"size": size, "sha256": sha256}
                for name, (size, sha256) in self.files.items()
            },
        }
        if self.mode is not None:
            content["mode"] = self.mode.value
        encoded = _encoded({**content, "checksum": _checksum(content)})
        if len(encoded) > MAX_BYTES:
            raise CheckpointError(
                f"{where}: the checkpoint {self.name} is not saved: to name its "
                f"{len(self.files):,} files {MANIFEST} would take {len(encoded):,} bytes, and may "
                f"have {MAX_BYTES:,}; older checkpoints are untouched; have the saver write fewer "
                "files"
            )
        return encoded

    def write(self, path: str) -> None:
        """Write it into a checkpoint's directory: whole, or not at all."""
        encoded = self.encoded(os.path.dirname(path))
        target = os.path.join(path, MANIFEST)
        with suppress(FileNotFoundError):
            os.unlink(f"{target}.new")  # of a run that was killed as it set a metric
        with open(f"{target}.new", "xb") as file:
            file.write(encoded)
        sync_file(f"{target}.new")
        os.rename(f"{target}.new", target)
        sync_directory(path)

    def verify(self, path: str, shown: str = "", *, reads_files: bool = True) -> None:
        """Compare it with the listed files: sizes and, with `reads_files`, content.

        Anything else in the directory is ignored: other programs leave theirs there.
        DamagedCheckpointError where they differ; CheckpointError where one cannot be read now;
        both call the checkpoint `shown`.
        """
        shown = shown or path
        try:
            for name, (size, _) in self.files.items():
                status = _status_below(path, name)
                if status is None:
                    raise damaged(shown, f"{name} is missing")
                kind, there = kind_of(status), status.st_size
                if kind != "file":
                    raise damaged(shown, f"{name} is a {kind} where a file was written")
                if there < size:
                    raise damaged(shown, f"{name} is truncated to {there:,} of {size:,} bytes")
                if there > size:
                    raise damaged(shown, f"{name} has {there:,} bytes where {size:,} were written")
            for name, written in self.files.items() if reads_files else ():
                if digest(os.path.join(path, name)) != written:
                    raise damaged(shown, f"{name} has different content than was written")
        except OSError as error:
            raise unreadable(shown, error) from error


def _status_below(path: str, name: str) -> os.stat_result | None:
    """The lstat of a listed file, or of what stands where one of its parents was; None for none.

    A link among the parents may lead anywhere.
    """
    status = None
    for part in name.split("/"):
        path = os.path.join(path, part)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if kind_of(status) != "directory":
            break
    return status


def read_manifest(path: str) -> Manifest:
    """Read the manifest in a directory, and compare nothing else; errors as of `verify`."""
    if not os.path.lexists(os.path.join(path, MANIFEST)):
        raise damaged(path, f"no manifest ({MANIFEST} is missing)")
    raw, num_bytes = _read(path, MANIFEST, MAX_BYTES)
    if num_bytes > MAX_BYTES:
        raise damaged(
            path,
            f"{MANIFEST} was not written here: it has {num_bytes:,} bytes, and none has more than "
            f"{MAX_BYTES:,}",
        )
    return parse_manifest(path, raw)


def read_file(path: str, manifest: Manifest, name: str) -> bytes | None:
    """The content of one listed file, checked; None if it is not listed."""
    if name not in manifest.files:
        return None
    size, sha256 = manifest.files[name]
    content, num_bytes = _read(path, name, size)
    if num_bytes != size or hashlib.sha256(content).hexdigest() != sha256:
        raise damaged(path, f"{name} has different content than was written")
    return content


def _read(path: str, name: str, limit: int) -> tuple[bytes, int]:
    """A file's content and size; no content of one that is larger, and may fill the memory."""
    try:
        with open_file(os.path.join(path, name)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return b"" if num_bytes > limit else file.readall(), num_bytes
    except OSError as error:
        raise unreadable(path, error) from error


def parse_manifest(path: str, raw: bytes) -> Manifest:
    """The manifest that a file holds; `path` of its checkpoint, for errors, as of `verify`."""
    try:
        content = json.loads(raw)
        unsigned = {name: value for name, value in content.items() if name != "checksum"}
        # before the version, where a flipped bit is damage too: each version must keep this rule
        is_whole = content["checksum"] == _checksum(unsigned) and raw == _encoded(content)
    # RecursionError: what can be read may be too deep to be written
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        what = f"cannot be read: it is truncated or overwritten ({len(raw):,} bytes)"
        raise damaged(path, f"{MANIFEST} {what}") from error
    if not is_whole or content.get("format") != _FORMAT:
        raise damaged(path, f"{MANIFEST} has different content than was written")
    version = content.get("version")
    if type(version) is int and version > _VERSION:
        raise CheckpointVersionError(
            f"{path} was written in version {version} of the format, and this asynchooks reads up "
            f"to version {_VERSION}; update asynchooks, or give another directory"
        )
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(path, f"{MANIFEST} lacks what belongs there ({error!r})") from error


def _parsed(content: dict[str, Any]) -> Manifest:
    """What a manifest says; any of the usual errors where nothing here writes such a thing."""
    files = {name: (file["size"], file["sha256"]) for name, file in content["files"].items()}
    sizes, hashes = [size for size, _ in files.values()], [sha256 for _, sha256 in files.values()]
    version, step, serial = content["version"], content["step"], content["serial"]
    seconds = float.fromhex(content["seconds"])
    metric = None if content["metric"] is None else float.fromhex(content["metric"])
    if not (
        all(type(each) is int and each >= 0 for each in (version, step, serial, *sizes))
        and version > 0 < serial
        and max(serial, *sizes, 0) < _END_OF_NUMBERS
        and step < _END_OF_STEPS
        and 0 <= seconds < math.inf
        and metric == metric  # which NaN is not
        and isinstance(content["basename"], str)
        and all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes)
        # posix paths that stay below the checkpoint's directory
        and not any("\0" in each or {"", ".", ".."} & {*each.split("/")} for each in files)
    ):
        raise ValueError("a number, name or hash that none has")
    mode = Mode(content["mode"]) if "mode" in content else None
    return Manifest(content["basename"], step, serial, seconds, metric, files, mode)


def damaged(path: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path}: {what}")


def unreadable(path: str, error: OSError) -> CheckpointError:
    """The error for a checkpoint that cannot be read: damage, or a fault that may pass."""
    if is_damage(error):
        return damaged(path, f"cannot be read: {error}")
    return CheckpointError(
        f"{path} cannot be read now: {error}; this says nothing about what is in it, so no other "
        "checkpoint is taken instead: repair that and try again"
    )


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode("ascii")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_encoded(content)).hexdigest()
