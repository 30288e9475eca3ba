"""A launcher that has ended when its test has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from . import launched as programs
from .launched import WITHOUT_WAITID, Launched

Launch = Callable[..., Launched]


@pytest.fixture
def launch(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Launch]:
    """Of a script: `launch(script, options, *arguments of the script)`."""
    if getattr(request, "param", "") == "without waitid":
        monkeypatch.setattr(programs, "LAUNCH", WITHOUT_WAITID)
    with ExitStack() as stack:

        def started(script: str, options: str = "", *arguments: str) -> Launched:
            return stack.enter_context(closing(Launched(tmp_path, script, options, *arguments)))

        yield started


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Opening it waits until another process opens the other end."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path
