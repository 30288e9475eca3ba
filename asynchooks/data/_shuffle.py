"""shuffle: items in a random order that depends on the seed alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _check as check
from .._errors import InputStateError
from ._division import Bounds, bounds_between, data_of
from ._sources import Source, stage_of
from ._stage import Epoch, Mark, Pair, Stage, State, T, epoch_of, saved_count, state_of

BLOCK = 1024
"""Draws from one generator: the position is a number, not a generator's state."""


def uniforms(seed: int, epoch: Epoch, number: int) -> list[float]:
    """The block of random numbers in [0, 1) that has the draw with this number."""
    generator = random.Random(f"{seed}:{epoch}:{number // BLOCK}")
    return [generator.random() for _ in range(BLOCK)]


def shuffle(source: Source[T], buffer_size: int, seed: int) -> Stage[T]:
    """A random one of the next `buffer_size` items, again and again, until none is left.

    Each pass of a `repeat` around it has an order of its own. Its saved position names the items
    in the buffer, not what they are: to go on, they are read again, so that the source is read
    from the oldest of them on (it has been there for some times `buffer_size` items).

    Args:
        source: see `asynchooks.data`.
        buffer_size: items, >= 1; at 1 the order stays.
        seed: any integer; the same seed gives the same order. A position that was saved with
            another one is refused.

    Example:
        order = [item async for item in shuffle(range(100), buffer_size=100, seed=7)]
        assert sorted(order) == list(range(100))
    """
    buffer_size = check.integer("buffer_size", buffer_size, least=1)
    return Shuffle(stage_of(source), buffer_size, check.integer("seed", seed))


class _Entry(NamedTuple):
    """An item in the buffer."""

    number: int  # how many came in before it
    item: Any
    mark: Mark
    before: Mark  # of the item that came in before it


@dataclass(eq=False, slots=True)
class _Drawn:
    """An item that has left, and what the buffer was like then: found by undoing the later draws.

    So a mark costs no copy of the buffer. The draws hang behind each other, so that those live
    behind which a consumer may still go back, and no others.
    """

    buffer: list[_Entry]  # as it is now; each pass has one of its own
    slot: int  # where it was
    entry: _Entry
    number: int  # of draws, with this one
    num_in: int  # items that had come in by then
    last: Mark  # of the last one of these
    counted: Mark  # of the item that came in as the one with this number: it says the epoch
    later: _Drawn | None = None

    def buffer_then(self) -> list[_Entry]:
        """What was in the buffer behind this draw; what came in for the next one does not count."""
        drawn, later = self, []
        while drawn.later is not None:
            drawn = drawn.later
            later.append(drawn)
        buffer = list(self.buffer)
        for drawn in reversed(later):
            drawn._undo(buffer)
        return [entry for entry in buffer if entry.number < self.num_in]

    def _undo(self, buffer: list[_Entry]) -> None:
        while buffer and buffer[-1].number >= self.num_in:
            buffer.pop()
        buffer.append(self.entry)
        buffer[self.slot], buffer[-1] = self.entry, buffer[self.slot]


