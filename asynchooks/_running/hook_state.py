"""The state of a session's hooks, encoded as text for a checkpoint; files are written elsewhere.

Arrays stand in it as base64; they are small (a data position, a generator's state). What is large
belongs into the model's own files.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError, add_note, shown
from .._hook import SessionRunHook

logger = logging.getLogger("asynchooks")

_ARRAY = "asynchooks.ndarray"
_OF_OTHER_SHAPE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a hook raises of a state that is not what it has saved."""
_OF = "asynchooks.of"
"""In a saved state: name and place of the hook that it belongs to."""


class HookState(dict[str, Any]):
    """A hook's state that says which of several hooks of one class it belongs to.

    A type of the state, not a mark of the hook, so that wrappers pass it on.

    Args:
        state: the state.
        name: what the hook is about, such as its metric: another hook does not get the state.
        place: where it reads or writes, which tells hooks apart as well, but may be another one
            when training is resumed: a directory that was moved.
    """

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


@dataclass(frozen=True, eq=False)
class _Saved:
    """The saved state of one hook; None if it had none."""

    key: str
    state: Mapping[str, Any] | None
    name: str
    place: str

    @property
    def text(self) -> str:
        return f"{self.key} {self.name!r}" if self.name else self.key


class _Live:
    """A hook of this session, under its class and, among several of one class, its order."""

    def __init__(self, key: str, hook: SessionRunHook) -> None:
        self.key = key
        self.hook = hook

    @cached_property
    def state(self) -> Any:
        """What it has now."""
        return _state_of(self.key, self.hook, lambda hook: hook.state_dict())

    @property
    def name(self) -> str:
        return _identity(self.hook, self.state)[0]

    @property
    def place(self) -> str:
        return _identity(self.hook, self.state)[1]

    @property
    def text(self) -> str:
        return f"{self.key} {self.name!r}" if self.name else self.key


def _identity(hook: SessionRunHook, state: Any) -> tuple[str, str]:
    """Name and place by which a hook's state is told from those of others of its class."""
    if isinstance(state, HookState):
        return state.name, state.place
    what = f"state_name of {type(hook).__name__}"
    return _check.instance(what, hook.state_name, str, "a text"), ""


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


def _class_of(key: str) -> str:
    return key.partition("#")[0]


def save_hooks(hooks: Iterable[Any]) -> bytes:
    """What the hooks' `state_dict` give; CheckpointError for what is neither JSON nor an array.

    A hook without a state has its place among several of its class.
    """
    texts = _texts(_named(hooks), lambda hook: hook.state_dict())
    have_some = Counter(_class_of(key) for key, text in texts.items() if text.keys() - {_OF})
    return _as_bytes({key: text for key, text in texts.items() if have_some[_class_of(key)]})


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
        state = _state_of(name, hook, state_of)
        if state is None:
            continue
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected a dict, got {shown(state)}")
            is_taken_back = type(hook).load_state_dict is not SessionRunHook.load_state_dict
            if state and not is_taken_back:
                raise TypeError("it has a state_dict, and no load_state_dict; write that, too")
            json.dumps(state, default=_encoded)  # says first what cannot be walked through
            text = _text_of(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the state_dict of the hook {name} cannot be saved: {error}. Give values of JSON, "
                "NumPy arrays, and lists and dicts of them"
            ) from error
        identity = _identity(hook, state)
        texts[name] = text if text and not any(identity) else {_OF: identity, **text}
    return texts


def _state_of(
    name: str,
    hook: SessionRunHook,
    state_of: Callable[[SessionRunHook], Mapping[str, Any] | None],
) -> Mapping[str, Any] | None:
    try:
        return state_of(hook)
    except Exception as error:
        add_note(error, f"in state_dict of {name}")
        raise


def have_more_than_timers(hooks: Iterable[Any]) -> bool:
    """Whether a hook has a state that is more than when it is due next."""
    states = [hook.state_dict() for _, hook in _named(hooks)]
    return any(state and not isinstance(state, TimerState) for state in states)


