"""Callee: what step functions call, found by its identity, whoever made the creators.

Nothing here calls it, or compares it or asks for its hash: it may define both, or neither.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from .._engine.sync import CallLock
from .._errors import shown
from ._raw_session import RawSession

logger = logging.getLogger("asynchooks")


class Callee:
    """A function, or the object that methods are of: calls of it share one lock.

    `callee_of` makes it. Creators and raw sessions hold it, and nothing else does.

    Args:
        target: the function or object. As this holds it, no other one gets its id meanwhile.
        what: for people.
    """

    __slots__ = ("__weakref__", "_open", "lock", "target")

    def __init__(self, target: object, what: str) -> None:
        self.target = target
        self.lock = CallLock(what)
        # raw sessions, weakly as they may be dropped, and the function of each; None: said
        self._open: dict[weakref.ref[RawSession], object] | None = {}

    def has_opened(self, raw: RawSession, step_function: Callable[..., Any]) -> None:
        """A raw session on the function counts steps; say so if another one counts others."""
        function = _unwrapped(step_function)[1]
        with _mutex:
            if self._open is None:  # it has been said
                return
            is_first = False
            for other, called in list(self._open.items()):
                session = other()
                if session is None:
                    del self._open[other]
                elif called is function and not session.global_step.is_same(raw.global_step):
                    # something may still hold the raw session of one that was dropped
                    is_first = bool(session.global_step.gate.workers)
                    if is_first:
                        break
            if is_first:
                self._open = None
            else:
                self._open[weakref.ref(raw)] = function
        if is_first:
            logger.warning(
                "Another session that is open runs the step function %s, too, and each of them "
                "counts a global step of its own: a limit such as StopAtStepHook(last_step=100) "
                "holds for each alone, so a model that they share is trained for more steps. If "
                "they are workers of one model, give all of them one creator: creator = "
                "SharedSessionCreator(step). If each has its own model, "
                "give each its own function, such as a method of the model",
                shown(step_function),
            )

    def has_closed(self, raw: RawSession) -> None:
        """It counts no more."""
        with _mutex:
            if self._open is not None:
                self._open.pop(weakref.ref(raw), None)


_callees: weakref.WeakValueDictionary[int, Callee] = weakref.WeakValueDictionary()
"""By the id of what is called: an entry lasts as long as a creator or a raw session has it."""
_mutex = threading.RLock()  # a collection of garbage within may run a finaliser of a user


def callee_of(step_function: Callable[..., Any]) -> Callee:
    """The callee of a function, method, partial or callable object; the same one for all users."""
    target, _ = _unwrapped(step_function)
    with _mutex:
        callee = _callees.get(id(target))
        if callee is None:
            callee = Callee(target, f"the step function {step_function!r}")
            _callees[id(target)] = callee
        return callee


def _unwrapped(fn: Any) -> tuple[object, object]:
    """(What calls must not overlap on, the function that is called), without what wraps it."""
    seen: list[object] = []
    while not any(fn is each for each in seen):  # a wrapper may name itself
        seen.append(fn)
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif not isinstance(fn, MethodType):  # whose function is of all objects of its class
            own = getattr(fn, "__dict__", None)
            fn = own.get("__wrapped__", fn) if isinstance(own, dict) else fn
    if isinstance(fn, MethodType):
        return fn.__self__, fn.__func__
    if isinstance(fn, (BuiltinMethodType, MethodWrapperType)):  # of C; a function has its module
        owner = fn.__self__
        return (fn, fn) if owner is None or isinstance(owner, ModuleType) else (owner, None)
    return fn, fn if isinstance(fn, (FunctionType, type)) else type(fn).__call__


def _forget() -> None:
    """In a forked process: calls under way, and threads that hold locks, are the parent's."""
    global _mutex
    _mutex = threading.RLock()
    _callees.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
