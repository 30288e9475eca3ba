"""Service: how long work of one kind takes, as fitted to its spans. `_fit.py` makes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ._likelihood import Posterior
from ._spans import Floats, shared_speed

_HEAVY = 0.05
"""Share of all work that its longest hundredth is: above it the longest samples are looked at."""
_NUM_LONGEST = 5
"""Samples of which few enough were seen that others may come."""


class Dependence(Enum):
    """On what else the duration of work depends.

    Example:
        slow = [each for each in plan.services.values() if each.dependence is Dependence.SHARED]
        print([each.name for each in slow])
    """

    FREE = "free"
    """On nothing: each takes as long alone as among others, or has a machine of its own."""
    SHARED = "shared"
    """On the load: n under way share the speed of the service."""
    QUEUE = "queue"
    """It waits for one of so many servers, first come first served."""

    @property
    def is_queue(self) -> bool:
        return self is Dependence.QUEUE


class Beyond(Enum):
    """What is assumed of a shared service at a load that was not recorded.

    More work at a time never makes less come out, and each further piece adds no more than the one
    before it. So what comes out lies between two lines that begin where the recorded load ends.
    """

    LAW = "law"
    """What was fitted goes on."""
    BEST = "best"
    """Above the recorded load each piece adds as much as the last one that was seen."""
    WORST = "worst"
    """Above the recorded load no more comes out; below it, in proportion to the load."""


@dataclass(frozen=True, eq=False)
class SizeLaw:
    """The work of an input: `(base_secs + secs_per_unit * size)` times a ratio that is drawn.

    Example:
        law = SizeLaw.of(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0]))
        print(law.secs(40.0))
    """

    base_secs: float
    """Of an input of size 0, >= 0."""
    secs_per_unit: float
    """For each unit of size, >= 0."""
    ratios: Floats
    """float64, shape (n,): of each sample to the line."""

    @classmethod
    def of(cls, works: Floats, sizes: Floats) -> SizeLaw | None:
        """The line through samples; None if less than two sizes are known, so there is none.

        The spread of work grows with its mean as a rule, so deviations count relative to the line.
        Both coefficients are >= 0. A sample without a size counts as one of the median size.
        """
        is_known = np.isfinite(sizes)
        known, secs = sizes[is_known], works[is_known]
        if not len(known) or known.min() == known.max():
            return None
        scale = float(known.max())  # so that both coefficients are of one magnitude
        columns = np.stack([np.ones(len(known)), known / scale], 1)
        weights, line = np.ones(len(known)), np.zeros(2)
        for _ in range(3):
            line = _line(columns * weights[:, None], secs * weights)
            fitted = columns @ line
            weights = 1.0 / np.maximum(fitted, 0.02 * float(fitted.max()) or 1.0)
        base, slope = line.tolist()
        means = base + slope * np.where(is_known, sizes, np.median(known)) / scale
        ratios = np.divide(works, means, out=np.ones(len(works)), where=means > 1e-12)
        return cls(base, slope / scale, ratios)

    def secs(self, size: float) -> float:
        """The mean work of this size, in seconds."""
        return self.base_secs + self.secs_per_unit * size


def _line(columns: Floats, secs: Floats) -> Floats:
    """(Base, slope), both >= 0, of least squares.

    SciPy's `nnls` is not used: that of 1.12 gives up where two sizes hardly differ.
    """
    both = cast(Floats, np.linalg.lstsq(columns, secs, rcond=None)[0])
    if both.min() >= 0.0:
        return both
    # else the best has one of them at zero
    products, squares = columns.T @ secs, np.maximum((columns * columns).sum(0), 1e-300)
    alone = np.maximum(products, 0.0) / squares
    return np.where(np.arange(2) == np.argmax(alone * products), alone, 0.0)


class Evidence(NamedTuple):
    """What samples were made of, so that other samples can be made that are as likely."""

    samples: Callable[[float], Floats]
    """The samples, by another slowdown."""
    posterior: Posterior | None
    """Of the slowdown; None where it cannot be known, or does not matter."""
    block: int
    """How many samples in a row depend on each other."""


@dataclass(frozen=True, eq=False)
class Service:
    """What a plan draws work from. Work is seconds at the speed of one alone, without a queue.

    Example:
        for service in plan.services.values():
            print(service, *service.notes, sep="\\n")
    """

    name: str
    """Of the kind of work."""
    dependence: Dependence
    """On what else its duration depends."""
    samples: Floats
    """float64, shape (n,): work."""
    sizes: Floats
    """float64, shape (n,): sizes, of the output drawn with the samples; NaN if there are none."""
    workers: NDArray[np.int64]
    """int64, shape (n,): whose each sample is; -1 if workers are alike, or not named."""
    slowdown: float = 0.0
    """Of SHARED: each of n goes at speed 1 / (1 + slowdown * (n - 1)); 1: one processor."""
    num_servers: int = 1
    """Of QUEUE."""
    is_own: bool = False
    """Whether each worker does it on a machine of its own."""
    load_low: float = 1.0
    """How many were under way as work began, at least, but for 1 % of the spans."""
    load_high: float = 1.0
    """The load that was seen when work began: 1 % and 99 % of the spans."""
    size_law: SizeLaw | None = None
    """What a plan goes by where sizes are of inputs; None if less than two sizes were recorded."""
    slowdown_low: float = 0.0
    """The least slowdown that the spans allow."""
    slowdown_high: float = 1.0
    """Unless QUEUE: between which slowdowns the truth is at 90 %, as far as the load says."""
    is_slow_together: bool = False
    """Whether all work was slow at the same times, which no draw knows of."""
    beyond: Beyond = Beyond.LAW
    """What is assumed of the speed outside of the load that was recorded."""
    num_cut: int = 0
    """Spans that were cut, whose weight the longer samples have."""
    notes: tuple[str, ...] = field(default=())
    """What a reader must know: cuts, few samples, slowness of all at the same times, drift."""
    evidence: Evidence | None = field(default=None, repr=False)
    """What the samples were made of, for `resampled`."""

    @property
    def is_bracketed(self) -> bool:
        """Whether it may be shared, and not as the law says outside of the recorded load."""
        is_one_by_one = self.is_own or self.dependence.is_queue
        return self.beyond is not Beyond.LAW and not is_one_by_one

    def speed(self, num: float) -> float:
        """Of each of so many that are under way, >= 1, relative to one alone."""
        is_above = num > self.load_high
        if not self.is_bracketed or (self.load_low <= num and not is_above):
            return self._law(num)
        edge = max(1.0, self.load_high if is_above else self.load_low)
        if self.beyond is Beyond.WORST:
            gain = 0.0 if is_above else 1.0 / edge
        else:
            slowdown = min(1.0, self.slowdown_low if is_above else self.slowdown_high)
            gain = (1.0 - slowdown) / (edge * (1.0 + slowdown * (edge - 1.0)))
        return edge * self._law(edge) * max(0.0, 1.0 + gain * (num - edge)) / num

    def _law(self, num: float) -> float:
        if self.dependence is not Dependence.SHARED:
            return 1.0
        return float(shared_speed(np.array([num]), self.slowdown)[0])

    def size_range(self) -> tuple[float, float]:
        """Between which sizes were recorded, 1 % and 99 % of them; NaN if none was."""
        known = self.sizes[np.isfinite(self.sizes)]
        if not len(known):
            return math.nan, math.nan
        low, high = np.quantile(known, (0.01, 0.99))
        return float(low), float(high)

    def known_workers(self) -> NDArray[np.int64]:
        """The numbers of those that have samples of their own, int64, shape (k,)."""
        return np.unique(self.workers[self.workers >= 0])

    @property
    def is_heavy(self) -> bool:
        """Whether the longest hundredth of the samples is much of all work."""
        longest = np.sort(self.samples)[-max(1, len(self.samples) // 100) :]
        return len(self.samples) >= 20 and bool(longest.sum() > _HEAVY * self.samples.sum())

    def without_longest(self) -> Service:
        """The same, with the longest samples no longer than the one after them."""
        law = self.size_law
        if law is not None:
            law = replace(law, ratios=_cut_down(law.ratios))
        return replace(self, samples=_cut_down(self.samples), size_law=law)

    def resampled(self, rng: np.random.Generator) -> Service:
        """What another recording of as many spans might have given: a bootstrap.

        The slowdown is drawn from its posterior, samples are drawn again (in blocks, where they
        depend on those before them; of each worker its own, where workers differ), and the law of
        sizes is fitted again.
        """
        evidence, law = self.evidence, self.size_law
        dependence, slowdown, samples = self.dependence, self.slowdown, self.samples
        if evidence is not None and evidence.posterior is not None:
            slowdown = evidence.posterior.draw(rng)
            dependence = Dependence.SHARED if slowdown > 0.0 else Dependence.FREE
            samples = evidence.samples(slowdown)
        places = self._places(rng)
        samples, sizes = samples[places], self.sizes[places]
        if law is not None:  # the old line if only one size was drawn
            law = SizeLaw.of(samples, sizes) or replace(law, ratios=law.ratios[places])
        return replace(
            self,
            dependence=dependence,
            slowdown=slowdown,
            samples=samples,
            sizes=sizes,
            workers=self.workers[places],
            size_law=law,
            evidence=None,
        )

    def _places(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Places of samples that are drawn again, of each worker as many as it has."""
        block = 1 if self.evidence is None else self.evidence.block
        drawn = np.empty(len(self.samples), np.int64)
        for worker in np.unique(self.workers):
            own = np.flatnonzero(self.workers == worker)
            num = len(own)
            firsts = rng.integers(num, size=-(-num // block))
            chosen = (firsts[:, None] + np.arange(block)).ravel()[:num] % num
            drawn[own] = own[chosen]
        return drawn

    def __str__(self) -> str:
        cut = f", {self.num_cut} cut" if self.num_cut else ""
        parts = [
            f"{self.name}: {len(self.samples):,} spans{cut}",
            f"mean {_secs(float(self.samples.mean()))}",
            f"99 % below {_secs(float(np.quantile(self.samples, 0.99)))}",
            self.law_words(),
        ]
        if self.size_law is not None:
            law, (low, high) = self.size_law, self.size_range()
            parts.append(
                f"{_secs(law.base_secs)} + {law.secs_per_unit:.3g} s for each unit of size, "
                f"recorded {low:g} to {high:g}"
            )
        parts.append(f"load {self.load_low:.0f} to {self.load_high:.0f}")
        return "; ".join(parts)

    def law_words(self) -> str:
        """Its dependence, in words."""
        interval = f"[{self.slowdown_low:.2g}, {self.slowdown_high:.2g}]"
        if self.dependence.is_queue:
            many = "s" if self.num_servers > 1 else ""
            return f"queue for {self.num_servers} server{many}, first come first served"
        if self.is_own:
            num = len(self.known_workers())
            return f"own machines, of {num} speeds" if num else "own machines, all alike"
        if self.dependence is Dependence.SHARED:
            return f"shared, slowdown {self.slowdown:.3g} {interval} for each further one"
        if self.load_high <= 1.0:
            return "seen one at a time"
        return f"free of the load, slowdown 0 {interval}"


def _cut_down(samples: Floats) -> Floats:
    different = np.unique(samples)
    capped: Floats = np.minimum(samples, different[max(0, len(different) - 1 - _NUM_LONGEST)])
    return capped


def _secs(secs: float) -> str:
    return f"{secs:.3g} s" if secs >= 0.1 or secs == 0.0 else f"{1e3 * secs:.3g} ms"
