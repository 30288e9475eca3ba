"""Spans of small simulated services, whose truth is known."""

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# private: a trace that is made by hand, of spans whose truth is known, names their kind
from asynchooks._engine.recording import Kind
from asynchooks.planning import Dependence, Spans, Trace

Floats = NDArray[np.float64]


def simulated(
    dependence: Dependence,
    works: Floats,
    *,
    num_clients: int = 16,
    slowdown: float = 0.0,
    num_servers: int = 1,
    pauses: Floats | None = None,
    until: float = math.inf,
) -> Spans:
    """Clients that ask for one piece of work after the other, each after a pause of its own.

    What is under way as the last one of `works` has ended, or at `until`, is cut.
    """
    rests = itertools.cycle([0.0] if pauses is None else pauses.tolist())
    comes = sorted(next(rests) for _ in range(num_clients))
    clock = done = 0.0
    shares: list[tuple[float, int]] = []  # (where the clock of work is at the end, span)
    most = num_servers if dependence is Dependence.QUEUE else num_clients
    queue: list[int] = []
    begun: list[float] = []
    ended: dict[int, float] = {}
    while len(ended) < len(works):
        speed = 1.0 / (1.0 + slowdown * max(0, len(shares) - 1))
        ends = clock + max(0.0, shares[0][0] - done) / speed if shares else math.inf
        now = min([ends, *comes[:1]])
        if now > until:
            break
        done += (now - clock) * speed
        clock = now
        if now == ends:
            ended[heapq.heappop(shares)[1]] = now
            heapq.heappush(comes, now + next(rests))
        else:
            heapq.heappop(comes)
            queue.append(len(begun))
            begun.append(now)
        while queue and len(shares) < most:
            span = queue.pop(0)
            heapq.heappush(shares, (done + float(works[span % len(works)]), span))
    is_cut = np.array([span not in ended for span in range(len(begun))])
    ends_at = [ended.get(span, min(until, clock)) for span in range(len(begun))]
    return Spans.of(np.array(begun), np.array(ends_at), is_cut=is_cut)


def with_spans(trace: Trace, kind: str, spans: dict[str, Spans]) -> Trace:
    """The trace with these spans of one kind, by name, in place of its own."""
    return replace(trace, spans={**trace.spans, Kind(kind): spans})


def trace_of_work(name: str, spans: Spans, **about: Any) -> Trace:
    """A trace of timed work alone."""
    return with_spans(Trace({}, about=about), "work", {name: spans})


def spans_of(trace: Trace, kind: str) -> Mapping[str, Spans]:
    """Its spans of one kind, by name; none if nothing was recorded."""
    return {each.value: found for each, found in trace.spans.items()}.get(kind, {})


def lognormal(rng: np.random.Generator, num: int, mean: float = 0.5, spread: float = 0.5) -> Floats:
    """Work of this mean, in seconds."""
    return rng.lognormal(math.log(mean) - spread**2 / 2, spread, num)
