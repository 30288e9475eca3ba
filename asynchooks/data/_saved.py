"""States of other libraries' iterators, as they are saved: JSON, and arrays."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Any

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
