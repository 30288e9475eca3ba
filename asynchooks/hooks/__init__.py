"""The hooks that come with asynchooks, one file per purpose."""

from ._background import WhenBusy
from ._checkpoint_saver import CheckpointSaverHook
from ._early_stopping import EarlyStoppingHook
from ._evaluation import Evaluate, EvaluationHook
from ._feed_fn import FeedFnHook
from ._final_ops import FinalOpsHook
from ._logging_tensor import LoggingTensorHook
from ._loop_lag import LoopLag, LoopLagHook
from ._nan_tensor import NanTensorHook
from ._preemption import PreemptionHook
from ._stall import OnStall, StallHook
from ._step_counter import StepCounterHook
from ._stop_at_step import StopAtStepHook
from ._summary_saver import SummarySaverHook
from ._time_limit import TimeLimitHook
from ._waiter import GlobalStepWaiterHook

__all__ = [
    "CheckpointSaverHook",
    "EarlyStoppingHook",
    "Evaluate",
    "EvaluationHook",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "LoopLag",
    "LoopLagHook",
    "NanTensorHook",
    "OnStall",
    "PreemptionHook",
    "StallHook",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TimeLimitHook",
    "WhenBusy",
]
