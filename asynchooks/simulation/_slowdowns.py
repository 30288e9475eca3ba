"""Times in which a worker computes slower, from one moment to another."""

from __future__ import annotations


class Slowdowns:
    """Factors by span of virtual time; where spans overlap, all of their factors hold."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, float]] = []

    def add(self, begin: float, end: float, factor: float) -> None:
        """From `begin` to `end`, in virtual seconds, work takes `factor` times as long."""
        self._spans.append((begin, end, factor))

    def stretch(self, start: float, secs: float) -> float:
        """How long work of so many seconds takes when it is begun at `start`."""
        edges = sorted({edge for begin, end, _ in self._spans for edge in (begin, end)})
        now, left = start, secs
        for edge in edges:
            if edge <= now:
                continue
            factor = self._factor(now)
            if now + left * factor <= edge:
                return now + left * factor - start
            left -= (edge - now) / factor
            now = edge
        return now + left * self._factor(now) - start

    def _factor(self, time: float) -> float:
        product = 1.0
        for begin, end, factor in self._spans:
            if begin <= time < end:
                product *= factor
        return product
