"""The programs, the settings they are recorded at, those that are planned, and how plans did."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from asynchooks.planning import Figures, Prediction, record

from .._report import print_table
from .programs import batching, gradients, pytorch

Settings = Mapping[str, Any]
FIGURES = "rate", "staleness"


class Program(NamedTuple):
    """One program; each of its settings in place of those that `main` has as defaults."""

    main: Callable[..., Awaitable[None]]
    recorded: tuple[Settings, ...]
    planned: tuple[Settings, ...]
    always: Settings = MappingProxyType({})


GRADIENTS = Program(
    gradients.main,
    recorded=({},),
    planned=(
        *({"num_workers": num} for num in (4, 16, 32)),
        *({"protocol": each} for each in ("ssp:1", "sync", "kasync:4", "kbatch-async:4")),
    ),
)
PROGRAMS: Mapping[str, Program] = {
    "batching": Program(
        batching.main,
        recorded=({"concurrency": 4}, {"concurrency": 32}),
        planned=(
            *({"concurrency": num} for num in (8, 16, 64)),
            {"concurrency": 16, "ordered": True},
            {"concurrency": 32, "batch_size": 16},
            {"concurrency": 16, "max_staleness": 2},
        ),
    ),
    "gradients": GRADIENTS,
    "seen_gradients": GRADIENTS._replace(always={"is_seen": True}),
    "pytorch": Program(
        pytorch.main,
        recorded=({"batch_size": 16}, {"batch_size": 64}),
        planned=(
            {"batch_size": 32},
            {"batch_size": 32, "concurrency": 8},
            {"batch_size": 32, "concurrency": 32},
            {"batch_size": 32, "num_ahead": 0},
            {"batch_size": 64, "concurrency": 32, "num_ahead": 2},
            {"batch_size": 128},
        ),
    ),
}


async def run_recorded(name: str, path: Path, settings: Settings) -> None:
    """Run a program really, and leave what was recorded at the path."""
    logging.disable(logging.WARNING)
    async with record(path, settings=settings):
        await PROGRAMS[name].main(**settings)


class Judged(NamedTuple):
    """One figure of one setting, beside real runs."""

    figure: str
    error: float
    """In %, of the prediction to the mean of all runs."""
    covered: Sequence[bool]
    """Whether each run is in the interval."""


def judged(prediction: Prediction, runs: Sequence[Figures]) -> list[Judged]:
    found = []
    for figure in FIGURES:
        truths, estimate = [getattr(each, figure) for each in runs], getattr(prediction, figure)
        mean = statistics.fmean(truths)
        if mean > 0:  # else, or with NaN, the program has no such one
            error = 100 * abs(estimate.value / mean - 1.0)
            found.append(Judged(figure, error, [estimate.covers(each) for each in truths]))
    return found


def print_judged(title: str, rows: Mapping[str, Sequence[Judged]]) -> None:
    """How large errors are, and how many runs the intervals cover, of each row and in all."""
    lines = []
    for label, all_found in rows.items():
        line, every = [label], [is_in for each in all_found for is_in in each.covered]
        for figure in FIGURES:
            some = [each for each in all_found if each.figure == figure]
            errors = [each.error for each in some] or [math.nan]
            covered = [is_in for each in some for is_in in each.covered] or [False]
            line.append(f"{statistics.median(errors):.1f} % ({max(errors):.1f} %)")
            line.append(f"{100 * statistics.fmean(covered):.0f} % of {len(covered)}")
        lines.append([*line, f"{100 * statistics.fmean(every):.0f} %" if every else "-"])
    columns = [f"{figure}: {what}" for figure in FIGURES for what in ("off by (most)", "covered")]
    print_table(title, ["", *columns, "all covered"], lines)
