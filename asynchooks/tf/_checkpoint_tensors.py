"""Which tensors a `tf.train.Checkpoint` would write, and which of a checkpoint's do not fit it.

It writes nothing and changes no variable.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Under which name a checkpoint holds which object has which variables."""

_MAX_TOLD = 20
"""How many variables that do not fit an error lists."""


def tensors_of(checkpoint: Any) -> dict[tuple[str, str], Any] | None:
    """TensorFlow's ShardableTensors that `checkpoint.write` would write, by name and slice.

    None where they cannot be had: for variables on several servers, and for objects whose savers
    are registered with TensorFlow.
    """
    collect = _Collect()
    with tempfile.TemporaryDirectory(prefix="asynchooks-") as scratch:
        options = tf.train.CheckpointOptions(experimental_sharding_callback=collect)
        with suppress(_Collected):
            checkpoint.write(os.path.join(scratch, "none"), options=options)
        has_written = bool(os.listdir(scratch))  # by a registered saver
    found = collect.tensors
    if has_written or not found or any(tf.is_symbolic_tensor(e.tensor) for e in found.values()):
        return None
    return found


def faults_of(checkpoint: Any, path: str) -> list[str]:
    """Which existing variables the files at the path lack or have otherwise, one line each.

    Only for messages: TensorFlow's own comparison has more ways to find a variable.
    """
    reader = tf.train.load_checkpoint(path)
    shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    nodes = _matches(checkpoint, reader) if _GRAPH_KEY in shapes else {}
    faults = []
    for (name, _), each in (tensors_of(checkpoint) or {}).items():
        place, _, attribute = name.partition("/.ATTRIBUTES/")
        here = f"{each.tensor.dtype.name} of shape {tuple(each.tensor.shape)}"
        node = nodes.get(id(each.trackable))
        keys = [] if node is None else node.attributes
        key = next((key.checkpoint_key for key in keys if key.name == attribute), name)
        if key not in shapes:
            faults.append(f"{place}: missing in the checkpoint, here is {here}")
        elif attribute == "VARIABLE_VALUE" and (
            (there := f"{types[key].name} of shape {tuple(shapes[key])}") != here
        ):
            faults.append(f"{place}: the checkpoint holds {there}, here is {here}")
    rest = len(faults) - _MAX_TOLD
    return [*faults[:_MAX_TOLD], f"and {rest} more"] if rest > 0 else faults


def _matches(checkpoint: Any, reader: Any) -> dict[int, Any]:
    """By the id of an existing object, its node in the checkpoint: where the same names lead to."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_GRAPH_KEY))
    view = tf.train.TrackableView(checkpoint)
    found = {id(checkpoint): graph.nodes[0]}
    pending = [checkpoint]
    while pending:
        each = pending.pop()
        existing = view.children(each)
        for child in found[id(each)].children:
            inner = existing.get(child.local_name)
            if inner is not None and id(inner) not in found:
                found[id(inner)] = graph.nodes[child.node_id]
                pending.append(inner)
    return found


class _Collected(Exception):  # noqa: N818 - it ends a write early, which is no error
    """The tensors are collected."""


class _Collect(tf.train.experimental.ShardingCallback):  # type: ignore[misc]
    """Is asked how to distribute the tensors of a checkpoint over files, and keeps them instead.

    The only public way to what TensorFlow would write, with all its kinds of variables, tables
    and iterators, without writing it.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, str], Any] = {}

    @property
    def description(self) -> str:
        return "collects the tensors"

    def __call__(self, shardable_tensors: Sequence[Any]) -> Any:
        for each in shardable_tensors:
            self.tensors[each.checkpoint_key, each.slice_spec] = each
        raise _Collected
