"""Names of metrics: none costs other points anything, and no two become one in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    EvaluationHook,
    FunctionSessionCreator,
    HistoryHook,
    MetricError,
    MetricsHook,
    MonitoredSession,
)
from asynchooks.metrics import (
    CsvSink,
    Histogram,
    JsonLinesSink,
    OpenTelemetrySink,
    Point,
    Resume,
    Sink,
)

from .readers import json_lines, rows

HALF = "half of \ud800 a pair"
FILES: dict[str, tuple[Callable[[Path], Sink], Callable[[Path], list[dict[str, Any]]]]] = {
    "json": (JsonLinesSink, json_lines),
    "csv": (CsvSink, rows),
}


def creator() -> FunctionSessionCreator:
    return FunctionSessionCreator(lambda: {"loss": 0.5})


@pytest.mark.anyio
@pytest.mark.parametrize("kind", FILES)
async def test_a_logged_name_that_no_file_can_hold_is_refused_and_costs_no_other_point(
    kind: str, tmp_path: Path
) -> None:
    new, read = FILES[kind]
    hook = MetricsHook(new(tmp_path / "m"), "loss", every_n_steps=1)
    async with MonitoredSession([hook], creator()) as session:
        for _ in range(5):
            await session.run([])
            with pytest.raises(MetricError, match="has half of a surrogate pair"):
                session.log_metrics({HALF: 1.0})
    assert [int(line["step"]) for line in read(tmp_path / "m")] == [1, 2, 3, 4, 5]
    assert hook.num_dropped == 0


@pytest.mark.anyio
async def test_such_a_name_is_refused_wherever_it_is_given() -> None:
    with pytest.raises(MetricError, match="the name of a value"):
        MetricsHook(print, {HALF: "loss"})
    with pytest.raises(MetricError, match="surrogate"):
        HistoryHook(HALF)
    with pytest.raises(MetricError, match="name is"):
        EvaluationHook(lambda session, step: {}, every_n_steps=1, name=HALF)
    by_function = HistoryHook({"opt": lambda: {HALF: 1.0}}, every_n_steps=1)
    with pytest.raises(MetricError, match="surrogate"):
        async with MonitoredSession([by_function], creator()) as session:
            await session.run([])
    evaluation = EvaluationHook(lambda session, step: {HALF: 1.0}, every_n_steps=1)
    with pytest.raises(MetricError, match="surrogate"):
        async with MonitoredSession([evaluation], creator()) as session:
            await session.run([])


@pytest.mark.parametrize("kind", FILES)
def test_a_point_that_a_file_cannot_hold_costs_that_point_alone(kind: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", FILES)
def test_metrics_that_are_called_as_our_own_columns_are_kept_apart(
    kind: str, tmp_path: Path
) -> None:
    new, read = FILES[kind]
    sink = new(tmp_path / "m")
    sink.open(Resume(0, None))
    sink.write(Point(7, 9.0, {"step": 1.0, "step_": 2.0, "time": 3.0, "time__": 4.0}))
    sink.flush()
    sink.close()
    [line] = read(tmp_path / "m")
    values = {name: float(value) for name, value in line.items()}
    assert values == {
        "step": 7.0, "time": 9.0, "step_": 1.0, "step__": 2.0, "time_": 3.0, "time___": 4.0,
    }  # fmt: skip


def test_names_that_become_one_column_are_kept_apart_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = CsvSink(tmp_path / "m.csv")
    sink.open(Resume(0, None))
    sink.write(Point(1, 1.0, {"a b": 1.0, "a\nb": 2.0, "h/mean": 3.0}))
    sink.write(Point(2, 2.0, {"h": Histogram.of(np.array([4.0])), "a\nb": 5.0}))
    sink.flush()
    sink.close()
    first, second = rows(tmp_path / "m.csv")
    assert (first["a b"], first["a b_2"], first["h/mean"]) == ("1.0", "2.0", "3.0")
    assert (second["a b"], second["a b_2"], second["h/mean_2"]) == ("", "5.0", "4.0")
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for each name"
    assert "give one of them another name" in warnings[0]


def test_gauges_whose_names_become_one_are_kept_apart_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from opentelemetry.sdk.metrics import MeterProvider

    reader = export.InMemoryMetricReader()
    provider = MeterProvider([reader])
    sink = OpenTelemetrySink(meter=provider.get_meter("test"))
    sink.open(Resume(0, None))
    long = "x" * 300
    sink.write(
        Point(5, 1.0, {"a?": 1.0, "a!": 2.0, "global_step": 3.0, long: 4.0, f"{long}y": 5.0})
    )
    sink.write(Point(3, 2.0, {"a?": 9.0}))  # a late one: the gauge shows the latest step
    found = {
        metric.name: metric.data.data_points[0].value
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    assert found == {
        "a_": 1.0, "a__2": 2.0, "global_step": 5, "global_step_2": 3.0,
        "x" * 255: 4.0, "x" * 253 + "_2": 5.0,
    }  # fmt: skip
    assert len(caplog.records) == 3


@pytest.mark.anyio
async def test_a_value_of_a_function_that_takes_anothers_name_is_refused() -> None:
    hook = HistoryHook({"opt/a": "loss", "opt": lambda: {"a": 1.0}}, every_n_steps=1)
    with pytest.raises(MetricError, match="whose name 'opt/a' another value of the same hook has"):
        async with MonitoredSession([hook], creator()) as session:
            await session.run([])
