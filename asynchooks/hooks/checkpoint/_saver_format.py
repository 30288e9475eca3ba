"""Checkpoints of a step function's model: what a saver writes, in a durable directory.

All of it blocks, and runs in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .._raw_session import RawSession
from ..checkpoints import Checkpoint, CheckpointDirectory, Saver, SnapshotSaver

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

    def reject(self, from_step: int, why: str) -> str | None:
        """Choose none of that step or later any more; returns the path of the newest left."""

    def flush(self) -> None:
        """Have everything on the disk."""


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

    def reject(self, from_step: int, why: str) -> str | None:
        return reject(self._directory, from_step, why)

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            self._saver.restore(checkpoint.prefix)
        except Exception as error:
            error.add_note(f"restoring the model from {checkpoint.path}, whose files are intact")
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
