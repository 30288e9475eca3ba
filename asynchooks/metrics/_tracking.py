"""What the sinks of trackers share: checks, and the steps that a store has of each metric."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from ._sink import Histogram, Point


def need(sink: str, library: str, extra: str) -> None:
    """Raise ImportError, with the extra to install, if the library is missing; import nothing."""
    try:
        is_there = find_spec(library) is not None
    except ModuleNotFoundError:  # of the package that the library is in
        is_there = False
    if not is_there:
        raise ImportError(
            f"{sink} needs {library}, which is not installed; pip install 'asynchooks[{extra}]'"
        )


def position_of(saved: object, key: str) -> Mapping[str, Any]:
    """The position that a sink has saved, with a text of this key; {} if it is another kind's."""
    is_own = isinstance(saved, Mapping) and isinstance(saved.get(key), str)
    return saved if is_own else {}  # type: ignore[return-value]


def summary(spread: Histogram) -> dict[str, float]:
    """What a store without histograms gets of one: the least, the mean and the greatest number."""
    if not spread.num:
        return {}
    return {"min": spread.least, "mean": spread.total / spread.num, "max": spread.greatest}


class StoredSteps:
    """The steps of each metric in a store that cannot remove points.

    After a restore or a `rewind` steps come a second time. The store keeps what it has.

    Args:
        find: returns the steps that the store has of a metric when it is opened; in order, if they
            are many. It is called once for each name.
    """

    def __init__(self, find: Callable[[str], Iterable[int]]) -> None:
        self._find = find
        self._steps: dict[str, array[int]] = {}

    def new(self, point: Point) -> dict[str, float | Histogram]:
        """The values of a point that the store does not have, which it is given now."""
        return {name: value for name, value in point.values.items() if self._add(name, point.step)}

    def _add(self, name: str, step: int) -> bool:
        steps = self._steps.get(name)
        if steps is None:
            steps = self._steps[name] = array("q", sorted(self._find(name)))
        place = bisect_left(steps, step)
        if place < len(steps) and steps[place] == step:
            return False
        steps.insert(place, step)  # mostly at the end
        return True