class Shuffle(Stage[Any]):
    kind = "shuffle"

    def __init__(self, source: Stage[Any], buffer_size: int, seed: int) -> None:
        super().__init__(source)
        self._source = source
        self._size = buffer_size
        self._seed = seed
        self._buffer: list[_Entry] = []

    def _set(self, state: State | None) -> None:
        state = {**self._at_first(), **(state or {})}
        if state["seed"] != self._seed:
            raise InputStateError(
                f"the state is that of seed {state['seed']}, and this is {self._seed}: items in "
                "another order would be lost or come twice"
            )
        self._num_out = saved_count(state["drawn"])
        self._num_in = saved_count(state["from"])
        self._num_to_read = saved_count(state["come_in"])  # before anything is drawn
        # what was in the buffer, by index: these are read again, and the others passed over
        self._wanted: dict[int, Any] = dict.fromkeys(map(saved_count, state["buffer"]))
        self._buffer = []
        self._is_at_end = False
        self._last = self._source._origin()  # the mark of the last item that has come in
        # around a repeat it mixes passes: by count, which ends a pass at the same item in each run
        self._counted: deque[Mark] = deque()  # of the items that came in, from the next draw on
        self._drawn: _Drawn | None = None
        self._uniforms: list[float] = []

    def _at_first(self) -> dict[str, Any]:
        return {"drawn": 0, "come_in": 0, "buffer": [], "from": 0, "seed": self._seed}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        if self._num_in < self._num_to_read:
            await self._read_again()
        pairs: list[Pair] = []
        while len(pairs) < limit:
            while len(self._buffer) < self._size and not self._is_at_end:
                if pairs:  # what is there goes out before anything is waited for
                    return pairs
                more = await self._source._read(self._size - len(self._buffer))
                self._is_at_end = not more
                self._buffer += [self._come_in(*pair) for pair in more]
            if not self._buffer:
                break
            pairs.append(self._draw())
        return pairs

    def _come_in(self, item: Any, mark: Mark) -> _Entry:
        entry = _Entry(self._num_in, item, mark, self._last)
        self._num_in, self._last = self._num_in + 1, mark
        if entry.number >= self._num_out:
            self._counted.append(mark)
        return entry

    def _draw(self) -> Pair:
        buffer, number = self._buffer, self._num_out
        if not self._uniforms or number % BLOCK == 0:
            self._uniforms = uniforms(self._seed, self._epoch, number)
        slot = int(self._uniforms[number % BLOCK] * len(buffer))
        entry, buffer[slot] = buffer[slot], buffer[-1]
        buffer.pop()
        self._num_out = number + 1
        counted = self._counted.popleft()
        drawn = _Drawn(buffer, slot, entry, number + 1, self._num_in, self._last, counted)
        if self._drawn is not None:
            self._drawn.later = drawn
        self._drawn = drawn
        return entry.item, (self, drawn, None)

    async def _read_again(self) -> None:
        """Read what was in the buffer, and pass over the rest."""
        while self._num_in < self._num_to_read:
            pairs = await self._source._read(self._num_to_read - self._num_in)
            if not pairs:
                raise InputStateError(
                    f"{self._source!r} ended at item {self._num_in}, and the saved position of "
                    f"shuffle is behind item {self._num_to_read}; give the source that it was "
                    "saved of"
                )
            for pair in pairs:
                entry = self._come_in(*pair)
                if entry.number in self._wanted:
                    self._wanted[entry.number] = entry
        self._buffer += self._wanted.values()
        self._wanted = {}

    def _state_of(self, data: _Drawn, below: Mark) -> dict[str, Any]:
        if not isinstance(data, _Drawn):  # before the first draw
            return super()._state_of(data, below)
        buffer = data.buffer_then()
        oldest = min(buffer, default=None, key=lambda entry: entry.number)
        state = {
            "drawn": data.number,
            "come_in": data.num_in,
            "buffer": [entry.number for entry in buffer],
            "from": data.num_in if oldest is None else oldest.number,
            "seed": self._seed,
            "source": state_of(data.last if oldest is None else oldest.before),
        }
        if self._is_divided():
            state["used"] = self._bounds_between(None, data, below)
        return state

    def _bounds_between(self, before: Mark, data: Any, below: Mark) -> Bounds:
        if not isinstance(data, _Drawn):
            return super()._bounds_between(before, data, below)
        drawn: Any = None if before is None else data_of(before)
        if isinstance(drawn, _Drawn) and drawn.buffer is data.buffer:
            entries = []
            while drawn is not data:
                drawn = drawn.later
                entries.append(drawn.entry)
            bounds: Bounds = []
        else:
            entries, bounds = data.buffer_then(), bounds_between(None, data.last)
            if before is not None:
                bounds += bounds_between(None, before)
        return bounds + [
            each for entry in entries for each in bounds_between(entry.before, entry.mark)
        ]

    def _epoch_of(self, data: _Drawn, below: Mark) -> int:
        return epoch_of(data.counted if isinstance(data, _Drawn) else below)

    def _fill(self) -> tuple[int, int]:
        return len(self._buffer), self._size
