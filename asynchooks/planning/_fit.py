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
from ._load import LoadPath
from ._queue import MAX_SERVERS, Served, log_num_orders, serve
from ._service import Dependence, Evidence, Service, SizeLaw
from ._spans import Floats, Spans

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


def fit(
    recordings: Sequence[Spans],
    name: str,
    *,
    is_input_size: bool,
) -> Service:
    """How long work of one kind takes, and on what it depends.

    Args:
        recordings: the spans of each run, those that were cut included.
        name: of the kind of work.
        is_input_size: whether sizes are of the input, on which the work then depends; else they
            are of the output, and are drawn with it.

    Raises:
        PlanError: no span was recorded, or all were cut.
    """
    runs = [each for each in recordings if len(each)]
    evidence = _Recorded(name, runs, is_input_size)
    num = len(evidence.secs)
    if not num:
        cut = f"all {len(evidence.is_cut)} spans were cut" if runs else "no span was recorded"
        raise PlanError(
            f"how long {name!r} takes is not known: {cut}; record a run in which some of it ends"
        )
    return _Fit(evidence).service()


class _Recorded:
    """The columns of all runs, and how likely they are by each law."""

    def __init__(self, name: str, runs: Sequence[Spans], is_input_size: bool) -> None:
        self.name, self.runs, self.is_input_size = name, runs, is_input_size
        self.paths = [LoadPath(each) for each in runs]
        self.is_cut = _joined([each.is_cut for each in runs], np.bool_)
        self.whole = ~self.is_cut
        self.loads = _joined([each.at_begin for each in self.paths], np.float64)
        every = _joined([each.worker for each in runs], np.int64)
        self.is_own = len(every) > 0 and bool((every >= 0).all())
        self.workers = every[self.whole]
        self.sizes = _joined([each.size for each in runs], np.float64)[self.whole]
        self.num_whole = [int(np.count_nonzero(~each.is_cut)) for each in runs]
        self.secs = self.every_work(0.0)[self.whole]

    @cached_property
    def density(self) -> WorkDensity:
        return WorkDensity(self.sizes)

    @cached_property
    def are_even(self) -> bool:
        """Whether all took as long, as far as durations are known."""
        return float(self.density.residuals(self.secs).std()) < LEAST_SPREAD

    def every_work(self, slowdown: float) -> Floats:
        """Of all spans, those that were cut included."""
        return _joined([each.work(slowdown) for each in self.paths], np.float64)

    def log_likelihood(self, slowdown: float) -> float:
        works = self.every_work(slowdown)
        if self.are_even:
            # ends a clock's jitter apart show only in which order they were seen, not the load
            speeds = np.maximum(works[self.whole], 1e-12) / np.maximum(self.secs, 1e-12)
        else:
            every = _joined([each.speed_at_end(slowdown) for each in self.paths], np.float64)
            speeds = every[self.whole]
        return self.density.log_likelihood(works[self.whole], works[self.is_cut]) + float(
            np.log(speeds).sum()
        )

    def by_run(self, column: Floats) -> list[Floats]:
        """A column of what has ended, of each run, about its mean."""
        parts = np.split(column, np.cumsum(self.num_whole)[:-1])
        return [each - each.mean() if len(each) else each for each in parts]

    def correlation(self, works: Floats) -> float:
        return _notes.autocorrelation(self.by_run(self.density.residuals(works)))

    def posterior(self) -> Posterior:
        def tempering(slowdown: float) -> float:
            works = self.every_work(slowdown)[self.whole]
            return 1.0 / _notes.inflation(self.correlation(works))

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
    screen = WorkDensity(_joined([each.size[~each.is_cut] for each in first], np.float64))
    found: tuple[float, int] | None = None
    for num_servers in range(1, most + 1):
        served = _served(first, num_servers)
        if served is not None:
            likelihood = _queue_likelihood(screen, first, served)
            # of those that are as likely the least: the others never had a queue
            if found is None or likelihood > found[0] + 1e-6:
                found = likelihood, num_servers
    if found is None or (full := _served(recorded.runs, found[1])) is None:
        return None
    return _Queue(
        found[1],
        np.maximum(_joined([each.secs for each in full], np.float64), 0.0),
        _joined([each.is_served for each in full], np.bool_),
        _queue_likelihood(recorded.density, recorded.runs, full),
    )


def _served(runs: Sequence[Spans], num_servers: int) -> list[Served] | None:
    every = []
    for run in runs:
        served = serve(run, num_servers)
        if not served.is_plausible:
            return None
        every.append(served)
    return every


def _queue_likelihood(density: WorkDensity, runs: Sequence[Spans], served: list[Served]) -> float:
    whole = _joined([~each.is_cut for each in runs], np.bool_)
    if not whole.any():
        return -np.inf
    every = _joined([each.secs for each in served], np.float64)
    secs, cut = every[whole], every[~whole & _joined([each.is_served for each in served], np.bool_)]
    num_contradict = sum(int(each.contradicts.sum()) for each in served)
    least = max(_LEAST_SERVICE * float(np.median(secs)), 1e-9)
    likelihood = density.log_likelihood(np.maximum(secs, least), cut)
    orders = sum(log_num_orders(each) for each in runs)
    return likelihood + num_contradict * _CONTRADICTION - orders


