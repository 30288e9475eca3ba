"""What metrics are called in a store that has names of its own, or refuses characters."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping

from ._sink import Histogram

logger = logging.getLogger("asynchooks")


def apart_from(own: Collection[str], name: str) -> str:
    """The name, with one `_` more where it is one of the store's own, or such a one with `_`s.

    So no two names become one.
    """
    return f"{name}_" if name.rstrip("_") in own else name


class Names:
    """The names of one store's metrics, and of their parts, no two of them alike.

    Where two would be one name, the second gets a number, and a warning says so.

    Args:
        store: what the warning calls it.
        change: returns a name that the store takes.
        joined_by: what stands between a metric's name and that of a part of it.
        longest: characters of a name, at most.
    """

    def __init__(
        self,
        store: str,
        change: Callable[[str], str],
        *,
        joined_by: str = "/",
        longest: int = sys.maxsize,
    ) -> None:
        self._store, self._change = store, change
        self._joined_by, self._longest = joined_by, longest
        self._taken: dict[str, tuple[str, str]] = {}  # of what a name is
        self._found: dict[tuple[str, str], str] = {}

    def of(self, name: str, part: str = "") -> str:
        """What this metric, or a part of it, is called in the store, from now on."""
        found = self._found.get((name, part))
        if found is None:
            found = self._found[name, part] = self._new(name, part)
            self._taken[found] = (name, part)
        return found

    def numbers(
        self,
        values: Mapping[str, float | Histogram],
        parts_of: Callable[[Histogram], Mapping[str, float]],
    ) -> dict[str, float]:
        """The values by their names in the store; of histograms their parts."""
        return {
            self.of(name, part): number
            for name, value in values.items()
            for part, number in (
                parts_of(value) if isinstance(value, Histogram) else {"": value}
            ).items()
        }

    def _new(self, name: str, part: str) -> str:
        whole = f"{name}{self._joined_by}{part}" if name and part else name or part
        wanted = found = self._change(whole)[: self._longest]
        number = 1
        while found in self._taken:
            number += 1
            end = f"_{number}"
            found = f"{wanted[: self._longest - len(end)]}{end}"
        if number > 1:
            logger.warning(
                "%s calls the metric %r %r, because %r is what it calls the metric %r; give one of "
                "them another name",
                self._store,
                whole,
                found,
                wanted,
                self._taken[wanted][0],
            )
        return found
