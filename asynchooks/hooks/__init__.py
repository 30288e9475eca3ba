"""The hooks that come with asynchooks, one file per purpose."""

from ._step_counter import StepCounterHook
from ._stop_at_step import StopAtStepHook
from ._waiter import GlobalStepWaiterHook

__all__ = ["GlobalStepWaiterHook", "StepCounterHook", "StopAtStepHook"]
