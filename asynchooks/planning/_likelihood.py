"""How likely durations are: densities of work, and what the load says of a slowdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ._scipy import special, stats
from ._spans import Floats

LEAST_SPREAD = 5e-3
"""Relative: clocks and event loops make durations differ by as much where work does not."""
_LEAST_WORK = 1e-3
"""Of the median: less is within the resolution of clocks, and must not outweigh all else."""
_COARSE = np.array([0.0, *np.geomspace(0.002, 1.0, 20)])
_NUM_SIZES = 5
"""From more sizes on, the density depends on them."""
_NONE = np.zeros(0)


class WorkDensity:
    """The density of work given its size: log-normal or gamma, whichever fits better.

    The gamma family has exponential work, which a log-normal density alone takes for other work:
    its shortest samples would outweigh all others.

    Args:
        sizes: float64, shape (n,), of the samples; not used if some are NaN or few differ.
    """

    def __init__(self, sizes: Floats) -> None:
        columns = [np.ones(len(sizes))]
        if np.isfinite(sizes).all() and len(np.unique(sizes)) > _NUM_SIZES:
            # a parabola in this is close to the logarithm of an affine law
            # most may be 0, or next to nothing beside the others
            scale = max(float(np.median(sizes)), 1e-6 * float(sizes.max()))
            column = np.log1p(sizes / scale)
            columns += [column, column * column]
        self._basis = np.linalg.qr(np.stack(columns, 1))[0]

    def residuals(self, works: Floats) -> Floats:
        """The logarithm of each to what is usual for its size."""
        return self._split(works)[1]

    def log_likelihood(self, works: Floats, cut: Floats = _NONE) -> float:
        """Of all works, and of others that were at least so long when they were cut, in seconds.

        Without those that were cut, the longest would be missing, and more so the more were under
        way as a recording ended: that alone looks like a dependence on the load.
        """
        logs, residuals = self._split(works)
        usual = logs - residuals
        # their size is not known, so the usual work is as uncertain as sizes are
        censored = np.log(np.maximum(cut, _least(works))) - float(usual.mean())
        weights = np.full(len(works), 1.0 / len(works))
        if len(cut):  # else a fit would take three times as long
            weights = weights_beside_cut(residuals, censored)
        return max(
            _normal(residuals, censored, weights, float(usual.var())),
            _gamma(residuals, censored, weights),
        ) - float(logs.sum())

    def _split(self, works: Floats) -> tuple[Floats, Floats]:
        logs = np.log(np.maximum(works, _least(works)))
        return logs, logs - self._basis @ (self._basis.T @ logs)


def _least(works: Floats) -> float:
    return max(_LEAST_WORK * float(np.median(works)), 1e-9)


def _normal(residuals: Floats, cut: Floats, weights: Floats, variance_of_sizes: float) -> float:
    """The log-likelihood of a normal density with the moments of the weighted residuals."""
    mean = float(weights @ residuals)
    spread = max(math.sqrt(weights @ (residuals - mean) ** 2), LEAST_SPREAD)
    known = float(stats.norm.logpdf(residuals, mean, spread).sum())
    wide = math.sqrt(spread**2 + variance_of_sizes)
    return known + float(special.log_ndtr((mean - cut) / wide).sum())


def _gamma(residuals: Floats, cut: Floats, weights: Floats) -> float:
    """The same of a gamma density of what residuals are the logarithms of.

    The shape is Minka's (2002) of mean and mean logarithm, to 1.5 %; of what was cut the cube root
    is taken to be normal, as Wilson and Hilferty (1931) do.
    """
    works = np.exp(residuals)
    mean = float(weights @ works)
    gap = max(math.log(mean) - float(weights @ residuals), 0.5 * LEAST_SPREAD**2)
    shape = (3.0 - gap + math.sqrt((gap - 3.0) ** 2 + 24.0 * gap)) / (12.0 * gap)
    known = shape * math.log(shape / mean) - math.lgamma(shape)
    known = len(works) * known + float((shape * (residuals - works / mean)).sum())
    middle, spread = 1.0 - 1.0 / (9.0 * shape), 1.0 / (3.0 * math.sqrt(shape))
    roots = np.exp((cut - math.log(mean)) / 3.0)
    return known + float(special.log_ndtr((middle - roots) / spread).sum())


def weights_beside_cut(samples: Floats, cut: Floats) -> Floats:
    """The weight of each sample, float64, shape (n,), of sum 1.0: Kaplan and Meier (1958).

    The weight of each that was cut moves to the samples that are longer than it. Where there is
    none, it moves to the longest.

    Args:
        samples: what was seen whole, at least one.
        cut: of the others at least so much.
    """
    left = stats.ecdf(stats.CensoredData(uncensored=samples, right=cut)).sf
    values, num = np.unique(samples, return_counts=True)
    after = left.evaluate(values)
    after[-1] = 0.0
    drops = -np.diff(after, prepend=1.0)
    return cast(Floats, (drops / num)[np.searchsorted(values, samples)])


def places_by_weight(weights: Floats) -> NDArray[np.int64]:
    """As many places as there are weights, in order, each about as often as it weighs."""
    num = len(weights)
    sums = np.cumsum(weights)
    return np.searchsorted(sums / sums[-1], (np.arange(num) + 0.5) / num).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Posterior:
    """How probable each slowdown is after a recording; 0.0 has half of the weight before it."""

    slowdowns: Floats
    """float64, shape (k,), increasing; the first is 0.0."""
    weights: Floats
    """float64, shape (k,), of sum 1.0."""
    log_likelihood: float
    """Of the most likely slowdown."""

    @property
    def free(self) -> float:
        """How probable it is that work does not depend on the load."""
        return float(self.weights[0])

    @property
    def mean(self) -> float:
        return float(self.slowdowns @ self.weights)

    @property
    def interval(self) -> tuple[float, float]:
        """Between which slowdowns the truth is at 90 %."""
        low, high = np.interp((0.05, 0.95), np.cumsum(self.weights), self.slowdowns).tolist()
        return low, high

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.choice(self.slowdowns, p=self.weights))


def posterior_of(
    log_likelihood: Callable[[float], float], tempering: Callable[[float], float]
) -> Posterior:
    """The posterior of a slowdown, on a grid that is fine where it has its weight.

    Args:
        log_likelihood: of a slowdown in [0, 1].
        tempering: of the best slowdown: the share of the log-likelihood that counts, in (0, 1].
    """
    known: dict[float, float] = {}

    def look(at: Floats) -> tuple[Floats, Floats]:
        known.update({each: log_likelihood(each) for each in at.tolist() if each not in known})
        found = sorted(known)
        return np.array(found), np.array([known[each] for each in found])

    places, values = look(_COARSE)
    share = tempering(float(places[values.argmax()]))
    for _ in range(3):  # each where the one before has found most of the weight
        near = np.flatnonzero(values.max() - values <= 12.0 / share)
        low, high = places[[max(near[0] - 1, 0), min(near[-1] + 1, len(places) - 1)]]
        places, values = look(np.linspace(low, high, 17))
    # every slowdown is as probable before; each place stands for what is nearest to it
    scaled = np.exp(share * (values - values.max()))
    weights = scaled * np.gradient(places)
    weights[0] += scaled[0]  # none is as probable before as all others together
    return Posterior(places, weights / weights.sum(), float(values.max()))
