"""Training beyond one process, on engines that exist already; sessions and hooks stay as they are.

A `StepSource` brings what other processes do to the global step: `DaskCluster` through a Dask
scheduler, a `RemoteParameterServer` with the parameters, which `host_parameter_server` puts on a
Dask worker. TensorFlow's is in `asynchooks.tf`, as everything of TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._later import later
from .._step_source import Demand, SourceState, StepSource

if TYPE_CHECKING:
    from ._dask import DaskCluster as DaskCluster
    from ._hosting import host_parameter_server as host_parameter_server
    from ._messages import HostStatistics as HostStatistics
    from ._messages import ServerAddress as ServerAddress
    from ._remote_server import RemoteParameterServer as RemoteParameterServer
else:  # Dask is imported when it is first used
    __getattr__, __dir__ = later(
        __name__,
        {
            "DaskCluster": "_dask",
            "HostStatistics": "_messages",
            "RemoteParameterServer": "_remote_server",
            "ServerAddress": "_messages",
            "host_parameter_server": "_hosting",
        },
    )

__all__ = [
    "DaskCluster",
    "Demand",
    "HostStatistics",
    "RemoteParameterServer",
    "ServerAddress",
    "SourceState",
    "StepSource",
    "host_parameter_server",
]
