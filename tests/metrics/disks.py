"""Disks under event files that are stuck, or full.

They lie below the private writer of files, as no disk is stuck on demand.
"""

import threading
from typing import Any

from asynchooks.metrics._append import append_whole


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
    """What event files are written to; it can be stuck."""

    def __init__(self) -> None:
        self.takes, self.is_waiting = threading.Event(), threading.Event()
        self.takes.set()

    def append(self, file: Any, data: bytes, size: int) -> int:
        self.is_waiting.set()
        self.takes.wait(20)
        return append_whole(file, data, size)
