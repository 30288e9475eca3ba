"""progress: a bar for work that is done in pieces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[float], object]]:
    """Draw a bar on stderr during the block, if that is a terminal.

    The block calls what it gets with how much of the total is done. The bar is drawn by these
    calls alone: a thread of its own would keep the block from forking.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=total)
        bar.refresh()
        yield lambda done: bar.update(task, completed=done, refresh=True)
