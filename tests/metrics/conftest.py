"""Fixtures of the tests of metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynchooks.metrics import _event_files

from .disks import Disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(_event_files, "append_whole", disk.append)
    yield disk
    disk.takes.set()
