"""What a stage counts: items, bytes, how long its calls take, and what it waits for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StageStatistics:
    """Counts of one stage since it was made, and what it waited for while it was open.

    At any moment an open stage waits for one of three: its source, the calls of its function, or
    its consumer; the three shares have the sum 1. Calls are those of the function of `map`,
    `filter`, `map_concurrent` and `rollouts`, and those that make a batch. A stage with several
    calls at a time waits for them while its consumer waits for it and it may read nothing more.

    `print(stage.statistics())` shows the stage and all below as a table.

    Example:
        async with prefetch(batch(records, 32), 2) as batches:
            async for images in batches:
                pass
        found = batches.statistics()
        assert found.num_items == 2
        print(found)  # a table, in which the slowest stage is marked
    """

    stage: str
    """Which function made it."""
    num_items: int
    """Items that it gave out."""
    num_bytes: int | None
    """Bytes of them, where known: arrays, bytes, and tuples, lists and mappings of these."""
    num_failures: int
    """Items that were left out because the call for them failed."""
    open_secs: float
    """Seconds for which it was open."""
    source_share: float
    """Share of these in which it waited for its source, 0 to 1."""
    calls_share: float
    """Share in which it waited for its calls, 0 to 1."""
    consumer_share: float
    """Share in which it waited to be read, 0 to 1."""
    p50_secs: float
    """Seconds that a call took in the median, to about 3 %; NaN where there were no calls."""
    p90_secs: float
    """Seconds within which nine of ten calls ended."""
    p99_secs: float
    """Seconds within which 99 of 100 calls ended."""
    num_buffered: int
    """Items that it holds now."""
    buffer_size: int
    """Items that it holds at most; 0 without a buffer."""
    sources: tuple[StageStatistics, ...]
    """Those of the stages that it reads."""

    @property
    def slowest(self) -> StageStatistics | None:
        """The stage, of this and those below, whose own work takes most of its time.

        Own work are its calls; for one that reads no other stage, it is reading. None where no
        stage has worked. If the last stage waits for its consumer most of the time, even the
        slowest one is fast enough.
        """
        _, found = max(self._walk(), key=lambda each: each[1]._work_share)
        return found if found._work_share > 0 else None

    @property
    def _work_share(self) -> float:
        return self.calls_share if self.sources else self.source_share

    def _walk(self, depth: int = 0) -> Iterator[tuple[int, StageStatistics]]:
        yield depth, self
        for each in self.sources:
            yield from each._walk(depth + 1)

    def __str__(self) -> str:
        slowest = self.slowest
        rows = [_HEADER]
        for depth, each in self._walk():
            mark = "<- slowest" if each is slowest else ""
            rows.append(["  " * depth + each.stage, *each._cells(), mark, each._more()])
        columns = []
        for number, column in enumerate(zip(*rows, strict=True)):
            if any(column[1:]):
                width = max(map(len, column))
                is_text = number in (0, len(_HEADER) - 2, len(_HEADER) - 1)
                columns.append([f"{cell:{'<' if is_text else '>'}{width}}" for cell in column])
        return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))

    def _cells(self) -> list[str]:
        shares = (self.source_share, self.calls_share, self.consumer_share)
        times = (self.p50_secs, self.p90_secs, self.p99_secs)
        return [
            f"{self.num_items:,}",
            "" if self.num_bytes is None else f"{self.num_bytes:,}",
            *[f"{share:.0%}" for share in shares],
            *["" if math.isnan(secs) else f"{1e3 * secs:.3g}" for secs in times],
            f"{self.num_failures:,}" if self.num_failures else "",
            f"{self.num_buffered}/{self.buffer_size}" if self.buffer_size else "",
        ]

    def _more(self) -> str:
        """What else its line says."""
        return ""


_HEADER = [
    "waits for:", "items", "bytes", "source", "calls", "consumer", "p50 ms", "p90 ms", "p99 ms",
    "failed", "held", "", "",
]  # fmt: skip

SOURCE, CALLS, CONSUMER, CLOSED = range(4)
"""What a stage waits for."""

_STEPS = 16
"""Steps of the histogram in which a duration grows by the factor e: each is 6 % wide."""
_LEAST_SECS = 1e-9
_FEW = 8
_SIZELESS = frozenset((int, float, str, bool))


@dataclass(slots=True)
class Clocks:
    """The counters of one stage."""

    num_items: int = 0
    num_bytes: int = -1  # below 0: no item had a size
    num_failures: int = 0
    waits_for: int = CLOSED
    since: float = 0.0
    secs: list[float] = field(default_factory=lambda: [0.0] * 4)
    _calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # by how long

    def shares(self, now: float) -> tuple[float, float, float, float]:
        """Seconds for which it was open, and the shares in which it waited."""
        secs = list(self.secs)
        secs[self.waits_for] += max(0.0, now - self.since)
        total = sum(secs[:CLOSED])
        source, calls, consumer = (each / total if total else 0.0 for each in secs[:CLOSED])
        return total, source, calls, consumer

    def add_call(self, secs: float) -> None:
        self._calls[int(_STEPS * math.log(secs / _LEAST_SECS)) if secs > _LEAST_SECS else 0] += 1

    def quantile(self, part: float) -> float:
        """Seconds within which such a part of the calls ended; NaN where there were none."""
        calls, found = sorted(self._calls.items()), math.nan
        left = part * sum(count for _, count in calls)
        for step, count in calls:
            if left <= 0:
                break
            found = _LEAST_SECS * math.exp((step + 0.5) / _STEPS) if step else 0.0
            left -= count
        return found

    def count(self, items: Sequence[Any]) -> None:
        self.num_items += len(items)
        if len(items) == 1 or not _SIZELESS.issuperset(map(type, items)):
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
    if len(parts) > _FEW and (type(parts[0]) in _SIZELESS or size_of(parts[0]) is None):
        return None  # a long list of small things
    sizes = [size for size in map(size_of, parts) if size is not None]
    return sum(sizes) if sizes else None
