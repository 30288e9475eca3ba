"""The lease of a prefix in an object store: it keeps the prefix to one run.

A store has no locks. A run holds the greatest generation of `lease/<generation>`, which only one
can create, and renews it while it lives. One whose holder has not renewed it for a while has ended,
by a kill or a crash, and the next generation may be taken. Time is that of the store.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import uuid
from contextlib import suppress
from typing import Any

from .._errors import CheckpointError, CheckpointInUseError
from ._store import Entry, ObjectStore

logger = logging.getLogger("asynchooks")

RENEWED_EVERY_SECS = 10.0
EXPIRES_AFTER_SECS = 35.0
"""Without a renewal, by the clock of the store, which counts whole seconds."""
_LOOKED_AT_EVERY_SECS = 2.0
_CLOSE_SECS = 10.0
"""How long a release is waited for; else the lease expires."""
_held: set[str] = set()
"""The runs of this process whose leases are held."""


class Lease:
    """A run's hold on the prefix of a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._generation = 0
        self._is_held = False
        self._pid = 0
        self._content: dict[str, Any] = {}
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        return self._is_held

    def take(self) -> None:
        """Take the lease, or raise `CheckpointInUseError`.

        It waits, up to half a minute, where a run on another machine may have died just now.
        """
        if self._is_held:
            raise self._in_use(self._content)
        newest = self._newest()
        if newest is not None:
            self._wait_until_free(newest)
        self._generation = 1 if newest is None else _generation_of(newest) + 1
        self._content = {"run": uuid.uuid4().hex, "renewed": 0, **_this_process()}
        if not self._store.create(self._key, self._encoded()):
            found = self._newest()
            raise self._in_use({} if found is None else self._read(found) or {})
        self._is_held, self._pid = True, os.getpid()
        _held.add(self._content["run"])
        for each in self._store.list("lease"):
            if 0 < _generation_of(each) < self._generation:
                self._store.delete(each.key)
        self._ends.clear()
        self._thread = threading.Thread(
            target=self._renew, name="asynchooks-checkpoint-lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the prefix meanwhile."""
        newest = self._newest()
        if newest is None or _generation_of(newest) != self._generation:
            raise CheckpointError(
                f"{self._store.name}: another run has taken this prefix, as this one had not "
                f"renewed its lease for {EXPIRES_AFTER_SECS:g} s (it stood still, or had no "
                "connection); nothing more is saved there by this run: end it, or give it another "
                "prefix"
            )

    def release(self, *, waits: bool = True) -> None:
        """Let others take the prefix; does nothing when it is not held, or in a forked process."""
        if not self._is_held:
            return
        self._is_held = False
        _held.discard(self._content["run"])
        if self._pid != os.getpid():
            return
        self._ends.set()
        if waits and self._thread is not None:
            self._thread.join(_CLOSE_SECS)

    def _renew(self) -> None:
        """In a thread of its own: steps that hold the event loop must not let the lease expire."""
        while not self._ends.wait(RENEWED_EVERY_SECS):
            try:
                self.check()
                self._put(renewed=self._content["renewed"] + 1)
            except CheckpointError as error:  # it may be a passing fault: a save looks again
                logger.warning("The lease of %s is not renewed: %s", self._store.name, error)
        with suppress(CheckpointError):  # else it expires
            self.check()
            self._put(released=True)

    def _put(self, **changes: Any) -> None:
        self._content |= changes
        self._store.put(self._key, self._encoded())

    @property
    def _key(self) -> str:
        return f"lease/{self._generation:010d}"

    def _encoded(self) -> bytes:
        return json.dumps(self._content, sort_keys=True).encode()

    def _newest(self) -> Entry | None:
        found = [each for each in self._store.list("lease") if _generation_of(each) > 0]
        return max(found, key=_generation_of, default=None)

    def _read(self, entry: Entry) -> dict[str, Any] | None:
        """What a lease says; None if it is gone, or was not written here."""
        raw = self._store.get(entry.key)
        with suppress(ValueError, RecursionError):
            content = json.loads(raw or b"")
            if isinstance(content, dict) and isinstance(content.get("run", ""), str):
                return content
        return None

    def _wait_until_free(self, entry: Entry) -> None:
        content = self._read(entry) or {}
        if content.get("released") is True or _has_ended(content):
            return
        if content.get("run") in _held:
            raise self._in_use(content)
        if content.get("process") and content["process"] == _this_process()["process"]:
            return  # a session was dropped, and its thread has not released it yet
        logger.info(
            "Waiting for a renewal of the lease of %s, to see whether its run still lives",
            self._store.name,
        )
        pause = threading.Event()
        while (self._store.now() - entry.modified).total_seconds() < EXPIRES_AFTER_SECS:
            pause.wait(_LOOKED_AT_EVERY_SECS)
            newest = self._newest()
            if newest is None:
                return
            if newest != entry:
                content = self._read(newest) or {}
                if content.get("released") is True and newest.key == entry.key:
                    return
                raise self._in_use(content)

    def _in_use(self, content: dict[str, Any]) -> CheckpointInUseError:
        pid, host = content.get("pid"), content.get("host")
        here = _this_process()
        if content.get("run") in _held:
            return CheckpointInUseError(
                f"{self._store.name}: this process uses it already; one run at a time: close the "
                "other one first, or give another prefix",
                os.getpid(),
            )
        holder = f"process {pid} on {host}" if isinstance(pid, int) else "another run"
        return CheckpointInUseError(
            f"{self._store.name} is in use by {holder}, which has just renewed its lease; wait for "
            "its end, or give another prefix",
            pid if isinstance(pid, int) and host == here["host"] else None,
        )


def _generation_of(entry: Entry) -> int:
    text = entry.key.rpartition("/")[2]
    return int(text) if text.isascii() and text.isdecimal() else 0


def _this_process() -> dict[str, Any]:
    """Whose lease it is; `process` tells a process from all others, "" where that is not known."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "process": _process(pid)}


def machine() -> str:
    """This boot of this machine, and the numbering of its processes; "" where it is not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _process(pid: int) -> str:
    """A process, by its number and when it began; "" if there is none, or that is not known."""
    with suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        here = machine()
        if here and fields[0] != "Z":
            return f"{here} {pid} {fields[19]}"
    return ""


def _has_ended(content: dict[str, Any]) -> bool:
    """Whether it is certain that the holder has ended: it was a process of this machine."""
    pid, process, here = content.get("pid"), str(content.get("process")), machine()
    if not isinstance(pid, int) or not here or not process.startswith(f"{here} "):
        return False
    return _process(pid) != process
