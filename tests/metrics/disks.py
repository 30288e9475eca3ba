"""Disks under event files that are stuck, or full."""

from __future__ import annotations

import threading
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

    def new_file(self, directory: str) -> tuple[str, Any]:
        name, self._file = NEW_FILE(directory)
        return name, self

    def append(self, data: bytes, size: int) -> int:
        self.is_waiting.set()
        self.takes.wait(20)
        if self.error is not None:
            self._file._file, file = AlmostFull(self._file._file, self.error), self._file._file
            try:
                self._file.append(data, size)
            finally:
                self._file._file = file
        return int(self._file.append(data, size))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
