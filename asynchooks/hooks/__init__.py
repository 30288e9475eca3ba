"""The hooks that come with asynchooks, one file per purpose; each is loaded at its first use."""

from typing import TYPE_CHECKING

from .._later import later

if TYPE_CHECKING:
    from ._data_wait import DataWaitHook as DataWaitHook
    from ._early_stopping import EarlyStoppingHook as EarlyStoppingHook
    from ._evaluation import Evaluate as Evaluate
    from ._evaluation import EvaluationHook as EvaluationHook
    from ._feed import FeedHook as FeedHook
    from ._feed_fn import FeedFnHook as FeedFnHook
    from ._final_ops import FinalOpsHook as FinalOpsHook
    from ._history import HistoryHook as HistoryHook
    from ._input_position import InputPositionHook as InputPositionHook
    from ._logging_tensor import LoggingTensorHook as LoggingTensorHook
    from ._metrics import Metric as Metric
    from ._metrics_hook import MetricsHook as MetricsHook
    from ._step_counter import StepCounterHook as StepCounterHook
    from ._stop_at_step import StopAtStepHook as StopAtStepHook
    from ._summaries import EventWriter as EventWriter
    from ._summaries import SummaryWriter as SummaryWriter
    from ._summary_saver import SummarySaverHook as SummarySaverHook
    from ._trace import TraceHook as TraceHook
    from ._waiter import GlobalStepWaiterHook as GlobalStepWaiterHook
    from .checkpoint._saver_hook import CheckpointSaverHook as CheckpointSaverHook
    from .checkpoint._saver_hook import WhenBusy as WhenBusy
    from .guards._loop_lag import LoopLag as LoopLag
    from .guards._loop_lag import LoopLagHook as LoopLagHook
    from .guards._nan_tensor import NanTensorHook as NanTensorHook
    from .guards._preemption import PreemptionHook as PreemptionHook
    from .guards._rank_stop import RankStopHook as RankStopHook
    from .guards._stall import OnStall as OnStall
    from .guards._stall import StallHook as StallHook
    from .guards._time_limit import TimeLimitHook as TimeLimitHook
    from .progress._hook import ProgressHook as ProgressHook

_PLACES = {
    "CheckpointSaverHook": "checkpoint._saver_hook",
    "DataWaitHook": "_data_wait",
    "EarlyStoppingHook": "_early_stopping",
    "Evaluate": "_evaluation",
    "EvaluationHook": "_evaluation",
    "EventWriter": "_summaries",
    "FeedFnHook": "_feed_fn",
    "FeedHook": "_feed",
    "FinalOpsHook": "_final_ops",
    "GlobalStepWaiterHook": "_waiter",
    "HistoryHook": "_history",
    "InputPositionHook": "_input_position",
    "LoggingTensorHook": "_logging_tensor",
    "LoopLag": "guards._loop_lag",
    "LoopLagHook": "guards._loop_lag",
    "Metric": "_metrics",
    "MetricsHook": "_metrics_hook",
    "NanTensorHook": "guards._nan_tensor",
    "OnStall": "guards._stall",
    "PreemptionHook": "guards._preemption",
    "ProgressHook": "progress._hook",
    "RankStopHook": "guards._rank_stop",
    "StallHook": "guards._stall",
    "StepCounterHook": "_step_counter",
    "StopAtStepHook": "_stop_at_step",
    "SummarySaverHook": "_summary_saver",
    "SummaryWriter": "_summaries",
    "TimeLimitHook": "guards._time_limit",
    "TraceHook": "_trace",
    "WhenBusy": "checkpoint._saver_hook",
}
if not TYPE_CHECKING:  # type checkers shall see the names above, and no others
    __getattr__, __dir__ = later(__name__, _PLACES)

__all__ = list(_PLACES)
