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
import re
import threading
import uuid
from contextlib import suppress
from datetime import datetime
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
        self._key = ""
        self._content: dict[str, Any] = {}
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        return self._content.get("run") in _held

    def take(self, now: datetime) -> None:
        """Take the lease, or raise `CheckpointInUseError`; `now` by the clock of the store.

        It waits, up to half a minute, where a run on another machine may have died just now.
        """
        newest = self._newest()
        if newest is not None:
            self._wait_until_free(newest, now)
        self._key = f"lease/{_generation_of(newest) + 1:010d}"
        self._content = {
            "run": uuid.uuid4().hex, "renewed": 0, "host": platform.node(), "pid": os.getpid(),
            "machine": machine(),
        }  # fmt: skip
        if not self._store.create(self._key, json.dumps(self._content).encode()):
            raise self._in_use(self._read(self._newest()))
        _held.add(self._content["run"])
        for each in self._store.list("lease"):
            if _generation_of(each) and each.key < self._key:
                self._store.delete(each.key)
        self._ends.clear()
        self._thread = threading.Thread(
            target=self._renew, name="asynchooks-checkpoint-lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the prefix meanwhile."""
        newest = self._newest()
        if newest is None or newest.key != self._key:
            raise CheckpointError(
                f"{self._store.name}: another run has taken this prefix, as this one had not "
                f"renewed its lease for {EXPIRES_AFTER_SECS:g} s (it stood still, or had no "
                "connection); nothing more is saved there by this run: end it, or give it another "
                "prefix"
            )

    def release(self, *, waits: bool = True) -> None:
        """Let others take the prefix; does nothing when it is not held, or in a forked process."""
        if self.is_held and self._content["pid"] == os.getpid():
            self._ends.set()
            if waits and self._thread is not None:
                self._thread.join(_CLOSE_SECS)
        _held.discard(self._content.get("run", ""))

    def _renew(self) -> None:
        """In a thread of its own: steps that hold the event loop must not let the lease expire."""
        while not self._ends.wait(RENEWED_EVERY_SECS):
            try:
                self._put(renewed=self._content["renewed"] + 1)
            except CheckpointError as error:  # it may be a passing fault: a save looks again
                logger.warning("The lease of %s is not renewed: %s", self._store.name, error)
        with suppress(CheckpointError):  # else it expires
            self._put(released=True)

    def _put(self, **changes: Any) -> None:
        self.check()
        self._content |= changes
        self._store.put(self._key, json.dumps(self._content).encode())

    def _newest(self) -> Entry | None:
        found = [each for each in self._store.list("lease") if _generation_of(each)]
        return max(found, key=_generation_of, default=None)

    def _read(self, entry: Entry | None) -> dict[str, Any]:
        """What a lease says; nothing if it is gone, or was not written here."""
        raw = None if entry is None else self._store.get(entry.key)
        with suppress(ValueError, RecursionError):
            content = json.loads(raw or b"")
            if isinstance(content, dict) and isinstance(content.get("run", ""), str):
                return content
        return {}

    def _wait_until_free(self, entry: Entry, now: datetime) -> None:
        """Return once the run that holds this lease has ended, else CheckpointInUseError."""
        first = self._read(entry)
        if first.get("released") is True or _is_of_ended(first):
            return
        if first.get("run") in _held:
            raise self._in_use(first)
        logger.info(
            "Waiting for a renewal of the lease of %s, to see whether its run still lives",
            self._store.name,
        )
        left = EXPIRES_AFTER_SECS - (now - entry.modified).total_seconds()
        pause = threading.Event()
        while left > 0:
            pause.wait(_LOOKED_AT_EVERY_SECS)
            left -= _LOOKED_AT_EVERY_SECS
            content = self._read(entry)
            if content.get("released") is True:
                return
            if content != first:
                raise self._in_use(content)

    def _in_use(self, content: dict[str, Any]) -> CheckpointInUseError:
        name, pid, host = self._store.name, content.get("pid"), content.get("host")
        if content.get("run") in _held:
            return CheckpointInUseError(
                f"{name}: this process uses it already; one run at a time: close the other one "
                "first, or give another prefix",
                os.getpid(),
            )
        holder = f"process {pid} on {host}" if isinstance(pid, int) else "another run"
        return CheckpointInUseError(
            f"{name} is in use by {holder}, which has just renewed its lease; wait for its end, or "
            "give another prefix",
            pid if isinstance(pid, int) and host == platform.node() else None,
        )


def _generation_of(entry: Entry | None) -> int:
    """0 of what is no lease."""
    match = None if entry is None else re.fullmatch("lease/([0-9]+)", entry.key)
    return 0 if match is None else int(match[1])


def machine() -> str:
    """This boot of this machine, and the numbering of its processes; "" where it is not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def has_ended(pid: object) -> bool:
    """Whether it is certain that this machine has no process of this number."""
    return machine() != "" and not os.path.exists(f"/proc/{pid}")


def _is_of_ended(content: dict[str, Any]) -> bool:
    """Whether it is certain that the holder has ended.

    It was a process of this machine, or a store of this one that was dropped. An ended process
    whose number another one has by now is not recognised: its lease expires.
    """
    if not machine() or content.get("machine") != machine():
        return False
    if content.get("pid") == os.getpid():  # whose thread may be yet to release it
        return content.get("run") not in _held
    return has_ended(content.get("pid"))
