"""Notifications: every run that moves the global step notifies other processes in the same run.

It adds operations to the user's graph, finds the runs that move the step, and runs none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from ._membership_table import MembershipTable, Place, num_subscribers_for

v1 = tf.compat.v1

_READS = {
    "Identity", "IsVariableInitialized", "ReadVariableOp", "ResourceGather", "VarIsInitializedOp",
    "VariableShape", "_ReadVariablesOp",
}  # fmt: skip
MAX_FUSED = 64


class Notifications:
    """The membership table's operations in a graph that is trained, made before it is finalized."""

    def __init__(self, graph: tf.Graph, step: Any) -> None:
        self.place = Place.of(step)
        self._graph = graph
        self._ops = MembershipTable(graph, self.place)
        self._updates = _updates_of(step)
        self.stride = _stride_of(self._updates)
        self.prepare = self._ops.prepare()
        with graph.as_default():
            self.known_epoch = v1.placeholder(tf.int64, (), "known_epoch")
        self.begin_epoch = self._ops.begin_epoch(self.known_epoch, 0)
        self.announce_ready = self._ops.announce_ready()
        self.notify_all: Any = None
        self._num_taken = -1
        self._lock = threading.Lock()  # guards growing
        self._after: dict[tf.Operation, Any] = {}  # notifications, each after one update
        self.now: Any = None  # a notification that is a run of its own
        # by the key of the fetches: result of `fused`; None: they do not move the step
        self._fused: dict[Hashable, tuple[Any, Any] | None] = {}
        self.grow(0)

    def grow(self, num_taken: int) -> None:
        """Notify all subscribers from now on, if there are more than before; from any thread."""
        with self._lock:
            if num_taken <= self._num_taken:
                return
            is_finalized = self._graph.finalized
            if is_finalized:  # operations may be added during runs
                self._graph._unsafe_unfinalize()
            try:
                self.now = self._ops.notification(num_taken)
                self.notify_all = self._ops.notify_all(num_taken) if num_taken else None
                self._after = {
                    each: self._ops.notification_after(each, num_taken)
                    for each in self._updates
                    if each._get_control_flow_context() is None
                }
            finally:
                if is_finalized:
                    self._graph.finalize()
            self._num_taken, self._fused = num_taken, {}

    def is_large_enough(self, num_taken: int) -> bool:
        """Whether all subscribers are notified; else it must `grow`."""
        return num_subscribers_for(num_taken) <= num_subscribers_for(self._num_taken)

    def fused(self, key: Hashable, fetches: Any) -> tuple[Any, Any] | None:
        """The fetches and a notification after the update of the step; None if they move no step.

        The second is None where a notification needs a run of its own.
        """
        if key is None:
            return self._fuse(fetches)
        try:
            return self._fused[key]
        except KeyError:
            if len(self._fused) >= MAX_FUSED:
                self._fused.clear()
            fused = self._fused[key] = self._fuse(fetches)
            return fused

    def _fuse(self, fetches: Any) -> tuple[Any, Any] | None:
        moves = self._moves(fetches)
        if not moves:
            return None
        return fetches, self._after.get(moves.pop()) if len(moves) == 1 else None

    def _moves(self, fetches: Any) -> set[tf.Operation]:
        """The updates of the step that a run of these fetches makes."""
        stack = [each for each in _ops_of(self._graph, fetches) if each is not None]
        seen = set(stack)
        found: set[tf.Operation] = set()
        while stack:
            op = stack.pop()
            if op in self._updates:
                found.add(op)
            for each in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
                if each not in seen:
                    seen.add(each)
                    stack.append(each)
        return found


def _ops_of(graph: tf.Graph, fetches: Any) -> list[Any]:
    flat = []
    for each in tf.nest.flatten(fetches, expand_composites=True):
        try:
            element = graph.as_graph_element(each)
        except (TypeError, ValueError, KeyError):
            continue  # the run raises the error
        flat.append(element if isinstance(element, tf.Operation) else element.op)
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
