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
    MetricError,
    NanLossDuringTrainingError,
    OverlappingCallError,
    PreemptionError,
    RankError,
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
    from .checkpoints import Mode, RandomStates, Retention, Saver, SnapshotSaver, StateDictSaver
    from .hooks import (
        CheckpointSaverHook,
        DataWaitHook,
        EarlyStoppingHook,
        Evaluate,
        EvaluationHook,
        EventWriter,
        FeedFnHook,
        FeedHook,
        FinalOpsHook,
        GlobalStepWaiterHook,
        HistoryHook,
        InputPositionHook,
        LoggingTensorHook,
        LoopLag,
        LoopLagHook,
        Metric,
        MetricsHook,
        NanTensorHook,
        OnStall,
        PreemptionHook,
        ProgressHook,
        RankStopHook,
        StallHook,
        StepCounterHook,
        StopAtStepHook,
        SummarySaverHook,
        SummaryWriter,
        TimeLimitHook,
        TraceHook,
        WhenBusy,
    )
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
    _rooms = (
        "adapters",
        "data",
        "distributed",
        "metrics",
        "planning",
        "protocols",
        "simulation",
        "testing",
    )
    _names = {
        **dict.fromkeys(_rooms, ()),
        "checkpoints": (
            "Mode",
            "RandomStates",
            "Retention",
            "Saver",
            "SnapshotSaver",
            "StateDictSaver",
        ),
        "hooks": _hook_names,
        "tf": (
            "ChiefSessionCreator",
            "ClusterTask",
            "HooksCallback",
            "MonitoredTrainingSession",
            "ProfilerHook",
            "Scaffold",
            "SingularMonitoredSession",
            "TensorFlowSaver",
            "WorkerSessionCreator",
            "sync_hook",
        ),
        "_version": ("__version__",),
    }
    __getattr__, __dir__ = later(
        __name__, {name: room for room, names in _names.items() for name in (room, *names)}
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
    "RankError",
    "RankStopHook",
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
