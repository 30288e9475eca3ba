"""Tensors by name, written in TensorFlow's format; and a copy of what a graph's saver saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from ..graph._callables import compiled, needed_by


def write_tensors(prefix: str, names: Any, slices: Any, tensors: list[Any]) -> None:
    """Write `<prefix>.index` and `<prefix>.data-00000-of-00001`, as TensorFlow's savers do; blocks.

    Eagerly, as that runs in the calling thread alone, also where eager execution is off: a session
    would write in the one pool of threads that all sessions of the process share, and steps would
    wait for its end.

    Args:
        names: of the tensors in the file, n of them.
        slices: of each one, "" for the whole, n of them.
        tensors: n tensors or arrays, which are not changed meanwhile.
    """
    with eager_context.eager_mode(), tf.device("CPU"):
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors
        )


class VariablesCopier:
    """Copies one saver's variables of one session; keep it between saves.

    It keeps the memory of the last copy that was written: new memory takes ten times as long to
    fill, here 0.4 s for 200 MB instead of 0.04.
    """

    def __init__(self, session: Any, saver: Any) -> None:
        self.session = session
        ops = _save_ops(session.graph, saver.saver_def.save_tensor_name)
        self._names, self._slices = (
            np.concatenate([tf.get_static_value(op.inputs[number]) for op in ops])
            for number in (1, 2)
        )
        # the public callable copies the values, holding the GIL: 0.4 s for 200 MB in new memory
        self._read = compiled(session, [tensor for op in ops for tensor in op.inputs[3:]])
        self._spare: list[np.ndarray[Any, Any]] = []

    def copy(self) -> Callable[[str], None]:
        """Copy the saver's variables, read by one run; they must not change meanwhile.

        Returns:
            What writes the copy to a prefix, once, in another thread; its memory is used again.
        """
        values = [  # perhaps the variables' own memory; NumPy's strings drop trailing zero bytes
            np.array(each, object) if isinstance(each, bytes) else np.asarray(each)
            for each in self._read()
        ]
        copies, self._spare = self._spare, []
        if [(each.shape, each.dtype) for each in copies] != [(v.shape, v.dtype) for v in values]:
            copies = [_aligned_like(value) for value in values]
        for place, value in zip(copies, values, strict=True):
            np.copyto(place, value)

        def write(prefix: str) -> None:
            try:
                write_tensors(prefix, self._names, self._slices, copies)
            finally:
                self._spare = copies

        return write


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
    save = graph.get_tensor_by_name(save_tensor_name).op
    found = [op for op in needed_by([save]) if op.type == "SaveV2"]
    if not found:
        raise ValueError(
            f"the saver of {save_tensor_name!r} writes no checkpoints of TensorFlow's second "
            "version; give a tf.compat.v1.train.Saver without write_version, or leave out "
            "background=True"
        )
    return sorted(found, key=lambda op: str(op.name))
