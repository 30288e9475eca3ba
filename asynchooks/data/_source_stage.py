"""SourceStage: the first stage of a pipeline, and what a saved state says of its source."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from .._errors import InputError, InputStateError, note_once
from ._stage import Stage, saved_count

_claimed: WeakSet[Any] = WeakSet()  # of the whole process: an iterator does not know its readers


class OwnState(NamedTuple):
    """A state of the iterator's own.

    Where a pass begins, it may still be that of the end of the pass before, as a generator begins
    at its first `next`. Iterated from there, the source goes on with the pass before: it gives
    nothing if that pass had ended, and its next items if `take` had cut it. So `before` is loaded,
    one more `next` brings the source to where that pass was left, and it is iterated again. If that
    pass had one `next` only, `before` would be such a beginning, too: it is that of an earlier pass
    then, and as many passes are made again.
    """

    value: Any
    begins: bool = False  # whether a pass begins here
    before: Any = None  # ahead of the last `next` of a pass before, if there was one
    was_cut: bool = False  # whether the pass before was left before its end
    num_passes: int = 1  # from `before` to here, of one `next` each

    def encoded(self) -> dict[str, Any]:
        state = {"state": encoded(self.value)}
        if self.begins:
            state["pass_before"] = encoded(self.before)
        if self.num_passes > 1:
            state["passes"] = self.num_passes
        return {**state, "was_cut": True} if self.was_cut else state

    @classmethod
    def decoded(cls, state: Mapping[str, Any]) -> OwnState:
        before = decoded(state.get("pass_before"))
        was_cut, num_passes = bool(state.get("was_cut")), saved_count(state.get("passes", 1))
        return cls(decoded(state["state"]), "pass_before" in state, before, was_cut, num_passes)

    @property
    def is_behind_cut(self) -> bool:
        """Whether a pass begins here, behind one that was cut."""
        return self.begins and self.was_cut and self.before is not None

    def is_one_of(self, *states: Any) -> bool:
        own = fingerprint(encoded(self.value))
        return any(fingerprint(encoded(each)) == own for each in states)


class Passes:
    """The states between the passes over one source."""

    def __init__(self) -> None:
        self.first: OwnState | None = None
        self.unread: OwnState | None = None  # the beginning of a pass: loaded, and not begun yet
        self._last: Any = None  # behind the last item, or before the first one
        self._before: Any = None  # as in OwnState, of the next pass
        self._num_passes = 1
        self._is_cut = False  # whether the end has not been read
        self._is_at_beginning = False  # of a pass behind another one
        self._left: Any = None  # where that other one was left, if it was read

    def load(self, state: OwnState | None) -> None:
        self.unread = state if state is not None and state.begins else None

    def following(self) -> OwnState | None:
        """Where the next pass begins, before it does; None if none came before it."""
        if self.unread is not None or self._before is None:
            return self.unread
        return OwnState(self._last, True, self._before, self._is_cut, self._num_passes)

    def begin(
        self, loaded: OwnState | None, current: Callable[[], Any], is_whole: bool = True
    ) -> OwnState:
        """The state before the first item; `is_whole`: whether a pass begins there."""
        if loaded is None:
            following = self.following() if is_whole else None
            loaded = (following or OwnState(None, is_whole))._replace(value=current())
            self._left = self._last
        else:
            self._before = loaded.before if loaded.begins else loaded.value
            self._is_cut, self._num_passes = loaded.was_cut, loaded.num_passes
            self._left = None
        self._last, self.unread = loaded.value, None
        self._is_at_beginning = loaded.before is not None
        if self.first is None and loaded.begins:
            self.first = loaded
        return loaded

    def go_on(self, state: Any) -> OwnState:
        """The state behind an item."""
        if self._is_at_beginning and self._is_cut and OwnState(state).is_one_of(self._left):
            self._is_at_beginning = False  # back where it was: one pass more leads no farther
        else:
            self._move()
        self._last, self._is_cut = state, True
        return OwnState(state)

    def end(self) -> None:
        """The end of a pass was read."""
        self._move()
        self._is_cut = False

    def _move(self) -> None:
        if self._is_at_beginning:  # the state may be that of the pass before
            self._num_passes += 1
        else:
            self._before, self._num_passes = self._last, 1
        self._is_at_beginning = False


class SourcePosition:
    """A number of items; or, of a source that has them, states of its own."""

    def __init__(self) -> None:
        self.begin = 0  # items before the first one that is given out
        self.saved: OwnState | None = None  # its own, to begin with
        self.states: deque[tuple[int, OwnState]] = deque()  # behind how many items

    def at(self, num_out: int) -> dict[str, Any]:
        for count, state in list(self.states):  # a thread may be adding one
            if count == num_out:
                return state.encoded()
        if self.saved is not None:  # nothing was read yet
            return self.saved.encoded()
        return {"items": self.begin + num_out}

    def load(self, state: Mapping[str, Any]) -> None:
        if "state" in state:
            self.saved = OwnState.decoded(state)
        else:
            self.begin = saved_count(state["items"])

    def trim(self, num_out: int) -> None:
        while self.states and self.states[0][0] < num_out:
            self.states.popleft()


class SourceStage(Stage[Any]):
    """Reads no other stage."""

    def __init__(self, *args: Any, position: SourcePosition | None = None) -> None:
        super().__init__(args=args)
        self._position = position or SourcePosition()
        self._has_claimed = False

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
        note_once(error, f"in {self!r}, after {self._position.begin + self._num_out} items")

    def _state_at(self, num_out: int) -> dict[str, Any]:
        return self._position.at(num_out)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._position.load(state)

    def _trim(self, num_out: int) -> None:
        self._position.trim(num_out)


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


def fingerprint(state: Any) -> bytes:
    """16 bytes that are equal for a state and for what a checkpoint gives back of it."""
    return hashlib.blake2b(repr(_comparable(state)).encode(), digest_size=16).digest()


def _comparable(state: Any) -> Any:
    """The state, with the order of keys, and lists for tuples, as text knows them."""
    if isinstance(state, Mapping):
        pairs = ((str(key), _comparable(each)) for key, each in state.items())
        return sorted(pairs, key=lambda pair: pair[0])
    if isinstance(state, (list, tuple)):
        return [_comparable(each) for each in state]
    if hasattr(state, "dtype") and hasattr(state, "tobytes"):  # `repr` leaves out a part of it
        return [str(state.dtype), list(state.shape), state.tobytes()]
    return state
