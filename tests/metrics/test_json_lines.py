"""JsonLinesSink: each line is JSON, and what was written can be read back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks.metrics import Histogram, JsonLinesSink, Point, Resume

from .readers import json_lines


def written(path: Path, *points: Point) -> list[dict[str, Any]]:
    sink = JsonLinesSink(path)
    sink.open(Resume(0, None))
    for point in points:
        sink.write(point)
    sink.flush()
    sink.close()
    return json_lines(path)


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"loss": 0.1, "größe": 1e-300, 'a "b"\n': -2.0}
    assert written(tmp_path / "m.jsonl", Point(7, 1893456000.123456, values)) == [
        {"step": 7, "time": 1893456000.123456, **values}
    ]


def test_nan_and_infinities_are_texts_that_float_takes(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    [line] = written(tmp_path / "m.jsonl", Point(1, 0.0, values))
    assert line == {"step": 1, "time": 0.0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert [repr(float(str(line[name]))) for name in "abc"] == ["nan", "inf", "-inf"]


def test_a_histogram_is_an_object_of_its_fields(tmp_path: Path) -> None:
    spread = Histogram.of(np.array([0.0, 1.0, 1.0, 2.0]), 2)
    empty = Histogram.of(np.array([math.nan]), 1)
    [line] = written(tmp_path / "m.jsonl", Point(1, 0.0, {"w": spread, "none": empty}))
    assert line["w"] == {
        "counts": [1, 3], "edges": [0.0, 1.0, 2.0], "least": 0.0, "greatest": 2.0, "num": 4,
        "total": 4.0, "total_of_squares": 6.0,
    }  # fmt: skip
    assert line["none"]["least"] == "NaN"


@pytest.mark.parametrize(
    "foreign",
    [b'{"epoch": 1}\n[]\n{"step": "x", "time": 0}\n', b"[" * 100_000 + b"\n"],
    ids=["others", "nested"],
)
def test_lines_of_another_program_stay_where_they_are(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(foreign)
    sink = JsonLinesSink(path)
    sink.open(Resume(5, None))
    sink.write(Point(6, 0.0, {"loss": 1.0}))
    sink.flush()
    sink.close()
    assert path.read_bytes() == foreign + b'{"step": 6, "time": 0.0, "loss": 1.0}\n'
