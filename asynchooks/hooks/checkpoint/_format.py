"""How a model becomes files of a checkpoint and back; and what is saved with it.

All of it blocks, and runs in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..._errors import add_note
from ...backends._raw_session import RawSession
from ...checkpoints import Checkpoint, Saver, SnapshotSaver
from ...checkpoints._place import CheckpointPlace

HOOKS = "hooks.json"
"""The file of a checkpoint that holds the hooks' states."""


@dataclass(frozen=True)
class Facts:
    """What is saved with the model."""

    step: int
    seconds: float  # of training so far
    hooks: bytes | None  # their states; None where they follow later
    metric: float | None  # by which the best checkpoints are kept; None if it is not known


@dataclass(frozen=True)
class Restored:
    """What a session resumes from."""

    path: str  # of the checkpoint, for messages
    facts: Facts
    is_model: bool  # whether the model was restored, too; a graph's creator does that itself


class CheckpointFormat:
    """How a model's state becomes files; `CheckpointSaverHook` chooses one in begin.

    Args:
        directory: where the checkpoints are; None where TensorFlow's saver names its files and
            deletes the old ones.
    """

    def __init__(self, directory: CheckpointPlace | None) -> None:
        self._directory = directory

    @property
    def directory(self) -> CheckpointPlace:
        """Where the checkpoints are; only where this format has a directory."""
        assert self._directory is not None
        return self._directory

    @property
    def is_immediate(self) -> bool:
        """Whether a save has its place in the order of the hooks, as in TensorFlow."""
        return self._directory is None

    def open(self) -> None:
        """Take the directory, before the session exists."""
        if self._directory is not None:
            self._directory.open()

    def close(self) -> None:
        """Release the directory; may be called twice."""
        if self._directory is not None:
            self._directory.close()

    def abandon(self) -> None:
        """Release the directory, and nothing else, which might block."""
        if self._directory is not None:
            self._directory.abandon()

    def flush(self) -> None:
        """Bring everything to the disk; checkpoints are there already."""

    def describe(self, session: Any) -> None:
        """Write what all checkpoints of a new raw session have in common."""

    def restore(self, raw: RawSession) -> Restored | None:
        """Restore the model, and find what was saved with it, if anything was."""
        raise NotImplementedError

    def take(self, session: Any, facts: Facts) -> Callable[[], object] | None:
        """Copy the model, which no step changes now; returns what writes it, None if written."""
        raise NotImplementedError

    def load(self, session: Any, checkpoint: Checkpoint) -> None:
        """Restore the model from one checkpoint of the directory."""
        raise NotImplementedError

    def save_hooks(self, step: int, hooks: bytes) -> None:
        """Add the states of the hooks to a checkpoint that was saved without them, if any is."""

    def restore_best(self, session: Any) -> str | None:
        """Restore the model from the best checkpoint; returns its path, None if there is none."""
        checkpoint = self.directory.best()
        if checkpoint is None:
            return None
        self.load(session, checkpoint)
        return checkpoint.path

    def reject(self, from_step: int, why: str) -> str | None:
        """Move aside the checkpoints from that step on; returns the path of the newest left."""
        if self._directory is None:
            return None
        for checkpoint in self.directory.checkpoints():
            if checkpoint.step >= from_step:
                self.directory.reject(checkpoint, why)
        newest = self.directory.newest_intact()
        return None if newest is None else newest.path

    def save(self, facts: Facts, write: Callable[[str], object]) -> Checkpoint:
        """Write one checkpoint, with the facts in it."""
        extra = {} if facts.hooks is None else {HOOKS: facts.hooks}
        return self.directory.save(
            facts.step, write, seconds=facts.seconds, metric=facts.metric, extra=extra
        )


class SaverFormat(CheckpointFormat):
    """The format of any object that has `save` and `restore`."""

    def __init__(self, directory: CheckpointPlace, saver: Saver) -> None:
        super().__init__(directory)
        self._saver = saver

    def restore(self, raw: RawSession) -> Restored | None:
        checkpoint = self.directory.newest_intact()
        if checkpoint is None:
            return None
        self.load(raw, checkpoint)
        return restored_from(self.directory, checkpoint, is_model=True)

    def load(self, session: Any, checkpoint: Checkpoint) -> None:
        try:
            self._saver.restore(checkpoint.prefix)
        except Exception as error:
            add_note(error, f"restoring the model from {checkpoint.path}, whose files are intact")
            raise

    def take(self, session: Any, facts: Facts) -> Callable[[], object] | None:
        if isinstance(self._saver, SnapshotSaver):
            return partial(self.save, facts, self._saver.snapshot())
        self.save(facts, self._saver.save)
        return None


make_graph_format: Callable[..., CheckpointFormat]
"""Makes the format of a `CheckpointSaverHook` on a graph; `asynchooks.tf` sets it."""


def restored_from(
    directory: CheckpointPlace, checkpoint: Checkpoint, *, is_model: bool
) -> Restored:
    """What was saved in a checkpoint besides the model."""
    hooks = directory.read_extra(checkpoint, HOOKS)
    facts = Facts(checkpoint.step, checkpoint.seconds, hooks, checkpoint.metric)
    return Restored(checkpoint.path, facts, is_model)
