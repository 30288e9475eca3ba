"""The state of a session's hooks, encoded as text for a checkpoint; files are written elsewhere.

Arrays stand in it as base64; they are small (a data position, a generator's state). What is large
belongs into the model's own files.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._errors import CheckpointError, DamagedCheckpointError, add_note, shown
from .._hook import SessionRunHook

logger = logging.getLogger("asynchooks")

_ARRAY = "asynchooks.ndarray"
_OF_OTHER_SHAPE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a hook raises of a state that is not what it has saved."""


class TimerState(dict[str, Any]):
    """A hook's state that holds no more than when it is due next, as TensorFlow's hooks restart it.

    A type of the state, not a mark of the hook, so that wrappers pass it on.
    """


class SharedState(dict[str, Any]):
    """A hook's state that other workers change as well, such as the position in a shared input.

    It is saved together with the model, while no worker runs a step.
    """


def _named(hooks: Iterable[Any]) -> list[tuple[str, SessionRunHook]]:
    """The hooks that may have state, by class and, among several of one class, by their order."""
    seen: Counter[str] = Counter()
    named = []
    for hook in hooks:
        if isinstance(hook, SessionRunHook):
            name = type(hook).__name__
            seen[name] += 1
            named.append((name if seen[name] == 1 else f"{name}#{seen[name]}", hook))
    return named


def save_hooks(hooks: Iterable[Any]) -> bytes:
    """What the hooks' `state_dict` give; CheckpointError for what is neither JSON nor an array."""
    return _as_bytes(_texts(_named(hooks), lambda hook: hook.state_dict()))


def shared_states(hooks: Iterable[Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Those states that other workers change as well, by the hook's name; `names`: of these."""

    def state_of(hook: SessionRunHook) -> Mapping[str, Any] | None:
        state = hook.state_dict()
        return state if isinstance(state, SharedState) else None

    named = [(name, hook) for name, hook in _named(hooks) if names is None or name in names]
    return _texts(named, state_of)


def with_states(saved: bytes, states: Mapping[str, Any]) -> bytes:
    """What `save_hooks` gave, with these states in place of those of the same hooks."""
    return _as_bytes({**json.loads(saved), **states}) if states else saved


def _as_bytes(texts: Mapping[str, Any]) -> bytes:
    return json.dumps(texts, indent=1).encode()


def _texts(
    hooks: Iterable[tuple[str, SessionRunHook]],
    state_of: Callable[[SessionRunHook], Mapping[str, Any] | None],
) -> dict[str, Any]:
    texts = {}
    for name, hook in hooks:
        try:
            state = state_of(hook)
        except Exception as error:
            add_note(error, f"in state_dict of {name}")
            raise
        if state is None:
            continue
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected a dict, got {shown(state)}")
            is_taken_back = type(hook).load_state_dict is not SessionRunHook.load_state_dict
            if state and not is_taken_back:
                raise TypeError("it has a state_dict, and no load_state_dict; write that, too")
            if state:
                json.dumps(state, default=_encoded)  # says first what cannot be walked through
                texts[name] = json.loads(json.dumps(_with_scalars(state), default=_encoded))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the state_dict of the hook {name} cannot be saved: {error}. Give values of JSON, "
                "NumPy arrays, and lists and dicts of them"
            ) from error
    return texts


def have_more_than_timers(hooks: Iterable[Any]) -> bool:
    """Whether a hook has a state that is more than when it is due next."""
    states = [hook.state_dict() for _, hook in _named(hooks)]
    return any(state and not isinstance(state, TimerState) for state in states)


def load_hooks(hooks: Iterable[Any], saved: bytes) -> None:
    """Give the hooks their states back; states without a hook, and the reverse, are logged."""
    states = _read(saved)
    fresh = []
    for name, hook in _named(hooks):
        if name not in states:
            fresh += [name] if hook.state_dict() else []
            continue
        try:
            hook.load_state_dict(states.pop(name))
        except Exception as error:
            kind = DamagedCheckpointError if isinstance(error, _OF_OTHER_SHAPE) else CheckpointError
            raise kind(
                f"the hook {name} cannot go on from its saved state: {error!r}. Was it saved by a "
                "hook of another kind, or version?"
            ) from error
    if fresh:
        logger.warning(
            "The checkpoint holds no states of these hooks, which start afresh: %s",
            ", ".join(fresh),
        )
    if states:
        logger.warning(
            "The checkpoint holds states of hooks that this session does not have: %s",
            ", ".join(sorted(states)),
        )


def _read(saved: bytes) -> dict[str, dict[str, Any]]:
    """The states by the names of their hooks."""
    try:
        states = json.loads(saved, object_pairs_hook=_decoded)
    except MemoryError:
        raise
    except Exception as error:  # whatever texts of another shape lead NumPy to
        raise DamagedCheckpointError(
            f"the saved state of the hooks is damaged: {error!r}; restore another checkpoint"
        ) from error
    if not isinstance(states, dict):
        raise DamagedCheckpointError(
            f"the saved state of the hooks is damaged: it is a {type(states).__name__}, expected "
            "states by the names of hooks; restore another checkpoint"
        )
    for name, state in states.items():
        if not isinstance(state, dict):
            raise DamagedCheckpointError(
                f"the saved state of the hook {name} is damaged: it is a {type(state).__name__}, "
                "expected a dict; restore another checkpoint"
            )
    return states


def _with_scalars(state: Any) -> Any:
    """The state, with NumPy scalars encoded that JSON would take for Python's numbers.

    TypeError for keys that would come back as others.
    """
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str) or key == _ARRAY:
                raise TypeError(f"the key {key!r} cannot be kept; give texts as keys")
        return {key: _with_scalars(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return [_with_scalars(each) for each in state]
    is_scalar = isinstance(state, (int, float, str)) and hasattr(state, "dtype")
    return _encoded(state) if is_scalar else state


def _encoded(value: Any) -> Any:
    import numpy as np

    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{value!r} is of type {type(value).__name__}")
    if value.dtype.hasobject or np.dtype(value.dtype.str) != value.dtype:
        raise TypeError(f"an array of dtype {value.dtype} cannot be kept")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {_ARRAY: [value.dtype.str, list(value.shape), data, isinstance(value, np.generic)]}


def _decoded(pairs: list[tuple[str, Any]]) -> Any:
    """The dict, or the array that it describes, exactly as `_encoded` does."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key stands twice among {[key for key, _ in pairs]!r}")
    if _ARRAY not in found:
        return found
    import numpy as np

    [[text, shape, data, is_scalar]] = found.values()
    if not isinstance(text, str) or not isinstance(is_scalar, bool) or (is_scalar and shape):
        raise ValueError(f"an array is described by {text!r}, {shape!r}, {is_scalar!r}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"an array has the shape {shape!r}")
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.str != text:
        raise ValueError(f"an array has the dtype {text!r}")
    content = base64.b64decode(data, validate=True)
    if len(content) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(content)} bytes do not make {dtype} of shape {shape}")
    if content:
        array = np.frombuffer(content, dtype).reshape(shape).copy()
    else:
        array = np.empty(shape, dtype)
    return array[()] if is_scalar else array
