"""The file of a trace, and the thread that writes it: the event loop never waits for the disk."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from .._engine.base import Engine, Slot

logger = logging.getLogger("asynchooks")

_GRACE_SECS = 5.0
"""How long the end of a session waits for the last chunk."""


class TraceFile:
    """Appends what `collect` gives, every so often, in a daemon thread, until it is closed.

    Args:
        path: of the file; an existing one is replaced.
        collect: gives a chunk that is whole; called in the thread, also when writing has failed.
        flush_secs: between two chunks.
    """

    def __init__(
        self,
        path: str,
        collect: Callable[[], bytes],
        when_broken: Callable[[], object],
        flush_secs: float,
    ) -> None:
        self._path, self._collect, self._flush_secs = path, collect, flush_secs
        self._when_broken = when_broken
        self.is_broken = False
        """Whether writing has failed: what is collected from then on is dropped."""
        self._is_dropped = False
        self._asked = threading.Event()
        self._file = -1
        self._size = 0
        self._when_done: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._is_done = False
        self._thread = threading.Thread(target=self._run, name="asynchooks-trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._try(self._open)
        try:
            while not (self._is_dropped or self._asked.wait(self._flush_secs)):
                self._write()
            if not self._is_dropped:
                self._write()
        finally:
            self._try(self._close)
            with self._lock:
                self._is_done = True
                if self._when_done is not None:
                    self._when_done()

    def _open(self) -> None:
        path = os.path.abspath(self._path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):
            if os.path.exists(path) and not os.path.isfile(path):
                raise FileExistsError(f"{path!r} is no file")
            os.unlink(path)  # so that another writer of it goes on with what it had
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o666)

    def _write(self) -> None:
        try:
            chunk = self._collect()
        except Exception:  # a bug of ours must not end the thread: what it takes would grow
            self._fail()
            logger.exception("The trace %s ends here, by an error of asynchooks", self._path)
            return
        if chunk and not self.is_broken:
            self._try(lambda: self._append(chunk))

    def _append(self, chunk: bytes) -> None:
        left = memoryview(chunk)
        while left:
            left = left[os.write(self._file, left) :]
        self._size += len(chunk)

    def _close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except OSError as error:
            if not self.is_broken:
                logger.error(
                    "The trace %s cannot be written, and ends here; training goes on: %r",
                    self._path, error,
                )  # fmt: skip
            self._fail()

    def _fail(self) -> None:
        self.is_broken = True
        self._when_broken()
        if self._file >= 0:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # to the last whole chunk

    def close(self) -> None:
        """Write what is left, and close the file; holds up the thread for a few seconds at most."""
        self._asked.set()
        self._thread.join(_GRACE_SECS)
        self._check_done()

    async def aclose(self, engine: Engine) -> None:
        """Write what is left, and close the file; waits for a stuck disk for a few seconds."""
        self._asked.set()
        if engine.is_virtual:
            self._thread.join(_GRACE_SECS)
        else:
            slot = Slot(engine, "the last chunk of a trace")
            with self._lock:
                self._when_done = slot.wake
                is_done = self._is_done
            if not is_done:
                with engine.shielded(_GRACE_SECS):
                    await engine.park(slot, engine.now() + _GRACE_SECS)
        self._check_done()

    def _check_done(self) -> None:
        if not self._is_done:
            logger.error(
                "The trace %s was not written to its end within %g s: its last part is missing",
                self._path, _GRACE_SECS,
            )  # fmt: skip

    def drop(self) -> None:
        """Close it behind this chunk; called in `collect`."""
        self._is_dropped = True
