"""Sinks of metrics, and what `MetricsHook` may read: each sink in a thread of its own.

    hook = MetricsHook(TensorBoardSink("logs"), ["loss", mean("accuracy")], every_n_steps=100)

A sink never holds up training: what it cannot take in time is dropped and counted.
"""

from typing import TYPE_CHECKING

from .._later import later

if TYPE_CHECKING:
    from ._csv import CsvSink as CsvSink
    from ._json_lines import JsonLinesSink as JsonLinesSink
    from ._mlflow import MlflowSink as MlflowSink
    from ._opentelemetry import OpenTelemetrySink as OpenTelemetrySink
    from ._readings import data_wait as data_wait
    from ._readings import histogram as histogram
    from ._readings import mean as mean
    from ._readings import steps_per_sec as steps_per_sec
    from ._sink import Histogram as Histogram
    from ._sink import Point as Point
    from ._sink import Resume as Resume
    from ._sink import Sink as Sink
    from ._tensorboard import TensorBoardSink as TensorBoardSink
    from ._wandb import WandbSink as WandbSink

_PLACES = {
    "CsvSink": "_csv",
    "Histogram": "_sink",
    "JsonLinesSink": "_json_lines",
    "MlflowSink": "_mlflow",
    "OpenTelemetrySink": "_opentelemetry",
    "Point": "_sink",
    "Resume": "_sink",
    "Sink": "_sink",
    "WandbSink": "_wandb",
    "TensorBoardSink": "_tensorboard",
    "data_wait": "_readings",
    "histogram": "_readings",
    "mean": "_readings",
    "steps_per_sec": "_readings",
}
if not TYPE_CHECKING:  # type checkers shall see the names above, and no others
    __getattr__, __dir__ = later(__name__, _PLACES)

__all__ = list(_PLACES)
