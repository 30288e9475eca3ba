"""One reader for each iterator: a second one would lose items to it, and be cut off by its end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakSet

from .._errors import InputError

_claimed: WeakSet[Any] = WeakSet()  # of the whole process, as an iterator knows nothing of readers


def claim(iterator: Any, who: object) -> None:
    """Say that it is read from now on.

    Raises:
        InputError: somebody else reads it.
    """
    with suppress(TypeError):  # no weak reference, as to a list's iterator; or no hash
        if iterator in _claimed:
            raise InputError(
                f"{who!r} is being read elsewhere; give all readers the same stage: "
                "source = prefetch(iterator, 8)"
            )
        _claimed.add(iterator)


def release(iterator: Any) -> None:
    with suppress(TypeError):
        _claimed.discard(iterator)
