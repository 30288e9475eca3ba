"""Fixtures of the tests of metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynchooks.metrics import _event_files

from .disks import Disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """What event files are written to that are opened from here on."""
    disk = Disk()
    monkeypatch.setattr(_event_files, "_new_file", disk.new_file)
    yield disk
    disk.takes.set()
