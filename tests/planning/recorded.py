"""Spans of small simulated services, whose truth is known."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from asynchooks.planning._service import Dependence
from asynchooks.planning._spans import Floats, Spans


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
    rests = np.zeros(len(works)) if pauses is None else pauses
    clock = done = 0.0
    comes = [(float(rest), client) for client, rest in enumerate(rests[:num_clients])]
    heapq.heapify(comes)
    shares: list[tuple[float, int]] = []  # (where the clock of work is at the end, span)
    queue: list[int] = []
    begun: list[float] = []
    ended = np.full(len(works) + num_clients, np.nan)
    num_begun = num_ended = 0

    def speed() -> float:
        return 1.0 / (1.0 + slowdown * (len(shares) - 1)) if shares else 1.0

    def begin(span: int) -> None:
        heapq.heappush(shares, (done + float(works[span % len(works)]), span))

    is_queue = dependence is Dependence.QUEUE
    while num_ended < len(works):
        ends = clock + max(0.0, shares[0][0] - done) / speed() if shares else math.inf
        now = min(ends, comes[0][0] if comes else math.inf)
        if now > until:
            break
        done += (now - clock) * speed()
        clock = now
        if now == ends:
            span = heapq.heappop(shares)[1]
            ended[span] = now
            rest = float(rests[(num_clients + num_ended) % len(works)])
            heapq.heappush(comes, (now + rest, span))
            num_ended += 1
            if queue:
                begin(queue.pop(0))
            continue
        heapq.heappop(comes)
        if num_begun == len(ended):
            continue
        begun.append(now)
        if is_queue and len(shares) >= num_servers:
            queue.append(num_begun)
        else:
            begin(num_begun)
        num_begun += 1
    ended = ended[:num_begun]
    is_cut = np.isnan(ended)
    return Spans.of(np.array(begun), np.where(is_cut, min(until, clock), ended), is_cut=is_cut)


def lognormal(rng: np.random.Generator, num: int, mean: float = 0.5, spread: float = 0.5) -> Floats:
    """Work of this mean, in seconds."""
    return rng.lognormal(math.log(mean) - spread**2 / 2, spread, num)


def with_columns(
    spans: Spans, *, size: Floats | None = None, worker: NDArray[np.int64] | None = None
) -> Spans:
    """The same spans, in their order, with these columns."""
    return Spans.of(
        spans.begun,
        spans.ended,
        size=spans.size if size is None else size,
        worker=spans.worker if worker is None else worker,
        is_cut=spans.is_cut,
    )
