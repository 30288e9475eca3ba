"""What a saver is, and what to wrap a model in to have one. Nothing is saved here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saver(Protocol):
    """Turns a model's state into files and back. The program makes it and keeps it.

    Both methods block and are called in a thread, one call at a time, while training stands still:
    no step runs, and no plain hook method where steps are not thread-safe.

    Example:
        class CounterSaver:
            def save(self, path: str) -> None:
                pathlib.Path(path).write_text(str(model.count))

            def restore(self, path: str) -> None:
                model.count = int(pathlib.Path(path).read_text())
    """

    def save(self, path: str) -> object:
        """Write the state to a file or directory of this name, or to names that begin with it.

        The directory that it is in exists and is fresh.
        """

    def restore(self, path: str) -> object:
        """Read what `save` wrote with this path; leave the state as it was if it does not fit."""


@runtime_checkable
class SnapshotSaver(Saver, Protocol):
    """A saver beside whose writing training goes on. Unlike a plain Saver, it can copy the state.

    Example:
        class CounterSaver:
            def save(self, path: str) -> None:
                self.snapshot()(path)

            def restore(self, path: str) -> None:
                model.count = int(pathlib.Path(path).read_text())

            def snapshot(self) -> Callable[[str], object]:
                text = str(model.count)
                return lambda path: pathlib.Path(path).write_text(text)
    """

    def snapshot(self) -> Callable[[str], object]:
        """Copy the state, quickly, and return what writes the copy to a path.

        That is called in another thread, once, or again if it failed; its files are complete when
        it returns. It may never be called.
        """


def check_saver(saver: object) -> None:
    """Raise TypeError, with what to wrap it in, unless it is a saver."""
    hint = _hint(saver)
    if hint is None and not isinstance(saver, type) and isinstance(saver, Saver):
        return
    raise TypeError(
        f"{_named(saver)} is no saver{lacks(saver, 'save', 'restore')}; "
        + (hint or "give an object with save(path) and restore(path), such as a StateDictSaver")
    )


def _hint(saver: Any) -> str | None:
    train = getattr(sys.modules.get("tensorflow"), "train", None)
    v1_train = getattr(
        getattr(getattr(sys.modules.get("tensorflow"), "compat", None), "v1", None), "train", None
    )
    if train is not None and v1_train is not None:  # else one is still being imported
        if isinstance(saver, v1_train.Saver):
            return "it saves a graph's variables: give it to the CheckpointSaverHook of a graph"
        if isinstance(saver, (train.Checkpoint, v1_train.Checkpoint)):
            return "wrap it: TensorFlowSaver(checkpoint)"
        if isinstance(saver, train.CheckpointManager):
            return "wrap its checkpoint: TensorFlowSaver(manager.checkpoint)"
    if isinstance(saver, type):
        return f"it is a class: make an instance, {saver.__name__}(...)"
    if isinstance(saver, Saver):
        return None
    if isinstance(saver, StateDict):
        return "wrap it: StateDictSaver(model=...)"
    if isinstance(saver, Mapping):
        return "wrap it: StateDictSaver(weights=...)"
    return None


def lacks(given: object, *methods: str) -> str:
    """For messages: which of these methods an object lacks that has the others; "" otherwise."""
    missing = [each for each in methods if not callable(getattr(given, each, None))]
    is_partial = 0 < len(missing) < len(methods)
    return f", which has no {' and no '.join(missing)}" if is_partial else ""


def _named(saver: object) -> str:
    return f"an object of {type(saver).__name__}" if isinstance(saver, Mapping) else repr(saver)


@runtime_checkable
class StateDict(Protocol):
    """What gives and takes its state as one nested dict, as PyTorch's modules do."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> object: ...
