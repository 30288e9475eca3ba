"""Checkpoints of a graph: TensorFlow's own files, written at once or from a copy.

All of it blocks, and runs in threads, with the graph as the default one.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ..._errors import CheckpointError, DamagedCheckpointError, add_note
from ..._hook import begin_graph
from ...backends._raw_session import RawSession
from ...checkpoints import Checkpoint, CheckpointDirectory, Retention
from ...hooks.checkpoint._format import HOOKS, CheckpointFormat, Facts, Restored, restored_from
from ...metrics._event_files import tensorflows_writer
from ._variables_copy import VariablesCopier

v1 = tf.compat.v1

_MAX_HOOKS_BYTES = 1 << 30
"""Of the file with the state of hooks, next to TensorFlow's own."""


def graph_format(
    directory: str,
    basename: str,
    saver: Any,
    scaffold: Any,
    save_graph_def: bool,
    retention: Retention | None,
    *,
    background: bool,
) -> CheckpointFormat:
    """The format that a `CheckpointSaverHook` with these arguments saves in."""
    args = directory, basename, saver, scaffold, save_graph_def
    if background:
        return CopiedGraphFormat(retention, *args)
    if retention is not None:
        raise ValueError(
            f"got {retention!r} for checkpoints that TensorFlow's saver writes and deletes; give "
            "it to the saver (max_to_keep, keep_checkpoint_every_n_hours), or give background=True"
        )
    return GraphFormat(*args)


class _GraphFiles(CheckpointFormat):
    """What both formats of a graph share: its saver, and the files next to checkpoints.

    The writer of events stays in TensorFlow's cache: the next session continues the same event
    file, as there.
    """

    def __init__(
        self, directory: str, basename: str, saver: Any, scaffold: Any, save_graph_def: bool
    ) -> None:
        self._graph = begin_graph.get()
        self._path, self._prefix = directory, os.path.join(directory, basename)
        self._saver, self._scaffold = saver, scaffold
        self._save_graph_def = save_graph_def
        self._writer: Any = None

    def open(self) -> None:
        """Open the writer of events, in a directory that is made if need be."""
        try:
            tf.io.gfile.makedirs(self._path)
            with self._graph.as_default():  # it refuses to work where eager execution is on
                self._writer = tensorflows_writer(self._path)
        except tf.errors.OpError as error:
            add_note(
                error,
                f"the checkpoint directory {self._path!r} cannot be made; give "
                "CheckpointSaverHook one that may be created and written to",
            )
            raise

    def describe(self, session: Any) -> None:
        graph = session.graph
        graph_def = graph.as_graph_def(add_shapes=True)
        saver = self._find_saver()
        if self._save_graph_def:
            v1.train.write_graph(graph_def, self._path, "graph.pbtxt")
        self._writer.add_graph(graph)
        saver_def = None if saver is None else saver.saver_def
        meta_graph = v1.train.export_meta_graph(graph_def=graph_def, saver_def=saver_def)
        self._writer.add_meta_graph(meta_graph)
        self._meta_graph: bytes = meta_graph.SerializeToString()

    def restored(self, raw: RawSession) -> Restored | None:
        """What was saved, in either format, with the model that the creator has restored."""
        prefix: str | None = getattr(raw.exposed, "asynchooks_restored", None)
        if prefix is None:
            return None
        if is_durable(prefix):
            place, name = os.path.split(prefix)
            directory = CheckpointDirectory(os.path.dirname(place), name.rpartition("-")[0])
            for each in directory.checkpoints():
                if each.prefix == os.path.abspath(prefix):
                    return restored_from(directory, each)
            return None
        path = f"{prefix}.{HOOKS}"
        if not tf.io.gfile.exists(path):
            return None
        facts = Facts(raw.read_step() or 0, 0.0, _read_hooks(path), None)
        return Restored(path, facts, None)

    def load(self, session: Any, checkpoint: Checkpoint) -> None:
        self._find_saver().restore(session, checkpoint.prefix)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _log(self, path: str, step: int) -> None:
        log = v1.SessionLog(status=v1.SessionLog.CHECKPOINT, checkpoint_path=path)
        self._writer.add_session_log(log, step)

    def _find_saver(self) -> Any:
        if self._saver is None and self._scaffold is not None:
            return self._scaffold.saver  # of the recreated session, too
        if self._saver is None:
            savers = v1.get_collection(v1.GraphKeys.SAVERS)
            if len(savers) != 1:
                raise RuntimeError(
                    f"the graph's collection SAVERS holds {len(savers)} savers, expected one; give "
                    "CheckpointSaverHook a saver or a scaffold"
                )
            self._saver = savers[0]
        return self._saver


