"""A copy of the variables that a graph's saver saves, and its writing in TensorFlow's format."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ..graph._default_graph import compiled, run_in_graph

v1 = tf.compat.v1


@dataclass(frozen=True)
class VariablesCopy:
    """Names, slices and values as a saver's op `SaveV2` takes them."""

    names: np.ndarray[Any, Any]  # of the variables in the file; bytes, shape (n,)
    slices: np.ndarray[Any, Any]  # of the variables, "" for the whole; bytes, shape (n,)
    values: list[np.ndarray[Any, Any]]  # n arrays, which are not changed any more


class VariablesWriter:
    """Writes copies in TensorFlow's format: `<prefix>.index` and `<prefix>.data-00000-of-00001`.

    In a graph and a session of its own, created once for copies whose values have these dtypes:
    nothing of it runs where training does. Close it.
    """

    def __init__(self, dtypes: list[np.dtype[Any]]) -> None:
        with tf.Graph().as_default() as graph:
            self._prefix = v1.placeholder(tf.string, ())
            self._names, self._slices = v1.placeholder(tf.string), v1.placeholder(tf.string)
            self._values = [v1.placeholder(tf.as_dtype(each)) for each in dtypes]
            self._save = tf.raw_ops.SaveV2(
                prefix=self._prefix,
                tensor_names=self._names,
                shape_and_slices=self._slices,
                tensors=self._values,
            )
        # else it would write in the one pool that all sessions of the process share, and steps
        # would wait for its end
        config = v1.ConfigProto(
            use_per_session_threads=True,
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=1,
        )
        self._session = v1.Session(graph=graph, config=config)
        self.close = self._session.close

    def write(self, copy: VariablesCopy, prefix: str) -> None:
        feeds = {self._prefix: prefix, self._names: copy.names, self._slices: copy.slices}
        feeds.update(zip(self._values, copy.values, strict=True))
        run_in_graph(self._session, self._save, feeds)


class VariablesCopier:
    """Copies one saver's variables of one session; keep it between saves.

    It keeps the memory of the last copy that was written: new memory takes ten times as long to
    fill, here 0.4 s for 200 MB instead of 0.04. Close it.
    """

    def __init__(self, session: Any, saver: Any) -> None:
        self.session = session
        self.saver = saver
        ops = _save_ops(session.graph, saver.saver_def.save_tensor_name)
        # the public callable copies the values, holding the GIL: 0.4 s for 200 MB in new memory
        self._read = compiled(session, [tensor for op in ops for tensor in op.inputs[1:]])
        self._ends = np.cumsum([0] + [len(op.inputs) - 1 for op in ops])
        self._spare: list[list[np.ndarray[Any, Any]]] = []
        self._writer: VariablesWriter | None = None

    def copy(self) -> VariablesCopy:
        """Copy the saver's variables, read by one run; they must not change meanwhile."""
        arrays = [  # perhaps the variables' own memory; NumPy's strings drop trailing zero bytes
            np.array(each, object) if isinstance(each, bytes) else np.asarray(each)
            for each in self._read()
        ]
        parts = [arrays[low:high] for low, high in itertools.pairwise(self._ends)]
        values = [value for part in parts for value in part[2:]]
        spare = self._spare.pop() if self._spare else map(_aligned_like, values)
        copies = []
        for place, value in zip(spare, values, strict=True):
            if (place.shape, place.dtype) != (value.shape, value.dtype):
                place = _aligned_like(value)
            np.copyto(place, value)
            copies.append(place)
        names, slices = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return VariablesCopy(names, slices, copies)

    def write(self, copy: VariablesCopy, prefix: str) -> None:
        """Write it, in another thread than the one that copies; its memory is used again."""
        try:
            if self._writer is None:
                self._writer = VariablesWriter([value.dtype for value in copy.values])
            self._writer.write(copy, prefix)
        finally:
            self._spare[:] = [copy.values]

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _aligned_like(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """New memory of that shape and dtype.

    TensorFlow uses memory at a multiple of 64 bytes as it is; it would copy any other once more,
    holding the GIL.
    """
    if value.dtype.hasobject:  # strings
        return np.empty_like(value)
    memory = np.empty(value.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    aligned: np.ndarray[Any, Any] = memory[begin : begin + value.nbytes].view(value.dtype)
    return aligned.reshape(value.shape)


def _save_ops(graph: tf.Graph, save_tensor_name: str) -> list[tf.Operation]:
    """The ops by which a saver writes: those that its save tensor depends on."""
    found, seen = [], set()
    pending = [graph.get_tensor_by_name(save_tensor_name).op]
    while pending:
        op = pending.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == "SaveV2":
            found.append(op)
        else:
            pending += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    if not found:
        raise ValueError(
            f"the saver of {save_tensor_name!r} writes no checkpoints of TensorFlow's second "
            "version; give a tf.compat.v1.train.Saver without write_version, or leave out "
            "background=True"
        )
    return sorted(found, key=lambda op: str(op.name))
