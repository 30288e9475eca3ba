"""What the benchmarks share: the three event loops, a busy step, and the table they print.

It measures nothing itself.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio

from ._fresh_process import in_fresh_process

T = TypeVar("T")

LOOPS = ("asyncio", "uvloop", "trio")
BUSY_SECS = 33e-6
"""What a small TensorFlow graph takes for one step."""
PACKAGES = (
    "tensorflow", "keras", "pytorch-ignite", "torch", "torchdata", "aiostream", "anyio", "trio",
    "uvloop", "numpy", "simpy", "spdl-core",
)  # fmt: skip
WIDE = 0.25
PEERS = {
    "aiostream": "aiostream",
    "spdl": "SPDL",
    "torch": "PyTorch",
    "ignite": "PyTorch Ignite",
    "keras": "Keras",
    "simpy": "SimPy",
    "tensorflow": "TensorFlow",
    "torchdata": "torchdata",
    "trio": "trio",
    "uvloop": "uvloop",
}
"""What the extra `bench` installs: module → name."""


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


def typical(values: Sequence[float], decimals: int) -> str:
    """The median, with a "?" if the quartiles are further apart than `WIDE` of it."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{decimals}f}" + ("?" if high - low > WIDE * abs(median) else "")


def is_installed(module: str) -> bool:
    # Ignite is nothing without torch, which it does not always bring
    return find_spec(module) is not None and (module != "ignite" or is_installed("torch"))


@dataclass(frozen=True)
class Measure:
    """One row of the suite's table: what is measured, its bar, and the peer that it needs."""

    name: str
    bar: str = "-"
    peer: str = ""


@dataclass(frozen=True)
class Row:
    """A measure and its figures, one for each of `LOOPS`."""

    measure: Measure
    figures: Sequence[str]


def rows_of(measures: Sequence[Measure], figures: Callable[[str], Mapping[str, str]]) -> list[Row]:
    """The rows of what `figures(loop)` measures, in a fresh process for each event loop.

    Args:
        measures: the rows in their order; nothing is run if the peers of all are missing.
        figures: a function of a module (it is pickled) that returns figures by name of measure.
    """
    is_measured = [not measure.peer or is_installed(measure.peer) for measure in measures]
    by_loop: dict[str, Mapping[str, str]] = {}
    for loop in LOOPS:
        if any(is_measured) and (loop == "asyncio" or is_installed(loop)):
            by_loop[loop] = in_fresh_process(figures, loop)
    return [
        Row(measure, [by_loop[loop][measure.name] if loop in by_loop else "-" for loop in LOOPS])
        if is_there
        else Row(measure, ["-"] * len(LOOPS))
        for measure, is_there in zip(measures, is_measured, strict=True)
    ]


def print_rows(rows: Sequence[Row]) -> None:
    """Print the suite's table, and below it what was not measured."""
    lines = [[row.measure.name, row.measure.bar, *row.figures] for row in rows]
    print_table("asynchooks beside its peers", ["measure", "bar", *LOOPS], lines)
    needed = {row.measure.peer for row in rows} | {"trio", "uvloop"}
    print()
    if any(figure.endswith("?") for row in rows for figure in row.figures):
        print(f"?: quartiles further apart than {WIDE:.0%} of the median; measure again when idle")
    for module in sorted(needed & PEERS.keys()):
        if not is_installed(module):
            name = PEERS[module]
            print(f"not measured: {name} is not installed; pip install -e '.[bench]'")


def progress(what: str, begun: float) -> None:
    """Say on stderr what is done, and how many seconds after `begun` (of `time.perf_counter`)."""
    print(f"{time.perf_counter() - begun:5.0f} s  {what}", file=sys.stderr, flush=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows under a title and the versions; the first column is text, others figures."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}\n{_facts()}\n")
    for line in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _facts() -> str:
    """Versions and machine, in one line."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    cores = f"{os.cpu_count()} cores, {platform.system()}"
    return ", ".join([python, *versions, _cpu_model(), cores])


def _cpu_model() -> str:
    cpus = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
