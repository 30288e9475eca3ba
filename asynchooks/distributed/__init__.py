"""Training in many processes, on existing engines, with the same sessions and hooks.

A `StepSource` brings the steps of other processes to the global step: `DaskCluster` through a Dask
scheduler, a `RemoteParameterServer` with the parameters, which `host_parameter_server` puts on a
Dask worker. TensorFlow's is in `asynchooks.tf`, like all that needs TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._later import later
from .._step.remote import Demand, SourceState, StepSource

if TYPE_CHECKING:
    from ._cluster import DaskCluster as DaskCluster
    from ._hosting import host_parameter_server as host_parameter_server
    from ._messages import ServerAddress as ServerAddress
    from ._remote import RemoteParameterServer as RemoteParameterServer
else:  # Dask is imported when it is first used
    __getattr__, __dir__ = later(
        __name__,
        {
            "DaskCluster": "_cluster",
            "RemoteParameterServer": "_remote",
            "ServerAddress": "_messages",
            "host_parameter_server": "_hosting",
        },
    )

__all__ = [
    "DaskCluster",
    "Demand",
    "RemoteParameterServer",
    "ServerAddress",
    "SourceState",
    "StepSource",
    "host_parameter_server",
]
