"""SecondOrStepTimer: when a hook is due, by steps or by seconds. It starts nothing by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import _check
from ._engine.current import now
from ._errors import call_text

_END_OF_SECS = 1e15
"""Beyond, differences of a clock's floats lose their fractions of a second."""


class SecondOrStepTimer:
    """Whether a hook is due, at most once every so many seconds or steps.

    The hook that uses it makes it. Seconds are those of the engine (real or simulated) that the
    caller runs in, and the system's where there is none.

    Args:
        every_secs: seconds between two triggers, >= 0.
        every_steps: steps between two triggers, >= 0; exactly one of the two is given.

    Source: TensorFlow's `tf.compat.v1.train.SecondOrStepTimer`.

    Example:
        timer = SecondOrStepTimer(every_steps=100)
        if timer.should_trigger_for_step(step):
            seconds, steps = timer.update_last_triggered_step(step)
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        _check_interval(every_secs=every_secs, every_steps=every_steps)
        self._every_secs = every_secs
        self._every_steps = every_steps
        self.reset()

    def __repr__(self) -> str:
        return call_text(self, every_secs=self._every_secs, every_steps=self._every_steps)

    def reset(self) -> None:
        """Forget the last trigger: the next query is True."""
        self._last_step: int | None = None
        self._last_time = 0.0

    def begin_session(self, step: int) -> None:
        """A session opens at this step; call it where the timer will be asked.

        A last trigger that lies ahead of it, by the step or by the clock, is of another training,
        or of another clock, and is forgotten: else the hook would not be due until both have come
        so far again.
        """
        if self._last_step is not None and (self._last_step > step or self._last_time > now()):
            self.reset()

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether the hook is due at this step.

        True until the first update; then never for the step of the last update, and else as soon
        as the interval has passed (`>=`, counted from the last update, not at multiples).
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        return now() >= self._last_time + self._every_secs

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Note a trigger; returns (seconds, steps) since the last one, (None, None) at first."""
        time = now()
        elapsed: tuple[float | None, int | None] = (None, None)
        if self._last_step is not None:
            elapsed = (time - self._last_time, step - self._last_step)
        self._last_step, self._last_time = step, time
        return elapsed

    def last_triggered_step(self) -> int | None:
        """The step of the last update, None before the first."""
        return self._last_step

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes up, perhaps in another process: of JSON's values."""
        secs = None if self._last_step is None else now() - self._last_time
        return {"last_step": self._last_step, "secs_since_last": secs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the timer that gave the state; the time between the two calls does not count.

        Seconds are kept as elapsed ones, because no clock outlives its process. Call it where the
        timer will be asked: on the engine whose seconds it counts.

        Args:
            state: "last_step": the step of the last update, and "secs_since_last": seconds since
                then, >= 0; both None before the first.

        Raises:
            TypeError, ValueError: it is no mapping, or holds something else.
        """
        _check.instance("a timer's state", state, Mapping, "what state_dict() returned")
        step, secs = state.get("last_step"), state.get("secs_since_last")
        is_first = step is None and secs is None
        is_step = isinstance(step, int) and not isinstance(step, bool)
        is_elapsed = _check.a_number(secs) and 0 <= secs < _END_OF_SECS  # type: ignore[operator]
        if not is_first and not (is_step and is_elapsed):
            raise ValueError(
                f"a timer's state is {dict(state)!r}; give what state_dict() returned: an integer "
                "last_step and secs_since_last >= 0, or None for both"
            )
        self._last_step = step
        self._last_time = 0.0 if secs is None else now() - secs


def timer_of(**intervals: float | None) -> SecondOrStepTimer:
    """The timer of a hook's arguments, of which one must be given; errors name them.

    Their names end in "secs" where they are seconds, and are steps else.
    """
    name, interval = _check_interval(**intervals)
    if name.endswith("secs"):
        return SecondOrStepTimer(every_secs=interval)
    return SecondOrStepTimer(every_steps=interval)  # type: ignore[arg-type]  # a whole number


def _check_interval(**intervals: float | None) -> tuple[str, float]:
    """The name of the one that is given, and its value."""
    given = {name: each for name, each in intervals.items() if each is not None}
    if len(given) != 1:
        names = [*given] or [*intervals][-2:]  # where a hook has two spellings, TensorFlow's
        of_steps_first = sorted(names, key=lambda name: name.endswith("secs"))
        got = " and ".join(f"{name}={intervals[name]!r}" for name in of_steps_first)
        raise ValueError(f"got {got}; give exactly one of them (and None for the other)")
    [(name, interval)] = given.items()
    number = _check.number(name, interval, least=0, finite=False, expected="a number >= 0")
    if not name.endswith("secs") and number != math.inf and number % 1:
        raise ValueError(f"{name} is {interval!r}; give a whole number >= 0")
    return name, interval
