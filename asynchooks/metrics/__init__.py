"""Sinks of metrics, and what `MetricsHook` may read: each sink in a thread of its own.

    hook = MetricsHook(TensorBoardSink("logs"), ["loss", mean("accuracy")], every_n_steps=100)

A sink never holds up training: what it cannot take in time is dropped and counted.
"""

from typing import TYPE_CHECKING

from .._later import later

if TYPE_CHECKING:
    from ._sink import FunctionSink as FunctionSink
    from ._sink import Histogram as Histogram
    from ._sink import Point as Point
    from ._sink import Resume as Resume
    from ._sink import Sink as Sink

_PLACES = {
    "FunctionSink": "_sink",
    "Histogram": "_sink",
    "Point": "_sink",
    "Resume": "_sink",
    "Sink": "_sink",
}
if not TYPE_CHECKING:  # type checkers shall see the names above, and no others
    __getattr__, __dir__ = later(__name__, _PLACES)

__all__ = list(_PLACES)
