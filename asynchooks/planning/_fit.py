"""fit: a `Service` from the spans of one kind of work, of one or several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .._errors import PlanError
from . import _notes
from ._likelihood import (
    LEAST_SPREAD,
    Posterior,
    WorkDensity,
    places_by_weight,
    posterior_of,
    weights_beside_cut,
)
from ._queue import MAX_SERVERS, Served, log_num_orders, serve
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
    if num >= _notes.FEW and has_load and not recorded.is_own:
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
    if recorded.is_own and _notes.do_workers_differ(residuals, recorded.workers[recorded.whole]):
        workers = recorded.workers
    own = workers[recorded.whole]
    kept = np.empty(num, np.int64)
    for worker in np.unique(own):
        places = np.flatnonzero(own == worker)
        residuals[places] -= residuals[places].mean()
        weights = weights_beside_cut(works[places], cut_works[workers[is_censoring] == worker])
        kept[places] = places[places_by_weight(weights)]
    parts = recorded.by_run(residuals)
    correlation = _notes.autocorrelation(parts)
    samples, sizes = works[kept], recorded.sizes[kept]
    law = SizeLaw.of(samples, sizes)
    slowness = max(map(_notes.common_slowness, recorded.begun, parts))
    load_low, load_high = np.quantile(recorded.loads, (0.01, 0.99)).tolist()
    interval = (0.0, 1.0) if posterior is None else posterior.interval
    num_together = len(np.unique(recorded.workers)) if recorded.is_own else 0
    is_known = queue is not None or recorded.is_own
    notes = [
        *_notes.cuts(works, cut_works),
        _notes.slow_together(slowness),
        "" if is_known else _notes.unknown_load(interval, has_load=has_load),
        _notes.few(num),
        _notes.one_size(sizes) if law is None else "",
        *_notes.tails(samples, num_together or int(np.quantile(recorded.loads, 0.5)), correlation),
        _notes.drift(parts, correlation),
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
        is_slow_together=slowness > _notes.COMMON,
        num_cut=int(np.count_nonzero(recorded.is_cut)),
        notes=tuple(filter(None, notes)),
        evidence=Evidence(
            kept, recorded.whole, recorded.paths, posterior, _notes.block_length(correlation, num)
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
            return 1.0 / _notes.inflation(_notes.autocorrelation(self.by_run(residuals)))

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
        served.append(serve(run, num_servers))
        if not served[-1].is_plausible:
            return None
    every = np.concatenate([each.secs for each in served])
    is_served = np.concatenate([each.is_served for each in served])
    whole = ~np.concatenate([each.is_cut for each in runs])
    likelihood = -math.inf
    if whole.any():
        secs, cut = every[whole], every[~whole & is_served]
        least = max(_LEAST_SERVICE * float(np.median(secs)), 1e-9)
        likelihood = density.log_likelihood(np.maximum(secs, least), cut)
        likelihood += sum(int(each.contradicts.sum()) for each in served) * _CONTRADICTION
        likelihood -= sum(map(log_num_orders, runs))
    return _Queue(num_servers, np.maximum(every, 0.0), is_served, likelihood)
