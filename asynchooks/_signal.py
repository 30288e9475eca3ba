"""Values that are told apart by identity alone: what a wait may end with beside a value."""

from __future__ import annotations


class Signal:
    """A value that is told apart by identity alone, with a readable name."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name
