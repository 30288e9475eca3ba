"""JsonLinesSink: a file with a line of JSON for each point."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ._lines import Key, LinesSink, column
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

    def _key(self, line: bytes) -> Key | None:
        try:
            found = json.loads(line)
            step, time = found["step"], found["time"]
        except (ValueError, TypeError, KeyError):  # of another program
            return None
        is_point = isinstance(step, int) and isinstance(time, (int, float))
        return (step, time) if is_point else None

    def _read_head(self) -> int:
        return 0

    def _lines(self, points: Sequence[Point]) -> bytes:
        return "".join(map(_line, points)).encode()


def _line(point: Point) -> str:
    line: dict[str, Any] = {"step": point.step, "time": point.time}
    line |= {column(name): _encoded(value) for name, value in point.values.items()}
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


def _encoded(value: Any) -> Any:
    if isinstance(value, Histogram):
        state = {name: _encoded(each) for name, each in value.state_dict().items()}
        return state | {"counts": value.counts.tolist(), "edges": value.edges.tolist()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
