"""Checks of a session's hooks: that they are hooks, and that their methods are named right."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any

from .._check import misfit
from .._engine.threads import is_async
from .._errors import tensorflow_train
from .._hook import AnyHook, SessionRunHook
from ..backends._creator import SessionCreator

MOMENTS = ("begin", "after_create_session", "before_run", "after_run", "end", "on_error")
FURTHER_MOMENTS = ("restore_model", "before_end", "after_close", "on_drop")
"""Moments that TensorFlow's hooks do not have: a method of that name there is no moment."""
_METHODS = (*MOMENTS, *FURTHER_MOMENTS, "state_dict", "load_state_dict")
_ELSEWHERE = {
    name: moment
    for moment, names in {
        "begin": "on_begin on_start on_train_begin on_train_start on_fit_start",
        "after_create_session": "after_session_created on_create_session on_session_created",
        "before_run": (
            "on_run_begin on_run_start before_step on_step_begin on_step_start on_batch_begin "
            "on_batch_start on_train_batch_begin on_train_batch_start on_train_step_begin "
            "on_train_step_start"
        ),
        "after_run": (
            "on_run_end after_step on_step_end on_batch_end on_train_batch_end on_train_step_end"
        ),
        "end": "on_end on_train_end on_fit_end",
        "on_error": "on_exception",
        "load_state_dict": "load_state",
    }.items()
    for name in names.split()
}
"""What other libraries (Keras, Lightning, Hugging Face) call such methods."""


_LETTERS = {method.replace("_", ""): method for method in _METHODS}


@cache
def _looks_like(name: str) -> str | None:
    """The method of which a slip of the hand makes this name, underscores and capitals aside.

    Of words as short as "end" that is another word ("send"): there only the capitals may differ.
    """
    given = name.replace("_", "").lower()
    words = [letters for letters in _LETTERS if len(letters) > 5 or letters == given]
    close = get_close_matches(given, words, 1, cutoff=0.85)  # one other letter of seven: 0.857
    return _LETTERS[close[0]] if close else None


def _hook_types() -> tuple[type, ...]:
    train = tensorflow_train()
    return (SessionRunHook,) if train is None else (SessionRunHook, train.SessionRunHook)


def overrides(hook: Any, moment: str) -> bool:
    """Whether the hook has a method of its own, so that calling it is worth anything."""
    if moment in FURTHER_MOMENTS and not isinstance(hook, SessionRunHook):
        return False
    if vars(hook).get(moment) is not None:  # a function of one object
        return True
    # a class is looked at each time: a notebook may give it methods between two sessions
    own = getattr(type(hook), moment, None)  # TensorFlow's hooks have no on_error
    if own is None or own is getattr(SessionRunHook, moment):
        return False
    train = tensorflow_train()
    return train is None or own is not getattr(train.SessionRunHook, moment, None)


def checked(hooks: Iterable[AnyHook] | None, name: str = "hooks") -> list[Any]:
    """The hooks as a list; `name` is the argument they were given as.

    Raises:
        TypeError: something in it is no hook (says what was probably meant).
    """
    if isinstance(hooks, SessionCreator):
        raise TypeError(
            f"{name} is {hooks!r}, a session creator. Hooks come first here: "
            "MonitoredSession(hooks, session_creator), not MonitoredSession(session_creator)"
        )
    types = _hook_types()
    if isinstance(hooks, types):
        raise TypeError(f"{name} is the hook {hooks!r}; give a list of hooks: [{hooks!r}]")
    try:
        listed = list(hooks or ())
    except TypeError:
        raise TypeError(f"{name} is {hooks!r}; give an iterable of SessionRunHook") from None
    for place, hook in enumerate(listed):
        which = f"{name}[{place}]"
        if isinstance(hook, type) and issubclass(hook, types):
            kind = hook.__name__
            raise TypeError(f"{which} is the class {kind}; give an instance of it: {kind}(...)")
        if not isinstance(hook, types):
            raise TypeError(
                f"{which} is {hook!r} of type {type(hook).__name__}; expected an instance of "
                "asynchooks.SessionRunHook or of TensorFlow's"
            )
        _check_methods(hook, which)
    return listed


@cache
def _parameters(moment: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(SessionRunHook, moment)).parameters)


def _check_methods(hook: Any, which: str) -> None:
    """Refuse methods that do nothing when they are called, or not what they should."""
    kind = type(hook).__name__
    for moment in (*MOMENTS, *FURTHER_MOMENTS):
        if not overrides(hook, moment):
            continue
        method = getattr(hook, moment)
        if str(method.__module__).startswith(("asynchooks.", "tensorflow.")):
            continue
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise TypeError(
                f"{moment} of {which}, a {kind}, holds a `yield`, so that a call of it would run "
                "nothing of its body; write a coroutine (`async def`) or a plain method without it"
            )
        names = _parameters(moment)
        if takes := misfit(method, len(names) - 1):
            raise TypeError(
                f"{moment} of {which}, a {kind}, takes {takes} beside self; write "
                f"{moment}({', '.join(names)})"
            )
        if moment == "on_drop" and is_async(method):
            raise TypeError(
                f"{which} is {hook!r}, whose {moment} is a coroutine function; give a plain "
                "method: nothing can be awaited there"
            )
    # TensorFlow's CheckpointSaverHook would take a coroutine, which is true, for a stop
    for listener in () if isinstance(hook, SessionRunHook) else getattr(hook, "_listeners", ()):
        if is_async(getattr(listener, "after_save", overrides)):
            raise TypeError(
                f"{which}, TensorFlow's {kind}, has the coroutine listener {listener!r}; give both "
                "to asynchooks.CheckpointSaverHook"
            )


def warn_of_misspelt(hooks: Iterable[Any]) -> None:
    """Warn of methods in users' classes that look like moments, and never would be called."""
    meant = set()
    for hook in hooks:
        kinds = [
            kind
            for kind in type(hook).__mro__
            if not kind.__module__.startswith(("asynchooks.", "tensorflow.", "builtins"))
        ]
        # a hook that is another library's callback, too, has that one's methods
        callbacks = [kind for kind in kinds if not issubclass(kind, _hook_types())]
        others = {name for kind in callbacks for name in vars(kind)}
        for name, value in [item for kind in kinds for item in vars(kind).items()]:
            if name.startswith("_") or not inspect.isroutine(value):
                continue
            method = _looks_like(name) or (None if name in others else _ELSEWHERE.get(name))
            is_moment = method in MOMENTS or isinstance(hook, SessionRunHook)
            if method is not None and is_moment and not overrides(hook, method):
                meant.add((type(hook).__name__, name, method))
    for owner, name, method in sorted(meant):
        warnings.warn(
            f"{owner} has a method {name!r}, which no session calls; if {method!r} is meant, call "
            "it that",
            stacklevel=_depth_of_caller(),
        )


def _depth_of_caller() -> int:
    """How far out the first frame is that is not ours, for a warning that our caller gives."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("asynchooks."):
        frame, depth = frame.f_back, depth + 1
    return depth
