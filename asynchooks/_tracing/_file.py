"""The file of a trace, and the thread that writes it: the event loop never waits for the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress

from .._engine.background import BackgroundThread
from .._engine.base import Engine
from ..metrics._append import append_whole

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
        self._thread = BackgroundThread("asynchooks-trace", self._serve)
        self._thread.start()
        self.ask_to_end = self._thread.end
        """Have what is left written, and the file closed; waits for nothing."""

    def _serve(self) -> None:
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

    def _write_all(self) -> None:
        path = os.path.abspath(self._path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path) and not os.path.isfile(path):
            raise FileExistsError(f"{path!r} is no file")
        with suppress(FileNotFoundError):
            os.unlink(path)  # so that another writer of it goes on with what it had
        size, is_last = 0, False
        with open(path, "xb", buffering=0) as file:
            while not is_last:
                is_last = self._thread.pause(self._flush_secs)
                size = append_whole(file, self._collect().encode(errors="replace"), size)

    def close(self) -> None:
        """Write what is left, and close the file; holds up the thread for a few seconds at most."""
        self._thread.end()
        self._check(self._thread.join(_GRACE_SECS))

    async def aclose(self, engine: Engine) -> None:
        """Write what is left, and close the file; waits for a stuck disk for a few seconds."""
        if engine.is_virtual:
            self.close()
            return
        self._thread.end()
        has_ended = False
        with engine.shielded(_GRACE_SECS):
            has_ended = await self._thread.wait_for_end(engine, engine.now() + _GRACE_SECS)
        self._check(has_ended)

    def _check(self, has_ended: bool) -> None:
        if not has_ended:
            logger.error(
                "The trace %s was not written to its end within %g s: its last part is missing",
                self._path,
                _GRACE_SECS,
            )
