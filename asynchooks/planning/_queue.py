"""The times of service that a queue implies, first come first served by so many servers."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._scipy import special
from ._spans import Floats, Spans

MAX_SERVERS = 16
_PLAUSIBLE = 0.97
"""At least; a handful out of order is what the jitter of an event loop makes."""
_JITTER_SECS = 5e-4
"""How late an event loop may see a beginning or an end, in seconds."""
_NO_TIME = 0.02
"""Of the mean: a service that took less did not take a turn of its own."""
_MOST_WITHOUT_TIME = 0.5
"""Share of those that waited. Work that takes as long each time, begun together, ends together, as
if a queue had done one of all and then the others at once: their services are the jitter of clocks,
whose density is greater than that of any time which work takes."""
_MANY_WINDOWS = 16
"""Windows without overlap, from which on their spread is known well enough to compare it."""
_UNEVEN = 0.15
"""Relative spread of shuffled windows: below it, what services differ by may be the jitter of
clocks, which evens out as well."""
_LEAST_RATIO = 0.3
"""Of the spread of windows to that of shuffled ones, which is 1 but for chance where a queue has
done independent work. Work that does not queue, of clients in step, has less than 0.25."""


_CONTRADICTION = math.log(0.03) + math.log(0.02)
"""What a span that contradicts a queue adds to its log-likelihood: as one of 3 % of any length."""


class Served(NamedTuple):
    """What a queue would have done with the spans of a recording."""

    secs: Floats
    """float64, shape (n,): of service; below 0 where the spans contradict the queue."""
    is_served: NDArray[np.bool_]
    """bool, shape (n,): False of spans that were cut before a server was free for them."""
    log_likelihood: float
    """What the order of the spans adds to the logarithm of the likelihood of these times."""


def _do_even_out(services: Floats, num_together: int) -> bool:
    """Whether services of very different lengths add up to about the same, turn after turn.

    Clients in step, of which none waits for another, look like a queue: one takes all the time, and
    the others end just after it. But each of their spans takes as long, and so does each window of
    as many services as there are clients. Independent services have no such order.
    """
    if len(services) < _MANY_WINDOWS * num_together:
        return False
    windows = _spread(services, num_together)
    # shuffled by a seed of its own, so that a fit gives the same each time
    shuffled = _spread(np.random.default_rng(0).permutation(services), num_together)
    usual = num_together * float(services.mean())
    return shuffled > _UNEVEN * usual and windows < _LEAST_RATIO * shuffled


def _spread(services: Floats, length: int) -> float:
    """Between the quartiles of the sums of so many in a row: a stall of a machine counts little."""
    sums = np.concatenate([[0.0], np.cumsum(services)])
    low, high = np.quantile(sums[length:] - sums[:-length], (0.25, 0.75))
    return float(high - low)


def serve(spans: Spans, num_servers: int) -> Served | None:
    """The times of service of spans, if so many servers have done them in order.

    None unless those that had to wait took turns, and hardly one contradicts the queue.
    """
    ended = np.maximum(spans.ended, spans.begun)
    order = np.lexsort((ended, spans.begun))  # of equal beginnings the first to end came first
    begun, ends, is_cut = spans.begun[order], ended[order], spans.is_cut[order]
    starts, is_served = np.empty(len(order)), np.ones(len(order), np.bool_)
    free_at = [-math.inf] * num_servers
    for place, (came, left, was_cut) in enumerate(
        zip(begun.tolist(), ends.tolist(), is_cut.tolist(), strict=True)
    ):
        start = max(came, free_at[0])
        starts[place] = start
        if was_cut and start >= left:
            is_served[place] = False  # it left the queue
        else:
            heapq.heapreplace(free_at, left)
    in_turn = ends - starts
    waited = (starts > begun) & ~is_cut
    slack = min(_JITTER_SECS, 0.2 * float(np.median(np.abs(in_turn))))
    at_once = waited & (in_turn < _NO_TIME * float(np.maximum(in_turn, 0.0).mean()))
    num_contradict, num_waited = int((waited & (in_turn < -slack)).sum()), int(waited.sum())
    together = np.arange(1, len(order) + 1) - np.searchsorted(np.sort(ends), begun, "right")
    if (
        num_contradict > (1.0 - _PLAUSIBLE) * num_waited
        or at_once.sum() > _MOST_WITHOUT_TIME * num_waited
        or _do_even_out(in_turn[~is_cut], max(1, int(together.max())))
    ):
        return None
    as_given = np.argsort(order)
    # spans with equal beginnings are in the order that suits a queue best, by chance one of as many
    nums = np.unique(begun, return_counts=True)[1]
    likelihood = num_contradict * _CONTRADICTION - float(special.gammaln(nums + 1.0).sum())
    return Served(in_turn[as_given], is_served[as_given], likelihood)