def have_own_states(hooks: Iterable[Any]) -> bool:
    """Whether a hook has a state that hooks of other sessions of the model do not have, too."""
    states = [_state_of(key, hook, lambda hook: hook.state_dict()) for key, hook in _named(hooks)]
    return any(state and not isinstance(state, (TimerState, SharedState)) for state in states)


def moved_positions(hooks: Iterable[Any], saved: bytes) -> list[str]:
    """The hooks whose saved state is a position in the data, behind its beginning."""
    pairs, _, _ = _matched_states(hooks, saved)
    return [
        each.text
        for each, its in pairs
        if isinstance(each.state, PositionState)
        and its.state is not None
        and _text_of(its.state) != _text_of(each.state)
    ]


def load_hooks(hooks: Iterable[Any], saved: bytes) -> None:
    """Give the hooks their states back; states without a hook, and the reverse, are logged."""
    matched_hooks(hooks, saved)()


def matched_hooks(hooks: Iterable[Any], saved: bytes, *, go_on: bool = False) -> Callable[[], None]:
    """Find which saved state belongs to which hook; returns what gives them to the hooks.

    Args:
        hooks: those of the session.
        saved: what `save_hooks` gave.
        go_on: whether hooks without a saved state keep what they have, as after a lost session.

    Raises:
        CheckpointError: some cannot be told apart, and there are more or fewer than there were.
        DamagedCheckpointError: they are not what was saved.
    """
    pairs, missed, fresh = _matched_states(hooks, saved)

    def load() -> None:
        for each, its in pairs:
            if its.state is not None:
                _load(each.key, each.hook, its.state)
        if fresh and not go_on:
            logger.warning(
                "The checkpoint holds no states of these hooks, which start afresh: %s",
                ", ".join(each.text for each in fresh),
            )
        if missed:
            logger.warning(
                "The checkpoint holds states of hooks that this session does not have: %s",
                ", ".join(each.text for each in missed),
            )

    return load


def _matched_states(
    hooks: Iterable[Any], saved: bytes
) -> tuple[list[tuple[_Live, _Saved]], list[_Saved], list[_Live]]:
    """Pairs of hooks and their saved states, states that are left over, and hooks without one."""
    states, live = _read(saved), [_Live(key, hook) for key, hook in _named(hooks)]
    pairs: list[tuple[_Live, _Saved]] = []
    of_class: dict[str, list[_Live]] = {}
    for each in live:
        of_class.setdefault(_class_of(each.key), []).append(each)
    missed: list[_Saved] = []
    for kind, kept in states.items():
        found, left = _matched(kept, of_class.get(kind, []))
        pairs += found
        missed += [each for each in left if each.state is not None]
    has_one = {each.key for each, _ in pairs}
    return pairs, missed, [each for each in live if each.key not in has_one and each.state]


def _load(name: str, hook: SessionRunHook, state: Mapping[str, Any]) -> None:
    try:
        hook.load_state_dict(state)
    except Exception as error:
        kind = DamagedCheckpointError if isinstance(error, _OF_OTHER_SHAPE) else CheckpointError
        raise kind(
            f"the hook {name} cannot go on from its saved state: {error!r}. Was it saved by a "
            "hook of another kind, or version?"
        ) from error


