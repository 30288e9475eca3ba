"""prefetch: a task that reads ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._engine.base import Slot
from ._arguments import check_count
from ._buffered import Buffered, Worker
from ._sources import Source, stage_of
from ._stage import Stage, T


def prefetch(source: Source[T], buffer_size: int) -> Stage[T]:
    """Read ahead in a task of its own: the source works while the items are used.

    Its position is that of its source: it may come and go between a save and its restore.

    Args:
        source: see `asynchooks.data`.
        buffer_size: items, >= 1, that it holds at most, with the one that is being read.

    Example:
        async with prefetch(batch(read_files(), 32), 2) as batches:
            async for images in batches:
                await session.run("loss", {"images": images})
    """
    buffer_size = check_count("buffer_size", buffer_size, 1)
    return Prefetch(stage_of(source), buffer_size)


class Prefetch(Buffered):
    kind = "prefetch"

    def __init__(self, source: Stage[Any], buffer_size: int) -> None:
        super().__init__(source)
        self._size = buffer_size
        self._room: Slot | None = None

    def _start(self) -> None:
        self._begin_worker()

    async def _work(self, worker: Worker) -> None:
        read, ready, clocks, engine = self._source._read, self._ready, self._clocks, self._engine
        while not self._is_over:
            room = self._size - len(ready)
            before = engine.tick()
            if room <= 0:
                self._room = Slot(engine, "room in the buffer of prefetch")
                worker.is_at_rest = True
                await engine.park(self._room)
                worker.is_at_rest = False
                clocks.blocked += engine.tick() - before
                continue
            items = await read(room)
            clocks.input_wait += engine.tick() - before
            if not items:
                self._finish()
                return
            self._put(items)

    def _taken(self) -> None:
        if self._room is not None:
            self._room.wake()
            self._room = None

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return Prefetch(sources[0], self._size)

    def _described(self, num_out: int) -> dict[str, Any]:
        return self._source._described(num_out)

    def _load_described(self, state: Mapping[str, Any]) -> None:
        self._source._load_described(state)

    def _fill(self) -> tuple[int, int]:
        return len(self._ready), self._size
