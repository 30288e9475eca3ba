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


def copied(tensor: Any) -> Any:
    """A copy of a tensor, or of an array, in the calling thread; 200 MB take 30 to 110 ms.

    InvalidArgumentError for types of which TensorFlow makes no copy: int4, say.
    """
    with eager_context.eager_mode(), tf.device("CPU"):
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype in (tf.variant, tf.resource):
            return tensor  # an iterator's state, say: serialized when it was read
        return tf.raw_ops.DeepCopy(x=tensor)


class VariablesCopier:
    """Copies one saver's variables of one session; keep it between saves."""

    def __init__(self, session: Any, saver: Any) -> None:
        self.session, self.saver = session, saver
        ops = _save_ops(session.graph, saver.saver_def.save_tensor_name)
        self._names, self._slices = (
            np.concatenate([tf.get_static_value(op.inputs[number]) for op in ops])
            for number in (1, 2)
        )
        # the public callable copies the values, holding the GIL: 0.4 s for 200 MB in new memory
        self._read = compiled(session, [tensor for op in ops for tensor in op.inputs[3:]])

    def copy(self) -> Callable[[str], None]:
        """Copy the saver's variables, read by one run; they must not change meanwhile.

        Returns:
            What writes the copy to a prefix, in another thread.
        """
        copies = [copied(each) for each in self._read()]
        return lambda prefix: write_tensors(prefix, self._names, self._slices, copies)


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
