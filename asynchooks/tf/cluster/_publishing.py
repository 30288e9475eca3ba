"""Publishing: every run that moves the global step fills the boxes of other tasks in the same run.

It adds operations to the user's graph, finds the runs that move the step, and runs none of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from ._table import Place, StepTable

v1 = tf.compat.v1

_READS = {
    "Identity", "IsVariableInitialized", "ReadVariableOp", "ResourceGather", "VarIsInitializedOp",
    "VariableShape", "_ReadVariablesOp",
}  # fmt: skip
_MAX_FUSED = 64


class Publishing:
    """The step table's operations in a graph that is trained, made before it is finalized."""

    def __init__(self, graph: tf.Graph, step: Any, num_tasks: int) -> None:
        self.place = Place.of(step)
        self._graph = graph
        table = StepTable(graph, self.place, num_tasks)
        self._updates = _updates_of(step)
        self.stride = _stride_of(self._updates)
        self.prepare = table.prepare()
        self.news = table.news()
        with graph.as_default():
            self.known_epoch = v1.placeholder(tf.int64, (), "known_epoch")
        self.begin_epoch = table.begin_epoch(self.known_epoch)
        self._after = {  # news after each update that can be followed in the same run
            each: table.news_after(each) for each in self._updates if not _is_within(each)
        }
        with graph.as_default():
            self.news_and_boxes = table.news_after(tf.no_op())  # a run of its own
        # by the key of the fetches: result of `fused`; None: they do not move the step
        self._fused: dict[Hashable, tuple[Any, Any] | None] = {}

    def fused(self, key: Hashable, fetches: Any) -> tuple[Any, Any] | None:
        """The fetches and the news after the update of the step; None if they move no step.

        The second is None where `news_and_boxes` must be run afterwards.
        """
        if key is not None and key in self._fused:
            return self._fused[key]
        moves = self._moves(fetches)
        found = None
        if moves:
            found = fetches, self._after.get(moves.pop()) if len(moves) == 1 else None
        if key is not None:
            if len(self._fused) >= _MAX_FUSED:
                self._fused.clear()
            self._fused[key] = found
        return found

    def _moves(self, fetches: Any) -> set[tf.Operation]:
        """The updates of the step that a run of these fetches makes."""
        stack = _ops_of(self._graph, fetches)
        seen = set(stack)
        found: set[tf.Operation] = set()
        while stack:
            op = stack.pop()
            if op in self._updates:
                found.add(op)
            new = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
            seen |= new
            stack += new
        return found


def _is_within(op: tf.Operation) -> bool:
    """Whether an update of the step is made within a condition, a loop or a function.

    An op that depends on such an op may still run before what that does: the step was read too
    early in half of the runs.
    """
    is_function = any(each.type == "func" for each in op.op_def.attr)
    return is_function or op._get_control_flow_context() is not None


def _ops_of(graph: tf.Graph, fetches: Any) -> list[Any]:
    flat = []
    for each in tf.nest.flatten(fetches, expand_composites=True):
        try:
            element = graph.as_graph_element(each)
        except (TypeError, ValueError, KeyError):
            continue  # the run raises the error
        op = element if isinstance(element, tf.Operation) else element.op
        if op is not None:
            flat.append(op)
    return flat


def _updates_of(step: Any) -> dict[tf.Operation, None]:
    """The operations that change the step, in order, but for its initializer and its restoring."""
    tensor = step.handle if hasattr(step, "handle") else step.op.outputs[0]
    return {
        op: None
        for op in tensor.consumers()
        if op.type not in _READS and op is not step.initializer and not _restores(op)
    }


def _restores(op: tf.Operation) -> bool:
    while len(op.inputs) > 0 and op.type != "RestoreV2":
        op = op.inputs[-1].op if op.type in ("Assign", "AssignVariableOp") else op.inputs[0].op
        if op.type not in ("Identity", "RestoreV2"):
            return False
    return bool(op.type == "RestoreV2")


def _stride_of(updates: Any) -> int:
    """By how much one run moves the step, where that is a constant of the graph; else 1."""
    strides = [
        tf.get_static_value(op.inputs[1])
        for op in updates
        if op.type in ("AssignAdd", "AssignAddVariableOp")
    ]
    known = [int(each) for each in strides if each is not None and each >= 1]
    return max(known, default=1)
