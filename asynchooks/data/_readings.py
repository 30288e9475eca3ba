"""Reading: what a thread does with an iterable; some libraries have ways of their own."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from .._errors import InputError, InputStateError, note_once
from .._later import is_a
from ._source_stage import Beginning, Own, has_methods, short_repr, too_short

logger = logging.getLogger("asynchooks")


class Reading:
    """What a thread does with an iterable, in one pass: it opens, reads and closes it.

    Where the iterable or its iterator has a state of its own, that is its position. This must not
    hold the stage, which ends the thread when it is collected. Other libraries have subclasses.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        keeps_state = has_methods(source, "state_dict", "load_state_dict")
        self.stateful = source if keeps_state else None
        self.ready: deque[tuple[Any, int | Own]] = deque()
        """Items, and how many there were up to each, or the state behind it."""
        self.is_over = False  # no further item will come
        self.error: BaseException | None = None
        self.is_closing = self.is_closed = False
        self.closing_error: BaseException | None = None
        self._iterator: Iterator[Any] | None = None
        self._state: Callable[[], Any] | None = None  # its own

    def begin_at(
        self, num_before: int, own: Own | None, is_pass_over: bool, beginning: Beginning
    ) -> None:
        """Say where the pass is to go on, before anything is read; see `SourceStage`."""
        self._begin = self._num = self._num_to_pass = num_before
        self._own, self._is_pass_over, self._beginning = own, is_pass_over, beginning

    @property
    def is_for_once(self) -> bool:
        return isinstance(self.source, Iterator)

    def read(self, limit: int, tick: Callable[[], float], until: float) -> None:
        """Read so many items, or one at least and as many as come until then."""
        try:
            if self._iterator is None and not self.is_closing:
                self._open()
            step, state, ready = self._iterator.__next__, self._state, self.ready  # type: ignore[union-attr]
            for _ in range(limit):
                if self.is_closing:
                    break
                item = step()
                self._num += 1
                ready.append((item, self._num if state is None else Own(state())))
                if tick() > until:
                    break
        except StopIteration:
            if self._is_pass_over and self._num == self._begin:
                self._close_iterator()
                self._own, self._is_pass_over, self._num_to_pass = None, False, 0
                self.read(limit, tick, until)
                return
            self.is_over = True
        except BaseException as error:
            self.error, self.is_over = error, True
        if self.is_closing:
            self.close()

    def _open(self) -> None:
        """Open it where the pass is to go on."""
        if self.stateful is not None:
            if self._own is not None:
                self.source.load_state_dict(self._own.value)
            iterator, self._state = self._iterate(), self.source.state_dict
        else:
            iterator = self._iterate()
            # the second pair is Grain's
            for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
                if has_methods(iterator, get, put):
                    if self._own is not None:
                        getattr(iterator, put)(self._own.value)
                    self._state = getattr(iterator, get)
                    break
            else:
                if self._own is not None:
                    raise InputStateError(
                        f"{self!r} has no state of its own, and the saved position is one; give "
                        "the same source"
                    )
        self._iterator = iterator
        for place in range(self._num_to_pass):
            if next(iterator, self) is self:
                raise too_short(self, place, self._num_to_pass)
        self._beginning.ask(self.stateful)

    def _iterate(self) -> Iterator[Any]:
        """Its iterator; those to pass over may be left out of it."""
        return iter(self.source)

    def explain(self, error: Exception) -> None:
        """Add a note to an error of its iterator, where there is more to say."""

    def close(self) -> None:
        self.is_over = self.is_closed = True
        try:
            self._close_iterator()
        except BaseException as error:
            self.closing_error = error

    def _close_iterator(self) -> None:
        """A generator, or a file; iterators of other libraries end by being forgotten."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if callable(close):
            close()

    def __repr__(self) -> str:
        return short_repr(self.source)


class _Dataset(Reading):
    """A tf.data.Dataset: arrays come out, and TensorFlow itself skips."""

    is_for_once = False

    def _iterate(self) -> Iterator[Any]:
        num, self._num_to_pass = self._num_to_pass, 0
        try:
            dataset = self.source.skip(num) if num else self.source
            iterator: Iterator[Any] = dataset.as_numpy_iterator()
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            raise InputError(
                f"{self!r} belongs to a graph, in which nothing outside can iterate over it; "
                "make it outside of any graph, with eager execution"
            ) from error
        return iterator


class _DatasetIterator(Reading):
    """An iterator of a tf.data.Dataset, under way perhaps."""

    def _iterate(self) -> Iterator[Any]:
        nest = sys.modules["tensorflow"].nest
        return (nest.map_structure(_as_numpy, item) for item in self.source)


def _as_numpy(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor


_GUARD = 'start training there under `if __name__ == "__main__":` only'


class _DataLoader(Reading):
    """A torch DataLoader, whose own settings hold: how many workers, and how they are started.

    Forking has a danger in a process with an event loop and threads. The log says it, and the
    remedy, once in a process: a function that `repeat` calls makes many loaders.
    """

    is_for_once = False

    has_warned: ClassVar[bool] = False

    def _iterate(self) -> Iterator[Any]:
        loader = self.source
        if not loader.num_workers or getattr(loader, "_iterator", None) is not None:
            return iter(loader)  # no workers, or they were started before
        if self._method() == "fork":
            self._warn()
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
                f"the workers of {self!r} could not be started by {self._method()!r}, as something "
                "of it cannot be pickled; define its dataset and its functions at the top of a "
                "module, or give num_workers=0"
            ) from error

    def explain(self, error: Exception) -> None:
        if "exited unexpectedly" in str(error) and self._method() != "fork":
            note_once(error, "its workers import the main module: " + _GUARD)

    def _method(self) -> str:
        """How workers are started; nothing fixes that for the program by this question."""
        context = self.source.multiprocessing_context or multiprocessing
        method: str | None = context.get_start_method(True)
        return method or multiprocessing.get_all_start_methods()[0]

    def _warn(self) -> None:
        if not _DataLoader.has_warned:
            _DataLoader.has_warned = True
            logger.warning(
                "The workers of %r are forked out of a process with an event loop and threads: one "
                "that needs a lock which a thread held at that moment hangs. Where one does, give "
                'the DataLoader multiprocessing_context="forkserver"%s; its workers then import '
                "the main module: %s. Or give num_workers=0.",
                self,
                "" if self.source.persistent_workers else " and persistent_workers=True",
                _GUARD,
            )


def kind_of(source: Any) -> type[Reading]:
    """How it is read."""
    for module, name, kind in (
        ("tensorflow", "data.Dataset", _Dataset),
        ("tensorflow", "data.Iterator", _DatasetIterator),
        ("torch.utils.data", "DataLoader", _DataLoader),
    ):
        if is_a(source, module, name):
            return kind
    return Reading
