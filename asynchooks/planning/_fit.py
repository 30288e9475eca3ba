"""fit: a `Service` from the spans of one kind of work, of one or several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._errors import PlanError
from ._likelihood import (
    LEAST_SPREAD,
    Posterior,
    WorkDensity,
    places_by_weight,
    posterior_of,
    weights_beside_cut,
)
from ._queue import MAX_SERVERS, serve
from ._scipy import stats
from ._service import Dependence, Evidence, Service, SizeLaw
from ._spans import Floats, LoadPath, Spans

_SURE_FREE = 0.1
"""Below this probability that work does not depend on the load, it is taken to depend on it."""
_QUEUE_MARGIN = 5.0
"""By how much the logarithm of its likelihood must be greater than without a queue."""
_FIRST = 5000
"""Spans of a recording by which numbers of servers are tried: by all, a fit of 50,000 spans would
take twice as long."""
_LEAST_SERVICE = 0.02
"""Of the median: less is what jitter leaves of a time of service."""
_FEW = 10
"""From as many samples on, how work depends on the load can be fitted."""
_COMMON = 2.5
"""The variance between times over that within them, from which on all are slow together."""
_SURE = 4.0
"""Standard deviations, from which on a deviation is no chance."""


def fit(recordings: Sequence[Spans], name: str) -> Service:
    """How long work of one kind takes, and on what it depends.

    Args:
        recordings: the spans of each run, those that were cut included.
        name: of the kind of work.

    Raises:
        PlanError: no span was recorded, or all were cut.
    """
    runs = [each for each in recordings if len(each)]
    if not any((~each.is_cut).any() for each in runs):
        num = sum(map(len, runs))
        why = f"all {num} spans were cut" if num else "no span was recorded"
        raise PlanError(
            f"how long {name!r} takes is not known: {why}; record a run in which some of it ends"
        )
    recorded = _Recorded(runs)
    is_own, whole, loads = recorded.is_own, recorded.whole, recorded.loads
    num, has_load = len(recorded.secs), bool(loads.max() > 1)
    posterior = queue = None
    if num >= _FEW and has_load and not is_own:
        posterior = recorded.posterior()
        queue = recorded.best_queue(posterior.log_likelihood + _QUEUE_MARGIN)
    dependence, slowdown, is_censoring = Dependence.FREE, 0.0, recorded.is_cut
    if queue is not None:
        dependence, posterior = Dependence.QUEUE, None
        every, is_censoring = queue.services, recorded.is_cut & queue.is_served
    else:
        if posterior is not None and posterior.free < _SURE_FREE:
            dependence, slowdown = Dependence.SHARED, posterior.mean
        every = recorded.every_work(slowdown)
    works, cut = every[whole], every[is_censoring]
    residuals = recorded.density.residuals(works)
    workers = np.full(len(every), -1)
    if is_own and _do_workers_differ(residuals, recorded.workers[whole]):
        workers = recorded.workers
    own = workers[whole]
    kept = np.empty(num, np.int64)  # the place of each sample among what ended, by its weight
    for worker in np.unique(own):
        places = np.flatnonzero(own == worker)
        residuals[places] -= residuals[places].mean()
        weights = weights_beside_cut(works[places], cut[workers[is_censoring] == worker])
        kept[places] = places[places_by_weight(weights)]
    parts = recorded.by_run(residuals)
    sizes = recorded.sizes[kept]
    law, known_sizes = SizeLaw.of(works[kept], sizes), sizes[np.isfinite(sizes)]
    slowness = max(map(_common_slowness, recorded.begun, parts))
    load_low, load_high = np.quantile(loads, (0.01, 0.99)).tolist()
    low, high = (0.0, 1.0) if posterior is None else posterior.interval
    longest, share = float(works.max()), len(cut) / (num + len(cut))
    beyond = np.count_nonzero(cut >= longest) / (num + len(cut))
    may_share = queue is None and not is_own
    notes = {
        f"{100 * share:.0f} % of it was cut, so it is longer than what was seen": share >= 0.01,
        f"{100 * beyond:.0f} % was cut after more than {longest:.3g} s, the longest that "
        "ended: how much longer it takes is not known": beyond > 0.01,
        f"all of it was slow at the same times, or it drifted (F {slowness:.1f}, 1.0 by chance), "
        "and it is drawn without regard to that: rates may be off by 10 %": slowness > _COMMON,
        "how several would share it is not known; record a run with more under way": may_share
        and not has_load,
        f"the load hardly varied, or too few ended: a slowdown of {low:.2g} to {high:.2g} for "
        "each further one is as likely; record another load as well": may_share
        and has_load
        and high - low > max(0.05, 0.5 * low),
        f"only {num} ended; {_FEW} are the least for a law": num < _FEW,
        f"only size {known_sizes.max(initial=0.0):g} was recorded, so it is not known how it "
        "depends on the size": law is None and len(known_sizes) > 0,
    }
    return Service(
        name,
        dependence,
        works[kept],
        sizes,
        own[kept],
        slowdown=slowdown,
        num_servers=1 if queue is None else queue.num_servers,
        is_own=is_own,
        load_low=load_low,
        load_high=load_high,
        size_law=law,
        slowdown_low=low,
        slowdown_high=high,
        is_slow_together=slowness > _COMMON,
        num_cut=int(np.count_nonzero(recorded.is_cut)),
        notes=tuple(note for note, holds in notes.items() if holds),
        evidence=Evidence(
            lambda slowdown: recorded.every_work(slowdown)[whole][kept],
            posterior,
            _block_length(_autocorrelation(parts), num),
        ),
    )


class _Queue(NamedTuple):
    num_servers: int
    services: Floats
    """Of all spans, >= 0."""
    is_served: NDArray[np.bool_]
    log_likelihood: float


class _Recorded:
    """The columns of all runs, and how likely they are by each law."""

    def __init__(self, runs: Sequence[Spans]) -> None:
        self.runs = runs
        self.paths = [LoadPath(each) for each in runs]
        every = Spans.joined(runs, in_order=False)
        self.is_cut, self.workers, whole = every.is_cut, every.worker, ~every.is_cut
        self.whole, self.sizes = whole, every.size[whole]
        self.is_own = bool((self.workers >= 0).all())
        self.loads = np.concatenate([each.at_begin for each in self.paths])
        self.begun = [each.begun[~each.is_cut] for each in runs]
        self.secs = self.every_work(0.0)[whole]
        self.density = WorkDensity(self.sizes)

    @cached_property
    def are_even(self) -> bool:
        """Whether all took as long, as far as durations are known."""
        return float(self.density.residuals(self.secs).std()) < LEAST_SPREAD

    def every_work(self, slowdown: float) -> Floats:
        """Of all spans, those that were cut included."""
        return np.concatenate([each.work(slowdown) for each in self.paths])

    def log_likelihood(self, slowdown: float) -> float:
        works = self.every_work(slowdown)
        if self.are_even:
            # ends a clock's jitter apart show only in which order they were seen, not the load
            speeds = np.maximum(works[self.whole], 1e-12) / np.maximum(self.secs, 1e-12)
        else:
            every = np.concatenate([each.speed_at_end(slowdown) for each in self.paths])
            speeds = every[self.whole]
        return self.density.log_likelihood(works[self.whole], works[self.is_cut]) + float(
            np.log(speeds).sum()
        )

    def by_run(self, column: Floats) -> list[Floats]:
        """A column of what has ended, of each run, about its mean."""
        parts = np.split(column, np.cumsum([len(each) for each in self.begun])[:-1])
        return [each - each.mean() if len(each) else each for each in parts]

    def posterior(self) -> Posterior:
        def tempering(slowdown: float) -> float:
            residuals = self.density.residuals(self.every_work(slowdown)[self.whole])
            correlation = max(_autocorrelation(self.by_run(residuals)), 0.0)
            # by how much the variance of a mean is less where samples are independent
            return (1.0 - correlation) / (1.0 + correlation)

        return posterior_of(self.log_likelihood, tempering)

    def best_queue(self, least: float) -> _Queue | None:
        """The queue that is most likely, if the logarithm of its likelihood is greater."""
        most_servers = min(MAX_SERVERS, int(self.loads.max()) - 1)
        first = _Recorded([each.pick(np.arange(min(len(each), _FIRST))) for each in self.runs])
        tried = [each for num in range(most_servers) if (each := first._queue(num + 1)) is not None]
        if not tried:
            return None
        # of those that are as likely the first, with the least: the others never had a queue
        likely = max(tried, key=lambda each: round(each.log_likelihood, 6))
        found = self._queue(likely.num_servers)
        return found if found is not None and found.log_likelihood > least else None

    def _queue(self, num_servers: int) -> _Queue | None:
        """So many servers, with how likely they are; None if the spans contradict them."""
        served = [each for run in self.runs if (each := serve(run, num_servers)) is not None]
        if len(served) < len(self.runs) or not self.whole.any():
            return None
        every = np.concatenate([each.secs for each in served])
        is_served = np.concatenate([each.is_served for each in served])
        secs = every[self.whole]
        least = max(_LEAST_SERVICE * float(np.median(secs)), 1e-9)
        likelihood = self.density.log_likelihood(
            np.maximum(secs, least), every[self.is_cut & is_served]
        ) + sum(each.log_likelihood for each in served)
        return _Queue(num_servers, np.maximum(every, 0.0), is_served, likelihood)


# What residuals say that the law leaves out


def _autocorrelation(residuals: Sequence[Floats]) -> float:
    """Of each with the one before it, in [-0.9, 0.9]; 0.0 if there are few."""
    num = sum(len(each) for each in residuals)
    total = sum(float(each @ each) for each in residuals)
    if num <= 30 or total <= 0.0:
        return 0.0
    lagged = sum(float(each[1:] @ each[:-1]) for each in residuals)
    return min(max(lagged / total, -0.9), 0.9)


def _block_length(correlation: float, num: int) -> int:
    """How many samples in a row a bootstrap draws: Politis and White's rule for such a process."""
    if num <= 30 or correlation <= 3.0 / math.sqrt(num):
        return 1
    persistence = 2.0 * correlation / (1.0 - correlation * correlation)
    return max(2, round(1.1 * math.cbrt(num) * math.cbrt(persistence) ** 2))


