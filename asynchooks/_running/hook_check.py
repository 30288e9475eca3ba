"""Checks of a session's hooks: that they are hooks, and that their methods are named right."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from .._engine.threads import is_async
from .._errors import tensorflow_train
from .._hook import AnyHook, SessionRunHook
from ..backends._creator import SessionCreator

MOMENTS = ("begin", "after_create_session", "before_run", "after_run", "end", "on_error")
FURTHER_MOMENTS = ("restore_model", "before_end", "after_close", "on_drop")
"""Moments that TensorFlow's hooks do not have: a method of that name there is no moment."""
_METHODS = (*MOMENTS, *FURTHER_MOMENTS, "state_dict", "load_state_dict")
_LETTERS = tuple((method.replace("_", ""), method) for method in _METHODS)
_ELSEWHERE = {
    name: moment
    for moment, names in {
        "begin": "on_begin on_start on_train_begin on_train_start on_fit_start",
        "before_run": (
            "before_step on_step_begin on_step_start on_batch_begin on_batch_start "
            "on_train_batch_begin on_train_batch_start on_train_step_begin on_train_step_start"
        ),
        "after_run": ("after_step on_step_end on_batch_end on_train_batch_end on_train_step_end"),
        "end": "on_end on_train_end on_fit_end",
        "on_error": "on_exception",
        "load_state_dict": "load_state",
    }.items()
    for name in names.split()
}
"""What other libraries (Keras, Lightning, Hugging Face) call such methods."""
_GONE = {
    "on_cancelled_run": "look at step_is_made of the last run_context in the next before_run",
}
"""Moments of earlier versions, and what to do in their place."""


def _hook_types() -> tuple[type, ...]:
    train = tensorflow_train()
    return (SessionRunHook,) if train is None else (SessionRunHook, train.SessionRunHook)


def overrides(hook: Any, moment: str) -> bool:
    """Whether the hook has a method of its own, so that calling it is worth anything."""
    if moment in FURTHER_MOMENTS and not isinstance(hook, SessionRunHook):
        return False
    own = getattr(hook, moment, None)  # TensorFlow's hooks have no on_error
    left_alone = {getattr(base, moment, None) for base in _hook_types()}
    return own is not None and getattr(own, "__func__", own) not in left_alone


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
        if not _is_ours(hook):
            _check_methods(hook, which)
        if not isinstance(hook, SessionRunHook):
            _check_listeners(hook, which)
    return listed


def _check_methods(hook: Any, name: str) -> None:
    """A method with a `yield` in it would run nothing when it is called, silently."""
    for moment in (*MOMENTS, *(FURTHER_MOMENTS if isinstance(hook, SessionRunHook) else ())):
        method = getattr(hook, moment, None)
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise TypeError(
                f"{moment} of {name}, a {type(hook).__name__}, holds a `yield`, so that a call of "
                "it would run nothing of its body; write a coroutine (`async def`) or a plain "
                "method without it"
            )
        if moment == "on_drop" and method is not None and is_async(method):
            raise TypeError(
                f"{name} is {hook!r}, whose {moment} is a coroutine function; give a plain method: "
                "nothing can be awaited there"
            )


def _check_listeners(hook: Any, name: str) -> None:
    """TensorFlow's CheckpointSaverHook would take a coroutine, which is true, for a stop."""
    for listener in getattr(hook, "_listeners", ()):
        if is_async(getattr(listener, "after_save", _check_listeners)):
            raise TypeError(
                f"{name}, TensorFlow's {type(hook).__name__}, has the coroutine listener "
                f"{listener!r}; give both to asynchooks.CheckpointSaverHook"
            )


def warn_of_misspelt(hooks: Iterable[Any]) -> None:
    """Warn of methods that look like those which sessions call, or called, and never would be."""
    listed = [each for each in hooks if not _is_ours(each)]
    meant = {(type(each), *pair) for each in listed for pair in _misspelt(each)}
    for kind, name, moment in sorted(meant, key=lambda each: each[1:]):
        warnings.warn(
            f"{kind.__name__} has a method {name!r}, which no session calls; if {moment!r} is "
            "meant, call it that",
            stacklevel=_depth_of_caller(),
        )
    for kind in dict.fromkeys(type(each) for each in listed if isinstance(each, SessionRunHook)):
        for name, instead in _GONE.items():
            if inspect.isroutine(getattr(kind, name, None)):
                warnings.warn(
                    f"{kind.__name__} has a method {name!r}, which no session calls any more; "
                    f"{instead}",
                    stacklevel=_depth_of_caller(),
                )


def _is_ours(hook: Any) -> bool:
    return type(hook).__module__.startswith("asynchooks.")


def _misspelt(hook: Any) -> Iterator[tuple[str, str]]:
    """(the name of a method, what it was probably to be), for those in users' classes."""
    kinds = [
        kind
        for kind in type(hook).__mro__
        if not kind.__module__.startswith(("asynchooks.", "tensorflow.", "builtins"))
    ]
    # a hook that is another library's callback, too, has that one's methods
    others = {name for kind in kinds if not issubclass(kind, _hook_types()) for name in vars(kind)}
    for kind in kinds:
        for name, value in vars(kind).items():
            if name.startswith("_") or name in _METHODS:
                continue
            method = _looks_like(name) or (None if name in others else _ELSEWHERE.get(name))
            if method is None or not inspect.isroutine(value) or overrides(hook, method):
                continue
            if method in MOMENTS or isinstance(hook, SessionRunHook):
                yield name, method


def _looks_like(name: str) -> str | None:
    """The method of which one slip of the hand makes this name, underscores and capitals aside.

    One letter more, less, other, or two exchanged. For words as short as "end" that is another
    word ("send"): there only the capitals may differ.
    """
    given = name.replace("_", "").lower()
    for meant, moment in _LETTERS:
        if given == meant or (len(meant) > 5 and _slip(given, meant)):
            return moment
    return None


def _slip(given: str, meant: str) -> bool:
    """Whether a letter was added, left out or changed, or two were exchanged."""
    if given[0] != meant[0] and given[-1] != meant[-1]:  # one slip leaves one end as it is
        return False
    pairs = zip(given, meant, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(given), len(meant)))
    given, meant = given[place:], meant[place:]
    is_exchanged = given[:2] == meant[1::-1] and given[2:] == meant[2:]
    return is_exchanged or given[1:] == meant or given == meant[1:] or given[1:] == meant[1:]


def _depth_of_caller() -> int:
    """How far out the first frame is that is not ours, for a warning that our caller gives."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("asynchooks."):
        frame, depth = frame.f_back, depth + 1
    return depth
