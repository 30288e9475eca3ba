"""asynchooks: monitored training sessions and their hooks for `async`/`await`.

The rooms of the package; each imports only from rooms below it, or to the right of it:

    __main__ cli _cli testing       the command line; fakes for tests
    tf                              TensorFlow: graphs, checkpoints, clusters, bridges to its loops
    adapters                        hooks in the training loops of other libraries
    distributed                     steps counted in other processes, through Dask
    planning                        records of runs, and plans of others in virtual time
    simulation                      thousands of workers in virtual time
    hooks protocols _tracing        one hook per file; asynchronous protocols; recorders of runs
    _session _running               MonitoredSession, where a reader starts; one run and its hooks
    data backends                   stages of input; raw sessions and the creators that make them
    _hook _stopping                 what hooks are; stop requests, side tasks, coordinators
    _step checkpoints metrics       the awaitable step and its gate; files of a checkpoint; sinks
    _timer _engine                  how anything waits: engines, stops, locks, threads, timers
    _check _errors _later _log _version  checks; every exception; lazy names; fields of log records

Which of them import asyncio, trio, TensorFlow or Dask: `FOREIGN` in tests/test_imports.py.
Hooks, checkpoints and TensorFlow's names are loaded at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._engine.stop import StopReason
from ._errors import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointVersionError,
    ClusterError,
    DamagedCheckpointError,
    FeedError,
    FetchError,
    InputError,
    InputStateError,
    InputStructureError,
    LateVariableError,
    MetricError,
    NanLossDuringTrainingError,
    OverlappingCallError,
    PreemptionError,
    StallError,
    StepFunctionError,
    StepSourceLostError,
    StepUnreachableError,
    StopTraining,
)
from ._hook import (
    FinishPhase,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    TensorFlowHook,
)
from ._later import later
from ._running.status import Status, Subscription
from ._running.step_context import StepContext
from ._session import MonitoredSession
from ._step.global_step import GlobalStep, GlobalStepStatistics
from ._stopping.backoff import Recovery, Restart
from ._stopping.coordinator import Coordinator
from ._stopping.tasks import OnFailure
from ._timer import SecondOrStepTimer
from .backends import _creator
from .backends._creator import SessionCreator
from .backends._function import FunctionSessionCreator
from .backends._raw_session import RawSession
from .backends._shared import SharedSessionCreator
from .hooks import __all__ as _hook_names
from .hooks.checkpoint._listeners import CheckpointSaverListener

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import checkpoints as checkpoints
    from . import data as data
    from . import distributed as distributed
    from . import hooks as hooks
    from . import metrics as metrics
    from . import planning as planning
    from . import protocols as protocols
    from . import simulation as simulation
    from . import testing as testing
    from . import tf as tf
    from ._version import __version__ as __version__
    from .checkpoints import Mode as Mode
    from .checkpoints import RandomStates as RandomStates
    from .checkpoints import Retention as Retention
    from .checkpoints import Saver as Saver
    from .checkpoints import SnapshotSaver as SnapshotSaver
    from .checkpoints import StateDictSaver as StateDictSaver
    from .hooks import CheckpointSaverHook as CheckpointSaverHook
    from .hooks import DataWaitHook as DataWaitHook
    from .hooks import EarlyStoppingHook as EarlyStoppingHook
    from .hooks import Evaluate as Evaluate
    from .hooks import EvaluationHook as EvaluationHook
    from .hooks import EventWriter as EventWriter
    from .hooks import FeedFnHook as FeedFnHook
    from .hooks import FeedHook as FeedHook
    from .hooks import FinalOpsHook as FinalOpsHook
    from .hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
    from .hooks import HistoryHook as HistoryHook
    from .hooks import InputPositionHook as InputPositionHook
    from .hooks import LoggingTensorHook as LoggingTensorHook
    from .hooks import LoopLag as LoopLag
    from .hooks import LoopLagHook as LoopLagHook
    from .hooks import Metric as Metric
    from .hooks import MetricsHook as MetricsHook
    from .hooks import NanTensorHook as NanTensorHook
    from .hooks import OnStall as OnStall
    from .hooks import PreemptionHook as PreemptionHook
    from .hooks import ProgressHook as ProgressHook
    from .hooks import StallHook as StallHook
    from .hooks import StepCounterHook as StepCounterHook
    from .hooks import StopAtStepHook as StopAtStepHook
    from .hooks import SummarySaverHook as SummarySaverHook
    from .hooks import SummaryWriter as SummaryWriter
    from .hooks import TimeLimitHook as TimeLimitHook
    from .hooks import TraceHook as TraceHook
    from .hooks import WhenBusy as WhenBusy
    from .tf import ChiefSessionCreator as ChiefSessionCreator
    from .tf import ClusterTask as ClusterTask
    from .tf import HooksCallback as HooksCallback
    from .tf import MonitoredTrainingSession as MonitoredTrainingSession
    from .tf import ProfilerHook as ProfilerHook
    from .tf import Scaffold as Scaffold
    from .tf import SingularMonitoredSession as SingularMonitoredSession
    from .tf import TensorFlowSaver as TensorFlowSaver
    from .tf import WorkerSessionCreator as WorkerSessionCreator
    from .tf import sync_hook as sync_hook
else:  # type checkers shall see the names above, and no others
    __getattr__, __dir__ = later(
        __name__,
        {
            "adapters": "adapters",
            "checkpoints": "checkpoints",
            "data": "data",
            "distributed": "distributed",
            "hooks": "hooks",
            **dict.fromkeys(_hook_names, "hooks"),
            "metrics": "metrics",
            "planning": "planning",
            "protocols": "protocols",
            "simulation": "simulation",
            "testing": "testing",
            "tf": "tf",
            "__version__": "_version",
            "Mode": "checkpoints",
            "RandomStates": "checkpoints",
            "Retention": "checkpoints",
            "Saver": "checkpoints",
            "SnapshotSaver": "checkpoints",
            "StateDictSaver": "checkpoints",
            "ChiefSessionCreator": "tf",
            "ClusterTask": "tf",
            "HooksCallback": "tf",
            "MonitoredTrainingSession": "tf",
            "ProfilerHook": "tf",
            "Scaffold": "tf",
            "SingularMonitoredSession": "tf",
            "TensorFlowSaver": "tf",
            "WorkerSessionCreator": "tf",
            "sync_hook": "tf",
        },
    )


def _default_creator() -> SessionCreator:
    try:
        from .tf.graph._creators import default_creator
    except ImportError as error:
        raise ImportError(
            "MonitoredSession got no session_creator. To train a step function, give it one: "
            "MonitoredSession(hooks, step). To train a TensorFlow graph, which is what it does "
            "without a creator, install TensorFlow: pip install 'asynchooks[tensorflow]'"
        ) from error
    return default_creator()


_creator.default_creator = _default_creator

__all__ = [  # without those from TensorFlow: a star import must work where it is missing
    "CheckpointError",
    "CheckpointInUseError",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "CheckpointVersionError",
    "ClusterError",
    "Coordinator",
    "DamagedCheckpointError",
    "DataWaitHook",
    "EarlyStoppingHook",
    "Evaluate",
    "EvaluationHook",
    "EventWriter",
    "FeedError",
    "FeedFnHook",
    "FeedHook",
    "FetchError",
    "FinalOpsHook",
    "FinishPhase",
    "FunctionSessionCreator",
    "GlobalStep",
    "GlobalStepStatistics",
    "GlobalStepWaiterHook",
    "HistoryHook",
    "InputError",
    "InputPositionHook",
    "InputStateError",
    "InputStructureError",
    "LateVariableError",
    "LoggingTensorHook",
    "LoopLag",
    "LoopLagHook",
    "Metric",
    "MetricError",
    "MetricsHook",
    "Mode",
    "MonitoredSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "OnFailure",
    "OnStall",
    "OverlappingCallError",
    "PreemptionError",
    "PreemptionHook",
    "ProgressHook",
    "RandomStates",
    "RawSession",
    "Recovery",
    "Restart",
    "Retention",
    "Saver",
    "SecondOrStepTimer",
    "SessionCreator",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "SharedSessionCreator",
    "SnapshotSaver",
    "StallError",
    "StallHook",
    "StateDictSaver",
    "Status",
    "StepContext",
    "StepCounterHook",
    "StepFunctionError",
    "StepSourceLostError",
    "StepUnreachableError",
    "StopAtStepHook",
    "StopReason",
    "StopTraining",
    "Subscription",
    "SummarySaverHook",
    "SummaryWriter",
    "TensorFlowHook",
    "TimeLimitHook",
    "TraceHook",
    "WhenBusy",
]
