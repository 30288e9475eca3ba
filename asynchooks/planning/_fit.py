"""fit: a `Service` from the spans of one kind of work, of one or several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
from ._queue import MAX_SERVERS, Served, log_num_orders, serve
from ._scipy import stats
from ._service import Dependence, Evidence, Service, SizeLaw
from ._spans import Floats, LoadPath, Spans

_SURE_FREE = 0.1
"""Below this probability that work does not depend on the load, it is taken to depend on it."""
_QUEUE_MARGIN = 5.0
"""By how much the logarithm of its likelihood must be greater than without a queue."""
_SCREENED = 5000
"""Spans of a recording by which numbers of servers are tried."""
_LEAST_SERVICE = 0.02
"""Of the median: less is what jitter leaves of a time of service."""
_CONTRADICTION = math.log(0.03) + math.log(_LEAST_SERVICE)
"""What a span that contradicts a queue adds to its log-likelihood: as one of 3 % of any length."""
_FEW = 10
"""From as many samples on, how work depends on the load can be fitted."""
_COMMON = 2.5
"""The variance between times over that within them, from which on all are slow together."""
_SURE = 4.0
"""Standard deviations, from which on a deviation is no chance."""
_LEAST_DEVIATION = 5e-3
"""Relative: where work differs by less, what is left are the rounding errors of clocks."""
_HEAVY = 2.5
"""Below this tail index, the variance of a recording says little about that of the next one."""
_PER_PLACE = 15
"""Samples for each of P, so that the mean of the longest of P is known to some percent."""


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
        cut = f"all {num} spans were cut" if num else "no span was recorded"
        raise PlanError(
            f"how long {name!r} takes is not known: {cut}; record a run in which some of it ends"
        )
    recorded = _Recorded(runs)
    num, has_load = len(recorded.secs), bool(recorded.loads.max() > 1)
    posterior = queue = None
    if num >= _FEW and has_load and not recorded.is_own:
        posterior, queue = recorded.posterior(), _best_queue(recorded)
        if queue is not None and (queue.log_likelihood <= posterior.log_likelihood + _QUEUE_MARGIN):
            queue = None
    dependence, slowdown, is_censoring = Dependence.FREE, 0.0, recorded.is_cut
    if queue is not None:
        dependence, posterior = Dependence.QUEUE, None
        every, is_censoring = queue.services, recorded.is_cut & queue.is_served
    else:
        if posterior is not None and posterior.free < _SURE_FREE:
            dependence, slowdown = Dependence.SHARED, posterior.mean
        every = recorded.every_work(slowdown)
    works, cut_works = every[recorded.whole], every[is_censoring]
    residuals = recorded.density.residuals(works)
    workers = np.full(len(every), -1)
    if recorded.is_own and _do_workers_differ(residuals, recorded.workers[recorded.whole]):
        workers = recorded.workers
    own = workers[recorded.whole]
    kept = np.empty(num, np.int64)
    for worker in np.unique(own):
        places = np.flatnonzero(own == worker)
        residuals[places] -= residuals[places].mean()
        weights = weights_beside_cut(works[places], cut_works[workers[is_censoring] == worker])
        kept[places] = places[places_by_weight(weights)]
    parts = recorded.by_run(residuals)
    correlation = _autocorrelation(parts)
    samples, sizes = works[kept], recorded.sizes[kept]
    law = SizeLaw.of(samples, sizes)
    slowness = max(map(_common_slowness, recorded.begun, parts))
    load_low, load_high = np.quantile(recorded.loads, (0.01, 0.99)).tolist()
    interval = (0.0, 1.0) if posterior is None else posterior.interval
    num_together = len(np.unique(recorded.workers)) if recorded.is_own else 0
    is_known = queue is not None or recorded.is_own
    notes = [
        *_cuts(works, cut_works),
        _slow_together(slowness),
        "" if is_known else _unknown_load(interval, has_load=has_load),
        _few(num),
        _one_size(sizes) if law is None else "",
        *_tails(samples, num_together or int(np.quantile(recorded.loads, 0.5)), correlation),
        _drift(parts, correlation),
    ]
    return Service(
        name,
        dependence,
        samples,
        sizes,
        own[kept],
        slowdown=slowdown,
        num_servers=1 if queue is None else queue.num_servers,
        is_own=recorded.is_own,
        load_low=load_low,
        load_high=load_high,
        size_law=law,
        slowdown_low=interval[0],
        slowdown_high=interval[1],
        is_slow_together=slowness > _COMMON,
        num_cut=int(np.count_nonzero(recorded.is_cut)),
        notes=tuple(filter(None, notes)),
        evidence=Evidence(
            kept, recorded.whole, recorded.paths, posterior, _block_length(correlation, num)
        ),
    )


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
            return 1.0 / _inflation(_autocorrelation(self.by_run(residuals)))

        return posterior_of(self.log_likelihood, tempering)


@dataclass(frozen=True)
class _Queue:
    num_servers: int
    services: Floats
    """Of all spans, >= 0."""
    is_served: NDArray[np.bool_]
    log_likelihood: float


def _best_queue(recorded: _Recorded) -> _Queue | None:
    """The most likely queue that the spans do not contradict, if there is one."""
    most = min(MAX_SERVERS, int(recorded.loads.max()) - 1)
    first = [each.pick(np.arange(min(len(each), _SCREENED))) for each in recorded.runs]
    every = Spans.joined(first, in_order=False)
    screen = WorkDensity(every.size[~every.is_cut])
    found: _Queue | None = None
    for num_servers in range(1, most + 1):
        queue = _queue(screen, first, num_servers)
        # of those that are as likely the least: the others never had a queue
        if queue is not None and (
            found is None or queue.log_likelihood > found.log_likelihood + 1e-6
        ):
            found = queue
    return None if found is None else _queue(recorded.density, recorded.runs, found.num_servers)


def _queue(density: WorkDensity, runs: Sequence[Spans], num_servers: int) -> _Queue | None:
    """So many servers, with how likely they are; None if the spans contradict them."""
    served: list[Served] = []
    for run in runs:
        if (found := serve(run, num_servers)) is None:
            return None
        served.append(found)
    every = np.concatenate([each.secs for each in served])
    is_served = np.concatenate([each.is_served for each in served])
    whole = ~np.concatenate([each.is_cut for each in runs])
    likelihood = -math.inf
    if whole.any():
        secs, cut = every[whole], every[~whole & is_served]
        least = max(_LEAST_SERVICE * float(np.median(secs)), 1e-9)
        likelihood = density.log_likelihood(np.maximum(secs, least), cut)
        likelihood += sum(each.num_contradict for each in served) * _CONTRADICTION
        likelihood -= sum(map(log_num_orders, runs))
    return _Queue(num_servers, np.maximum(every, 0.0), is_served, likelihood)


# What a reader of a fit must know: tests of its residuals for what the law leaves out


def _autocorrelation(residuals: Sequence[Floats]) -> float:
    """Of each with the one before it, in [-0.9, 0.9]; 0.0 if there are few."""
    num = sum(len(each) for each in residuals)
    total = sum(float(each @ each) for each in residuals)
    if num <= 30 or total <= 0.0:
        return 0.0
    lagged = sum(float(each[1:] @ each[:-1]) for each in residuals)
    return min(max(lagged / total, -0.9), 0.9)


def _inflation(correlation: float) -> float:
    """How much greater the variance of a mean is than that of independent samples, >= 1."""
    positive = min(max(correlation, 0.0), 0.9)
    return (1.0 + positive) / (1.0 - positive)


def _block_length(correlation: float, num: int) -> int:
    """How many samples in a row a bootstrap draws: Politis and White's rule for such a process."""
    if num <= 30 or correlation <= 3.0 / math.sqrt(num):
        return 1
    persistence = 2.0 * correlation / (1.0 - correlation * correlation)
    return max(2, round(1.1 * math.cbrt(num) * math.cbrt(persistence) ** 2))


