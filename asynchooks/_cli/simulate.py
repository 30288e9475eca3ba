"""`asynchooks simulate`: its arguments, checked before anything runs, the run, and its output."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import argument, number, numeric, positive

if TYPE_CHECKING:
    from ..protocols import Protocol
    from ..simulation import Delay, Failure, Report

SUMMARY = "Train with many workers in virtual time, and compare protocols."
DESCRIPTION = """\
Train with many workers around one parameter server, in virtual time, and print a table of the \
results. The workers fit a small built-in least-squares problem (16 weights, 256 examples, batches \
of 8), so the losses are those of real training. The same arguments always give the same results.

DELAY is a number of seconds (constant:0.1) or a distribution of them: exponential:MEAN, \
shifted-exponential:SHIFT,EXCESS, uniform:LOW,HIGH, pareto:SCALE,SHAPE, lognormal:MU,SIGMA, \
weibull:SCALE,SHAPE, empirical:PATH (a recorded trace) or stragglers:PROBABILITY,FACTOR,DELAY."""
EPILOG = """\
examples:
Compare four protocols, each at its best learning rate:
  asynchooks simulate --compare async,ssp:3,ksync:48,sync --learning-rates 0.01,0.1,1 --until 10
Let workers crash, and write what each of them did for ui.perfetto.dev:
  asynchooks simulate --workers 8 --mtbf exponential:100 --repair constant:5 --trace out.pftrace
Print the results of stale synchronous training as JSON:
  asynchooks simulate --protocol ssp:3 --updates 500 --json"""
DEFAULT_UPDATES = 10_000
_NUM_LOSSES = 200
_SHARES = ("computed", "lost", "waited", "pulled", "pushed", "down", "idle")
_WIDTH = 200
"""Columns, where there is no terminal that could be too narrow."""
_LOOK_EVERY_SECS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    _add_training(parser)
    _add_delays(parser.add_argument_group("time and failures").add_argument)
    _add_ends(parser.add_argument_group("end of the training").add_argument)
    _add_output(parser.add_argument_group("output").add_argument)


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("workers and protocols")
    training.add_argument("--workers", type=positive, default=64, metavar="N",
        help="Train with N workers (default: 64).")  # fmt: skip
    which = training.add_mutually_exclusive_group()
    which.add_argument(
        "--protocol", action="append", metavar="NAME",
        help="Train by this protocol: async (the default), sync, ksync:K, kbatch-sync:K, kasync:K, "
        "kbatch-async:K or ssp:S. Add +discard:B to discard gradients staler than B, and @RATE to "
        "set the learning rate. Given several times, it compares them, as --compare does.",
    )  # fmt: skip
    which.add_argument(
        "--compare", metavar="NAMES",
        help="Train by several protocols, such as async,ksync:6,sync@0.2, and print a row for "
        "each.",
    )  # fmt: skip
    training.add_argument("--staleness", type=_count, metavar="S",
        help="Set the bound of ssp, if its name has none.")  # fmt: skip
    rates = training.add_mutually_exclusive_group()
    rates.add_argument(
        "--learning-rate", type=numeric(float, 0, "a finite number >= 0"), metavar="RATE",
        help="Set the learning rate of all protocols without @RATE. The default is 0.2 if no "
        "gradient is stale, as with sync. Otherwise it is a stable rate: 0.5 / workers times the "
        "gradients of an update, at most 0.05.",
    )  # fmt: skip
    rates.add_argument(
        "--learning-rates", type=_rates, metavar="RATES",
        help="Train each protocol without @RATE with each of several rates, such as 0.05,0.1,0.2, "
        "and print the one that ends with the lowest loss.",
    )  # fmt: skip
    training.add_argument("--seed", type=_count, default=0, metavar="N",
        help="Draw all random numbers from this seed (default: 0).")  # fmt: skip
    training.add_argument("--seeds", type=positive, default=1, metavar="N",
        help="Train with N seeds, from --seed on, in parallel, and print means with 90 %% "
        "intervals (default: 1).")  # fmt: skip
    training.add_argument("--backend", choices=("asyncio", "trio", "turbo"), default="turbo",
        help="Run on this backend (default: turbo, the fastest). All give the same "
        "results.")  # fmt: skip


def _add_delays(add: Callable[..., Any]) -> None:
    add("--delay", type=_delay, default="exponential:1.0", metavar="DELAY",
        help="Compute a gradient in this time (default: exponential:1.0).")  # fmt: skip
    add("--pull", type=_delay, metavar="DELAY",
        help="Let parameters arrive at a worker after this time (default: at once).")  # fmt: skip
    add("--push", type=_delay, metavar="DELAY",
        help="Let a gradient arrive at the server after this time (default: at once).")  # fmt: skip
    add("--service", type=_delay, metavar="DELAY",
        help="Let the server take this time for each gradient, one at a time (default: no "
        "time).")  # fmt: skip
    add("--mtbf", type=_delay, metavar="DELAY",
        help="Crash a worker after this time (default: never). This needs --repair.")  # fmt: skip
    add("--repair", type=_delay, metavar="DELAY",
        help="Let a crashed worker work again after this time. This needs --mtbf.")  # fmt: skip


def _add_ends(add: Callable[..., Any]) -> None:
    add("--updates", type=positive, metavar="N",
        help="Stop after N updates of the parameters "
        f"(default: {DEFAULT_UPDATES}, unless --until is given).")  # fmt: skip
    add("--until", type=numeric(float, 0, "virtual seconds >= 0"), metavar="SECS",
        help="Stop at this virtual time, unless --updates stops earlier.")  # fmt: skip
    add("--max-secs-without-update", metavar="SECS",
        type=numeric(float, 5e-324, "virtual seconds > 0"),
        help="Fail when no update comes for so many virtual seconds (default: never).")  # fmt: skip


def _add_output(add: Callable[..., Any]) -> None:
    add("--trace", metavar="PATH",
        help="Write a trace of one protocol, which ui.perfetto.dev shows.")  # fmt: skip
    add("--plot", metavar="PATH",
        help="Write plots as .png, .svg or .pdf. This needs the extra plot.")  # fmt: skip
    add("--json", action="store_true",
        help="Print JSON instead of the table, which needs the extra cli.")  # fmt: skip


_NAME = re.compile(r"([^+@]*)(.*)", re.DOTALL)
"""The base of a protocol's name, and the rest."""


