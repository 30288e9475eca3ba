"""What the benchmarks share: the three event loops, a busy step, and the table they print.

It measures nothing itself.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

LOOPS = ("asyncio", "uvloop", "trio")
BUSY_SECS = 33e-6
"""What a small TensorFlow graph takes for one step."""


def run_on(loop: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a coroutine function on one of `LOOPS` and return its value."""
    options = {"use_uvloop": True} if loop == "uvloop" else {}
    backend = "trio" if loop == "trio" else "asyncio"
    return anyio.run(fn, *args, backend=backend, backend_options=options)


class BusyModel:
    """A step function that computes for `BUSY_SECS`, and the moment at which each step was done.

    `done_at[n]` is when step n was about to be published, in seconds of `time.perf_counter`; it
    holds for inline steps only.
    """

    def __init__(self) -> None:
        self.runs_started = 0
        self.done_at = [time.perf_counter()]

    def step(self) -> dict[str, float]:
        self.runs_started += 1
        until = time.perf_counter() + BUSY_SECS
        while time.perf_counter() < until:
            pass
        self.done_at.append(time.perf_counter())
        return {"loss": 0.0}


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    place = math.ceil(len(values) * percent / 100) - 1
    return sorted(values)[max(0, place)]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows under a title and the versions; the first column is text, others figures."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("tensorflow", "anyio", "trio", "uvloop")
    )
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}\nPython {platform.python_version()}, {versions}\n")
    for line in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
