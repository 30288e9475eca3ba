"""Numbers by which hooks decide: where they come from, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .._errors import MetricError, shown
from .._hook import SessionRunArgs
from ._arguments import saved_whole
from ._results import Results


class Metric:
    """One of the results of evaluations, whose step is known: `EvaluationHook.metric`.

    Args:
        results: of the evaluations.
        key: which of them.
        owner: the hook that evaluates.
    """

    def __init__(self, results: Results, key: str, owner: Any) -> None:
        self._results = results
        self._key = key
        self.owner = owner

    def newest(self) -> tuple[int, float] | None:
        """The step that was evaluated last, and the value; None if none was.

        Raises:
            MetricError: there is no such metric.
        """
        return self._results.newest(self._key)

    def at(self, step: int) -> float | None:
        """The value at this step of the present session; None if another one was evaluated last.

        Raises:
            MetricError: there is no such metric.
        """
        newest = self.newest()
        return newest[1] if newest is not None and self._results.are_of(step) else None

    def of(self, results: Mapping[str, float]) -> float | None:
        """The value in results of one evaluation; None if it gave none.

        Raises:
            MetricError: it is NaN.
        """
        value = results.get(self._key)
        return None if value is None else as_number(value, self)

    def __call__(self) -> float | None:
        """The last value; None if there is none yet."""
        newest = self.newest()
        return None if newest is None else newest[1]

    def __repr__(self) -> str:
        return f"{self.owner!r}.metric({self._key!r})"


class MetricReader:
    """How one hook looks at its metric, which a user gave.

    A value of a `Metric` is seen once, whatever is asked how often.

    Args:
        metric: fetches of one number, a `Metric`, or a function that returns a number or None.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.evaluation = metric if isinstance(metric, Metric) else None
        self.args = None if callable(metric) else SessionRunArgs(metric)
        self._last_taken: int | None = None

    def check_is_taken(self, hooks: Iterable[Any], reader: str) -> None:
        """Raise RuntimeError if none of a session's hooks takes it: it would never be read.

        Args:
            reader: what decides by it, for people.
        """
        owner = None if self.evaluation is None else self.evaluation.owner
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
        if self.evaluation is not None:
            newest = self.evaluation.newest()
            if newest is None or newest[0] == self._last_taken:
                return None
            self._last_taken = newest[0]
            return newest[0], as_number(newest[1], self._metric)
        value = self._metric() if self.args is None else results
        if value is None and self.args is None:
            return None
        return step, as_number(value, self._metric)

    def at(self, step: int) -> float | None:
        """The value that an evaluation of this step gave; None if there is none.

        Raises:
            MetricError: it is missing, or NaN, or no number.
        """
        value = None if self.evaluation is None else self.evaluation.at(step)
        return None if value is None else as_number(value, self._metric)

    def state_dict(self) -> dict[str, Any]:
        return {"last_taken": self._last_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        is_taken = state["last_taken"] is not None
        self._last_taken = saved_whole(state, "last_taken") if is_taken else None


def named(fetches: Any) -> str:
    """What is fetched, as messages call it: a tensor by its name."""
    name = getattr(fetches, "name", None)
    return repr(name if isinstance(name, str) else fetches)


def described(value: Any) -> str:
    """A value that is no number, for messages: of an array its shape."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"an array of shape {tuple(shape)} and {dtype}"
    return shown(value)


def as_number(value: Any, metric: Any) -> float:
    """The value as a float.

    Raises:
        MetricError: it is NaN, or no number.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("a text is no number")
        # NumPy only warns of an array of one element
        number = float(value if getattr(value, "ndim", 0) == 0 else value.item())
    except (TypeError, ValueError, OverflowError) as error:
        raise MetricError(
            f"the metric {named(metric)} is {described(value)}; give one number"
        ) from error
    if math.isnan(number):
        raise MetricError(
            f"the metric {named(metric)} is NaN, which is neither better nor worse than any other; "
            "what was saved stays as it is"
        )
    return number