@dataclass(frozen=True)
class Contender:
    """A protocol that trains, once with each of its learning rates."""

    name: str
    protocol: Protocol
    rates: Sequence[float]
    shows_rate: bool
    """Whether its rate was given for it, rather than by default or for all."""


@dataclass(frozen=True)
class Result:
    """The result of one protocol with its best learning rate."""

    contender: Contender
    report: Report
    learning_rate: float
    tried: Mapping[float, float]
    """The last loss by learning rate, of all learning rates that were tried."""
    more: Sequence[Report] = ()
    """Of further seeds, with that rate."""

    @property
    def reports(self) -> list[Report]:
        """Of all seeds."""
        return [self.labelled_report(), *self.more]

    def labelled_report(self) -> Report:
        """The report with the rate in its protocol's name, if it was given for it."""
        if not self.contender.shows_rate:
            return self.report
        return replace(self.report, protocol=f"{self.report.protocol}@{self.learning_rate:g}")


def _simulate(
    options: argparse.Namespace, contenders: list[Contender], failures: list[Failure]
) -> int:
    """Train by each protocol, and write and print the results; the exit code is 0."""
    from ..simulation import plot_reports, write_trace

    results = [_best(options, each, failures) for each in contenders]
    if options.seeds > 1:
        results = _with_seeds(options, results, failures)
    if options.trace is not None:
        write_trace(options.trace, results[0].report)
    if options.plot is not None:
        plot_reports(options.plot, [each.reports for each in results])
    if options.json:
        _print_json(options.seed, options.backend, results)
    else:
        _print_table(results)
    return 0


def _best(options: argparse.Namespace, contender: Contender, failures: list[Failure]) -> Result:
    """The result with the learning rate that ended with the lowest loss; of equals the first."""
    reports = [_train(options, contender, rate, failures) for rate in contender.rates]
    losses = [each.losses[-1][2] for each in reports]
    # one that has diverged may be NaN
    order = [math.inf if math.isnan(each) else each for each in losses]
    best = order.index(min(order))
    tried = dict(zip(contender.rates, losses, strict=True))
    return Result(contender, reports[best], contender.rates[best], tried)


def _with_seeds(
    options: argparse.Namespace, results: Sequence[Result], failures: list[Failure]
) -> list[Result]:
    """The results with the reports of further seeds, each with its best rate."""
    from .._errors import SimulationError
    from ..simulation._pool import in_processes

    seeds = range(options.seed + 1, options.seed + options.seeds)
    runs = [(place, seed) for place in range(len(results)) for seed in seeds]

    def train(run: tuple[int, int]) -> Report:
        place, seed = run
        one, rate = results[place].contender, results[place].learning_rate
        try:
            report = _train(options, one, rate, failures, seed=seed, is_shown=False)
        except SimulationError as error:
            raise SimulationError(f"{one.name} with seed {seed}: {error}") from error
        return replace(report, timeline=None)

    found = in_processes(train, runs)
    num = len(seeds)
    return [
        replace(result, more=found[place * num : (place + 1) * num])
        for place, result in enumerate(results)
    ]


