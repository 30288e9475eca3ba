"""The output of `asynchooks simulate`: a table, JSON, and its progress."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..simulation import Report

_SHARES = ("computed", "lost", "waited", "pulled", "pushed", "down", "idle")
_WIDTH = 200
"""Columns, where there is no terminal that could be too narrow."""
_LOOK_EVERY_SECS = 0.1


@dataclass(frozen=True)
class Result:
    """The result of one protocol with its best learning rate."""

    report: Report
    learning_rate: float
    tried: Mapping[float, float]
    """The last loss by learning rate, of all learning rates that were tried."""
    shows_rate: bool

    def labelled_report(self) -> Report:
        """The report with the rate in its protocol's name, if it was given for it."""
        if not self.shows_rate:
            return self.report
        return replace(self.report, protocol=f"{self.report.protocol}@{self.learning_rate:g}")


def print_table(results: Sequence[Result]) -> None:
    """Print a row for each result. Kinds of time that no worker spent have no column."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [each.report.summary_row() for each in results]
    shares = [kind for kind in _SHARES if any(row[f"share_{kind}"] >= 5e-4 for row in rows)]
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("protocol")
    titles = "rate", "virtual s", "updates", "per s", "staleness", "max", "dropped"
    for title in (*titles, *shares, "loss"):
        table.add_column(title, justify="right")
    for row, result in zip(rows, results, strict=True):
        table.add_row(
            row["protocol"],
            f"{result.learning_rate:.4g}",
            f"{row['secs']:.6g}",
            str(row["updates"]),
            f"{row['updates_per_second']:.4g}",
            f"{row['mean_staleness']:.4g}",
            str(row["max_staleness"]),
            str(row["discarded"]),
            *(f"{row[f'share_{kind}']:.1%}" for kind in shares),
            "" if row["loss"] is None else f"{row['loss']:.3g}",
        )
    is_terminal = sys.stdout.isatty()
    Console(file=sys.stdout, width=None if is_terminal else _WIDTH).print(table)


def print_json(seed: int, backend: str, results: Sequence[Result]) -> None:
    """Print one object: seed, backend, and the reports with the counts of each staleness."""
    rows = [
        {
            **each.report.summary_row(),
            "staleness": {str(k): v for k, v in each.report.staleness.items()},
            "learning_rate": each.learning_rate,
            "loss_by_learning_rate": _finite({str(k): v for k, v in each.tried.items()}),
        }
        for each in results
    ]
    print(json.dumps({"seed": seed, "backend": backend, "reports": [_finite(row) for row in rows]}))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null in place of NaN and infinity, which JSON lacks."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


@contextmanager
def progress(name: str, done: Callable[[], float]) -> Iterator[None]:
    """Show `done()`, from 0 to 1, on stderr while the block runs, if that is a terminal."""
    if not (sys.stderr.isatty() and _has_rich()):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    has_ended = threading.Event()
    # drawn by our thread alone: rich's own does not ask for the progress
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(name, total=1.0)

        def look() -> None:
            while not has_ended.wait(_LOOK_EVERY_SECS):
                bar.update(task, completed=done(), refresh=True)

        thread = threading.Thread(target=look, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


def check_rich() -> None:
    """Raise ImportError that names the extra, unless rich is installed."""
    if not _has_rich():
        raise ImportError(
            "the table needs rich, which is not installed; pip install 'asynchooks[cli]', or give "
            "--json"
        )


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
