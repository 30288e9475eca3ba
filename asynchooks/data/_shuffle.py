"""shuffle: items in a random order that depends on the seed alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import _check as check
from .._errors import InputStateError
from ._sources import Source, stage_of
from ._stage import Stage, T, saved_count

_BLOCK = 1024
"""Draws from one generator: the position is a number, not a generator's state."""


def shuffle(source: Source[T], buffer_size: int, seed: int) -> Stage[T]:
    """A random one of the next `buffer_size` items, again and again, until none is left.

    Each pass of a `repeat` around it has an order of its own. Its saved position names the items
    in the buffer, not what they are: to go on, they are read again, so that the source is read
    from the oldest of them on (it has been there for some times `buffer_size` items).

    Args:
        source: see `asynchooks.data`.
        buffer_size: items, >= 1; at 1 the order stays.
        seed: any integer; the same seed gives the same order.

    Example:
        order = [item async for item in shuffle(range(100), buffer_size=100, seed=7)]
        assert sorted(order) == list(range(100))
    """
    buffer_size = check.integer("buffer_size", buffer_size, least=1)
    return Shuffle(stage_of(source), buffer_size, check.integer("seed", seed))


class _Drawn(NamedTuple):
    """One item that left: where it was, which one it was, and how many had come in before."""

    slot: int
    which: int
    num_in: int


class Shuffle(Stage[Any]):
    kind = "shuffle"

    def __init__(self, source: Stage[Any], buffer_size: int, seed: int) -> None:
        super().__init__(source, args=(buffer_size, seed))
        self._source = source
        self._size = buffer_size
        self._seed = seed
        self._indexes: list[int] = []  # of the items in the buffer, counted from the very first
        self._items: list[Any] = []
        self._num_in = 0  # from the very first
        self._num_before = 0  # that left before the restore
        self._from = 0  # the index at which the source was when it was loaded
        self._num_at_start = 0  # that had come in when it was loaded
        self._at_start: list[int] = []  # what was in the buffer when it was loaded
        self._wanted: dict[int, Any] | None = None  # these are to be read again
        self._is_at_end = False
        self._log: deque[_Drawn] = deque()
        self._uniforms: list[float] = []

    async def _pull(self, limit: int) -> Sequence[Any]:
        if self._wanted is not None:
            await self._read_buffer(self._wanted)
        drawn: list[Any] = []
        while len(drawn) < limit:
            while len(self._items) < self._size and not self._is_at_end:
                if drawn:  # what is there goes out before anything is waited for
                    return drawn
                items = await self._source._read(self._size - len(self._items))
                self._is_at_end = not items
                self._items += items
                self._indexes += range(self._num_in, self._num_in + len(items))
                self._num_in += len(items)
            if not self._items:
                break
            drawn.append(self._draw(self._num_before + self._num_out + len(drawn)))
        return drawn

    def _draw(self, number: int) -> Any:
        items, indexes = self._items, self._indexes
        if not self._uniforms or number % _BLOCK == 0:
            generator = random.Random(f"{self._seed}:{self._epoch}:{number // _BLOCK}")
            self._uniforms = [generator.random() for _ in range(_BLOCK)]
        slot = int(self._uniforms[number % _BLOCK] * len(items))
        item, index = items[slot], indexes[slot]
        items[slot], indexes[slot] = items[-1], indexes[-1]
        items.pop()
        indexes.pop()
        self._log.append(_Drawn(slot, index, self._num_in))
        return item

    async def _read_buffer(self, wanted: dict[int, Any]) -> None:
        """Read what was in the buffer, and pass over the rest."""
        index = self._from + self._source._num_out
        while index < self._num_in:
            items = await self._source._read(self._num_in - index)
            if not items:
                raise InputStateError(
                    f"{self._source!r} ended at item {index}, and the saved position of shuffle is "
                    f"behind item {self._num_in}; give the source that it was saved of"
                )
            for item in items:
                if index in wanted:
                    wanted[index] = item
                index += 1
        self._indexes = list(wanted)
        self._items = list(wanted.values())
        self._wanted = None

    def _buffer_at(self, num_out: int) -> tuple[list[int], int]:
        """What was in the buffer behind that many items, and how many had come in by then.

        Right behind an item: what came in for the next one does not count.
        """
        since = self._num_out - num_out
        if since == 0 and self._num_out == 0:
            return (list(self._at_start), self._num_at_start)
        indexes, num_in = list(self._indexes), self._num_in
        log = list(self._log)
        for drawn in reversed(log[len(log) - since :]):
            del indexes[len(indexes) - (num_in - drawn.num_in) :]
            num_in = drawn.num_in
            if drawn.slot == len(indexes):
                indexes.append(drawn.which)
            else:
                indexes.append(indexes[drawn.slot])
                indexes[drawn.slot] = drawn.which
        before = log[len(log) - since - 1].num_in if len(log) > since else self._num_at_start
        del indexes[len(indexes) - (num_in - before) :]
        return indexes, before

    def _state_at(self, num_out: int) -> dict[str, Any]:
        indexes, num_in = self._buffer_at(num_out)
        start = min([num_in, *indexes])
        return {
            "drawn": self._num_before + num_out,
            "come_in": num_in,
            "buffer": indexes,
            "from": start,
            "source": self._source._saved_at(start - self._from),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._num_before = saved_count(state["drawn"])
        self._num_in = self._num_at_start = saved_count(state["come_in"])
        self._from = saved_count(state["from"])
        self._at_start = [saved_count(each) for each in state["buffer"]]
        self._wanted = dict.fromkeys(self._at_start)

    def _epoch_of(self, place: int) -> int:
        # around a repeat it mixes passes: by count, which ends a pass at the same item in each run
        return self._source._epoch_of(self._num_before + place - self._from)

    def _trim(self, num_out: int) -> None:
        indexes, num_in = self._buffer_at(num_out)
        while len(self._log) > self._num_out - num_out + 1:  # the last one says what had come in
            self._log.popleft()
        self._source._trim(min([num_in, *indexes]) - self._from)

    def _fill(self) -> tuple[int, int]:
        return len(self._items), self._size
