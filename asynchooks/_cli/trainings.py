"""The trainings of `asynchooks simulate`, and what is shown of them.

All protocols train with each of their learning rates and each seed, in one sweep. The rate with
the lowest loss gives the row of a protocol.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..protocols import KAsync, KBatchAsync, Protocol, parse_protocol
from ..simulation import Report, Simulation, plot_reports, sweep, write_trace
from ..simulation.cluster._least_squares import LeastSquares
from .output import figure, print_json, print_table, progress

_NUM_LOSSES = 200
"""That are computed in one training."""
_EXPECTED_UPDATES = 10_000
"""Of a training that ends at a time alone, if each update takes one gradient."""
_SHARES = ("computed", "lost", "waited", "pulled", "pushed", "down", "idle")
_FIGURES = (
    "updates_per_second",
    "mean_staleness",
    "loss",
    "secs",
    "updates",
    "max_staleness",
    "discarded",
    *(f"share_{kind}" for kind in _SHARES),
)


@dataclass(frozen=True)
class Training:
    """A protocol with one learning rate."""

    name: str
    protocol: Protocol
    rate: float

    def __repr__(self) -> str:
        return f"{self.name}@{self.rate:g}"


@dataclass(frozen=True)
class Result:
    """A training with the rate that ended with the lowest loss."""

    training: Training
    figures: dict[str, Any]
    """Means over seeds by name, with `_low` and `_high` of their intervals."""
    reports: Sequence[Report]
    """By seed."""
    tried: dict[float, float]
    """The loss by learning rate."""

    def shown(self, name: str) -> str:
        """A figure for the table."""
        return figure(*(self.figures[name + end] for end in ("", "_low", "_high")))


def contenders(options: argparse.Namespace) -> list[list[Training]]:
    """For each protocol that the options name its trainings, one for each of its rates.

    Raises:
        ValueError: there is no such protocol.
    """
    groups = []
    for name, own in dict.fromkeys(options.protocols or [("async", None)]):
        protocol = parse_protocol(name, options.workers)
        rates = [own]
        if own is None:
            rates = options.learning_rates or [_default_rate(protocol, options.workers)]
        groups.append([Training(name, protocol, rate) for rate in dict.fromkeys(rates)])
    return groups


def _default_rate(protocol: Protocol, num_workers: int) -> float:
    """Large where no gradient is stale; else stable for gradients with the expected staleness."""
    if protocol.abandons_stale:
        return 0.2
    num_gradients = protocol.k if isinstance(protocol, KAsync | KBatchAsync) else 1
    return min(0.05, 0.5 * num_gradients / num_workers)


def train_all(options: argparse.Namespace, groups: Sequence[Sequence[Training]]) -> int:
    """Train, and write and print the results; the exit code is 0.

    Raises:
        SimulationError: a training failed (says which and why).
        OSError: a file cannot be written.
    """
    trainings = [each for group in groups for each in group]
    total = len(trainings) * options.seeds
    label = ", ".join(dict.fromkeys(each.name for each in trainings))
    num_done = itertools.count(1)
    with progress(label, total) as show:
        look = show if total == 1 else lambda done: None  # others are counted when they are done
        found = sweep(
            lambda seed, training: _train(options, training, seed, look),
            {"training": trainings},
            seeds=range(options.seed, options.seed + options.seeds),
            num_processes=1 if options.seeds == 1 else None,
            done=lambda: show(next(num_done)),
        )
    each_result = zip(trainings, found.to_rows(_FIGURES), found.reports, strict=True)
    results = [_best(list(itertools.islice(each_result, len(group)))) for group in groups]
    if options.trace is not None:
        write_trace(options.trace, results[0].reports[0])
    if options.plot is not None:
        plot_reports(
            options.plot,
            [
                [replace(report, protocol=repr(each.training)) for report in each.reports]
                for each in results
            ],
        )
    if options.json:
        rows = [_row(each) for each in results]
        print_json({"seed": options.seed, "reports": rows})
    else:
        _print_table(results)
    return 0


def _train(
    options: argparse.Namespace, training: Training, seed: int, look: Callable[[float], object]
) -> Report:
    problem = LeastSquares(seed)
    simulation = Simulation(seed, "turbo")
    is_drawn = options.trace is not None or options.plot is not None
    cluster = simulation.cluster(
        options.workers,
        parameters=problem.first,
        protocol=training.protocol,
        compute=options.delay,
        pull=options.pull,
        push=options.push,
        service=options.service,
        failures=options.failures,
        learning_rate=training.rate,
        keep_timeline=is_drawn and seed == options.seed,
    )
    updates, until = options.updates, options.until
    expected = updates or _EXPECTED_UPDATES // training.protocol.num_gradients(cluster.server)

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
    return replace(report, protocol=training.name)


def _best(tried: Sequence[tuple[Training, dict[str, Any], Sequence[Report]]]) -> Result:
    """The one with the lowest loss; of equals the first. A loss that has diverged may be NaN."""
    losses = {training.rate: figures["loss"] for training, figures, _ in tried}
    best = min(tried, key=lambda each: (math.isnan(each[1]["loss"]), each[1]["loss"]))
    return Result(*best, losses)


def _print_table(results: Sequence[Result]) -> None:
    titles = ("protocol", "rate", "virtual s", "updates", "per s", "staleness", "max", "dropped")
    rows = []
    for each in results:
        figures = each.figures
        shares = [figures[f"share_{kind}"] for kind in _SHARES]
        rows.append(
            [
                each.training.name,
                f"{each.training.rate:.4g}",
                f"{figures['secs']:.6g}",
                f"{figures['updates']:.0f}",
                each.shown("updates_per_second"),
                each.shown("mean_staleness"),
                f"{figures['max_staleness']:.0f}",
                f"{figures['discarded']:.0f}",
                *(f"{share:.1%}" if share >= 5e-4 else "" for share in shares),
                each.shown("loss"),
            ]
        )
    print_table([*titles, *_SHARES, "loss"], rows)


def _row(result: Result) -> dict[str, Any]:
    """For JSON: the report of the first seed, and of several seeds the means with intervals."""
    report = result.reports[0]
    row = {
        **report.summary_row(),
        "staleness": report.staleness,
        "learning_rate": result.training.rate,
        "loss_by_learning_rate": result.tried,
    }
    if len(result.reports) == 1:
        return row
    means = {
        name: {
            "mean": result.figures[name],
            "low": result.figures[f"{name}_low"],
            "high": result.figures[f"{name}_high"],
        }
        for name in ("updates_per_second", "mean_staleness", "loss")
    }
    return {**row, "num_seeds": len(result.reports), "means": means}
