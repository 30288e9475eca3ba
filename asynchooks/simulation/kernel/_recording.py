"""The events of a simulation, in order: to compare two runs, and to show where they differ."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Event(NamedTuple):
    """One event: its time, and what happened, as text."""

    time: float
    what: str

    def __str__(self) -> str:
        return f"{self.time.hex()} {self.what}"


class Recording:
    """Every entry that fired, and what the program noted, in order. The kernel writes it."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, time: float, what: str) -> None:
        """Record what happens at this time."""
        self.events.append(Event(time, what))

    def __repr__(self) -> str:
        return f"<Recording of {len(self.events)} events>"

    def to_bytes(self) -> bytes:
        """All of it, a line for each event, times as exact hexadecimal floats."""
        return "".join(f"{each}\n" for each in self.events).encode()

    def digest(self) -> str:
        """SHA-256 of `to_bytes`, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()
