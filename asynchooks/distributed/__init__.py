"""Training beyond one process, on engines that exist already; sessions and hooks stay as they are.

A `StepSource` brings what other processes do to the global step: `DaskCluster` through a Dask
scheduler. TensorFlow's is in `asynchooks.tf`, as everything of TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._later import later
from .._step_source import Demand, SourceState, StepSource

if TYPE_CHECKING:
    from ._dask import DaskCluster as DaskCluster
else:  # Dask is imported when it is first used
    __getattr__, __dir__ = later(__name__, {"DaskCluster": "_dask"})

__all__ = ["DaskCluster", "Demand", "SourceState", "StepSource"]
