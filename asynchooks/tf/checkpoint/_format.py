"""Checkpoints of a graph: TensorFlow's own files, written at once or from a copy.

All of it blocks, and runs in threads, with the graph as the default one.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .._hook import begin_graph
from .._raw_session import RawSession
from ..checkpoints import CheckpointDirectory, Retention
from ..hooks._saver_format import HOOKS, Facts, Format, Restored, reject, restored_from, save
from ._variables_copy import VariablesCopier

v1 = tf.compat.v1


def graph_format(
    directory: str,
    basename: str,
    saver: Any,
    scaffold: Any,
    save_graph_def: bool,
    retention: Retention | None,
    *,
    background: bool,
) -> Format:
    """The format that a `CheckpointSaverHook` with these arguments saves in."""
    if background:
        checkpoints = CheckpointDirectory(directory, basename, retention)
        return CopiedGraphFormat(checkpoints, directory, saver, scaffold, save_graph_def)
    if retention is not None:
        raise ValueError(
            f"got {retention!r} for checkpoints that TensorFlow's saver writes and deletes; give "
            "it to the saver (max_to_keep, keep_checkpoint_every_n_hours), or give "
            "background=True"
        )
    return GraphFormat(directory, basename, saver, scaffold, save_graph_def)


class _GraphFiles:
    """What both formats of a graph have in common: its saver, and the files beside checkpoints."""

    def __init__(self, directory: str, saver: Any, scaffold: Any, save_graph_def: bool) -> None:
        self._graph = begin_graph.get()
        self._path = directory
        self._saver = saver
        self._scaffold = scaffold
        self._save_graph_def = save_graph_def
        self._writer: Any = None

    def open(self) -> None:
        try:
            tf.io.gfile.makedirs(self._path)
            with self._graph.as_default():  # it refuses to work where eager execution is on
                self._writer = v1.summary.FileWriterCache.get(self._path)
        except tf.errors.OpError as error:
            error.add_note(
                f"the checkpoint directory {self._path!r} cannot be made; give "
                "CheckpointSaverHook one that may be created and written to"
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
    """TensorFlow's own: its saver writes at once, names the newest and deletes the old ones."""

    is_immediate = True

    def __init__(
        self, directory: str, basename: str, saver: Any, scaffold: Any, save_graph_def: bool
    ) -> None:
        super().__init__(directory, saver, scaffold, save_graph_def)
        self._prefix = os.path.join(directory, basename)

    def close(self) -> None:
        """TensorFlow knows no owner of a directory."""

    def restore(self, raw: RawSession) -> Restored | None:
        return saved_beside(raw)

    def take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        self._find_saver().save(
            session, self._prefix, global_step=facts.step, write_meta_graph=self._save_graph_def
        )
        self._log(self._prefix, facts.step)
        return None

    def restore_best(self, session: Any) -> str | None:
        return None  # its checkpoints have no metric

    def reject(self, from_step: int, why: str) -> str | None:
        return None  # its checkpoints cannot be told apart

    def save_hooks(self, step: int, hooks: bytes) -> None:
        path = self._hooks_path(step)
        with tf.io.gfile.GFile(f"{path}.new", "wb") as file:
            file.write(hooks)
        tf.io.gfile.rename(f"{path}.new", path, overwrite=True)
        place, name = os.path.split(self._prefix)
        for other in tf.io.gfile.listdir(place):
            if other.startswith(f"{name}-") and other.endswith(f".{HOOKS}"):
                other = os.path.join(place, other)
                if not tf.io.gfile.exists(other.removesuffix(HOOKS) + "index"):
                    tf.io.gfile.remove(other)  # its checkpoint is gone

    def _hooks_path(self, step: int) -> str:
        return f"{self._prefix}-{step}.{HOOKS}"


class CopiedGraphFormat(_GraphFiles):
    """A copy of the variables, in TensorFlow's format, in a durable directory.

    The file `checkpoint` names the newest, so that TensorFlow's own tools find it.
    """

    is_immediate = False

    def __init__(
        self,
        checkpoints: CheckpointDirectory,
        directory: str,
        saver: Any,
        scaffold: Any,
        save_graph_def: bool,
    ) -> None:
        super().__init__(directory, saver, scaffold, save_graph_def)
        self._checkpoints = checkpoints
        self._meta: tuple[int, bytes] = (-1, b"")  # by the graph's version
        self._copier: VariablesCopier | None = None

    def open(self) -> None:
        self._checkpoints.open()
        super().open()

    def close(self) -> None:
        self._close_copier()
        self._checkpoints.close()

    def _close_copier(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    def restore(self, raw: RawSession) -> Restored | None:
        return saved_beside(raw)

    def take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        saver = self._find_saver()
        if self._copier is None or (self._copier.session, self._copier.saver) != (session, saver):
            self._close_copier()
            self._copier = VariablesCopier(session, saver)
        copier, copy = self._copier, self._copier.copy()
        meta = self._meta_graph(session.graph, saver) if self._save_graph_def else None

        def write(prefix: str) -> None:
            copier.write(copy, prefix)
            if meta is not None:
                with open(f"{prefix}.meta", "wb") as file:
                    file.write(meta)

        def save_copy() -> None:
            prefix = save(self._checkpoints, write, facts).prefix
            self._name_newest()
            self._log(prefix, facts.step)

        return save_copy

    def _name_newest(self) -> None:
        """In the file `checkpoint`, for TensorFlow's tools."""
        every = [each.prefix for each in self._checkpoints.checkpoints()]
        if every:
            v1.train.update_checkpoint_state(
                self._path, every[-1], all_model_checkpoint_paths=every
            )

    def _meta_graph(self, graph: Any, saver: Any) -> bytes:
        """Made once for all checkpoints: meanwhile Python's lock is held."""
        if self._meta[0] != graph.version:
            meta = v1.train.export_meta_graph(graph=graph, saver_def=saver.saver_def)
            self._meta = graph.version, meta.SerializeToString()
        return self._meta[1]

    def restore_best(self, session: Any) -> str | None:
        checkpoint = self._checkpoints.best()
        if checkpoint is None:
            return None
        self._find_saver().restore(session, checkpoint.prefix)
        return checkpoint.path

    def reject(self, from_step: int, why: str) -> str | None:
        newest = reject(self._checkpoints, from_step, why)
        self._name_newest()
        return newest

    def save_hooks(self, step: int, hooks: bytes) -> None:
        """It is in the checkpoint already."""


def saved_beside(raw: RawSession) -> Restored | None:
    """What was saved beside the model that the session's creator has restored, in either format."""
    prefix: str | None = getattr(raw.exposed, "asynchooks_restored", None)
    if prefix is None:
        return None
    if is_durable(prefix):
        place, name = os.path.split(prefix)
        directory = CheckpointDirectory(os.path.dirname(place), name.rpartition("-")[0])
        found = [each for each in directory.checkpoints() if each.prefix == os.path.abspath(prefix)]
        return restored_from(directory, found[0], is_model=False) if found else None
    path = f"{prefix}.{HOOKS}"
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        facts = Facts(raw.read_step() or 0, 0.0, file.read(), None)
    return Restored(path, facts, is_model=False)


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
        names = {os.path.basename(os.path.dirname(each)) for each in manifests}
    basenames = {name.rpartition("-")[0] for name in names}
    if len(basenames) != 1:
        return None
    return CheckpointDirectory(directory, basenames.pop())
