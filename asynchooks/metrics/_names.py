"""What metrics are called in a store that has names of its own, or refuses characters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

logger = logging.getLogger("asynchooks")


def apart_from(own: Collection[str], name: str) -> str:
    """The name, with one `_` more where it is one of the store's own, or such a one with `_`s.

    So no two names become one.
    """
    return f"{name}_" if name.rstrip("_") in own else name


class Names:
    """The names of one store's metrics, no two of them alike.

    Where a change makes two names one, the second gets a number, and a warning says so.

    Args:
        store: what errors call it.
        change: returns a name that the store takes.
        known: changed names, by metric, of the same store in an earlier process.
    """

    def __init__(
        self, store: str, change: Callable[[str], str], known: Mapping[str, str] | None = None
    ) -> None:
        self._store, self._change = store, change
        self._names = dict(known or {})
        self._taken = {changed: name for name, changed in self._names.items()}

    def of(self, name: str) -> str:
        """What this metric is called in the store, from now on."""
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = self._new(name)
            self._taken[found] = name
        return found

    def _new(self, name: str) -> str:
        wanted = found = self._change(name)
        number = 1
        while found in self._taken:
            number += 1
            found = self._change(f"{name}_{number}")
        if number > 1:
            logger.warning(
                "%s would call the metric %r %r, as it calls the metric %r; it is %r there. Give "
                "one of them another name",
                self._store, name, wanted, self._taken[wanted], found,
            )  # fmt: skip
        return found

    def changed(self) -> dict[str, str]:
        """Those that are not the metric's own, for `known`."""
        return {name: found for name, found in self._names.items() if name != found}
