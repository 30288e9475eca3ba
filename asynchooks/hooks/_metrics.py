"""Numbers by which hooks decide: where they come from, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._errors import MetricError
from .._hook import SessionRunArgs


class Metric:
    """A number that is taken now and then, such as an evaluation's: `EvaluationHook.metric`.

    Args:
        newest: returns the step at which it was taken last, and the value; None before.
        owner: the hook that takes it, if one does.
    """

    def __init__(self, newest: Callable[[], tuple[int, float] | None], owner: Any = None) -> None:
        self._newest = newest
        self.owner = owner

    def newest(self) -> tuple[int, float] | None:
        """The step at which it was taken last, and its value; None if it never was.

        Raises:
            MetricError: there is no such metric.
        """
        return self._newest()

    def __call__(self) -> float | None:
        """The last value; None if there is none yet."""
        newest = self._newest()
        return None if newest is None else newest[1]


class MetricReader:
    """How one hook looks at its metric, which a user gave.

    A value of a `Metric` is seen once, whatever is asked how often.

    Args:
        metric: fetches of one number, a `Metric`, or a function that returns a number or None.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.args = None if callable(metric) else SessionRunArgs(metric)
        self._last_taken: int | None = None

    def check_is_taken(self, hooks: Iterable[Any], reader: str) -> None:
        """Raise RuntimeError if none of a session's hooks takes it: it would never be read.

        Args:
            reader: what decides by it, for people.
        """
        owner = self._metric.owner if isinstance(self._metric, Metric) else None
        if owner is not None and not any(each is owner for each in hooks):
            name = type(owner).__name__
            raise RuntimeError(
                f"{reader} decides by a metric of an {name} that is none of the session's hooks, "
                f"so it would never be taken; add it: MonitoredSession([{name.lower()}, ...])"
            )

    def read(self, results: Any, step: int) -> tuple[int, float] | None:
        """The step and the number that were not seen before, None if there is none.

        Args:
            results: what the last run gave for `args`, if it was asked for them.
            step: the global step now.

        Raises:
            MetricError: it is missing, or NaN, or no number.
        """
        if isinstance(self._metric, Metric):
            newest = self._metric.newest()
            if newest is None or newest[0] == self._last_taken:
                return None
            self._last_taken = newest[0]
            return newest[0], as_number(newest[1], self._metric)
        value = self._metric() if self.args is None else results
        if value is None and self.args is None:
            return None
        return step, as_number(value, self._metric)

    def state_dict(self) -> dict[str, Any]:
        return {"last_taken": self._last_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_taken = state["last_taken"]


def as_number(value: Any, metric: Any) -> float:
    """The value as a float.

    Raises:
        MetricError: it is NaN, or no number.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("a text is no number")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise MetricError(f"the metric {metric!r} is {value!r}; give one number") from error
    if math.isnan(number):
        raise MetricError(
            f"the metric {metric!r} is NaN, which is neither better nor worse than any other; what "
            "was saved stays as it is"
        )
    return number
