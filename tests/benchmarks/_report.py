"""What the benchmarks share: the three event loops, a busy step, and the table they print.

It measures nothing itself.
"""

import importlib.metadata
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

LOOPS = ("asyncio", "uvloop", "trio")
PEERS = {
    "aiostream": "aiostream", "ignite": "pytorch-ignite", "keras": "keras", "simpy": "simpy",
    "spdl": "spdl-core", "tensorflow": "tensorflow", "torch": "torch", "torchdata": "torchdata",
    "trio": "trio", "uvloop": "uvloop",
}  # fmt: skip
"""Modules that are measured beside ours where they are installed, and their distributions."""
WIDE = 0.25
BEGUN = time.perf_counter()


Figures = Callable[[str], Awaitable[Mapping[str, str]]]
"""A function of a module (it is pickled): figures on an event loop, by what is measured."""
Rows = list[list[str]]
"""What is measured, and its figures, one for each of `LOOPS`."""


def run_on(loop: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a coroutine function on one of `LOOPS` and return its value."""
    options = {"use_uvloop": True} if loop == "uvloop" else {}
    backend = "trio" if loop == "trio" else "asyncio"
    return anyio.run(fn, *args, backend=backend, backend_options=options)


def run_afresh(loop: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """In a process of its own, so that memory which others freed is not taken for not needed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run_on, loop, fn, *args).result()


class BusyModel:
    """A step function that computes for a while, and the moment at which each step was done.

    `done_at[n]` is when step n was about to be published, in seconds of `time.perf_counter`; it
    holds for inline steps only.

    Args:
        secs: of a step; by default what a small TensorFlow graph takes for one.
    """

    def __init__(self, secs: float = 33e-6) -> None:
        self.secs, self.done_at = secs, [time.perf_counter()]

    def step(self) -> dict[str, float]:
        until = time.perf_counter() + self.secs
        while time.perf_counter() < until:
            pass
        self.done_at.append(time.perf_counter())
        return {"loss": 0.0}


def p50_and_p99(secs: Sequence[float]) -> str:
    """In milliseconds."""
    cuts = statistics.quantiles(secs, n=100, method="inclusive")
    return " / ".join(f"{cuts[place] * 1e3:.2f}" for place in (49, 98))


def typical(values: Sequence[float], decimals: int = 2) -> str:
    """The median, with a "?" if the quartiles are further apart than `WIDE` of it."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{decimals}f}" + ("?" if high - low > WIDE * abs(median) else "")


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the ratios of neighbouring blocks, for the table."""
    return typical([mine / other for mine, other in zip(ours, theirs, strict=True)])


def is_installed(module: str) -> bool:
    # Ignite is nothing without torch, which it does not always bring
    return find_spec(module) is not None and (module != "ignite" or is_installed("torch"))


def rows_of(figures: Figures) -> Rows:
    """Measured in a fresh process for each event loop; what only some have is "-" for others."""
    loops = [loop for loop in LOOPS if loop == "asyncio" or is_installed(loop)]
    by_loop = {loop: run_afresh(loop, figures, loop) for loop in loops}
    names = dict.fromkeys(name for found in by_loop.values() for name in found)
    return [[name, *(by_loop.get(loop, {}).get(name, "-") for loop in LOOPS)] for name in names]


def print_rows(rows: Rows) -> None:
    """Print the suite's table, and below it what was not measured."""
    print_table("asynchooks beside its peers", ["measure", *LOOPS], rows)
    print()
    if any(cell.endswith("?") for row in rows for cell in row):
        print(f"?: quartiles further apart than {WIDE:.0%} of the median; measure again when idle")
    if missing := [each for each in PEERS if not is_installed(each)]:
        print(f"not installed: {', '.join(missing)}; pip install -e '.[bench]'")


def measure(figures: Figures) -> None:
    """One group alone."""
    print_rows(rows_of(figures))


def parts_of(parts: Mapping[str, Callable[[], T]], names: Sequence[str]) -> dict[str, T]:
    """What the named parts of a benchmark come to, or all of them; an unknown name ends it."""
    if unknown := set(names) - parts.keys():
        sys.exit(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    found = {}
    for name in names or parts:
        found[name] = parts[name]()
        print(f"{time.perf_counter() - BEGUN:5.0f} s  {name}", file=sys.stderr, flush=True)
    return found


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows under a title and the versions; the first column is text, others figures."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}\n{_facts()}\n")
    for line in (header, ["-" * width for width in widths], *rows):
        cells = [each.rjust(width) for each, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())


def _facts() -> str:
    """Versions and machine, in one line."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    packages = ("anyio", "numpy", *PEERS.values())
    versions = [f"{name} {installed[name]}" for name in packages if name in installed]
    cpus = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    model = re.search(r"model name\s*: (.*)", cpus.read_text() if cpus.exists() else "")
    machine = model[1] if model else platform.machine()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return ", ".join([python, *versions, machine, f"{os.cpu_count()} cores"])
