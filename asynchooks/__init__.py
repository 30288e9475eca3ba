"""asynchooks: monitored training sessions and their hooks for `async`/`await`.

    L6  testing                 fakes: a recording hook, a scripted raw session
        cli, _simulate_command, _simulate_output, _launch_command, _arguments
                                the command line
        launch                  processes of a cluster on this machine
    L5  tf                      the only importer of TensorFlow: graphs, sessions, creators
        distributed             steps of other processes, on engines that exist already
        simulation              thousands of workers in virtual time
    L4  hooks                   one file per purpose
        protocols               asynchronous training: who waits for whom
    L3  _session                MonitoredSession: a reader starts here
    L2  _supervised, _connection, _ending, _hook_list, _merge, _raw_run, _raw_session,
        _session_creator, _function_session, _shared_session, _hook, _hook_calls, _hook_state,
        _listener, _coordinator, _session_stop, _side_tasks, _runner, _work_thread, _or_stop,
        _step_fn, _recovery, _phase
    L1  _global_step, _fed_runs, _step_runs, _gate, _waiters, _timer, _lock, _portal,
        _stacks, checkpoints
    L0  _engine, _real_time, _wakeup_fd, _signal, _stop, _stop_reason, _step_source,
        _version, _errors, _later
                                the one way to wait, and every exception

Imports point down only. Hooks, checkpoints and TensorFlow's names are loaded at
their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._coordinator import Coordinator
from ._errors import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointVersionError,
    ClusterError,
    DamagedCheckpointError,
    FeedError,
    FetchError,
    GraphStackError,
    InputError,
    InputStateError,
    InputStructureError,
    LateVariableError,
    MetricError,
    NanLossDuringTrainingError,
    PreemptionError,
    StallError,
    StepFunctionError,
    StepSourceLostError,
    StepUnreachableError,
    StopTraining,
)
from ._function_session import FunctionSessionCreator
from ._global_step import GlobalStep, GlobalStepStatistics
from ._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from ._later import later
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

if TYPE_CHECKING:
    from .checkpoints import Mode as Mode
    from .checkpoints import Retention as Retention
    from .checkpoints import Saver as Saver
    from .checkpoints import SnapshotSaver as SnapshotSaver
    from .checkpoints import StateDictSaver as StateDictSaver
    from .hooks import CheckpointSaverHook as CheckpointSaverHook
    from .hooks import DataWaitHook as DataWaitHook
    from .hooks import EarlyStoppingHook as EarlyStoppingHook
    from .hooks import Evaluate as Evaluate
    from .hooks import EvaluationHook as EvaluationHook
    from .hooks import FeedFnHook as FeedFnHook
    from .hooks import FeedHook as FeedHook
    from .hooks import FinalOpsHook as FinalOpsHook
    from .hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
    from .hooks import InputPositionHook as InputPositionHook
    from .hooks import LoggingTensorHook as LoggingTensorHook
    from .hooks import LoopLag as LoopLag
    from .hooks import LoopLagHook as LoopLagHook
    from .hooks import NanTensorHook as NanTensorHook
    from .hooks import OnStall as OnStall
    from .hooks import PreemptionHook as PreemptionHook
    from .hooks import StallHook as StallHook
    from .hooks import StepCounterHook as StepCounterHook
    from .hooks import StopAtStepHook as StopAtStepHook
    from .hooks import SummarySaverHook as SummarySaverHook
    from .hooks import TimeLimitHook as TimeLimitHook
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
            "data": "data",
            "tf": "tf",
            "Mode": "checkpoints",
            "Retention": "checkpoints",
            "Saver": "checkpoints",
            "SnapshotSaver": "checkpoints",
            "StateDictSaver": "checkpoints",
            "CheckpointSaverHook": "hooks",
            "EarlyStoppingHook": "hooks",
            "Evaluate": "hooks",
            "EvaluationHook": "hooks",
            "FeedHook": "hooks",
            "InputPositionHook": "hooks",
            "DataWaitHook": "hooks",
            "FeedFnHook": "hooks",
            "FinalOpsHook": "hooks",
            "GlobalStepWaiterHook": "hooks",
            "LoggingTensorHook": "hooks",
            "LoopLag": "hooks",
            "LoopLagHook": "hooks",
            "NanTensorHook": "hooks",
            "OnStall": "hooks",
            "PreemptionHook": "hooks",
            "StallHook": "hooks",
            "StepCounterHook": "hooks",
            "StopAtStepHook": "hooks",
            "SummarySaverHook": "hooks",
            "TimeLimitHook": "hooks",
            "WhenBusy": "hooks",
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
    "FeedError",
    "FeedFnHook",
    "FeedHook",
    "FetchError",
    "FinalOpsHook",
    "FunctionSessionCreator",
    "GlobalStep",
    "GlobalStepStatistics",
    "GlobalStepWaiterHook",
    "GraphStackError",
    "InputError",
    "InputPositionHook",
    "InputStateError",
    "InputStructureError",
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
    "StepSourceLostError",
    "StepUnreachableError",
    "StopAtStepHook",
    "StopReason",
    "StopTraining",
    "SummarySaverHook",
    "TimeLimitHook",
    "WhenBusy",
]
