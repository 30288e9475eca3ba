"""The hooks that come with asynchooks, one file per purpose."""

from ._feed_fn import FeedFnHook
from ._final_ops import FinalOpsHook
from ._logging_tensor import LoggingTensorHook
from ._nan_tensor import NanTensorHook
from ._step_counter import StepCounterHook
from ._stop_at_step import StopAtStepHook
from ._summary_saver import SummarySaverHook
from ._waiter import GlobalStepWaiterHook

__all__ = [
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "NanTensorHook",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
]