def _drift(residuals: Sequence[Floats], correlation: float) -> str:
    """A note if the second half of a recording differs from the first beyond chance."""
    for each in residuals:
        half = len(each) // 2
        if half < 15:
            continue
        first, second = each[:half], each[half:]
        error = math.sqrt(
            _inflation(correlation) * (first.var() / len(first) + second.var() / len(second))
        )
        change = float(second.mean() - first.mean())
        if error > 0.0 and abs(change) > _SURE * error and abs(change) > 0.01:
            return (
                f"the second half of a recording takes {100 * math.expm1(change):+.0f} % of the "
                "first: it drifts, so what comes later may differ from all that was recorded"
            )
    return ""


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
    if len(begun) <= 60 or secs <= 0.0 or float(residuals.std()) < _LEAST_DEVIATION:
        return found
    for num_bins in (100, 40, 16):
        bins = np.minimum(((begun - begun[0]) / secs * num_bins).astype(int), num_bins - 1)
        parts = np.split(residuals, np.flatnonzero(np.diff(bins)) + 1)
        groups = [each for each in parts if len(each) >= 5]
        if len(groups) >= 5:
            ratio, sigmas = _variance_ratio(groups)
            if sigmas > _SURE:
                found = max(found, ratio)
    return found


def _do_workers_differ(residuals: Floats, workers: NDArray[np.int64]) -> bool:
    """Whether workers differ in speed, beyond chance."""
    known = np.unique(workers)
    if len(known) < 2 or len(residuals) <= 4 * len(known):
        return False
    groups = [residuals[workers == each] for each in known]
    return _variance_ratio(groups)[1] > 3.5


