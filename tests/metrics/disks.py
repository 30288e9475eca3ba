"""Disks under event files that are stuck, or full."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from asynchooks.metrics import _event_files

NEW_FILE = _event_files._new_file


class AlmostFull:
    """A file on a disk that takes a few more bytes."""

    def __init__(self, file: Any, error: OSError) -> None:
        self._file, self._error, self._num_writes = file, error, 0
        self.truncate, self.seek = file.truncate, file.seek

    def write(self, data: Any) -> int:
        self._num_writes += 1
        if self._num_writes == 2:
            raise self._error
        return int(self._file.write(data[:7]))


class Disk:
    """A file whose disk can be stuck, or full."""

    def __init__(self) -> None:
        self.takes = threading.Event()
        self.takes.set()
        self.is_waiting = threading.Event()
        self.error: OSError | None = None
        self._file: Any = None

    def new_file(self, directory: str) -> Any:
        self._file = NEW_FILE(directory)
        return self

    @property
    def name(self) -> str:
        return str(self._file.name)

    @property
    def size(self) -> int:
        return int(self._file.size)

    def append(self, events: Sequence[bytes]) -> None:
        self.is_waiting.set()
        self.takes.wait(20)
        good = self._file._file
        if self.error is not None:
            self._file._file = AlmostFull(good, self.error)
        try:
            self._file.append(events)
        finally:
            self._file._file = good

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
