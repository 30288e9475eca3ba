"""TensorFlowSaver: what a `tf.train.Checkpoint` tracks as files of a checkpoint, and back.

It neither numbers files nor saves graphs of TensorFlow 1: CheckpointSaverHook does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf

from ..._check import instance
from ..._errors import CheckpointError, DamagedCheckpointError
from ._variables_copy import write_tensors

_DAMAGE = (tf.errors.NotFoundError, tf.errors.DataLossError, tf.errors.OutOfRangeError, IndexError)
"""What TensorFlow raises for files that are missing, damaged or cut off."""
_MAX_LISTED = 20
"""How many variables that do not fit are listed in an error."""
_SAVED = "saved"
"""What the names of files begin with before they are copied."""


class TensorFlowSaver:
    """Saves Keras models, optimizers and other eager variables; the program makes and keeps it.

    The files are those of TensorFlow: `tf.train.Checkpoint.read` and `tf.train.load_checkpoint`
    take the same path. Unlike StateDictSaver, it restores variables that do not exist yet when
    they are created.

    Args:
        checkpoint: a `tf.train.Checkpoint` that names the objects to save.

    Raises:
        TypeError: it is no `tf.train.Checkpoint`.

    Example:
        model = tf.Module()
        model.weights = tf.Variable([1.0, 2.0])
        saver = TensorFlowSaver(tf.train.Checkpoint(model=model))
        write = saver.snapshot()
        model.weights.assign([3.0, 4.0])  # the copy stays as it is
        write("model.ckpt-1")
    """

    def __init__(self, checkpoint: Any) -> None:
        expected = "TensorFlowSaver(tf.train.Checkpoint(model=model, optimizer=optimizer))"
        self._checkpoint = instance("checkpoint", checkpoint, tf.train.Checkpoint, expected)

    def save(self, path: str) -> None:
        """Write the variables as they are now; they must not change meanwhile.

        Args:
            path: what the files' names begin with.

        Raises:
            RuntimeError: eager execution is off, in this thread or altogether.
            CheckpointError: the disk is full or cannot be written to.
        """
        _check_eager()
        with _disk_errors(path):
            self._checkpoint.write(path)

    def restore(self, path: str) -> None:
        """Read the variables; those that do not exist yet get their values when they are created.

        Unlike StateDictSaver, TensorFlow compares while it reads: after an error, variables may
        have changed.

        Args:
            path: as it was given to `save`.

        Raises:
            RuntimeError: eager execution is off, in this thread or altogether.
            CheckpointError: a variable is not in the checkpoint, or has another shape or type
                there; the message lists them.
            DamagedCheckpointError: the files are missing or damaged.
        """
        _check_eager()
        try:
            self._checkpoint.read(path).assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.InvalidArgumentError) as error:
            faults = _faults_of(self._checkpoint, path) or [str(error)[:1000]]
            raise CheckpointError(
                f"the checkpoint {path!r} does not fit the objects here; variables may have "
                "changed. Build the objects as they were when they were saved, or restore another "
                "checkpoint:\n  " + "\n  ".join(faults)
            ) from error
        except (tf.errors.OpError, IndexError) as error:
            damaged = isinstance(error, _DAMAGE) or type(error) is tf.errors.OpError
            kind = DamagedCheckpointError if damaged else CheckpointError
            raise kind(
                f"TensorFlow cannot read the checkpoint {path!r}: {error}; variables may have "
                "changed. Restore another checkpoint"
            ) from error

    def snapshot(self) -> Callable[[str], None]:
        """Copy the variables and return what writes the copy to a path, later, in any thread.

        Raises:
            RuntimeError: eager execution is off, in this thread or altogether.
        """
        _check_eager()
        # Tried: CheckpointOptions(enable_async=True). It reports a failed write at the next one or
        # never (`sync` raises nothing), and it looks for variables only once: one that came later
        # was written as it was after the snapshot in 20 of 20 trials (TensorFlow 2.21).
        tensors = _tensors_of(self._checkpoint)
        if tensors is None:
            return _written_at_once(self._checkpoint)
        try:
            # a tensor is its variable's own memory until TensorFlow changes the variable, which
            # leaves the tensor as it is; but others may write into that memory, by DLPack, say.
            # 200 MB take 30 to 110 ms to copy
            copies = {name: _copied(each.tensor) for name, each in tensors.items()}
        except tf.errors.InvalidArgumentError:  # TensorFlow has no such copy of int4, say
            return _written_at_once(self._checkpoint)
        return lambda path: _write(copies, path)


def _written_at_once(checkpoint: Any) -> Callable[[str], None]:
    """A checkpoint that TensorFlow writes at the snapshot already; copies it to its place.

    For variables on several servers, for types that TensorFlow cannot copy, and for objects whose
    savers are registered with TensorFlow.
    """
    directory = tempfile.mkdtemp(prefix="asynchooks-")

    def copy(path: str) -> None:
        for name in os.listdir(directory):
            shutil.copyfile(os.path.join(directory, name), path + name.removeprefix(_SAVED))

    weakref.finalize(copy, shutil.rmtree, directory, ignore_errors=True)
    prefix = os.path.join(directory, _SAVED)
    with _disk_errors(prefix):
        checkpoint.write(prefix)
    return copy


def _copied(tensor: Any) -> Any:
    if tensor.dtype in (tf.variant, tf.resource):
        return tensor  # an iterator's state, say: serialized when it was read
    with tf.device("CPU"):
        return tf.raw_ops.DeepCopy(x=tensor)


def _write(tensors: dict[tuple[str, str], Any], path: str) -> None:
    with _disk_errors(path):
        names, slices = zip(*tensors, strict=True)
        write_tensors(path, list(names), list(slices), list(tensors.values()))


@contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    """Raise CheckpointError for TensorFlow's errors of the disk."""
    try:
        yield
    except tf.errors.OpError as error:
        raise CheckpointError(
            f"TensorFlow cannot write the checkpoint {path!r}: {error.message}; make room or "
            "give another directory"
        ) from error


def _check_eager() -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            "TensorFlowSaver saves eager variables, but eager execution is off: "
            "tf.compat.v1.disable_eager_execution() was called, or this runs inside a graph or a "
            "tf.function. For a graph, use CheckpointSaverHook(directory, save_steps=100)"
        )


def _tensors_of(checkpoint: Any) -> dict[tuple[str, str], Any] | None:
    """TensorFlow's ShardableTensors that `checkpoint.write` would write, by name and slice.

    None where they are not available: for variables on several servers, and for objects whose
    savers are registered with TensorFlow.
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


def _faults_of(checkpoint: Any, path: str) -> list[str]:
    """Which existing variables the files at the path lack or have otherwise, one line each.

    By their names, and only for messages: TensorFlow may find a variable under another name, too.
    """
    reader = tf.train.load_checkpoint(path)
    shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    faults = []
    for (name, _), each in (_tensors_of(checkpoint) or {}).items():
        place, _, attribute = name.partition("/.ATTRIBUTES/")
        here = f"{each.tensor.dtype.name} of shape {tuple(each.tensor.shape)}"
        if name not in shapes:
            faults.append(f"{place}: no such name in the checkpoint, here is {here}")
        elif attribute == "VARIABLE_VALUE":
            there = f"{types[name].name} of shape {tuple(shapes[name])}"
            if there != here:
                faults.append(f"{place}: the checkpoint holds {there}, here is {here}")
    rest = len(faults) - _MAX_LISTED
    return [*faults[:_MAX_LISTED], f"and {rest} more"] if rest > 0 else faults


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
