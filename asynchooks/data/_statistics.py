"""What a stage counts: items, bytes, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._engine.base import Engine


@dataclass(frozen=True)
class StageStatistics:
    """Counts and times of one stage, since it was made.

    Of two stages side by side, the slower one waits little and blocks much; "data wait" of
    training is `consumer_wait_secs` of the last stage.

    Example:
        async with prefetch(batch(records, 32), 2) as batches:
            async for images in batches:
                pass
        assert batches.statistics().num_items == 2
    """

    stage: str
    """Which function made it."""
    num_items: int
    """Items that it gave out."""
    num_bytes: int | None
    """Bytes of them, where known: arrays, bytes, and tuples, lists and mappings of these."""
    input_wait_secs: float
    """Seconds in which it waited for its source."""
    blocked_secs: float
    """Seconds in which it could have worked, had its consumer taken items."""
    consumer_wait_secs: float
    """Seconds in which its consumers waited for it, all together."""
    num_failures: int
    """Items that were left out because the call for them failed."""
    num_buffered: int
    """Items that it holds now."""
    buffer_size: int
    """Items that it holds at most; 0 without a buffer."""
    sources: tuple[StageStatistics, ...]
    """Those of the stages that it reads."""

    def __str__(self) -> str:
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> list[str]:
        size = "" if self.num_bytes is None else f", {self.num_bytes:,} bytes"
        fill = f", {self.num_buffered} of {self.buffer_size} held" if self.buffer_size else ""
        waits = f"waited {self.input_wait_secs:.3g} s for input, {self.blocked_secs:.3g} s for its"
        line = (
            f"{indent}{self.stage}: {self.num_items:,} items{size}; {waits} consumer, which waited "
            f"{self.consumer_wait_secs:.3g} s{fill}"
        )
        return [line, *(each for below in self.sources for each in below._lines(indent + "  "))]


_FEW = 8
_SIZELESS = frozenset((int, float, str, bool))


@dataclass(slots=True)
class Clocks:
    """The counters of one stage."""

    num_items: int = 0
    num_failures: int = 0
    num_bytes: int = -1  # below 0: no item had a size
    input_wait: float = 0.0
    blocked: float = 0.0
    consumer_wait: float = 0.0
    _read_ended_at: float | None = None

    def begin_read(self, engine: Engine) -> float:
        """Items are asked for; returns when."""
        now = engine.stopwatch()
        if self._read_ended_at is not None:
            self.blocked += now - self._read_ended_at
        return now

    def end_read(self, engine: Engine, begun: float, pairs: Sequence[tuple[Any, Any]]) -> None:
        """The items that were asked for are there: a stage without tasks waited for its input."""
        now = self._read_ended_at = engine.stopwatch()
        self.input_wait += now - begun
        self.consumer_wait += now - begun
        self.count([item for item, _ in pairs])

    def count(self, items: Sequence[Any]) -> None:
        self.num_items += len(items)
        if _SIZELESS.issuperset(map(type, items)):
            return
        for item in items:
            size = size_of(item)
            if size is not None:
                self.num_bytes = max(self.num_bytes, 0) + size


def size_of(item: Any) -> int | None:
    """Bytes of an item, None where they are not known."""
    if type(item) in _SIZELESS:
        return None
    if isinstance(item, (bytes, bytearray)):
        return len(item)
    if isinstance(item, (tuple, list)):
        return _sum(item)
    if isinstance(item, Mapping):
        return _sum(list(item.values()))
    size = getattr(item, "nbytes", None)  # arrays and tensors of every library have it
    return size if isinstance(size, int) else None


def _sum(parts: Sequence[Any]) -> int | None:
    if len(parts) > _FEW and size_of(parts[0]) is None:  # a long list of small things
        return None
    sizes = [size for size in map(size_of, parts) if size is not None]
    return sum(sizes) if sizes else None
