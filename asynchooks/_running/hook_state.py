"""The state of a session's hooks, encoded as text for a checkpoint; files are written elsewhere.

Arrays stand in it as base64; they are small (a data position, a generator's state). What is large
belongs into the model's own files.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from types import NoneType
from typing import Any

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError, InputStateError, add_note, shown
from .._hook import SessionRunHook

logger = logging.getLogger("asynchooks")

_ARRAY = "asynchooks.ndarray"
_OF_OTHER_SHAPE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a hook raises of a state that is not what it has saved."""
_OF = "asynchooks.of"
"""In a saved state: name and place of the hook that it belongs to. It stands alone for no state."""


class HookState(dict[str, Any]):
    """A hook's state that says which of several hooks of one class it belongs to.

    A type of the state, not a mark of the hook, so that wrappers pass it on.

    Args:
        state: the state.
        name: what the hook is about, such as its metric: another hook does not get the state.
        place: where it reads or writes, which tells hooks apart as well, but may be another one
            when training is resumed: a directory that was moved.
    """

    when_saved: Callable[[], None] | None = None
    """What to call once a checkpoint holds it."""

    def __init__(self, state: Mapping[str, Any], *, name: str = "", place: str = "") -> None:
        super().__init__(state)
        self.name = name
        self.place = place


class TimerState(HookState):
    """A hook's state that holds no more than when it is due next, as TensorFlow's hooks restart it.

    None is refused: of several that cannot be told apart each may have any.
    """


class PositionState(HookState):
    """A hook's state that is a position in the data, of which each rank reads its own part."""


class SharedState(PositionState):
    """The position in an input that other workers read as well.

    It is saved together with the model, while no worker runs a step.
    """


class _State:
    """The state of one hook: the one that it has now, asked for once; or a saved one."""

    def __init__(self, key: str, hook: Any = None) -> None:
        self.key = key  # the hook's class and, among several of one class, the hook's number
        self.kind = key.partition("#")[0]
        self.hook = hook

    @cached_property
    def state(self) -> Any:
        """None where a hook was saved without one."""
        try:
            return self.hook.state_dict()
        except Exception as error:
            add_note(error, f"in state_dict of {self.key}")
            raise

    @cached_property
    def identity(self) -> tuple[str, str, str]:
        """Class, name and place, by which a state is told from those of other hooks."""
        if isinstance(self.state, HookState):
            return self.kind, self.state.name, self.state.place
        what = f"state_name of {self.kind}"
        return self.kind, _check.instance(what, self.hook.state_name, str, "a text"), ""

    def __str__(self) -> str:
        name = self.identity[1]
        return f"{self.key} {name!r}" if name else self.key


def _states(hooks: Iterable[Any]) -> list[_State]:
    """The states of the hooks that may have one, in their order."""
    seen: Counter[str] = Counter()
    found = []
    for hook in hooks:
        if isinstance(hook, SessionRunHook):
            kind = type(hook).__name__
            seen[kind] += 1
            found.append(_State(kind if seen[kind] == 1 else f"{kind}#{seen[kind]}", hook))
    return found


def have_states_apart_from(hooks: Iterable[Any], *kinds: type[HookState]) -> bool:
    """Whether a hook has a state that is of none of these kinds."""
    return any(each.state and not isinstance(each.state, kinds) for each in _states(hooks))


def when_saved(hooks: Iterable[Any]) -> list[Callable[[], None]]:
    """What to call once a checkpoint holds the states of now."""
    calls = [getattr(each.state, "when_saved", None) for each in _states(hooks)]
    return [each for each in calls if each is not None]


def save_hooks(hooks: Iterable[Any]) -> bytes:
    """What the hooks' `state_dict` give; CheckpointError for what is neither JSON nor an array.

    A hook without a state has its place among several of its class.
    """
    return _as_bytes(_texts(_states(hooks)))


def shared_states(hooks: Iterable[Any], keys: Collection[str] | None = None) -> dict[str, Any]:
    """Those states that other workers change as well, by the hook's key; `keys`: of these."""
    return _texts(
        each
        for each in _states(hooks)
        if (keys is None or each.key in keys) and isinstance(each.state, SharedState)
    )


def with_states(saved: bytes, states: Mapping[str, Any]) -> bytes:
    """What `save_hooks` gave, with these states in place of those of the same hooks."""
    return _as_bytes({**json.loads(saved), **states}) if states else saved