def _variance_ratio(groups: Sequence[Floats]) -> tuple[float, float]:
    """(The variance between groups over that within, 1 if they are alike; by how many sigma)."""
    num, total = len(groups), sum(map(len, groups))
    if num < 2 or total <= num:
        return 1.0, 0.0
    mean = float(np.concatenate(groups).mean())
    between = sum(len(each) * (float(each.mean()) - mean) ** 2 for each in groups) / (num - 1)
    within = sum(len(each) * float(each.var()) for each in groups) / (total - num)
    if within <= 0.0:
        return (math.inf, math.inf) if between > 0.0 else (1.0, 0.0)
    ratio = between / within
    return ratio, float(stats.norm.isf(stats.f.sf(ratio, num - 1, total - num)))


def _common_slowness(begun: Floats, residuals: Floats) -> float:
    """The greatest variance between bins of time over that within them, if it is no chance."""
    found = 1.0
    secs = float(begun[-1] - begun[0]) if len(begun) else 0.0
    if len(begun) <= 60 or secs <= 0.0 or float(residuals.std()) < LEAST_SPREAD:
        return found
    for num_bins in (100, 40, 16):
        bins = np.minimum(((begun - begun[0]) / secs * num_bins).astype(int), num_bins - 1)
        parts = np.split(residuals, np.flatnonzero(np.diff(bins)) + 1)
        groups = [each for each in parts if len(each) >= 5]
        ratio, sigmas = _variance_ratio(groups)
        if len(groups) >= 5 and sigmas > _SURE:
            found = max(found, ratio)
    return found


def _do_workers_differ(residuals: Floats, workers: NDArray[np.int64]) -> bool:
    """Whether workers differ in speed, beyond chance."""
    known = np.unique(workers)
    if len(known) < 2 or len(residuals) <= 4 * len(known):
        return False
    groups = [residuals[workers == each] for each in known]
    return _variance_ratio(groups)[1] > 3.5
