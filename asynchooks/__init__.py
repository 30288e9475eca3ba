"""asynchooks: monitored training sessions and their hooks for `async`/`await`.

    L6  testing                 fakes: a recording hook, a scripted raw session
    L5  tf                      the only importer of TensorFlow: graphs, sessions, creators
    L4  hooks                   one file per purpose
    L3  _session                MonitoredSession: a reader starts here
    L2  _supervised, _connection, _ending, _hook_list, _merge, _raw_run, _raw_session,
        _session_creator, _function_session, _shared_session, _hook, _hook_calls, _hook_state,
        _listener, _coordinator, _session_stop, _side_tasks, _runner, _work_thread, _or_stop,
        _step_fn, _recovery, _phase
    L1  _global_step, _step_runs, _gate, _waiters, _timer, _lock, _portal, _stacks,
        checkpoints
    L0  _engine, _real_time, _wakeup_fd, _signal, _stop, _stop_reason, _errors
                                the one way to wait, and every exception

Imports point down only. TensorFlow's names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._coordinator import Coordinator
from ._errors import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointVersionError,
    DamagedCheckpointError,
    FeedError,
    FetchError,
    GraphStackError,
    LateVariableError,
    MetricError,
    NanLossDuringTrainingError,
    PreemptionError,
    StallError,
    StepFunctionError,
    StepUnreachableError,
    StopTraining,
)
from ._function_session import FunctionSessionCreator
from ._global_step import GlobalStep, GlobalStepStatistics
from ._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from ._listener import CheckpointSaverListener
from ._raw_session import RawSession
from ._recovery import Recovery, Restart
from ._session import MonitoredSession
from ._session_creator import SessionCreator
from ._shared_session import SharedSessionCreator
from ._side_tasks import OnFailure
from ._step_fn import StepContext
from ._stop_reason import StopReason
from ._timer import SecondOrStepTimer
from .checkpoints import Mode, Retention, Saver, SnapshotSaver, StateDictSaver
from .hooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    LoopLag,
    LoopLagHook,
    NanTensorHook,
    OnStall,
    PreemptionHook,
    StallHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
    WhenBusy,
)

if TYPE_CHECKING:
    from .tf import ChiefSessionCreator as ChiefSessionCreator
    from .tf import HooksCallback as HooksCallback
    from .tf import MonitoredTrainingSession as MonitoredTrainingSession
    from .tf import ProfilerHook as ProfilerHook
    from .tf import Scaffold as Scaffold
    from .tf import SingularMonitoredSession as SingularMonitoredSession
    from .tf import TensorFlowSaver as TensorFlowSaver
    from .tf import WorkerSessionCreator as WorkerSessionCreator
    from .tf import sync_hook as sync_hook

_FROM_TF = (
    "ChiefSessionCreator",
    "HooksCallback",
    "MonitoredTrainingSession",
    "ProfilerHook",
    "Scaffold",
    "SingularMonitoredSession",
    "TensorFlowSaver",
    "WorkerSessionCreator",
    "sync_hook",
)

__all__ = [  # without those from TensorFlow: a star import must work where it is missing
    "CheckpointError",
    "CheckpointInUseError",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "CheckpointVersionError",
    "Coordinator",
    "DamagedCheckpointError",
    "EarlyStoppingHook",
    "Evaluate",
    "EvaluationHook",
    "FeedError",
    "FeedFnHook",
    "FetchError",
    "FinalOpsHook",
    "FunctionSessionCreator",
    "GlobalStep",
    "GlobalStepStatistics",
    "GlobalStepWaiterHook",
    "GraphStackError",
    "LateVariableError",
    "LoggingTensorHook",
    "LoopLag",
    "LoopLagHook",
    "MetricError",
    "Mode",
    "MonitoredSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "OnFailure",
    "OnStall",
    "PreemptionError",
    "PreemptionHook",
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
    "StepContext",
    "StepCounterHook",
    "StepFunctionError",
    "StepUnreachableError",
    "StopAtStepHook",
    "StopReason",
    "StopTraining",
    "SummarySaverHook",
    "TimeLimitHook",
    "WhenBusy",
]


def __getattr__(name: str) -> Any:
    if name in _FROM_TF:
        return getattr(importlib.import_module(".tf", __name__), name)
    if name == "tf":
        return importlib.import_module(".tf", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_TF, "tf"})
