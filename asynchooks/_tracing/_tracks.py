"""Numbers of tracks and of labels. A track that is given back is used again by its name."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from .._engine.recording import Kind

_MOST = (1 << 15) - 1  # the others are counters'


class Tracks:
    """The tracks of one file. It has no lock."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._num_of: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}
        self._new: dict[int, str] = {}

    def take(self, name: str) -> int:
        """A track of this name, or of this name with a number, on which nothing is under way."""
        if free := self._free.get(name):
            return heappop(free)
        if len(self._names) == _MOST:
            return _MOST
        self._num_of[name] = number = self._num_of.get(name, 0) + 1
        self._names.append(name)
        track = len(self._names)
        self._new[track] = name if number == 1 else f"{name} {number}"
        return track

    def give_back(self, track: int) -> None:
        heappush(self._free.setdefault(self._names[track - 1], []), track)

    def take_new(self) -> dict[int, str]:
        """Numbers and names of tracks that are new since the last call."""
        new, self._new = self._new, {}
        return new


class Label(NamedTuple):
    """What all spans of one number are: their name, and what only our reader asks for."""

    name: str
    kind: Kind | None = None
    """None: of a mark or a use."""
    worker: int = -1
    """Whose machine did it; -1 if none was named."""
    is_on_session: bool = False
    is_cut: bool = False

    @property
    def shown(self) -> str:
        """The name in Perfetto."""
        return f"{self.name} (cut)" if self.is_cut else self.name


class Labels:
    """The numbers of labels, from 1, of which the format has some thousands."""

    _MOST = 10_000

    def __init__(self) -> None:
        self._numbers: dict[Label, int] = {}
        self._new: dict[int, Label] = {}

    def number(self, label: Label) -> int:
        number = self._numbers.get(label)
        if number is None:
            if len(self._numbers) >= self._MOST:
                label = Label("other")
                if label in self._numbers:
                    return self._numbers[label]
            number = self._numbers[label] = len(self._numbers) + 1
            self._new[number] = label
        return number

    def take_new(self) -> dict[int, Label]:
        new, self._new = self._new, {}
        return new
