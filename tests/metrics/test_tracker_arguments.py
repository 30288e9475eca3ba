"""What the sinks of trackers refuse, and what they make of points, in this process."""

import math
import sys
from typing import Any

import numpy as np
import pytest

from asynchooks import MetricsHook
from asynchooks.metrics import (
    Histogram,
    MlflowSink,
    OpenTelemetrySink,
    Point,
    Resume,
    Sink,
    TensorBoardSink,
    WandbSink,
)

from ..support.step_loops import run_steps

SINKS: dict[str, tuple[Sink, str]] = {
    "wandb": (WandbSink(project="p"), "wandb"),
    "mlflow": (MlflowSink("e"), "mlflow"),
    "opentelemetry": (OpenTelemetrySink(), "opentelemetry.metrics"),
    "tensorboard": (TensorBoardSink("logs"), "tensorboard"),
}


@pytest.mark.parametrize("extra", SINKS)
async def test_a_missing_library_is_an_error_of_the_opening_that_names_the_extra(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, library = SINKS[extra]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"pip install 'asynchooks\[{extra}\]'"):
        await run_steps(lambda: {"loss": 1.0}, 1, MetricsHook(sink, "loss"))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WandbSink(run=object(), project="p"), TypeError, "run is given, and.*: project"),
        (lambda: MlflowSink(run_id="r", tags={"a": "b"}), ValueError, "run_id is 'r'"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def gauges(*points: Point, prefix: str = "", **attributes: str) -> dict[str, Any]:
    """What OpenTelemetry's SDK has after these points: name → (attributes, value)."""
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from opentelemetry.sdk.metrics import MeterProvider

    reader = export.InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = provider.get_meter("test")
    sink = OpenTelemetrySink(prefix=prefix, attributes=attributes, meter=meter)
    sink.open(Resume(0, None))
    for point in points:
        sink.write(point)
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                [each] = metric.data.data_points
                found[metric.name] = (dict(each.attributes), each.value)
    provider.shutdown()
    return found


def test_opentelemetry_has_a_gauge_for_each_metric_with_its_last_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long = "x" * 300
    numbers = {
        "loss": 0.5,
        "nan": math.nan,
        "layer 1/a:0": 2.0,
        "_é": 3.0,
        "1st": 4.0,
        "a?": 1.0,
        "a!": 2.0,
        "global_step": 3.0,
        long: 4.0,
        f"{long}y": 5.0,
    }
    spread = Histogram.of(np.arange(5.0))
    found = gauges(
        Point(10, 0.0, {"loss": 1.0}),
        Point(20, 0.0, {**numbers, "spread": spread, "empty": Histogram.of([math.nan])}),
        Point(3, 2.0, {"a?": 9.0}),  # a late one: the gauge shows the latest step
        worker="a",
    )
    assert found == {
        name: ({"worker": "a"}, value)
        for name, value in {
            "global_step": 20,
            "loss": 0.5,
            "layer_1/a_0": 2.0,
            "m__": 3.0,
            "m_1st": 4.0,
            "spread.min": 0.0,
            "spread.mean": 2.0,
            "spread.max": 4.0,
            "a_": 1.0,
            "a__2": 2.0,
            "global_step_2": 3.0,
            "x" * 255: 4.0,
            "x" * 253 + "_2": 5.0,
        }.items()
    }
    assert len(caplog.records) == 3, "names that become one are kept apart with a warning"
    found = gauges(Point(1, 0.0, {"loss": 1.0}), prefix="training.")
    assert found == {"training.global_step": ({}, 1), "training.loss": ({}, 1.0)}
