"""Checkpoints of a step function's model: what a saver writes, in a durable directory.

All of it blocks, and runs in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..._errors import add_note
from ...backends._raw_session import RawSession
from ...checkpoints import Checkpoint, CheckpointDirectory, Saver, SnapshotSaver

HOOKS = "hooks.json"
"""The file of a checkpoint that holds the hooks' state."""


@dataclass(frozen=True)
class Facts:
    """What is saved beside the model.

    Args:
        step: the global step.
        seconds: of training so far.
        hooks: the state of the hooks; None where it follows later.
        metric: what tells good checkpoints from bad ones, None if nothing does.
    """

    step: int
    seconds: float
    hooks: bytes | None
    metric: float | None


@dataclass(frozen=True)
class Restored:
    """What a session goes on from.

    Args:
        path: of the checkpoint, for people.
        facts: what was saved beside the model.
        is_model: whether the model was brought back, too; a graph's creator does that itself.
    """

    path: str
    facts: Facts
    is_model: bool


class Format(Protocol):
    """How a model's state becomes files; `CheckpointSaverHook` chooses one in begin."""

    is_immediate: bool
    """Whether a save has its place in the order of the hooks, as in TensorFlow."""

    def open(self) -> None:
        """Take the directory, before the session exists."""

    def close(self) -> None:
        """Give the directory back; may be called twice."""

    def abandon(self) -> None:
        """Give the directory back, and nothing else, which might block."""

    def restore(self, raw: RawSession) -> Restored | None:
        """Bring the model back, and find what else was saved, if anything was."""

    def describe(self, session: Any) -> None:
        """Write what holds for all checkpoints of a new raw session."""

    def take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        """Copy the model and return what writes the copy; None: it has been written already.

        Nobody runs a step meanwhile.
        """

    def save_hooks(self, step: int, hooks: bytes) -> None:
        """Add the state of the hooks to the checkpoint of a step that was saved without it."""

    def restore_best(self, session: Any) -> str | None:
        """Bring the model back to the best checkpoint; returns its path, None if there is none."""

    def is_better(self, metric: float) -> bool:
        """Whether a checkpoint with this metric would be one of the best that stay."""

    def set_metric(self, step: int, metric: float) -> bool:
        """Give the checkpoint of a step its metric; returns whether there is one."""

    def reject(self, from_step: int, why: str) -> str | None:
        """Choose none of that step or later any more; returns the path of the newest left."""

    def flush(self) -> None:
        """Have everything on the disk."""


MakeFormat = Callable[..., Format]
_make_graph_format: MakeFormat | None = None


def set_graph_format(make: MakeFormat) -> None:
    """Have `make` called for a session on a graph, with what `graph_format` is given."""
    global _make_graph_format
    _make_graph_format = make


def graph_format(*args: Any, background: bool) -> Format:
    """The format of a `CheckpointSaverHook` with these arguments, where a graph is run."""
    assert _make_graph_format is not None
    return _make_graph_format(*args, background=background)


def save(
    directory: CheckpointDirectory, write: Callable[[str], object], facts: Facts
) -> Checkpoint:
    """One checkpoint, with the facts in it."""
    extra = {} if facts.hooks is None else {HOOKS: facts.hooks}
    return directory.save(
        facts.step, write, seconds=facts.seconds, metric=facts.metric, extra=extra
    )


def restored_from(
    directory: CheckpointDirectory, checkpoint: Checkpoint, *, is_model: bool
) -> Restored:
    """What was saved in it beside the model."""
    hooks = directory.read_extra(checkpoint, HOOKS)
    facts = Facts(checkpoint.step, checkpoint.seconds, hooks, checkpoint.metric)
    return Restored(checkpoint.path, facts, is_model)


def reject(directory: CheckpointDirectory, from_step: int, why: str) -> str | None:
    """Move aside what was saved at that step or later; returns the path of the newest left."""
    for checkpoint in directory.checkpoints():
        if checkpoint.step >= from_step:
            directory.reject(checkpoint, why)
    newest = directory.newest_intact()
    return None if newest is None else newest.path


class SaverFormat:
    """The format of any object that has `save` and `restore`."""

    is_immediate = False

    def __init__(self, directory: CheckpointDirectory, saver: Saver) -> None:
        self._directory = directory
        self._saver = saver

    def open(self) -> None:
        self._directory.open()

    def close(self) -> None:
        self._directory.close()

    def abandon(self) -> None:
        self._directory.close()

    def restore(self, raw: RawSession) -> Restored | None:
        checkpoint = self._directory.newest_intact()
        if checkpoint is None:
            return None
        self._load(checkpoint)
        return restored_from(self._directory, checkpoint, is_model=True)

    def restore_best(self, session: Any) -> str | None:
        checkpoint = self._directory.best()
        if checkpoint is None:
            return None
        self._load(checkpoint)
        return checkpoint.path

    def is_better(self, metric: float) -> bool:
        return self._directory.is_better(metric)

    def set_metric(self, step: int, metric: float) -> bool:
        return self._directory.set_metric(step, metric)

    def reject(self, from_step: int, why: str) -> str | None:
        return reject(self._directory, from_step, why)

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            self._saver.restore(checkpoint.prefix)
        except Exception as error:
            add_note(error, f"restoring the model from {checkpoint.path}, whose files are intact")
            raise

    def describe(self, session: Any) -> None:
        """Nothing holds for all of them."""

    def take(self, session: Any, facts: Facts) -> Callable[[], None] | None:
        if isinstance(self._saver, SnapshotSaver):
            copy = self._saver.snapshot()
            return lambda: self._write(copy, facts)
        self._write(self._saver.save, facts)
        return None

    def _write(self, write: Callable[[str], object], facts: Facts) -> None:
        save(self._directory, write, facts)

    def save_hooks(self, step: int, hooks: bytes) -> None:
        """It is in the checkpoint already."""

    def flush(self) -> None:
        """Whatever is saved is on the disk."""
