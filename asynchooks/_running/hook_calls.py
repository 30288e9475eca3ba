"""The methods of hooks, as they are called: coroutines one by one, plain ones together.

It calls nothing by itself, and knows nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._errors import tensorflow_train
from ._hook import SessionRunHook
from ._runner import is_async
from ._session_creator import SessionCreator


class HookCall:
    """One method of one hook; `place` is the hook's in the list, as hooks may compare equal."""

    __slots__ = ("hook", "is_async", "moment", "place")

    def __init__(self, place: int, hook: Any, moment: str) -> None:
        self.place = place
        self.hook = hook
        self.moment = moment
        self.is_async = is_async(self.method)

    @property
    def method(self) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.hook, self.moment)
        return method


def calls_of(hooks: list[Any], moment: str) -> tuple[HookCall, ...]:
    """The calls of this moment, in order; a method that a hook leaves alone costs nothing."""
    overriding = [(place, hook) for place, hook in enumerate(hooks) if overrides(hook, moment)]
    return tuple([HookCall(place, hook, moment) for place, hook in overriding])


Group = tuple[HookCall, Callable[..., Any], tuple[HookCall, ...]]
"""(A call, its method, the plain methods that share one hop to a thread: none for a coroutine)."""


def in_groups(calls: Iterable[HookCall]) -> tuple[Group, ...]:
    """The calls in order, neighbouring plain methods together."""
    groups: list[Group] = []
    for call in calls:
        if call.is_async:
            groups.append((call, call.method, ()))
        elif groups and groups[-1][2]:
            first, method, plain = groups[-1]
            groups[-1] = first, method, (*plain, call)
        else:
            groups.append((call, call.method, (call,)))
    return tuple(groups)


def overrides(hook: Any, moment: str) -> bool:
    """Whether the hook has a method of its own, so that calling it is worth anything."""
    own = getattr(hook, moment, None)  # TensorFlow's hooks have no on_error
    left_alone = {getattr(base, moment, None) for base in _hook_types()}
    return own is not None and getattr(own, "__func__", own) not in left_alone


def needs_global_step(hook: Any) -> bool:
    return isinstance(hook, SessionRunHook) and hook.needs_global_step


def needs_graph_entered(hook: Any) -> bool:
    """Whether its coroutines may look at the default graph; of ours we know."""
    looks = vars(type(hook)).get("_looks_at_default_graph", True)  # not of classes made of them
    return bool(looks or getattr(hook, "_looks_at_default_graph", True))


def _hook_types() -> tuple[type, ...]:
    train = tensorflow_train()
    return (SessionRunHook,) if train is None else (SessionRunHook, train.SessionRunHook)


def checked(hooks: Iterable[Any] | None, name: str = "hooks") -> list[Any]:
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
        if isinstance(hook, type) and issubclass(hook, types):
            raise TypeError(
                f"{name}[{place}] is the class {hook.__name__}; give an instance of it: "
                f"{hook.__name__}(...)"
            )
        if not isinstance(hook, types):
            raise TypeError(
                f"{name}[{place}] is {hook!r} of type {type(hook).__name__}; expected an instance "
                "of asynchooks.SessionRunHook or of TensorFlow's"
            )
        if not isinstance(hook, SessionRunHook):
            _check_listeners(hook, f"{name}[{place}]")
    return listed


def _check_listeners(hook: Any, name: str) -> None:
    """TensorFlow's CheckpointSaverHook would take a coroutine, which is true, for a stop."""
    for listener in getattr(hook, "_listeners", ()):
        if is_async(getattr(listener, "after_save", _check_listeners)):
            raise TypeError(
                f"{name}, TensorFlow's {type(hook).__name__}, has the coroutine listener "
                f"{listener!r}; give both to asynchooks.CheckpointSaverHook"
            )
