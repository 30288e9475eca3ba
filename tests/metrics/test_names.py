"""Names of metrics: none costs other points anything, and no two become one in silence."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    EvaluationHook,
    HistoryHook,
    MetricError,
    MetricsHook,
    MonitoredSession,
)
from asynchooks.metrics import (
    CsvSink,
    Histogram,
    JsonLinesSink,
    Point,
    Resume,
    Sink,
)

from ..support.step_loops import run_steps
from .readers import json_lines, rows, written

HALF = "half of \ud800 a pair"
FILES: dict[str, tuple[Callable[[Path], Sink], Callable[[Path], list[dict[str, Any]]]]] = {
    "json": (JsonLinesSink, json_lines),
    "csv": (CsvSink, rows),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_name_that_no_file_can_hold_costs_no_other_point(kind: str, tmp_path: Path) -> None:
    new, read = FILES[kind]
    sink = new(tmp_path / "m")
    sink.open(Resume(0, None))
    sink.write(Point(1, 1.0, {"loss": 1.0}))
    with pytest.raises(UnicodeEncodeError):
        sink.write(Point(2, 2.0, {HALF: 1.0}))
    sink.write(Point(3, 3.0, {"loss": 3.0}))
    sink.flush()
    sink.close()
    assert [int(line["step"]) for line in read(tmp_path / "m")] == [1, 3]


def evaluation(**options: Any) -> EvaluationHook:
    return EvaluationHook(lambda session, step: {HALF: 1.0}, every_n_steps=1, **options)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MetricsHook(print, {HALF: "loss"}), "the name of a value"),
        (lambda: HistoryHook(HALF), "surrogate"),
        (lambda: evaluation(name=HALF), "name is"),
        (lambda: HistoryHook({"opt": lambda: {HALF: 1.0}}, every_n_steps=1), "surrogate"),
        (evaluation, "surrogate"),
        (
            lambda: HistoryHook({"opt/a": "loss", "opt": lambda: {"a": 1.0}}, every_n_steps=1),
            "whose name 'opt/a' another value of the same hook has",
        ),
    ],
)
async def test_such_a_name_is_refused_wherever_it_is_given(make: Any, match: str) -> None:
    with pytest.raises(MetricError, match=match):
        await run_steps(lambda: {"loss": 0.5}, 1, make())
    async with MonitoredSession([], dict) as session:
        with pytest.raises(MetricError, match="has half of a surrogate pair"):
            session.log_metrics({HALF: 1.0})


@pytest.mark.parametrize("kind", FILES)
def test_metrics_that_are_called_as_our_own_columns_are_kept_apart(
    kind: str, tmp_path: Path
) -> None:
    new, read = FILES[kind]
    metrics = {"step": 1.0, "step_": 2.0, "time": 3.0, "time__": 4.0}
    written(new(tmp_path / "m"), Point(7, 9.0, metrics))
    [line] = read(tmp_path / "m")
    values = {name: float(value) for name, value in line.items()}
    assert values == {
        "step": 7.0,
        "time": 9.0,
        "step_": 1.0,
        "step__": 2.0,
        "time_": 3.0,
        "time___": 4.0,
    }


def test_names_that_become_one_column_are_kept_apart_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(
        CsvSink(tmp_path / "m.csv"),
        Point(1, 1.0, {"a b": 1.0, "a\nb": 2.0, "h/mean": 3.0}),
        Point(2, 2.0, {"h": Histogram.of(np.array([4.0])), "a\nb": 5.0}),
    )
    first, second = rows(tmp_path / "m.csv")
    assert (first["a b"], first["a b_2"], first["h/mean"]) == ("1.0", "2.0", "3.0")
    assert (second["a b"], second["a b_2"], second["h/mean_2"]) == ("", "5.0", "4.0")
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for each name"
    assert "give one of them another name" in warnings[0]
