"""What all commands print: tables and JSON.

They use rich, which the extra `cli` brings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

_WIDTH = 1000
"""Columns of the widest table. On a narrower terminal a row goes on below: in columns that are made
to fit, numbers would be cut."""


def check_rich() -> None:
    """Raise ImportError where no table can be printed."""
    if find_spec("rich") is None:
        raise ImportError(
            "the table needs rich, which is not installed; pip install 'asynchooks[cli]', or give "
            "--json"
        )


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_left: int = 1,
    bold: Sequence[str] | None = None,
) -> None:
    """Print a table. A column that is empty in all rows is left out.

    Args:
        titles: of the columns.
        rows: a text for each column.
        num_left: how many columns, from the left, are texts; the others are aligned as numbers.
        bold: the row that stands out.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    kept = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    for place in kept:
        table.add_column(titles[place], justify="left" if place < num_left else "right")
    for row in rows:
        table.add_row(*(row[place] for place in kept), style="bold" if row is bold else None)
    Console(width=_WIDTH, markup=False, emoji=False, highlight=False).print(table)


def figure(value: float, low: float, high: float) -> str:
    """A number for a table, with its interval if it has one."""
    interval = f" ({low:.4g} to {high:.4g})" if math.isfinite(low) else ""
    return f"{value:.4g}{interval}"


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object in one line."""
    print(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
