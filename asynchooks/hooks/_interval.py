"""When a hook is due that keeps values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .. import _check

_DEFAULT_STEPS = 100


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
