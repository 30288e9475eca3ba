"""JsonLinesSink: a file with a line of JSON for each point."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ._lines import LinesSink, Row, column
from ._sink import Histogram, Point


class JsonLinesSink(LinesSink):
    """Writes each point as a line of JSON: `{"step": 100, "time": 1893456000.0, "loss": 0.25}`.

    `pandas.read_json(path, lines=True)` reads it. JSON has no word for NaN and infinities: they are
    the texts "NaN", "Infinity" and "-Infinity", which pandas and Python's `float` take for what
    they mean. A histogram is an object with the names of the fields of `Histogram`, its arrays
    lists. A metric that is called step or time is written as `step_` or `time_`.

    Continues the file where a session is restored, each step once: a process that was killed may
    have written later steps, which are removed. A new training (step 0) moves a file that is there
    already aside, as metrics-1.jsonl beside metrics.jsonl. What was flushed outlives a power cut.

    Args:
        path: of the file; missing directories are made. One sink of one process writes to it.

    Raises:
        TypeError: `path` is no path.

    Example:
        hooks = [MetricsHook(JsonLinesSink("logs/metrics.jsonl"), "loss", every_n_steps=10)]
    """

    def _columns_in(self, line: bytes) -> list[str]:
        try:
            return [name for name in json.loads(line) if name not in ("step", "time")]
        except (ValueError, TypeError, RecursionError):  # of another program
            return []

    def _cells(self, point: Point) -> dict[str, Any]:
        cells = {column(name): _as_json(value) for name, value in point.values.items()}
        _text(cells).encode()  # an error of this point, and not of all that are written with it
        return cells

    def _encoded(self, rows: Sequence[Row]) -> bytes:
        return "".join(f"{_text(row)}\n" for row in rows).encode()


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _as_json(value: Any) -> Any:
    if isinstance(value, Histogram):
        state = {name: _as_json(each) for name, each in value.state_dict().items()}
        return state | {"counts": value.counts.tolist(), "edges": value.edges.tolist()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
