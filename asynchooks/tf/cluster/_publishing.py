"""Publishing: every run that moves the global step fills the boxes of other tasks in the same run.

It adds operations to the user's graph, finds the runs that move the step, and runs none of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from ..graph._callables import needed_by, ops_of, parts_of
from ._table import StepTable

_READS = {
    "Identity",
    "IsVariableInitialized",
    "ReadVariableOp",
    "ResourceGather",
    "VarIsInitializedOp",
    "VariableShape",
    "_ReadVariablesOp",
}
_MAX_FUSED = 64


class Publishing:
    """The step table's operations in a graph that is trained, made before it is finalized."""

    def __init__(self, step: Any, num_tasks: int, index: int | None) -> None:
        self.table = StepTable(step, num_tasks, index)
        self._updates = _updates_of(step)
        self.stride = _stride_of(self._updates)
        self._after = {  # news after each update that can be followed in the same run
            each: self.table.news_after(each) for each in self._updates if not _is_within(each)
        }
        # by the key of the fetches: result of `fused`, and the fetches, whose ids the key holds
        self._fused: dict[Hashable, tuple[tuple[Any, Any] | None, list[Any]]] = {}

    def fused(self, key: Hashable, fetches: Any) -> tuple[Any, Any] | None:
        """The fetches and the news after the update of the step; None if they move no step.

        The second is None where the news must be read by a run of their own.
        """
        if key in self._fused:
            return self._fused[key][0]
        moves = self._moves(fetches)
        found = None
        if moves:
            found = fetches, self._after.get(moves[0]) if len(moves) == 1 else None
        if key is not None:
            if len(self._fused) >= _MAX_FUSED:
                self._fused.clear()
            self._fused[key] = found, tf.nest.flatten(fetches)
        return found

    def _moves(self, fetches: Any) -> list[tf.Operation]:
        """The updates of the step that a run of these fetches makes."""
        try:
            ops = ops_of(parts_of(self.table.graph, fetches))
        except Exception:  # the run raises the error
            return []
        return [op for op in needed_by(ops) if op in self._updates]


def _is_within(op: tf.Operation) -> bool:
    """Whether an update of the step is made within a condition, a loop or a function.

    An op that depends on such an op may still run before what that does: the step was read too
    early in half of the runs.
    """
    is_function = any(each.type == "func" for each in op.op_def.attr)
    return is_function or op._get_control_flow_context() is not None


def _updates_of(step: Any) -> dict[tf.Operation, None]:
    """The operations that change the step, in order, but for its initializer."""
    tensor = step.handle if hasattr(step, "handle") else step.op.outputs[0]
    ops = (op for op in tensor.consumers() if op.type not in _READS)
    return {op: None for op in ops if op is not step.initializer}


def _stride_of(updates: Any) -> int:
    """By how much one run moves the step, where that is a constant of the graph; else 1."""
    strides = [
        tf.get_static_value(op.inputs[1])
        for op in updates
        if op.type in ("AssignAdd", "AssignAddVariableOp")
    ]
    known = [int(each) for each in strides if each is not None and each >= 1]
    return max(known, default=1)
