"""How iterables of other libraries are opened, and how they tell their position.

All of it happens in the thread that reads.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .._errors import InputError, InputStateError
from ._saved import Passes

logger = logging.getLogger("asynchooks")


@dataclass(frozen=True)
class Opened:
    """An iterator under way."""

    iterator: Iterator[Any]
    num_to_pass: int = 0
    """Items of it that are still to be passed over."""
    state: Callable[[], Any] | None = None
    """Its own position; None where it has none: then items are counted."""
    again: Callable[[], Opened] | None = None
    """What is read instead, if it ends before its first item."""


def opener_of(source: Iterable[Any]) -> Opener:
    """How to open it; the libraries are not loaded for this."""
    for module, name, kind in (
        ("tensorflow", "data.Dataset", _Dataset),
        ("tensorflow", "data.Iterator", _DatasetIterator),
        ("torch.utils.data", "DataLoader", _DataLoader),
    ):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and isinstance(source, found):
            return kind(source)
    return Opener(source)


class Opener:
    """Any iterable.

    Where it, or its iterator, has `state_dict` and `load_state_dict`, or `get_state` and
    `set_state` (Grain's), that is its position.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.passes = Passes()

    @property
    def is_for_once(self) -> bool:
        return isinstance(self.source, Iterator)

    def open(self, num_to_pass: int, saved: Any) -> Opened:
        """An iterator that goes on behind so many items, or where its own state was `saved`."""
        source = self.source
        if _speaks(source, "state_dict", "load_state_dict"):
            if saved is not None:
                source.load_state_dict(saved)
            return Opened(self._iterator(), num_to_pass, source.state_dict)
        iterator = self._iterator()
        for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
            if _speaks(iterator, get, put):
                if saved is not None:
                    getattr(iterator, put)(saved)
                return Opened(iterator, num_to_pass, getattr(iterator, get))
        if saved is not None:
            raise InputStateError(
                f"{self!r} has no state of its own, and the saved position is one; give the same "
                "source"
            )
        return Opened(iterator, num_to_pass)

    def _iterator(self) -> Iterator[Any]:
        return iter(self.source)

    def __repr__(self) -> str:
        text = repr(self.source)
        return text if len(text) <= 80 else f"a {type(self.source).__name__}"


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


class _DataLoader(Opener):
    """A torch DataLoader.

    Its workers must not be forked out of a process in which an event loop and threads run: they
    would inherit locks that nobody releases. Where forking is no more than the default, they come
    from a fork server, a process that runs nothing else.
    """

    is_for_once = False

    def _iterator(self) -> Iterator[Any]:
        loader = self.source
        if not loader.num_workers:
            return iter(loader)
        context = loader.multiprocessing_context
        is_default = context is None
        method = (multiprocessing if is_default else context).get_start_method()
        if method != "fork" or getattr(loader, "_iterator", None):
            return iter(loader)
        if not is_default:
            raise InputError(
                f"{self!r} forks its workers, and this process runs an event loop and threads. "
                'Got: multiprocessing_context="fork"; write: multiprocessing_context="forkserver"'
            )
        logger.info("The workers of %r come from a fork server instead of being forked", self)
        loader.multiprocessing_context = "forkserver"
        try:
            return iter(loader)
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise InputError(
                f"the workers of {self!r} could not be started, as something of it cannot be "
                "pickled; define its dataset and its functions at the top of a module, or give "
                "num_workers=0"
            ) from error
        finally:
            loader.multiprocessing_context = None


def _speaks(source: Any, *names: str) -> bool:
    return all(callable(getattr(source, name, None)) for name in names)
