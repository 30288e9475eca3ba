"""The trainings of `asynchooks simulate`, and what is shown of them.

Each protocol trains with all its learning rates and all seeds, in one sweep. The rate with the
lowest loss gives its row.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..protocols import KAsync, KBatchAsync, Protocol, parse_protocol
from ..simulation import Report, Simulation, plot_reports, sweep, write_trace
from ..simulation.cluster._least_squares import LeastSquares
from ..simulation.output._bar import progress
from ..simulation.output._interval import Interval, interval_of
from .output import figure, print_json, print_table

_NUM_LOSSES = 200
"""That are computed in one training."""
_EXPECTED_UPDATES = 10_000
"""Of a training that ends at a time alone, if each update takes one gradient."""
_SHARES = ("computed", "lost", "waited", "pulled", "pushed", "down", "idle")
_INTERVALS = ("updates_per_second", "mean_staleness", "loss")
_FIGURES = (
    *_INTERVALS,
    "secs",
    "updates",
    "max_staleness",
    "discarded",
    *(f"share_{kind}" for kind in _SHARES),
)


class Contender(NamedTuple):
    """A protocol, and the learning rates of which it is shown with its best."""

    name: str
    protocol: Protocol
    rates: Sequence[float]


class Result(NamedTuple):
    """A protocol with the learning rate that ended with the lowest loss."""

    name: str
    rate: float
    figures: Mapping[str, Interval]
    """The mean over seeds, with its interval, by name."""
    reports: Sequence[Report]
    """By seed."""
    tried: Mapping[float, float]
    """The loss by learning rate."""


def contenders(options: argparse.Namespace) -> list[Contender]:
    """The protocols that the options name.

    Raises:
        ValueError: there is no such protocol.
    """
    found = []
    for name, own in dict.fromkeys(options.protocols or [("async", None)]):
        protocol = parse_protocol(name, options.workers)
        default = [_default_rate(protocol, options.workers)]
        rates = (options.learning_rates or default) if own is None else [own]
        found.append(Contender(name, protocol, list(dict.fromkeys(rates))))
    return found


def _default_rate(protocol: Protocol, num_workers: int) -> float:
    """Large where no gradient is stale; else stable for gradients with the expected staleness."""
    if protocol.abandons_stale:
        return 0.2
    num_gradients = protocol.k if isinstance(protocol, KAsync | KBatchAsync) else 1
    return min(0.05, 0.5 * num_gradients / num_workers)


def train_all(options: argparse.Namespace, contenders: Sequence[Contender]) -> int:
    """Train, and write and print the results; the exit code is 0.

    Raises:
        SimulationError: a training failed (says which and why).
        OSError: a file cannot be written.
    """
    total = sum(len(each.rates) for each in contenders) * options.seeds
    num_done = itertools.count(1)
    with progress(", ".join(each.name for each in contenders), total) as show:
        look = show if total == 1 else lambda done: None  # others are counted when they are done
        results = [_best(options, each, look, lambda: show(next(num_done))) for each in contenders]
    if options.trace is not None:
        write_trace(options.trace, results[0].reports[0])
    if options.plot is not None:
        plot_reports(
            options.plot,
            [
                [replace(one, protocol=f"{each.name}@{each.rate:g}") for one in each.reports]
                for each in results
            ],
        )
    if options.json:
        print_json({"seed": options.seed, "reports": [_row(each) for each in results]})
    else:
        _print_table(results)
    return 0


def _best(
    options: argparse.Namespace,
    contender: Contender,
    look: Callable[[float], object],
    done: Callable[[], object],
) -> Result:
    """With the rate of the lowest loss; of equals the first. One that has diverged may be NaN."""
    found = sweep(
        lambda seed, protocol, rate: _train(options, contender, rate, seed, look),
        {"protocol": [contender.name], "rate": contender.rates},
        seeds=range(options.seed, options.seed + options.seeds),
        num_processes=1 if options.seeds == 1 else None,
        done=done,
    )
    by_rate = [
        {name: interval_of(found.values(each, name)) for name in _FIGURES}
        for each in found.settings
    ]
    losses = [figures["loss"].mean for figures in by_rate]
    place = min(range(len(losses)), key=lambda place: (math.isnan(losses[place]), losses[place]))
    tried = dict(zip(contender.rates, losses, strict=True))
    return Result(
        contender.name, contender.rates[place], by_rate[place], found.reports[place], tried
    )


def _train(
    options: argparse.Namespace,
    contender: Contender,
    rate: float,
    seed: int,
    look: Callable[[float], object],
) -> Report:
    problem = LeastSquares(seed)
    simulation = Simulation(seed, "turbo")
    is_drawn = options.trace is not None or options.plot is not None
    cluster = simulation.cluster(
        options.workers,
        parameters=problem.first,
        protocol=contender.protocol,
        compute=options.delay,
        pull=options.pull,
        push=options.push,
        service=options.service,
        failures=options.failures,
        learning_rate=rate,
        keep_timeline=is_drawn and seed == options.seed,
    )
    updates, until = options.updates, options.until
    expected = updates or _EXPECTED_UPDATES // contender.protocol.num_gradients(cluster.server)

    def loss(parameters: Any) -> float:
        by_updates = cluster.server.version / updates if updates else 0.0
        look(max(by_updates, simulation.now / until if until else 0.0))
        return problem.loss(parameters)

    # the loss shows a learning rate that is too large: no warning is needed
    with np.errstate(over="ignore", invalid="ignore"):
        report = cluster.run(
            gradient=problem.gradient,
            updates=updates,
            until=until,
            loss=loss,
            loss_every=max(1, expected // _NUM_LOSSES),
            max_secs_without_update=options.max_secs_without_update,
        )
    return replace(report, protocol=contender.name)


def _print_table(results: Sequence[Result]) -> None:
    titles = ("protocol", "rate", "virtual s", "updates", "per s", "staleness", "max", "dropped")
    rows = []
    for name, rate, figures, _, _ in results:
        per_second, staleness, loss = (figure(*figures[each]) for each in _INTERVALS)
        shares = [figures[f"share_{kind}"].mean for kind in _SHARES]
        rows.append(
            [
                name,
                f"{rate:.4g}",
                f"{figures['secs'].mean:.6g}",
                f"{figures['updates'].mean:.0f}",
                per_second,
                staleness,
                f"{figures['max_staleness'].mean:.0f}",
                f"{figures['discarded'].mean:.0f}",
                *(f"{share:.1%}" if share >= 5e-4 else "" for share in shares),
                loss,
            ]
        )
    print_table([*titles, *_SHARES, "loss"], rows)


def _row(result: Result) -> dict[str, Any]:
    """For JSON: the report of the first seed, and of several seeds the means with intervals."""
    first, num = result.reports[0], len(result.reports)
    row = {
        **first.summary_row(),
        "staleness": first.staleness,
        "learning_rate": result.rate,
        "loss_by_learning_rate": result.tried,
    }
    if num > 1:
        row["num_seeds"] = num
        row["means"] = {name: result.figures[name]._asdict() for name in _INTERVALS}
    return row