def _cuts(works: Floats, cut: Floats) -> list[str]:
    """Notes on work that was cut, beside what ended."""
    share = len(cut) / (len(works) + len(cut))
    longest = float(works.max())
    beyond = float(np.count_nonzero(cut >= longest)) / (len(works) + len(cut))
    notes = []
    if share >= 0.01:
        notes.append(f"{100 * share:.0f} % of it was cut, so it is longer than what was seen")
    if beyond > 0.01:
        notes.append(
            f"{100 * beyond:.0f} % was cut after more than {longest:.3g} s, the longest that "
            "ended: how much longer it takes is not known"
        )
    return notes


def _slow_together(ratio: float) -> str:
    """A note if all work was slow at the same times."""
    if ratio <= _COMMON:
        return ""
    return (
        f"all of it was slow at the same times (F {ratio:.1f}, 1.0 by chance), and it is drawn "
        "without regard to that: rates may be off by 10 %"
    )


def _unknown_load(slowdowns: tuple[float, float], *, has_load: bool) -> str:
    """A note if the load says little of the slowdown, which is between these."""
    low, high = slowdowns
    if not has_load:
        return "how several would share it is not known; record a run with more under way"
    if high - low <= max(0.05, 0.5 * low):
        return ""
    return (
        f"the load hardly varied, or too few ended: a slowdown of {low:.2g} to {high:.2g} for each "
        "further one is as likely; record another load as well"
    )


def _few(num: int) -> str:
    """A note if too few have ended."""
    return "" if num >= _FEW else f"only {num} ended; {_FEW} are the least for a law"


def _one_size(sizes: Floats) -> str:
    """A note on sizes of which no law follows, if any is known."""
    if not np.isfinite(sizes).any():
        return ""
    return (
        f"only size {np.nanmax(sizes):g} was recorded, so it is not known how it depends on the "
        "size"
    )


def _tails(samples: Floats, num_together: int, correlation: float) -> list[str]:
    """Notes if so few samples do not determine the mean, or the longest of those together."""
    num, mean = len(samples), float(samples.mean())
    notes: list[str] = []
    if num < _FEW or mean <= 0.0:
        return notes
    error = float(samples.std()) / mean * math.sqrt(_inflation(correlation) / num)
    top = np.sort(samples)[-max(10, num // 50) - 1 :]
    excess = float(np.log(top[1:] / top[0]).mean()) if top[0] > 0 and num >= 100 else 0.0
    index = 1.0 / excess if excess > 0.0 else math.inf
    if index < _HEAVY:
        notes.append(
            f"its tail is heavy (index {index:.1f}): work longer than the longest that was "
            f"recorded, {samples.max():.3g} s, must be expected"
        )
    if error > 0.04:
        notes.append(f"its mean is known to {100 * 1.645 * error:.0f} % at 90 %; record for longer")
    if num_together > 1 and num < _PER_PLACE * num_together and error > 0.01:
        notes.append(
            f"{num} samples do not determine the longest of {num_together} at a time; "
            f"{_PER_PLACE * num_together} do"
        )
    return notes
