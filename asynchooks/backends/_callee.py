"""Callee: what step functions call, found by its identity, whatever creators were made.

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
from types import BuiltinMethodType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from .._engine.sync import CallLock
from .._errors import shown
from .._step.gate import Gate

logger = logging.getLogger("asynchooks")


class Callee(CallLock):
    """A function, or the object that methods are of, as the lock that calls of it share.

    `callee_of` makes it. Creators and raw sessions hold it, and nothing else does.

    Args:
        target: the function or object. As this holds it, no other one gets its id meanwhile.
        what: for people.
    """

    def __init__(self, target: object, what: str) -> None:
        super().__init__(what)
        self.target = target
        # of the sessions that run it, with the function that each of them calls
        self._gates: weakref.WeakKeyDictionary[Gate, object] = weakref.WeakKeyDictionary()
        self._is_warned_of = False

    def counts_on(self, gate: Gate, step_function: Callable[..., Any]) -> None:
        """A session on the function counts its steps here; say so if another counts elsewhere."""
        with _mutex:
            if self._is_warned_of:
                return
            self._gates[gate] = function = _unwrapped(step_function)[1]
            self._is_warned_of = any(
                other is not gate and called is function and other.workers
                for other, called in self._gates.items()
            )
        if self._is_warned_of:
            logger.warning(
                "Another session that is open runs the step function %s, too, and each of them "
                "counts a global step of its own: a limit such as StopAtStepHook(last_step=100) "
                "holds for each alone, so a model that they share is trained for more steps. If "
                "they are workers of one model, give all of them one creator: creator = "
                "SharedSessionCreator(step). If each has its own model, "
                "give each its own function, such as a method of the model",
                shown(step_function),
            )


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
    inner: Any = None
    while inner is not fn:  # a wrapper may name itself
        inner = fn
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif not isinstance(fn, MethodType):  # whose function is of all objects of its class
            own = getattr(fn, "__dict__", None)
            fn = own.get("__wrapped__", fn) if isinstance(own, dict) else fn
    is_method = isinstance(fn, (MethodType, BuiltinMethodType, MethodWrapperType))
    owner = fn.__self__ if is_method else None
    if owner is None or isinstance(owner, ModuleType):  # as a function of C has it
        return fn, fn
    return owner, getattr(fn, "__func__", None)


def _forget() -> None:
    """In a forked process: calls under way, and threads that hold locks, are the parent's."""
    global _mutex
    _mutex = threading.RLock()
    _callees.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