def _as_bytes(texts: Mapping[str, Any]) -> bytes:
    return json.dumps(texts).encode()


def _texts(states: Iterable[_State]) -> dict[str, Any]:
    texts = {}
    for each in states:
        state, kind = each.state, type(each.hook)
        if kind.state_dict is SessionRunHook.state_dict:
            continue
        whose = {_OF: each.identity[1:]}
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected a dict, got {shown(state)}")
            if state and kind.load_state_dict is SessionRunHook.load_state_dict:
                raise TypeError("it has a state_dict, and no load_state_dict; write that, too")
            json.dumps(state, default=str)  # finds a state that holds itself
            texts[each.key] = {**whose, **_encoded(state)}
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the state_dict of the hook {each.key} cannot be saved: {error}. Give values of "
                "JSON, NumPy arrays, and lists and dicts of them"
            ) from error
    return texts


def moved_positions(
    hooks: Iterable[Any], saved: Iterable[bytes]
) -> dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Positions in the data that are not as they were saved, by the hook's key.

    Args:
        hooks: those of the session.
        saved: what `save_hooks` gave on each rank.

    Returns:
        The state that the hook has, and those that were saved.
    """
    positions: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    for each in saved:
        for now, its in _matched(hooks, each)[0]:
            if isinstance(now.state, PositionState) and its.state is not None:
                positions.setdefault(now.key, (now.state, []))[1].append(its.state)
    return {
        key: (now, states)
        for key, (now, states) in positions.items()
        if any(_encoded(each) != _encoded(now) for each in states)
    }


def load_hooks(hooks: Iterable[Any], saved: bytes) -> None:
    """Give the hooks their states back; states without a hook, and the reverse, are logged."""
    matched_hooks(hooks, saved)()


def matched_hooks(
    hooks: Iterable[Any],
    saved: bytes,
    instead: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    go_on: bool = False,
) -> Callable[[], None]:
    """Find which saved state belongs to which hook; returns what gives them to the hooks.

    Args:
        hooks: those of the session.
        saved: what `save_hooks` gave.
        instead: states to give in place of those that were saved, by the hook's key.
        go_on: whether hooks without a saved state keep what they have, as after a lost session.

    Raises:
        CheckpointError: some cannot be told apart, and there are more or fewer than there were.
        DamagedCheckpointError: they are not what was saved.
        InputStateError: from the result: a hook's input is another pipeline than it was.
    """
    pairs, missed, fresh = _matched(hooks, saved)

    def load() -> None:
        for now, its in pairs:
            if its.state is None:
                continue
            state = (instead or {}).get(now.key, its.state)
            try:
                now.hook.load_state_dict(state)
            except Exception as error:
                if isinstance(error, InputStateError) and error.__cause__ is None:
                    add_note(error, f"in the saved state of the hook {now.key}")
                    raise  # the checkpoint is intact: it is of another pipeline
                is_damaged = isinstance(error, _OF_OTHER_SHAPE)
                raise (DamagedCheckpointError if is_damaged else CheckpointError)(
                    f"the hook {now.key} cannot go on from its saved state: {error!r}. Was it "
                    "saved by a hook of another kind, or version?"
                ) from error
        if fresh and not go_on:
            logger.warning(
                "The checkpoint holds no states of these hooks, which start afresh: %s",
                ", ".join(map(str, fresh)),
            )
        if missed:
            logger.warning(
                "The checkpoint holds states of hooks that this session does not have: %s",
                ", ".join(map(str, missed)),
            )

    return load


def _matched(
    hooks: Iterable[Any], saved: bytes
) -> tuple[list[tuple[_State, _State]], list[_State], list[_State]]:
    """Pairs of hooks and their saved states, states that are left over, and hooks without one.

    By class, name and place; where a name has none of the places, by class and name; states that
    do not say whose they are, by class alone.
    """
    here, kept = _states(hooks), _read(saved)
    num_here, num_kept = (Counter(each.kind for each in states) for states in (here, kept))
    pairs = [  # one hook of a class is not asked whose state it is: that need not exist yet
        (one, each)
        for each in kept
        for one in here
        if one.kind == each.kind and num_here[one.kind] == num_kept[one.kind] == 1
        if not any(each.identity[1:])
    ]

    def left(states: list[_State]) -> list[_State]:
        used = {each for pair in pairs for each in pair}
        return [each for each in states if each not in used]

    for num_parts in (3, 2, 1):
        known = {its.identity[:num_parts] for _, its in pairs}
        here, kept = left(here), left(kept)
        for what in dict.fromkeys(each.identity[:num_parts] for each in kept):
            there, its = (
                [each for each in states if each.identity[:num_parts] == what]
                for states in (here, kept)
            )
            says_more = any(any(each.identity[num_parts:]) for each in its)
            if not there or (what in known if num_parts == 2 else says_more):
                continue
            names = ", ".join(map(str, there))
            if isinstance(there[0].state, TimerState):
                pass  # any will do
            elif len(there) != len(its):
                if num_parts == 2 or not any(each.state for each in its):
                    continue
                raise CheckpointError(
                    f"the checkpoint holds the states of {len(its)} hooks of the class {what[0]}, "
                    f"and this session has {len(there)}, which cannot be told apart: {names}. "
                    "Which of them has which state is not known. Give the session the hooks that "
                    "it was saved with, in the same order; or have them say what tells them apart, "
                    "as by name=, by another metric, or in a hook of yours by `state_name`, before "
                    "the next checkpoint is saved"
                )
            elif num_parts < 3 and len(its) > 1:
                logger.warning(
                    "The states of these hooks are told apart by the order of the hooks alone, "
                    "which must be the one that they were saved in: %s",
                    names,
                )
            pairs += zip(there, its, strict=False)
    missed = [each for each in left(kept) if each.state is not None]
    return pairs, missed, [each for each in left(here) if each.state]


def _read(saved: bytes) -> list[_State]:
    """The states that `save_hooks` gave."""
    try:
        states = json.loads(saved, object_pairs_hook=_decoded)
    except MemoryError:
        raise
    except Exception as error:  # whatever texts of another shape lead NumPy to
        raise _damaged("hooks", repr(error)) from error
    if not isinstance(states, dict):
        raise _damaged(
            "hooks", f"it is a {type(states).__name__}, expected states by the names of hooks"
        )
    found = []
    for key, state in states.items():
        if not isinstance(state, dict):
            raise _damaged(f"hook {key}", f"it is a {type(state).__name__}, expected a dict")
        its = _State(key)
        its.state = None if state.keys() == {_OF} else state
        match state.pop(_OF, ["", ""]):
            case [str(name), str(place)]:
                its.identity = its.kind, name, place
            case of:
                raise _damaged(f"hook {key}", f"whose it is, is not said by {shown(of)}")
        found.append(its)
    return found


def _damaged(whose: str, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the saved state of the {whose} is damaged: {why}; restore another checkpoint"
    )


def as_saved(state: Mapping[str, Any]) -> str:
    """A text that is the same for a state and for what a checkpoint gives back of it."""
    return json.dumps(_encoded(state), sort_keys=True)


def _encoded(value: Any) -> Any:
    """The value as JSON has it; TypeError for what would not come back as it was."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in (_ARRAY, _OF):
                raise TypeError(f"the key {key!r} cannot be kept; give texts as keys")
        return {key: _encoded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(each) for each in value]
    if isinstance(value, (str, int, float, NoneType)) and not hasattr(value, "dtype"):
        return value
    import numpy as np

    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{value!r} is of type {type(value).__name__}")
    if value.dtype.hasobject or np.dtype(value.dtype.str) != value.dtype:
        raise TypeError(f"an array of dtype {value.dtype} cannot be kept")
    return _described(value, isinstance(value, np.generic))


def _described(array: Any, is_scalar: bool) -> dict[str, list[Any]]:
    data = base64.b64encode(array.tobytes()).decode()
    return {_ARRAY: [array.dtype.str, list(array.shape), data, is_scalar]}


def _decoded(pairs: list[tuple[str, Any]]) -> Any:
    """The dict, or the array that it describes, if it does so exactly as `_described` does."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key stands twice among {[key for key, _ in pairs]!r}")
    if _ARRAY not in found:
        return found
    import numpy as np

    text, shape, data, is_scalar = found[_ARRAY]
    dtype = np.dtype(text)
    if dtype.hasobject:  # its bytes would be taken for addresses
        raise ValueError(f"an array has the dtype {text!r}")
    array: Any = np.ndarray(shape, dtype, bytearray(base64.b64decode(data)))
    if json.dumps(_described(array, bool(is_scalar and not shape))) != json.dumps(found):
        raise ValueError(f"an array is described by {shown(found)}")
    return array[()] if is_scalar else array
