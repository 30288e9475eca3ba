"""TensorFlow graphs under `MonitoredSession`; the only part of asynchooks that imports it.

TensorFlow's default graph is a stack of the thread, and all tasks of an event loop share one
thread. So every coroutine that a session drives (hooks, step_fn, side tasks) has its session's
graph as the default one whenever it runs, and leaves the stack as it was whenever it waits; use
`in_graph` for coroutines of your own. What cannot be cured: scopes of names, devices and control
dependencies belong to the graph and the thread, not to the task. On a graph that several workers
share, leave them before the first `await`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import tensorflow  # noqa: F401  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "TensorFlow is not installed, and this needs it: pip install 'asynchooks[tensorflow]'. "
        "Without it, train a step function: "
        "MonitoredSession(hooks, FunctionSessionCreator(step_fn))"
    ) from error

from tensorflow.compat.v1.train import Scaffold

from ..hooks import CheckpointSaverHook
from ._checkpoint_object import TensorFlowSaver
from ._cluster_task import ClusterTask
from ._creators import ChiefSessionCreator, WorkerSessionCreator
from ._graph import in_graph
from ._profiler import ProfilerHook
from ._sessions import MonitoredTrainingSession, SingularMonitoredSession
from ._sync_hook import sync_hook

if TYPE_CHECKING:
    from ._keras import HooksCallback as HooksCallback

__all__ = [
    "CheckpointSaverHook",
    "ChiefSessionCreator",
    "ClusterTask",
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


def __getattr__(name: str) -> Any:
    if name == "HooksCallback":  # Keras takes a second to import
        from ._keras import HooksCallback

        return HooksCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
