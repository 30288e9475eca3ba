"""Training beyond one process, on engines that exist already; sessions and hooks stay as they are.

A `StepSource` brings what other processes do to the global step. TensorFlow's is in
`asynchooks.tf`, as everything of TensorFlow.
"""

from .._step_source import Demand, SourceState, StepSource

__all__ = ["Demand", "SourceState", "StepSource"]
