"""TensorFlow graphs under `MonitoredSession`; the only part of asynchooks that imports it.

TensorFlow's default graph is a stack of the thread, and all tasks of an event loop share one
thread. So every coroutine that a session drives (hooks, step_fn, side tasks) has its session's
graph as the default one whenever it runs, and restores the stack whenever it waits; use `in_graph`
for coroutines of your own. This does not cover scopes of names, devices and control dependencies:
they belong to the graph and the thread, not to the task. On a graph that several workers share,
leave them before the first `await`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import tensorflow  # noqa: F401  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "TensorFlow is not installed, which asynchooks.tf needs: "
        "pip install 'asynchooks[tensorflow]'. "
        "Without it, train a step function: "
        "MonitoredSession(hooks, step)"
    ) from error

from tensorflow.compat.v1.train import Scaffold

from .._later import later
from ..hooks import CheckpointSaverHook
from ._profiler import ProfilerHook
from .bridges._sync_hook import sync_hook
from .checkpoint._object import TensorFlowSaver
from .cluster._task import ClusterTask
from .graph._creators import ChiefSessionCreator, WorkerSessionCreator
from .graph._default_graph import in_graph
from .graph._session import GraphCoordinator
from .graph._sessions import MonitoredTrainingSession, SingularMonitoredSession

if TYPE_CHECKING:
    from .bridges._keras import HooksCallback as HooksCallback
else:  # Keras takes a second to import
    __getattr__, __dir__ = later(__name__, {"HooksCallback": "bridges._keras"})

__all__ = [
    "CheckpointSaverHook",
    "ChiefSessionCreator",
    "ClusterTask",
    "GraphCoordinator",
    "HooksCallback",
    "MonitoredTrainingSession",
    "ProfilerHook",
    "Scaffold",
    "SingularMonitoredSession",
    "TensorFlowSaver",
    "WorkerSessionCreator",
    "in_graph",
    "sync_hook",
]
