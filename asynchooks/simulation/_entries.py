"""What the kernel's heap holds beside tasks: things that fire once, at their time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol


class Target(Protocol):
    """What an entry wakes; it fires only while `due` is the entry's order of asking."""

    due: int

    def fire(self) -> None: ...


class Once(ABC):
    """An entry that fires outside of every task; what it does may only wake, start and cancel."""

    __slots__ = ("due",)

    # for the turbo kernel, which does not ask whether it resumes a task
    is_guarded = True
    run = None

    def __init__(self) -> None:
        self.due = 0

    @property
    def body(self) -> Once:
        """What is sent to."""
        return self

    def send(self, _: None) -> None:
        """Fire, as a task that is resumed."""
        self.due = 0
        self.fire()

    @abstractmethod
    def fire(self) -> None: ...


class Call(Once):
    """A function that an entry calls."""

    __slots__ = ("_fn", "_what")

    def __init__(self, fn: Callable[[], object], what: str) -> None:
        super().__init__()
        self._fn = fn
        self._what = what

    def fire(self) -> None:
        self._fn()

    def __repr__(self) -> str:
        return self._what


NOTHING = Call(lambda: None, "nothing")
"""For a kernel that is to look again at what can run."""


def check_secs(secs: float) -> float:
    """The seconds as a float, or an error.

    NumPy's narrow floats are converted before they meet the time, which they would round.
    """
    try:
        checked = float(secs)
    except (TypeError, ValueError, OverflowError):
        checked = -1.0
    if not checked >= 0 or isinstance(secs, str):
        raise ValueError(f"secs is {secs!r}; give virtual seconds >= 0")
    return checked
