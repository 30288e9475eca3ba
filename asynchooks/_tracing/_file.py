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
        collect: gives lines that are whole; called in the thread.
        when_broken: called when writing has failed, after which nothing is collected any more.
        flush_secs: between two chunks.
    """

    def __init__(
        self,
        path: str,
        collect: Callable[[], str],
        when_broken: Callable[[], object],
        flush_secs: float,
    ) -> None:
        self._path, self._collect, self._flush_secs = path, collect, flush_secs
        self._when_broken = when_broken
        self._asked = threading.Event()
        self._lock = threading.Lock()  # guards the next two
        self._is_done = False
        self._slot: Slot | None = None  # of the task that waits for the end
        self._thread = threading.Thread(target=self._run, name="asynchooks-trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._when_broken()
            logger.error(
                "The trace %s cannot be written, and ends here; training goes on: %r",
                self._path,
                error,
            )
        except Exception:
            self._when_broken()
            logger.exception("The trace %s ends here, by an error of asynchooks", self._path)
        with self._lock:
            self._is_done = True
            if self._slot is not None:
                self._slot.wake()

    def _write_all(self) -> None:
        path = os.path.abspath(self._path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path) and not os.path.isfile(path):
            raise FileExistsError(f"{path!r} is no file")
        with suppress(FileNotFoundError):
            os.unlink(path)  # so that another writer of it goes on with what it had
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file, size, is_last = os.open(path, flags, 0o666), 0, False
        try:
            while not is_last:
                is_last = self._asked.wait(self._flush_secs)
                chunk = self._collect().encode(errors="replace")
                left = memoryview(chunk)
                while left:
                    left = left[os.write(file, left) :]
                size += len(chunk)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)  # to the last whole chunk
            raise
        finally:
            os.close(file)

    def ask_to_end(self) -> None:
        """Have what is left written, and the file closed; waits for nothing."""
        self._asked.set()

    def close(self) -> None:
        """Write what is left, and close the file; holds up the thread for a few seconds at most."""
        self._asked.set()
        self._thread.join(_GRACE_SECS)
        self._check_done()

    async def aclose(self, engine: Engine) -> None:
        """Write what is left, and close the file; waits for a stuck disk for a few seconds."""
        if engine.is_virtual:
            self.close()
            return
        self._asked.set()
        slot = Slot(engine, "the last chunk of a trace")
        with self._lock:
            self._slot, is_done = slot, self._is_done
        if not is_done:
            with engine.shielded(_GRACE_SECS):
                await engine.park(slot, engine.now() + _GRACE_SECS)
        self._check_done()

    def _check_done(self) -> None:
        if not self._is_done:
            logger.error(
                "The trace %s was not written to its end within %g s: its last part is missing",
                self._path,
                _GRACE_SECS,
            )
