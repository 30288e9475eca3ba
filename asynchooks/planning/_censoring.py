"""Weights of samples beside others that were cut: those would have been longer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ._spans import Floats


def kaplan_meier(samples: Floats, cut: Floats) -> Floats:
    """The weight of each sample, float64, shape (n,), of sum 1.0: Kaplan and Meier (1958).

    The weight of each that was cut moves to the samples that are longer than it. Where there is
    none, it moves to the longest.

    Args:
        samples: what was seen whole, at least one.
        cut: of the others at least so much.
    """
    every = np.concatenate([samples, cut])
    is_seen = np.zeros(len(every))
    is_seen[: len(samples)] = 1.0
    order = np.lexsort((1.0 - is_seen, every))  # what was cut at a time was longer than it
    seen = is_seen[order]
    share = seen / np.arange(len(every), 0, -1)
    left = np.cumprod(1.0 - share)
    before = np.concatenate([[1.0], left[:-1]])
    weights = np.empty(len(every))
    weights[order] = before * share
    weights[int(np.argmax(samples))] += left[-1]
    return weights[: len(samples)]


def places_by_weight(weights: Floats) -> NDArray[np.int64]:
    """As many places as there are weights, in order, each about as often as it weighs."""
    num = len(weights)
    sums = np.cumsum(weights)
    return np.searchsorted(sums / sums[-1], (np.arange(num) + 0.5) / num).astype(np.int64)