class GraphFormat(_GraphFiles):
    """TensorFlow's own: its saver writes at once, names the newest and deletes the old ones.

    It releases nothing at its close: in TensorFlow directories have no owner.
    """

    is_immediate = True

    def close(self) -> None:
        pass

    abandon = close

    def take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        if facts.hooks is not None:  # first: else a restored model would read other items
            self._write_hooks(facts.step, facts.hooks)
        self._find_saver().save(
            session, self._prefix, global_step=facts.step, write_meta_graph=self._save_graph_def
        )
        self._log(self._prefix, facts.step)
        return None

    def save_hooks(self, step: int, hooks: bytes) -> None:
        self._write_hooks(step, hooks)
        place, name = os.path.split(self._prefix)
        for other in tf.io.gfile.listdir(place):
            if other.startswith(f"{name}-") and other.endswith(f".{HOOKS}"):
                other = os.path.join(place, other)
                if not tf.io.gfile.exists(other.removesuffix(HOOKS) + "index"):
                    tf.io.gfile.remove(other)  # its checkpoint is gone

    def _write_hooks(self, step: int, hooks: bytes) -> None:
        path = f"{self._prefix}-{step}.{HOOKS}"
        if len(hooks) > _MAX_HOOKS_BYTES:
            raise CheckpointError(
                f"{path!r} is not written: the state of the hooks has {len(hooks):,} bytes, and "
                f"may have {_MAX_HOOKS_BYTES:,}; keep what is large with the model"
            )
        with tf.io.gfile.GFile(f"{path}.new", "wb") as file:
            file.write(hooks)
        tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


class CopiedGraphFormat(_GraphFiles):
    """A copy of the variables, in TensorFlow's format, in a durable directory.

    The file `checkpoint` names the newest, so that TensorFlow's own tools find it.
    """

    _copier: VariablesCopier | None = None

    def __init__(self, retention: Retention | None, directory: str, basename: str, *args: Any):
        super().__init__(directory, basename, *args)
        self.directory = CheckpointDirectory(directory, basename, retention)

    def open(self) -> None:
        self.directory.open()
        super().open()

    def close(self) -> None:
        self._copier = None
        try:
            self.flush()
        finally:
            super().close()

    def take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        if self._copier is None or self._copier.session is not session:
            self._copier = VariablesCopier(session, self._find_saver())
        write_copy = self._copier.copy()

        def write(prefix: str) -> None:
            write_copy(prefix)
            if self._save_graph_def:
                with open(f"{prefix}.meta", "wb") as file:
                    file.write(self._meta_graph)

        def save_copy() -> None:
            prefix = self.save(facts, write).prefix
            self._name_newest()
            self._log(prefix, facts.step)

        return save_copy

    def _name_newest(self) -> None:
        """In the file `checkpoint`, for TensorFlow's tools."""
        every = [each.prefix for each in self.directory.checkpoints()]
        if every:
            v1.train.update_checkpoint_state(
                self._path, every[-1], all_model_checkpoint_paths=every
            )

    def reject(self, from_step: int, why: str) -> None:
        super().reject(from_step, why)
        self._name_newest()


def _read_hooks(path: str) -> bytes:
    """The state of the hooks, for which there is no manifest."""
    num_bytes = tf.io.gfile.stat(path).length
    if not 0 < num_bytes <= _MAX_HOOKS_BYTES:  # a pipe or a device, which may never end, has 0
        raise DamagedCheckpointError(
            f"{path!r} holds no state of hooks: it has {num_bytes:,} bytes, expected 1 to "
            f"{_MAX_HOOKS_BYTES:,}; restore another checkpoint"
        )
    with tf.io.gfile.GFile(path, "rb") as file:
        content: bytes = file.read(num_bytes)
        return content


def is_durable(prefix: str) -> bool:
    """Whether the checkpoint is a directory of its own, by its name."""
    place, name = os.path.split(prefix)
    return os.path.basename(place) == name


def durable_checkpoints(directory: str, newest: str | None) -> CheckpointDirectory | None:
    """The checkpoints there, if the newest is one that is a directory of its own.

    Args:
        newest: what the file `checkpoint` names; None if there is no such file.
    """
    if newest is not None:
        if not is_durable(newest):
            return None  # TensorFlow's saver wrote it
        names = {os.path.basename(newest)}
    else:
        manifests = glob.glob(os.path.join(glob.escape(directory), "*", "manifest.json"))
        found = {os.path.basename(os.path.dirname(each)) for each in manifests}
        # other programs have manifests, too; those that were rejected have a further number
        names = {each for each in found if re.fullmatch(r"(?!.*\.rejected-\d+$).+-\d+", each)}
    basenames = {name.rpartition("-")[0] for name in names}
    if len(basenames) != 1:
        return None
    return CheckpointDirectory(directory, basenames.pop())
