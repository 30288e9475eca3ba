"""sweep: many simulated trainings, in parallel, compared with common random numbers."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from .. import _check
from .._check import a_number
from .._errors import SimulationError
from ._pool import in_processes
from .output._interval import Interval, interval_of
from .output._report import Report

Figure = str | Callable[[Report], float]
"""The name of a number in `Report.summary_row`, or a function of the report."""
_FIGURES = ("updates_per_second", "mean_staleness", "secs", "loss")


def sweep(
    train: Callable[..., Report],
    options: Mapping[str, Sequence[Any]],
    *,
    seeds: int | Iterable[int] = 5,
    num_processes: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> Sweep:
    """Train at all combinations of options, each with the same seeds, in parallel processes.

    The delays of a worker are drawn from the seed, by worker and purpose. So all settings of one
    seed meet the same delays, as far as they ask for the same: these common random numbers make
    differences between settings far clearer than the settings themselves. The result does not
    depend on the number of processes, which are forks of this one.

    Args:
        train: called with `seed` and one value of each option, by name; makes one simulation, and
            returns its report.
        options: the values of each option of `train`, such as
            `{"protocol": [Asynchronous(), Synchronous()], "rate": [0.1, 0.2]}`.
        seeds: so many, from 0, or these; integers >= 0, at least one.
        num_processes: >= 1; None: one for each core. Where other threads run, or libraries that
            have some are loaded, there is no fork, and all is done in this process.
        done: called as each training is done.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        SimulationError: a training has failed (the text says at which setting and why, its cause
            where), or its process has died.
        KeyboardInterrupt: Ctrl-C; the processes are killed.

    Example:
        def train(seed, protocol):
            simulation = Simulation(seed=seed, backend="turbo")
            cluster = simulation.cluster(8, protocol=protocol, compute=Exponential(1.0))
            return cluster.run(updates=500)

        options = {"protocol": [StaleSynchronous(1), StaleSynchronous(3)]}
        result = sweep(train, options, seeds=4, num_processes=1)
        for setting in result.settings:
            print(setting, result.interval(setting, "updates_per_second"))
        print(result.difference(result.settings[1], result.settings[0], "updates_per_second"))
    """
    _check.function("train", train, "a function of `seed` and of the options")
    _check.instance("options", options, Mapping, "a dict of the values of each option")
    _check.function("done", done, "a function without arguments")
    if "seed" in options:
        raise ValueError("options have 'seed', which each training gets anyway; give seeds")
    for name, values in options.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise TypeError(f"options[{name!r}] is {values!r}; give a list of values, at least one")
    numbers = _seeds(seeds)
    settings = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    runs = [(setting, seed) for setting in settings for seed in numbers]
    found = in_processes(
        lambda run: _trained(train, *run), runs, num_processes=num_processes, done=done
    )
    for (setting, seed), result in zip(runs, found, strict=True):
        if isinstance(result, _Failure):
            raise SimulationError(
                f"the training at {setting!r} with seed {seed} failed: {result.reason}"
            ) from SimulationError(result.traceback)
    num = len(numbers)
    reports = [found[place * num : (place + 1) * num] for place in range(len(settings))]
    return Sweep(settings, numbers, reports)  # type: ignore[arg-type]


def _seeds(seeds: int | Iterable[int]) -> list[int]:
    if isinstance(seeds, Iterable) and not isinstance(seeds, str | bytes):
        numbers = [_check.integer("a seed", each, least=0) for each in seeds]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(f"seeds are {numbers!r}; give at least one, and each once")
        return numbers
    return list(range(_check.integer("seeds", seeds, least=1, expected="a number >= 1, or seeds")))


@dataclass(frozen=True)
class _Failure:
    """An error as text: some errors cannot be sent from another process."""

    reason: str
    traceback: str


def _trained(
    train: Callable[..., Report], setting: Mapping[str, Any], seed: int
) -> Report | _Failure:
    try:
        report = train(seed=seed, **setting)
        return _check.instance("what train returned", report, Report, "what Cluster.run returns")
    except Exception as error:
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


@dataclass(frozen=True)
class Sweep:
    """The reports of many trainings. `sweep` makes it.

    Example:
        def train(seed, workers):
            simulation = Simulation(seed=seed, backend="turbo")
            return simulation.cluster(workers, compute=Exponential(1.0)).run(updates=500)

        result = sweep(train, {"workers": [4, 8]}, seeds=4, num_processes=1)
        assert len(result.to_rows()) == 2
    """

    settings: Sequence[Mapping[str, Any]]
    """All combinations of the options; the first option changes last."""
    seeds: Sequence[int]
    """Of each setting."""
    reports: Sequence[Sequence[Report]]
    """By the place of the setting, and of the seed."""

    def values(self, setting: Mapping[str, Any], figure: Figure) -> list[float]:
        """A figure of a setting, by the place of the seed.

        Raises:
            TypeError: the setting is no dict, or the figure neither a name nor a function that
                returns a number.
            ValueError: there is no such setting, or no such figure.
        """
        return [_figure(each, figure) for each in self._of(setting)]

    def interval(self, setting: Mapping[str, Any], figure: Figure) -> Interval:
        """The mean over seeds, and its 90 % confidence interval.

        Args:
            setting: one of `settings`.
            figure: the name of a number in `Report.summary_row`, or a function of the report, such
                as `lambda report: report.secs_to(0.1)`.

        Raises:
            TypeError: as `values`.
            ValueError: there is no such setting, or no such figure, or it is not finite with some
                seed, such as the seconds to a loss that was not reached.
        """
        values = self.values(setting, figure)
        self._check_finite(setting, values)
        return interval_of(values)

    def difference(
        self, setting: Mapping[str, Any], other: Mapping[str, Any], figure: Figure
    ) -> Interval:
        """By how much a figure of one setting exceeds that of another one, seed by seed.

        As both had the same delays, this is narrower than the intervals of the two.

        Raises:
            TypeError: as `values`.
            ValueError: there is no such setting, or no such figure, or it is not finite with some
                seed.
        """
        ones, twos = self.values(setting, figure), self.values(other, figure)
        self._check_finite(setting, ones)
        self._check_finite(other, twos)
        return interval_of([one - two for one, two in zip(ones, twos, strict=True)])

    def to_rows(self, figures: Sequence[str] = _FIGURES) -> list[dict[str, Any]]:
        """A row for each setting: its options, and each figure with `_low` and `_high`.

        These two are not a number where a figure is not finite with some seed, such as a loss of a
        training that has diverged. A loss is left out where none was recorded.

        Args:
            figures: the names of numbers in `Report.summary_row`.

        Raises:
            TypeError, ValueError: figures is no list of such names.
        """
        _check_names(figures)
        rows = []
        for setting in self.settings:
            row = dict(setting)
            for name in figures:
                if name == "loss" and not all(each.losses for each in self._of(setting)):
                    continue
                found = interval_of(self.values(setting, name))
                row |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
            rows.append(row)
        return rows

    def _of(self, setting: Mapping[str, Any]) -> Sequence[Report]:
        _check.instance("setting", setting, Mapping, "one of `settings`, a dict")
        for each, reports in zip(self.settings, self.reports, strict=True):
            if each is setting:  # its values need not be comparable
                return reports
        for each, reports in zip(self.settings, self.reports, strict=True):
            if each.keys() == setting.keys() and all(
                _is_equal(value, setting[name]) for name, value in each.items()
            ):
                return reports
        raise ValueError(f"there is no setting {dict(setting)!r}; see `settings`")

    def _check_finite(self, setting: Mapping[str, Any], values: Sequence[float]) -> None:
        for seed, value in zip(self.seeds, values, strict=True):
            if not math.isfinite(value):
                raise ValueError(
                    f"the figure is {value} at {dict(setting)!r} with seed {seed}, so its mean has "
                    "no interval; look at `values`, or let the trainings run for longer"
                )


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return np.array_equal(one, two)
    try:
        return one is two or bool(one == two)
    except ValueError:  # of arrays within, as in a dict of them
        return False


def _check_names(figures: object) -> None:
    expected = 'a list of names, such as ["updates_per_second", "secs"]'
    if isinstance(figures, str) or not isinstance(figures, Sequence):
        raise TypeError(f"figures is {figures!r}; give {expected}")
    for each in figures:
        _check.instance("a figure", each, str, "a name, such as 'updates_per_second'")


def _figure(report: Report, figure: Figure) -> float:
    if callable(figure):
        found: object = figure(report)
        if not isinstance(found, Real):
            raise TypeError(
                f"the function of a report returned {found!r}; let it return a number, such as "
                "report.secs_to(0.1)"
            )
        return float(found)
    row = report.summary_row()
    expected = "a name, such as 'updates_per_second', or a function of a report"
    value = row.get(_check.instance("figure", figure, str, expected))
    if not a_number(value):
        known = [name for name, each in row.items() if isinstance(each, int | float)]
        raise ValueError(f"{figure!r} is no figure of a report; give one of {', '.join(known)}")
    return float(value)  # type: ignore[arg-type]  # it is a number
