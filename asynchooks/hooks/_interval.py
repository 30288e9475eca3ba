"""When a hook is due that keeps values, and the names of options by which its user says that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from .. import _check

T = TypeVar("T")

_DEFAULT_STEPS = 100
_SAME = (
    ("every_n_steps", "every_n_iter", "every_steps", "save_steps", "log_every_n_steps"),
    ("every_n_secs", "every_secs", "save_secs"),
    ("last_step", "max_steps"),
    ("metric", "monitor"),
    ("restore_best", "restore_best_weights"),
    ("retention", "save_best_only", "save_top_k", "max_to_keep"),
)
"""Spellings of one option: ours, TensorFlow's, and those of other libraries."""
_OF_EPOCHS = (
    "repeat(source, 5) around the data of FeedHook makes 5 epochs; its after_epoch is called "
    "behind each, and EvaluationHook(every_n_epochs=1) evaluates there"
)


def names_options(cls: type[T]) -> type[T]:
    """Have a hook answer an option that it does not have with the name of the one it has."""
    init: Any = cls.__init__
    known = list(signature(init).parameters)

    @wraps(init)
    def checked(self: T, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                if "epoch" in name:
                    raise TypeError(f"{cls.__name__} got {name}; {_OF_EPOCHS}")
                same = [each for names in _SAME if name in names for each in names if each in known]
                right = [*same, *get_close_matches(name, known), ", ".join(known[1:])][0]
                raise TypeError(f"{cls.__name__} got {name}; write {right}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[assignment]  # its type stays that of the class's own
    return cls


class Interval:
    """When a hook is due: at step 1 and at each multiple of a number of steps, or after seconds.

    Multiples make the steps of a resumed training those of an uninterrupted one. A step that was
    passed by other workers' runs is made up for by the next run.
    """

    __slots__ = ("_next_step", "_next_time", "_now", "_saved_secs", "every_secs", "every_steps")

    def __init__(self, every_n_steps: int | None, every_n_secs: float | None) -> None:
        if every_n_steps is not None and every_n_secs is not None:
            raise ValueError(
                f"got every_n_steps={every_n_steps!r} and every_n_secs={every_n_secs!r}; give at "
                f"most one of them (every {_DEFAULT_STEPS} steps by default)"
            )
        self.every_secs: float | None = None
        self.every_steps = _DEFAULT_STEPS
        if every_n_secs is not None:
            self.every_secs = _check.seconds("every_n_secs", every_n_secs, zero=True)
        elif every_n_steps is not None:
            self.every_steps = _check.integer("every_n_steps", every_n_steps, least=1)
        self._now: Callable[[], float] = lambda: 0.0
        self._saved_secs: float | None = None  # how long ago it was done, at a restore
        self._next_step = 1  # due from this step on,
        self._next_time = math.inf  # or from this time on

    def reset(self) -> None:
        """A session begins, perhaps on another clock than the last one."""
        self._next_time = math.inf

    def begin(self, step: int, now: Callable[[], float]) -> None:
        """A raw session was created, at this step, on an engine with this clock."""
        self._now = now
        if self.every_secs is None:
            self._next_step = 1 if step < 1 else self._after(step)
        elif self._saved_secs is not None:
            self._next_time = now() + self.every_secs - self._saved_secs
        elif self._next_time == math.inf:
            self._next_time = now()
        self._saved_secs = None

    def set_back(self, step: int) -> None:
        """The step has gone back: the next run is that of this step."""
        if self.every_secs is None:
            self._next_step = 1 if step <= 1 else self._after(step - 1)

    def is_due(self, step: int) -> bool:
        if self.every_secs is None:
            return step >= self._next_step
        return self._now() >= self._next_time

    @property
    def idle_until(self) -> float:
        """Below this step the next run is not due; inf where that depends on the time."""
        return self._next_step - 1 if self.every_secs is None else math.inf

    @property
    def idle_until_secs(self) -> float:
        """Before this time the next run is not due; inf where that depends on the step."""
        return math.inf if self.every_secs is None else self._next_time

    def update(self, step: int) -> None:
        """The hook has done at this step what it was due for."""
        if self.every_secs is None:
            self._next_step = self._after(step)
        else:
            self._next_time = self._now() + self.every_secs

    def _after(self, step: int) -> int:
        return (step // self.every_steps + 1) * self.every_steps

    def state_dict(self) -> dict[str, Any]:
        """How long ago the hook was due last, in seconds; steps need no state."""
        if self.every_secs is None or self._next_time == math.inf:
            return {}
        return {"secs_since_last": self.every_secs - (self._next_time - self._now())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._saved_secs = _check.number("the saved secs_since_last", state["secs_since_last"])
