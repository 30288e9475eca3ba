"""Progress as a table in the output of a notebook's cell, updated in place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from typing import Any

from ._display import Surface
from ._rows import View, WorkerView, cells_of, counted, folded_text, line_of, rows_of

_MOST_ROWS = 32
_CELL = '<td style="text-align:left;white-space:nowrap">{}</td>'


def is_in_notebook() -> bool:
    """Whether a Jupyter kernel runs this program: in a browser, VS Code, Colab or the like."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookSurface(Surface):
    """One output, in the cell in which the first session opened; other cells may run meanwhile.

    It needs IPython alone, and no widgets. Make it in the cell's own thread.
    """

    interval_secs = 0.5

    def __init__(self) -> None:
        from IPython.display import display

        bundle = self._bundle([], [])
        self._handle: Any = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        self._last_lines: list[str] = []
        self._shown: object = bundle

    def draw(self, views: Sequence[View], last_lines: Sequence[str], now: float) -> None:
        self._last_lines = [*self._last_lines, *last_lines][-_MOST_ROWS:]
        bundle = self._bundle(views, self._last_lines)
        if self._handle is not None and bundle != self._shown:
            self._shown = bundle
            self._handle.update(bundle, raw=True)

    def _bundle(self, views: Sequence[View], last_lines: Sequence[str]) -> dict[str, str]:
        """The same by type: HTML, and text for what shows no HTML."""
        lines = [*last_lines, *(line_of(each, self.dot) for each in views[:_MOST_ROWS])]
        html = "".join(f"<div>{escape(line)}</div>" for line in last_lines) + _table(views)
        return {"text/html": html, "text/plain": "\n".join(lines)}

    def close(self) -> None:
        """The last lines stay in the cell's output."""

    def forget(self) -> None:
        self._handle = None


def _table(views: Sequence[View]) -> str:
    if not views:
        return ""
    rows = rows_of(views)
    html = "<table>" + "".join(map(_row, rows[:_MOST_ROWS])) + "</table>"
    if len(rows) > _MOST_ROWS:
        html += f"<div>{escape(folded_text(rows[_MOST_ROWS:]))}</div>"
    beside = counted(name for each in views for name in each.beside)
    if beside:
        html += f"<div>{escape('beside: ' + ', '.join(beside))}</div>"
    return html


def _row(row: View | WorkerView) -> str:
    name, phase, *rest = (escape(text) for text in cells_of(row, " · "))
    bar = ""
    if isinstance(row, View) and row.limit:
        bar = f'<progress max="{row.limit}" value="{min(row.step, row.limit)}"></progress>'
    return "<tr>" + "".join(_CELL.format(cell) for cell in (name, phase, bar, *rest)) + "</tr>"
