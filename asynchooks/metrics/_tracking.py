"""What the sinks of trackers share: the check for a library, and the steps that a store has."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

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


def summary(spread: Histogram) -> dict[str, float]:
    """What a store without histograms gets of one: the least, the mean and the greatest number."""
    if not spread.num:
        return {}
    return {"min": spread.least, "mean": spread.total / spread.num, "max": spread.greatest}


class LastSteps:
    """The last step of each metric in a store that cannot remove points.

    After a restore or a `rewind` steps come a second time. The store keeps what it has: of each
    metric, what is not of a later step than its last one is left out.

    Args:
        find_last: returns the last step that the store has of a metric when it is opened; None
            where it has none. It is called once for each name.
    """

    def __init__(self, find_last: Callable[[str], int | None]) -> None:
        self._find_last = find_last
        self._last: dict[str, int | None] = {}

    def later(self, point: Point) -> dict[str, float | Histogram]:
        """The values of a point that the store does not have, which it is given now."""
        found = {}
        for name, value in point.values.items():
            if name not in self._last:
                self._last[name] = self._find_last(name)
            last = self._last[name]
            if last is None or point.step > last:
                found[name] = value
                self._last[name] = point.step
        return found
