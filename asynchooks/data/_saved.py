"""States as they are saved: those of other libraries' iterators, and by what one is known again.

It reads and writes no files.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_BYTES, _TENSOR = "asynchooks.base64", "asynchooks.tensor"


class OwnState(NamedTuple):
    """An iterator's own state.

    Where a pass begins, it may still be that of the end of the pass before, as a generator begins
    at its first `next`: iterated from there, it gives nothing. Then `last` is loaded, that pass is
    ended once more, and the source iterated again.
    """

    value: Any
    begins: bool = False  # whether a pass begins here
    last: Any = None  # behind the last item of the pass before, if there was one

    def described(self) -> dict[str, Any]:
        state = {"state": encoded(self.value)}
        return {**state, "pass_before": encoded(self.last)} if self.begins else state


def own_state(described: Mapping[str, Any]) -> OwnState:
    """The state that was described so."""
    last = decoded(described.get("pass_before"))
    return OwnState(decoded(described["state"]), "pass_before" in described, last)


class Passes:
    """What the passes over one source know of each other."""

    def __init__(self) -> None:
        self.first: OwnState | None = None
        self._last: Any = None

    def begin(
        self, loaded: OwnState | None, tell: Callable[[], Any], is_whole: bool = True
    ) -> OwnState:
        """The state before the first item; `is_whole` tells whether a pass begins there."""
        if loaded is None:
            loaded = OwnState(tell(), is_whole, self._last if is_whole else None)
        else:
            self._last = loaded.last if loaded.begins else loaded.value
        if self.first is None and loaded.begins:
            self.first = loaded
        return loaded

    def go_on(self, state: Any) -> OwnState:
        """The state behind an item."""
        self._last = state
        return OwnState(state)


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