def _train(
    options: argparse.Namespace,
    contender: Contender,
    rate: float,
    failures: list[Failure],
    *,
    seed: int | None = None,
    is_shown: bool = True,
) -> Report:
    import numpy as np

    from ..simulation import Simulation
    from ..simulation.cluster._least_squares import LeastSquares

    name, protocol = contender.name, contender.protocol
    seed = options.seed if seed is None else seed
    problem = LeastSquares(seed)
    simulation = Simulation(seed, options.backend)
    cluster = simulation.cluster(
        options.workers,
        parameters=problem.first,
        protocol=protocol,
        compute=options.delay,
        pull=options.pull,
        push=options.push,
        service=options.service,
        failures=failures,
        learning_rate=rate,
        keep_timeline=not (options.trace is None and options.plot is None),
    )
    updates = options.updates
    # without a number of updates: as often for those that make one of many gradients
    expected = updates or DEFAULT_UPDATES // protocol.num_gradients(cluster.server)

    def done() -> float:
        by_updates = cluster.server.version / updates if updates else 0.0
        return max(by_updates, simulation.now / options.until if options.until else 0.0)

    # the loss shows a learning rate that is too large: no warning is needed
    label = f"{name}@{rate:g}" if contender.shows_rate else name
    bar = _progress(label, done) if is_shown else nullcontext()
    with bar, np.errstate(over="ignore", invalid="ignore"):
        report = cluster.run(
            gradient=problem.gradient,
            updates=updates,
            until=options.until,
            loss=problem.loss,
            loss_every=max(1, expected // _NUM_LOSSES),
            max_secs_without_update=options.max_secs_without_update,
        )
    return replace(report, protocol=name)


def checked(options: argparse.Namespace) -> Callable[[], int]:
    """The function that trains and prints the results, and returns the exit code.

    Raises:
        ValueError: arguments do not go together.
        ImportError: an extra is missing (says which).
        OSError: a file could not be written.
    """
    from ..simulation.output._plots import check_format, check_matplotlib
    from ..simulation.output._whole_file import check_writable

    contenders = _contenders(options)
    failures = _failures(options)
    if options.updates is None and options.until is None:
        options.updates = DEFAULT_UPDATES
    if options.backend == "trio" and find_spec("trio") is None:
        raise ImportError("--backend trio needs trio; pip install 'asynchooks[trio]'")
    if not (options.json or _has_rich()):
        raise ImportError(
            "the table needs rich, which is not installed; pip install 'asynchooks[cli]', or give "
            "--json"
        )
    if options.trace is not None:
        if len(contenders) > 1:
            raise ValueError("--trace takes one protocol; give a single --protocol")
        with _named("--trace"):
            check_writable(options.trace)
    if options.trace is not None and options.trace == options.plot:
        raise ValueError(f"--trace and --plot are both {options.plot!r}; give two paths")
    if options.plot is not None:
        with _named("--plot"):
            check_format(options.plot)
            check_matplotlib()
            check_writable(options.plot)
    return partial(_simulate, options, contenders, failures)


def _contenders(options: argparse.Namespace) -> list[Contender]:
    """The protocols in the order of the options, each once."""
    names = options.protocol or ["async"]
    if options.compare is not None:
        names = options.compare.split(",")
    names = [name.strip() for name in names]
    complete = []
    for name in names:
        base, rest = _NAME.match(name).groups()  # type: ignore[union-attr]
        if base == "ssp":
            if options.staleness is None:
                raise ValueError("ssp needs a bound; give ssp:3, or --staleness 3")
            name = f"ssp:{options.staleness}{rest}"
        complete.append(name)
    if options.staleness is not None and complete == names:
        raise ValueError("--staleness is the bound of ssp; give it with the protocol ssp alone")
    return [_contender(name, options) for name in dict.fromkeys(complete)]


def _contender(text: str, options: argparse.Namespace) -> Contender:
    """One protocol and its learning rates."""
    from ..protocols import parse_protocol

    name, at, rate_text = text.partition("@")
    protocol = parse_protocol(name, options.workers)
    if at:
        allowed = f"the learning rate of {name} as {name}@0.1, a finite number >= 0"
        return Contender(name, protocol, (number(rate_text, float, 0, allowed),), shows_rate=True)
    if options.learning_rates is not None:
        return Contender(name, protocol, options.learning_rates, shows_rate=True)
    rate = options.learning_rate
    if rate is None:
        rate = _default_rate(protocol, options.workers)
    return Contender(name, protocol, (rate,), shows_rate=False)


def _default_rate(protocol: Protocol, num_workers: int) -> float:
    """Large where no gradient is stale; else stable for gradients with the expected staleness."""
    if protocol.abandons_stale:
        return 0.2
    from ..protocols import KAsync, KBatchAsync

    num_gradients = protocol.k if isinstance(protocol, KAsync | KBatchAsync) else 1
    return min(0.05, 0.5 * num_gradients / num_workers)


def _failures(options: argparse.Namespace) -> list[Failure]:
    if (options.mtbf is None) != (options.repair is None):
        raise ValueError("--mtbf and --repair go together; give both")
    if options.mtbf is None:
        return []
    from ..simulation import Crashes

    with _named("--mtbf"):
        return [Crashes(options.mtbf, options.repair)]


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Errors of the block say which option they are about."""
    try:
        yield
    except OSError as error:
        # without the errno, which helps no reader
        raise type(error)(f"argument {option}: {error.filename!r} {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"argument {option}: {error}") from error


def _print_table(results: Sequence[Result]) -> None:
    """Print a row for each result. Kinds of time that no worker spent have no column."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [_mean_row(each) for each in results]
    shares = [kind for kind in _SHARES if any(row[f"share_{kind}"] >= 5e-4 for row in rows)]
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("protocol")
    titles = "rate", "virtual s", "updates", "per s", "staleness", "max", "dropped"
    for title in (*titles, *shares, "loss"):
        table.add_column(title, justify="right")
    for row, result in zip(rows, results, strict=True):
        table.add_row(
            row["protocol"],
            f"{result.learning_rate:.4g}",
            f"{row['secs']:.6g}",
            str(row["updates"]),
            _shown(result, "updates_per_second"),
            _shown(result, "mean_staleness"),
            str(row["max_staleness"]),
            str(row["discarded"]),
            *(f"{row[f'share_{kind}']:.1%}" for kind in shares),
            "" if row["loss"] is None else _shown(result, "loss", 3),
        )
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _mean_row(result: Result) -> dict[str, Any]:
    """The summary of the one report, with the means of several."""
    from ..simulation.output._interval import interval_of

    row = result.report.summary_row()
    if result.more:
        every = [each.summary_row() for each in result.reports]
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = interval_of([each[name] for each in every]).mean
        row["updates"] = round(sum(each["updates"] for each in every) / len(every))
        row["max_staleness"] = max(each["max_staleness"] for each in every)
        row["discarded"] = round(sum(each["discarded"] for each in every) / len(every))
    return row


def _shown(result: Result, name: str, digits: int = 4) -> str:
    """A figure; of several seeds the mean, and its 90 % interval."""
    if not result.more:
        return f"{result.report.summary_row()[name]:.{digits}g}"
    mean, low, high = _interval(result, name)
    return f"{mean:.{digits}g} ({low:.{digits}g} to {high:.{digits}g})"


def _interval(result: Result, name: str) -> tuple[float, float, float]:
    from ..simulation.output._interval import interval_of

    return interval_of([each.summary_row()[name] for each in result.reports])


def _intervals(result: Result) -> dict[str, Any]:
    """Of JSON: the means over seeds, with their intervals."""
    if not result.more:
        return {}
    figures = ["updates_per_second", "mean_staleness"]
    if result.report.losses:
        figures.append("loss")
    return {
        "num_seeds": len(result.reports),
        "means": {
            name: _finite(dict(zip(("mean", "low", "high"), _interval(result, name), strict=True)))
            for name in figures
        },
    }


def _print_json(seed: int, backend: str, results: Sequence[Result]) -> None:
    """Print one object: seed, backend, and the reports with the counts of each staleness."""
    rows = [
        {
            **each.report.summary_row(),
            "staleness": {str(k): v for k, v in each.report.staleness.items()},
            "learning_rate": each.learning_rate,
            "loss_by_learning_rate": _finite({str(k): v for k, v in each.tried.items()}),
            **_intervals(each),
        }
        for each in results
    ]
    print(json.dumps({"seed": seed, "backend": backend, "reports": [_finite(row) for row in rows]}))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null in place of NaN and infinity, which JSON lacks."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


@contextmanager
def _progress(name: str, done: Callable[[], float]) -> Iterator[None]:
    """Show `done()`, from 0 to 1, on stderr while the block runs, if that is a terminal."""
    if not (sys.stderr.isatty() and _has_rich()):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    has_ended = threading.Event()
    # drawn by our thread alone: rich's own does not ask for the progress
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(name, total=1.0)

        def look() -> None:
            while not has_ended.wait(_LOOK_EVERY_SECS):
                bar.update(task, completed=done(), refresh=True)

        thread = threading.Thread(target=look, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


_count = numeric(int, 0, "a whole number >= 0")


@argument
def _rates(text: str) -> tuple[float, ...]:
    allowed = "finite numbers >= 0 with commas between them, such as 0.05,0.1,0.2"
    return tuple(dict.fromkeys(number(each, float, 0, allowed) for each in text.split(",")))


@argument
def _delay(text: str) -> Delay:
    from ..simulation import parse_delay

    return parse_delay(text)
