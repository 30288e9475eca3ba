"""How iterables of other libraries are opened, and how they report their position.

All of it happens in the thread that reads.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .._errors import InputError, InputStateError, note_once
from .._later import is_a
from ._source_stage import has_methods, short_repr

logger = logging.getLogger("asynchooks")


@dataclass(frozen=True)
class Opened:
    """An iterator under way."""

    iterator: Iterator[Any]
    num_to_pass: int = 0
    """Items of it that are still to be passed over."""
    state: Callable[[], Any] | None = None
    """Its own position; None where it has none: then items are counted."""


def opener_of(source: Iterable[Any]) -> Opener:
    """How to open it."""
    for module, name, kind in (
        ("tensorflow", "data.Dataset", _Dataset),
        ("tensorflow", "data.Iterator", _DatasetIterator),
        ("torch.utils.data", "DataLoader", _DataLoader),
    ):
        if is_a(source, module, name):
            return kind(source)
    return Opener(source)


class Opener:
    """Any iterable; where it, or its iterator, has a state of its own, that is its position."""

    def __init__(self, source: Any) -> None:
        self.source = source
        keeps_state = has_methods(source, "state_dict", "load_state_dict")
        self.stateful = source if keeps_state else None

    @property
    def is_for_once(self) -> bool:
        return isinstance(self.source, Iterator)

    def open(self, num_to_pass: int, saved: Any) -> Opened:
        """An iterator that goes on behind so many items, or where its own state was `saved`."""
        source = self.source
        if self.stateful is not None:
            if saved is not None:
                source.load_state_dict(saved)
            return Opened(self._iterator(), num_to_pass, source.state_dict)
        iterator = self._iterator()
        # the second pair is Grain's
        for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
            if has_methods(iterator, get, put):
                if saved is not None:
                    getattr(iterator, put)(saved)
                return Opened(iterator, num_to_pass, getattr(iterator, get))
        if saved is not None:
            raise InputStateError(
                f"{self!r} has no state of its own, and the saved position is one; give the same "
                "source"
            )
        return Opened(iterator, num_to_pass)

    def explain(self, error: Exception) -> None:
        """Add a note to an error of its iterator, where there is more to say."""

    def _iterator(self) -> Iterator[Any]:
        return iter(self.source)

    def __repr__(self) -> str:
        return short_repr(self.source)


class _Dataset(Opener):
    """A tf.data.Dataset: arrays come out, and TensorFlow itself skips."""

    is_for_once = False

    def open(self, num_to_pass: int, saved: Any) -> Opened:
        try:
            dataset = self.source.skip(num_to_pass) if num_to_pass else self.source
            return Opened(dataset.as_numpy_iterator())
        except (RuntimeError, AttributeError, TypeError) as error:
            raise InputError(
                f"{self!r} belongs to a graph, in which nothing outside can iterate over it; "
                "make it outside of any graph, with eager execution"
            ) from error


class _DatasetIterator(Opener):
    """An iterator of a tf.data.Dataset, under way perhaps."""

    def _iterator(self) -> Iterator[Any]:
        nest = sys.modules["tensorflow"].nest
        return (nest.map_structure(_as_numpy, item) for item in self.source)


def _as_numpy(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor


_GUARD = 'start training there under `if __name__ == "__main__":` only'


class _DataLoader(Opener):
    """A torch DataLoader, whose own settings hold: how many workers, and how they are started.

    Each way has its danger in a process with an event loop and threads. The log says it, and the
    remedy, once for each way in a process: a function that `repeat` calls makes many loaders.
    """

    is_for_once = False

    logged: ClassVar[set[str]] = set()  # ways of starting workers that the log has named

    def _iterator(self) -> Iterator[Any]:
        loader = self.source
        if not loader.num_workers or getattr(loader, "_iterator", None) is not None:
            return iter(loader)  # no workers, or they were started before
        method = self._method()
        if method not in self.logged:
            self.logged.add(method)
            self._log(method)
        if method == "fork":
            return iter(loader)
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # it still begins
            raise InputError(
                f"a worker of {self!r}, which imports the main module, would start workers itself: "
                + _GUARD
            )
        try:
            return iter(loader)
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise InputError(
                f"the workers of {self!r} could not be started by {method!r}, as something of it "
                "cannot be pickled; define its dataset and its functions at the top of a module, "
                "or give num_workers=0"
            ) from error

    def explain(self, error: Exception) -> None:
        if "exited unexpectedly" in str(error) and self._method() != "fork":
            note_once(error, "its workers import the main module: " + _GUARD)

    def _method(self) -> str:
        """How workers are started; nothing fixes that for the program by this question."""
        context = self.source.multiprocessing_context or multiprocessing
        method: str | None = context.get_start_method(True)
        return method or multiprocessing.get_all_start_methods()[0]

    def _log(self, method: str) -> None:
        is_persistent = self.source.persistent_workers
        if method == "fork":
            logger.warning(
                "The workers of %r are forked out of a process with an event loop and threads: one "
                "that needs a lock which a thread held at that moment hangs. Where one does, give "
                'the DataLoader multiprocessing_context="forkserver"%s; its workers then import '
                "the main module: %s. Or give num_workers=0.",
                self, "" if is_persistent else " and persistent_workers=True", _GUARD,
            )  # fmt: skip
        else:
            logger.info(
                "The workers of %r are started by %r, which takes seconds%s, and import the main "
                "module: %s.", self, method,
                "" if is_persistent else " (for several passes give persistent_workers=True)",
                _GUARD,
            )  # fmt: skip
