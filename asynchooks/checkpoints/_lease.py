"""The lease of a prefix in an object store: it keeps the prefix to one run.

A store has no locks. A run holds the greatest generation of `lease/<generation>`, which only one
can create, and renews it while it lives. One whose holder has not renewed it while another run
looked on has ended, by a kill or a crash, and the next generation may be taken. No clock of the
store or of another machine is asked.
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
from typing import Any

from .._engine.background import BackgroundThread
from .._errors import CheckpointError, CheckpointInUseError
from ._store import ObjectStore

logger = logging.getLogger("asynchooks")

_LEASE = "lease/[0-9]{10}"
"""The keys of leases."""
RENEWED_EVERY_SECS = 10.0
EXPIRES_AFTER_SECS = 35.0
"""How long another run looks on without a renewal before it takes over."""
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
        self._thread: BackgroundThread

    @property
    def is_held(self) -> bool:
        return self._content.get("run") in _held

    def take(self) -> None:
        """Take the lease, or raise `CheckpointInUseError`.

        It waits for half a minute where the last run on another machine has not released it.

        Raises:
            CheckpointError: the store cannot be used, or ignores conditions.
        """
        newest = self._newest()
        self._wait_until_free(newest)
        self._key = f"lease/{int(newest[6:] or 0) + 1:010d}"
        self._content = {
            "run": uuid.uuid4().hex,
            "renewed": 0,
            "host": platform.node(),
            "pid": os.getpid(),
            "machine": machine(),
        }
        encoded = json.dumps(self._content).encode()
        # first: a thread of this process that finds the lease must not take it for one to release
        _held.add(self._content["run"])
        try:
            if not self._store.create(self._key, encoded):
                raise self._in_use(self._read(self._newest()))
            self._check_conditions()
        except BaseException:
            _held.discard(self._content["run"])
            raise
        for each in self._store.list("lease"):
            if re.fullmatch(_LEASE, each.key) and each.key < self._key:
                self._store.delete(each.key)
        self._thread = BackgroundThread("asynchooks-checkpoint-lease", self._renew)
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the prefix meanwhile."""
        if self._newest() != self._key:
            raise CheckpointError(
                f"{self._store.name}: another run has taken this prefix, as this one had not "
                f"renewed its lease for {EXPIRES_AFTER_SECS:g} s (it stood still, or had no "
                "connection); nothing more is saved there by this run: end it, or give it another "
                "prefix"
            )

    def release(self, *, waits: bool = True) -> None:
        """Let others take the prefix; does nothing when it is not held, or in a forked process."""
        if self.is_held and self._content["pid"] == os.getpid():
            self._thread.end()
            if waits:
                self._thread.join(_CLOSE_SECS)
        _held.discard(self._content.get("run", ""))

    def _check_conditions(self) -> None:
        """Find out, by the lease just created, whether the store creates only what is missing."""
        if not self._store.create(self._key, b"{}"):
            return
        self._store.delete(self._key)
        raise CheckpointError(
            f"{self._store.name}: the store ignores conditions: it has replaced an object that was "
            "to be created only if there was none. Two runs there would damage each other's "
            "checkpoints; use another store"
        )

    def _renew(self) -> None:
        """In a thread of its own: steps that hold the event loop must not let the lease expire."""
        while not self._thread.pause(RENEWED_EVERY_SECS):
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

    def _newest(self) -> str:
        """The key of the greatest generation; "" where there is none."""
        keys = [each.key for each in self._store.list("lease")]
        return max((each for each in keys if re.fullmatch(_LEASE, each)), default="")

    def _read(self, key: str) -> dict[str, Any]:
        """What a lease says; nothing if it is gone, or was not written here."""
        with suppress(ValueError, RecursionError):
            content = json.loads(self._store.get(key) or b"") if key else None
            if isinstance(content, dict) and isinstance(content.get("run", ""), str):
                return content
        return {}

    def _wait_until_free(self, key: str) -> None:
        """Return once the run that holds this lease has ended, else CheckpointInUseError."""
        first = content = self._read(key)
        if first.get("run") in _held:
            raise self._in_use(first)
        if not key or _is_of_ended(first):
            return
        pause, waited = threading.Event(), 0.0
        while content.get("released") is not True and waited < EXPIRES_AFTER_SECS:
            if not waited:
                logger.info(
                    "Waiting for a renewal of the lease of %s, to see whether its run still lives",
                    self._store.name,
                )
            pause.wait(_LOOKED_AT_EVERY_SECS)
            waited += _LOOKED_AT_EVERY_SECS
            content = self._read(key)
            if content != first and content.get("released") is not True:
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
    is_here = machine() != "" and content.get("machine") == machine()
    pid = content.get("pid")  # of this process, where the thread is yet to release it
    return is_here and (pid == os.getpid() or has_ended(pid))
