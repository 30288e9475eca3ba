"""SourceStage: the first stage of a pipeline, and what a saved state says of its source."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from .._errors import InputError, InputStateError, note_once
from ._stage import Mark, Stage, State, saved_count

_claimed: WeakSet[Any] = WeakSet()  # of the whole process: an iterator does not know its readers


PASS_OVER = "pass_over"
"""In a state: whether the pass is over to which the source's own state belongs."""


class Own(NamedTuple):
    """A state of the source's own: whatever it returned."""

    value: Any


class Beginning:
    """Where a pass over a source begins: `own` is known once the source is open, if it has one."""

    own: Own | None = None

    def ask(self, stateful: Any) -> None:
        """The source is about to be read: it knows where it is."""
        if stateful is not None and self.own is None:
            self.own = Own(stateful.state_dict())


class SourceStage(Stage[Any]):
    """Reads no other stage. Its position is a number of items, or a state of the source's own.

    Of a source that keeps its state from one pass to the next, the state behind the last item of a
    pass stands for the beginning of the next one, with `PASS_OVER`: iterated from there it gives
    nothing, and then it is iterated once more. The state that it has in between would not do: some
    count a pass as it ends, others at the next `iter` or `next`.
    """

    def __init__(self, stateful: Any = None) -> None:
        super().__init__()
        self._stateful = stateful  # what keeps its state from one pass to the next
        self._first = Beginning()  # before the first item that it has ever given
        self._last_own: Own | None = None  # behind the last one
        self._has_claimed = False
        self._set(None)

    def _set(self, state: State | None) -> None:
        self._beginning = Beginning()
        self._num_before = 0  # items of the pass to pass over
        self._own: Own | None = None  # its own state to go on from
        self._is_pass_over = False  # whether it is one behind which it is to be iterated once more
        self._num_given = 0
        if state is None:
            self._beginning.own = self._last_own
        elif "state" in state:
            self._own = self._last_own = Own(decoded(state["state"]))
            self._is_pass_over = bool(state.get(PASS_OVER))
        else:
            self._num_before = saved_count(state["items"])
        if self._own is None and not self._num_before:
            if self._first.own is None:
                self._first = self._beginning
            elif state is not None:  # it has moved since
                self._own = self._first.own

    def _note_own(self, behind: int | Own) -> None:
        """What is behind the last item that was given: where a further pass begins, perhaps."""
        if self._stateful is not None and isinstance(behind, Own):
            self._last_own = behind

    def _origin(self) -> Mark:
        return (self, self._beginning, None) if self._loaded is None else self._loaded

    def _state_of(self, data: Any, below: Mark) -> dict[str, Any]:
        if isinstance(data, Beginning):
            if data.own is None:
                return {"items": 0}
            return {"state": encoded(data.own.value), PASS_OVER: True}
        return {"state": encoded(data.value)} if isinstance(data, Own) else {"items": data}

    def _epoch_of(self, data: Any, below: Mark) -> int:
        return 0

    def _keeps_position(self) -> bool:
        return self._stateful is not None

    def _claim(self, iterator: Any) -> None:
        """Say that it is read; InputError if it is already: each reader would lose items."""
        with suppress(TypeError):  # no weak reference, as to a list's iterator; or no hash
            if iterator in _claimed:
                raise read_elsewhere(self)
            _claimed.add(iterator)
        self._has_claimed = True

    def _unclaim(self, iterator: Any) -> None:
        if self._has_claimed:
            with suppress(TypeError):
                _claimed.discard(iterator)

    def _explain(self, error: Exception) -> None:
        note_once(error, f"in {self!r}, after {self._num_before + self._num_given} items")


def has_methods(source: Any, *names: str) -> bool:
    return all(callable(getattr(source, name, None)) for name in names)


def short_repr(source: object) -> str:
    """For messages: the `repr` of a queue or stream would show everything that it holds."""
    text, kind = repr(source), type(source).__name__
    if len(text) <= 80:
        return text
    return f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"


def read_elsewhere(source: object) -> InputError:
    return InputError(
        f"{source!r} is being read elsewhere; give all readers the same stage: "
        "source = prefetch(iterator, 8)"
    )


def too_short(source: object, length: int, begin: int) -> InputStateError:
    """The error of a source that ended before the position at which it was to go on."""
    return InputStateError(
        f"{source!r} ended after {length} items, and the saved position is behind item {begin}; "
        "give the source that it was saved of"
    )


_BYTES, _TENSOR = "asynchooks.base64", "asynchooks.tensor"


def encoded(state: Any) -> Any:
    """The state, with bytes (which Grain's are) as text, and torch's tensors as arrays."""
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, Mapping):
        return {key: encoded(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return [encoded(each) for each in state]
    if type(state).__module__ == "torch" and hasattr(state, "numpy"):
        return {_TENSOR: state.numpy()}
    return state


def decoded(state: Any) -> Any:
    """What `encoded` was given; lists for tuples."""
    if isinstance(state, Mapping):
        if list(state) == [_BYTES]:
            return base64.b64decode(state[_BYTES])
        if list(state) == [_TENSOR]:
            return sys.modules["torch"].from_numpy(state[_TENSOR])
        return {key: decoded(each) for key, each in state.items()}
    if isinstance(state, list):
        return [decoded(each) for each in state]
    return state