def _matched(
    saved: list[_Saved], live: list[_Live]
) -> tuple[list[tuple[_Live, _Saved]], list[_Saved]]:
    """Pairs of the hooks of one class and their states; and the states that are left over.

    By name and place; where a name has none of the places, by name alone; states of an earlier
    version, which did not say whose they are, by their number alone.
    """
    if len(saved) == len(live) == 1 and not (saved[0].name or saved[0].place):
        return [(live[0], saved[0])], []  # whose state need not exist yet
    pairs: list[tuple[_Live, _Saved]] = []

    def match(key: Callable[[_Live | _Saved], object], *, is_exact: bool) -> None:
        for value in {key(each): None for each in saved}:
            its = [each for each in saved if key(each) == value]
            there = [each for each in live if key(each) == value]
            if len(its) != len(there):
                continue
            if not is_exact and len(its) > 1 and not isinstance(there[0].state, TimerState):
                logger.warning(
                    "The states of these hooks are told apart by the order of the hooks alone, "
                    "which must be the one that they were saved in: %s",
                    ", ".join(each.text for each in there),
                )
            pairs.extend(zip(there, its, strict=True))
            for each in its:
                saved.remove(each)
            for one in there:
                live.remove(one)

    saved, live = list(saved), list(live)
    match(lambda each: (each.name, each.place), is_exact=True)
    known = {its.name for _, its in pairs}
    match(lambda each: each.name if each.name not in known else each, is_exact=False)
    if live and all(not (each.name or each.place) for each in saved):
        match(lambda each: None, is_exact=False)
    for each in list(saved):
        there = [one for one in live if _may_be(one, each)]
        if there and isinstance(there[0].state, TimerState):  # any will do
            pairs.append((there[0], each))
            live.remove(there[0])
            saved.remove(each)
        elif there and any(its.state for its in saved if _may_be(there[0], its)):
            raise _mixed_up([its for its in saved if _may_be(there[0], its)], there)
    return pairs, saved


def _may_be(live: _Live, saved: _Saved) -> bool:
    """Whether nothing says that the state belongs to another hook."""
    of = (saved.name, saved.place)
    return of in (("", ""), (live.name, live.place))


def _mixed_up(saved: list[_Saved], live: list[_Live]) -> CheckpointError:
    kind = _class_of(live[0].key)
    about = f" that are about {live[0].name!r}" if live[0].name else ""
    return CheckpointError(
        f"the checkpoint holds the states of {len(saved)} hooks of the class {kind}{about}, and "
        f"this session has {len(live)}, which cannot be told apart: which of them has which state "
        "is not known. Give the session the hooks that it was saved with, in the same order; or "
        "have them say what tells them apart, as by name=, by another metric, or in a hook of "
        "yours by `state_name`, before the next checkpoint is saved"
    )


def _read(saved: bytes) -> dict[str, list[_Saved]]:
    """The states of the hooks of each class, in their order."""
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
    found: dict[str, dict[int, _Saved]] = {}
    for key, state in states.items():
        if not isinstance(state, dict):
            raise DamagedCheckpointError(
                f"the saved state of the hook {key} is damaged: it is a {type(state).__name__}, "
                "expected a dict; restore another checkpoint"
            )
        kind, _, number = key.partition("#")
        match state.get(_OF, ["", ""]):
            case [str(name), str(place)] if re.fullmatch("[0-9]{0,5}", number):
                its = {each: state[each] for each in state if each != _OF}
                is_none = not its and _OF in state
                each = _Saved(key, None if is_none else its, name, place)
                found.setdefault(kind, {})[int(number or 1)] = each
            case _:
                raise DamagedCheckpointError(
                    f"the saved state of the hook {key} is damaged: whose it is, is not said by "
                    f"{shown(state.get(_OF))}; restore another checkpoint"
                )
    return {kind: _in_order(kind, kept) for kind, kept in found.items()}


def _in_order(kind: str, kept: Mapping[int, _Saved]) -> list[_Saved]:
    """With those that had no state, which earlier versions left out."""
    return [
        kept.get(number) or _Saved(f"{kind}#{number}", None, "", "")
        for number in range(1, max(kept) + 1)
    ]


def _text_of(state: Mapping[str, Any]) -> Any:
    """The state as it is in a file."""
    return json.loads(json.dumps(_with_scalars(state), default=_encoded))


def _with_scalars(state: Any) -> Any:
    """The state, with NumPy scalars encoded that JSON would take for Python's numbers.

    TypeError for keys that would come back as others.
    """
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str) or key in (_ARRAY, _OF):
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
