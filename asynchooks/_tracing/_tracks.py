"""Numbers and names of tracks: one that is given back is used again by the next of its name."""

from __future__ import annotations

from heapq import heappop, heappush

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


class Names:
    """The numbers of names of spans, from 1, of which the format has some thousands."""

    _MOST = 10_000

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._new: dict[int, str] = {}

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) >= self._MOST:
                name = "other"
                if name in self._numbers:
                    return self._numbers[name]
            number = self._numbers[name] = len(self._numbers) + 1
            self._new[number] = name
        return number

    def take_new(self) -> dict[int, str]:
        new, self._new = self._new, {}
        return new
