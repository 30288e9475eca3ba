"""The state of a session's hooks, as text for a checkpoint. It saves and restores nothing itself.

Arrays stand in it as base64; they are small (a data position, a generator's state). What is large
belongs into the model's own files.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ._errors import CheckpointError, DamagedCheckpointError
from ._hook import SessionRunHook

logger = logging.getLogger("asynchooks")

_ARRAY = "asynchooks.ndarray"


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
    """What the hooks' `state_dict` give, of those that give anything.

    Raises:
        CheckpointError: a state holds what is neither JSON nor an array (names the hook).
    """
    texts = {}
    for name, hook in _named(hooks):
        try:
            state = hook.state_dict()
        except Exception as error:
            error.add_note(f"in state_dict of {name}")
            raise
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected a dict, got {state!r}")
            if state and not _takes_back(hook):
                raise TypeError("it has a state_dict, and no load_state_dict; write that, too")
            if state:
                json.dumps(state, default=_encoded)  # says first what cannot be walked through
                _check_keys(state)
                texts[name] = json.loads(json.dumps(_with_scalars(state), default=_encoded))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the state_dict of the hook {name} cannot be saved: {error}. Give values of JSON, "
                "NumPy arrays, and lists and dicts of them"
            ) from error
    return json.dumps(texts, indent=1).encode()


def have_more_than_timers(hooks: Iterable[Any]) -> bool:
    """Whether a hook has a state that is more than when it is due next."""
    return any(hook.state_dict() for _, hook in _named(hooks) if not hook._has_only_timers)


def load_hooks(hooks: Iterable[Any], saved: bytes) -> None:
    """Give the hooks their states back; what does not fit is said in the log.

    Raises:
        DamagedCheckpointError: that is not what `save_hooks` gave.
        CheckpointError: a hook cannot take its state (names the hook).
    """
    try:
        states = json.loads(saved, object_hook=_decoded)
    except ValueError as error:
        raise DamagedCheckpointError(f"the saved state of the hooks is damaged: {error}") from error
    anew = []
    for name, hook in _named(hooks):
        if name not in states:
            anew += [name] if hook.state_dict() else []
            continue
        try:
            hook.load_state_dict(states.pop(name))
        except Exception as error:
            raise CheckpointError(
                f"the hook {name} cannot go on from its saved state: {error!r}. Was it saved by a "
                "hook of another kind, or version?"
            ) from error
    if anew:
        logger.warning(
            "The checkpoint holds no states of these hooks, which begin anew: %s", ", ".join(anew)
        )
    if states:
        logger.warning(
            "The checkpoint holds states of hooks that this session does not have: %s",
            ", ".join(sorted(states)),
        )


def _check_keys(state: Any) -> None:
    """Raise TypeError for keys that would come back as others."""
    if isinstance(state, Mapping):
        for key, each in state.items():
            if not isinstance(key, str) or key == _ARRAY:
                raise TypeError(f"the key {key!r} cannot be kept; give texts as keys")
            _check_keys(each)
    elif isinstance(state, (list, tuple)):
        for each in state:
            _check_keys(each)


def _takes_back(hook: SessionRunHook) -> bool:
    return type(hook).load_state_dict is not SessionRunHook.load_state_dict


def _with_scalars(state: Any) -> Any:
    """The state, with NumPy scalars encoded that JSON would take for Python's numbers."""
    if isinstance(state, Mapping):
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


def _decoded(found: dict[str, Any]) -> Any:
    if _ARRAY not in found:
        return found
    import numpy as np

    dtype, shape, data, is_scalar = found[_ARRAY]
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return array[()] if is_scalar else array