class _Fit:
    """Picks the law, and makes the service of it."""

    def __init__(self, recorded: _Recorded) -> None:
        self.recorded = recorded
        self._notes: list[str] = []

    def service(self) -> Service:
        recorded = self.recorded
        num, has_load = len(recorded.secs), bool(recorded.loads.max() > 1)
        posterior = queue = None
        if num >= _notes.FEW and has_load and not recorded.is_own:
            posterior, queue = recorded.posterior(), _best_queue(recorded)
            most = max(posterior.log_likelihood, posterior.log_likelihood_free)
            if queue is not None and queue.log_likelihood <= most + _QUEUE_MARGIN:
                queue = None
        dependence, slowdown, is_censoring = Dependence.FREE, 0.0, recorded.is_cut
        if queue is not None:
            dependence, posterior = Dependence.QUEUE, None
            every, is_censoring = queue.services, recorded.is_cut & queue.is_served
        else:
            if posterior is not None and posterior.free < _SURE_FREE:
                dependence, slowdown = Dependence.SHARED, posterior.mean
            every = recorded.every_work(slowdown)
        works = every[recorded.whole]
        workers, residuals = self._workers(works)
        correlation = _notes.autocorrelation(recorded.by_run(residuals))
        kept = self._kept(works, every[is_censoring], workers)
        samples, sizes = works[kept], recorded.sizes[kept]
        law = SizeLaw.of(samples, sizes) if recorded.is_input_size else None
        is_slow_together = self._is_slow_together(residuals)
        low, high = np.quantile(recorded.loads, (0.01, 0.99))
        interval = (0.0, 1.0) if posterior is None else _interval(posterior)
        self._say_load(dependence, has_load, interval)
        self._say_samples(samples, law, sizes, workers, correlation)
        self._say(_notes.drift(recorded.by_run(residuals), correlation))
        return Service(
            recorded.name,
            dependence,
            samples,
            sizes,
            workers[kept],
            slowdown=slowdown,
            num_servers=1 if queue is None else queue.num_servers,
            is_own=recorded.is_own,
            load_low=float(low),
            load_high=float(high),
            size_law=law,
            slowdown_low=interval[0],
            slowdown_high=interval[1],
            is_slow_together=is_slow_together,
            num_cut=int(np.count_nonzero(recorded.is_cut)),
            notes=tuple(self._notes),
            evidence=Evidence(
                kept,
                recorded.whole,
                tuple(recorded.paths),
                posterior,
                _notes.block_length(correlation, num),
            ),
        )

    def _workers(self, works: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Whose each sample is, if workers differ, and residuals without what differs."""
        recorded = self.recorded
        residuals = recorded.density.residuals(works)
        if not recorded.is_own or not _notes.do_workers_differ(residuals, recorded.workers):
            return np.full(len(works), -1, np.int64), residuals
        residuals = residuals.copy()
        for worker in np.unique(recorded.workers):
            own = recorded.workers == worker
            residuals[own] -= residuals[own].mean()
        return recorded.workers, residuals

    def _kept(self, works: Floats, cut: Floats, workers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of samples in order, as often as they count beside what was cut."""
        if not len(cut):
            return np.arange(len(works))
        share = len(cut) / (len(works) + len(cut))
        if share >= 0.01:
            self._say(f"{100 * share:.0f} % of it was cut, so it is longer than what was seen")
        beyond = float(np.mean(cut >= works.max()))
        if beyond * share > 0.01:
            self._say(
                f"{100 * beyond * share:.0f} % was cut after more than {works.max():.3g} s, the "
                "longest that ended: how much longer it takes is not known"
            )
        if (workers < 0).all():
            return places_by_weight(weights_beside_cut(works, cut))
        recorded = self.recorded
        every = _joined([each.worker for each in recorded.runs], np.int64)[recorded.is_cut]
        kept = np.empty(len(works), np.int64)
        for worker in np.unique(workers):
            own = np.flatnonzero(workers == worker)
            kept[own] = own[places_by_weight(weights_beside_cut(works[own], cut[every == worker]))]
        return kept

    def _is_slow_together(self, residuals: Floats) -> bool:
        """Whether all samples of a recording were slow at the same times."""
        recorded = self.recorded
        parts = recorded.by_run(residuals)
        begun = [each.begun[~each.is_cut] for each in recorded.runs]
        ratio = max(map(_notes.common_slowness, begun, parts))
        if ratio <= _notes.COMMON:
            return False
        self._say(
            f"all of it was slow at the same times (F {ratio:.1f}, 1.0 by chance), and it is drawn "
            "without regard to that: rates may be off by 10 %"
        )
        return True

    def _say(self, note: str | None) -> None:
        if note is not None:
            self._notes.append(note)

    def _say_load(
        self, dependence: Dependence, has_load: bool, interval: tuple[float, float]
    ) -> None:
        if dependence.is_queue or self.recorded.is_own:
            return
        if not has_load:
            self._say("how several would share it is not known; record a run with more under way")
        elif interval[1] - interval[0] > max(0.05, 0.5 * interval[0]):
            self._say(
                f"the load hardly varied, or too few ended: a slowdown of {interval[0]:.2g} to "
                f"{interval[1]:.2g} for each further one is as likely; record another load as well"
            )

    def _say_samples(
        self,
        samples: Floats,
        law: SizeLaw | None,
        sizes: Floats,
        workers: NDArray[np.int64],
        correlation: float,
    ) -> None:
        recorded = self.recorded
        if len(samples) < _notes.FEW:
            self._say(f"only {len(samples)} ended; {_notes.FEW} are the least for a law")
        if recorded.is_input_size and law is None and np.isfinite(sizes).any():
            self._say(
                f"only inputs of size {np.nanmax(sizes):g} were recorded, so it is not known how "
                "it depends on the size"
            )
        num_workers = len(np.unique(recorded.workers)) if recorded.is_own else 0
        together = num_workers or int(np.quantile(recorded.loads, 0.5))
        values = samples if law is None else law.ratios
        for note in _notes.tails(values, together, correlation):
            self._say(note)


def _interval(posterior: Posterior) -> tuple[float, float]:
    return posterior.quantile(0.05), posterior.quantile(0.95)


def _joined(parts: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, kind)
