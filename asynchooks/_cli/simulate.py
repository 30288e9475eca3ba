"""`asynchooks simulate`: its arguments, checked before anything runs, and the run itself.

What is printed is made in `_simulate_output.py`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from . import simulate_output as output
from .arguments import argument, number, positive

if TYPE_CHECKING:
    from ..protocols import Protocol
    from ..simulation import Delay, Failure, Report

SUMMARY = "train with many workers in virtual time"
DESCRIPTION = (
    "Workers around one parameter server train in virtual time, and what came of it is printed. "
    "They fit a small built-in least-squares problem (16 weights, 256 examples, batches of 8), so "
    "losses are those of real training. The same arguments do the same, always."
)
DEFAULT_UPDATES = 10_000
_NUM_LOSSES = 200
_DELAY = "seconds by a law, as constant:0.1, exponential:1.0 or uniform:1,3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the sub-command takes."""
    add = parser.add_argument
    add("--workers", type=positive, default=64, metavar="N", help="default 64")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--protocol", default="async", metavar="NAME",
        help="async (default), sync, ksync:K, kbatch-sync:K, kasync:K, kbatch-async:K or ssp:S; "
        "+discard:B behind it drops staler gradients, @RATE is its learning rate",
    )  # fmt: skip
    which.add_argument(
        "--compare", metavar="NAMES", help="several, as async,ksync:6,sync@0.2: a row for each"
    )
    add("--staleness", type=_count, metavar="S", help="the bound of ssp, if not in its name")
    add("--delay", type=_delay, default="exponential:1.0", metavar="DELAY",
        help=f"of computing a gradient: {_DELAY} (default exponential:1.0)")  # fmt: skip
    add("--pull", type=_delay, metavar="DELAY", help="until parameters arrive (default none)")
    add("--push", type=_delay, metavar="DELAY", help="until a gradient arrives (default none)")
    add("--service", type=_delay, metavar="DELAY",
        help="of the server for each gradient, one after the other (default none)")  # fmt: skip
    add("--mtbf", type=_delay, metavar="DELAY", help="until a worker crashes (default: never)")
    add("--repair", type=_delay, metavar="DELAY", help="until it works again; goes with --mtbf")
    add("--updates", type=positive, metavar="N",
        help=f"of the parameters (default {DEFAULT_UPDATES}, without --until)")  # fmt: skip
    add("--until", type=_secs, metavar="SECS", help="the last virtual second, perhaps earlier")
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument(
        "--learning-rate", type=_rate, metavar="RATE",
        help="of all without @RATE (default 0.2 where no gradient is stale, as with sync; else "
        "what is stable: 0.5 / workers times the gradients of an update, at most 0.05)",
    )  # fmt: skip
    rates.add_argument(
        "--learning-rates",
        type=_rates,
        metavar="RATES",
        help="several, as 0.05,0.1,0.2: each protocol without @RATE trains with each of them, and "
        "shows the one that ends with the lowest loss",
    )
    add("--max-secs-without-update", type=_secs_above_zero, metavar="SECS",
        help="virtual seconds after which training that makes no update has failed "
        "(default: never)")  # fmt: skip
    add("--seed", type=_count, default=0, metavar="N", help="of all random numbers (default 0)")
    add("--backend", choices=("asyncio", "trio", "turbo"), default="turbo",
        help="all give the same; turbo (default) is the fastest")  # fmt: skip
    add("--trace", metavar="PATH", help="write a trace for ui.perfetto.dev")
    add("--plot", metavar="PATH", help="write plots as .png, .svg or .pdf (extra: plot)")
    add("--json", action="store_true", help="print JSON in place of the table (extra: cli)")


_BEHIND = re.compile(r"([^+@]*)([+@]?)(.*)", re.DOTALL)
"""The base of a name, and what is behind it."""


@dataclass(frozen=True)
class Contender:
    """A protocol that trains, once with each of its learning rates."""

    name: str
    protocol: Protocol
    rates: Sequence[float]
    shows_rate: bool
    """Whether its rate is of its own, rather than by default or the same for all."""


@dataclass(frozen=True)
class Simulate:
    """What the arguments ask for; `checked` makes it."""

    options: argparse.Namespace
    contenders: list[Contender]
    failures: list[Failure]

    def run(self) -> int:
        """Train by each protocol, and write and print what came of it; the exit code is 0.

        Raises:
            SimulationError: the simulation could not go on.
            OSError: a file could not be written.
        """
        from ..simulation import plot_reports, write_trace

        options = self.options
        results = [self._best(each) for each in self.contenders]
        if options.trace is not None:
            write_trace(options.trace, results[0].report)
        if options.plot is not None:
            plot_reports(options.plot, [each.labelled_report() for each in results])
        if options.json:
            output.print_json(options.seed, options.backend, results)
        else:
            output.print_table(results)
        return 0

    def _best(self, contender: Contender) -> output.Result:
        """What came of it with the rate that ended with the lowest loss; of equals the first."""
        reports = [self._train(contender, rate) for rate in contender.rates]
        losses = [each.losses[-1][2] for each in reports]
        # one that has diverged may be NaN
        order = [math.inf if math.isnan(each) else each for each in losses]
        best = order.index(min(order))
        tried = dict(zip(contender.rates, losses, strict=True))
        return output.Result(
            reports[best], contender.rates[best], tried, shows_rate=contender.shows_rate
        )

    def _train(self, contender: Contender, rate: float) -> Report:
        import numpy as np

        from ..simulation import Simulation
        from ..simulation.cluster._least_squares import LeastSquares

        options, name, protocol = self.options, contender.name, contender.protocol
        problem = LeastSquares(options.seed)
        simulation = Simulation(options.seed, options.backend)
        cluster = simulation.cluster(
            options.workers,
            parameters=problem.first,
            protocol=protocol,
            compute=options.delay,
            pull=options.pull,
            push=options.push,
            service=options.service,
            failures=self.failures,
            learning_rate=rate,
            keep_timeline=not (options.trace is None and options.plot is None),
        )
        updates = options.updates
        # without a number of updates: as often for those that make one of many gradients
        expected = updates or DEFAULT_UPDATES // protocol.num_gradients(cluster.server)

        def done() -> float:
            by_updates = cluster.server.version / updates if updates else 0.0
            return max(by_updates, simulation.now / options.until if options.until else 0.0)

        # a rate that is too large is the user's to see, by its loss, and no cause for warnings
        what = f"{name}@{rate:g}" if contender.shows_rate else name
        with output.progress(what, done), np.errstate(over="ignore", invalid="ignore"):
            report = cluster.run(
                gradient=problem.gradient,
                updates=updates,
                until=options.until,
                loss=problem.loss,
                loss_every=max(1, expected // _NUM_LOSSES),
                max_secs_without_update=options.max_secs_without_update,
            )
        return replace(report, protocol=name)


def checked(options: argparse.Namespace) -> Simulate:
    """The command, if everything that it needs is there.

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
    if not options.json:
        output.check_rich()
    if options.trace is not None:
        if len(contenders) > 1:
            raise ValueError("--trace is of one protocol; give --protocol in place of --compare")
        with _named("--trace"):
            check_writable(options.trace)
    if options.trace is not None and options.trace == options.plot:
        raise ValueError(f"--trace and --plot are both {options.plot!r}; give two paths")
    if options.plot is not None:
        with _named("--plot"):
            check_format(options.plot)
            check_matplotlib()
            check_writable(options.plot)
    return Simulate(options, contenders, failures)


def _contenders(options: argparse.Namespace) -> list[Contender]:
    """In the order in which they were asked for, each once."""
    names = [options.protocol] if options.compare is None else options.compare.split(",")
    names = [name.strip() for name in names]
    complete = []
    for name in names:
        base, sign, rest = _BEHIND.match(name).groups()  # type: ignore[union-attr]
        if base == "ssp":
            if options.staleness is None:
                raise ValueError("ssp needs a bound; give ssp:3, or --staleness 3")
            name = f"ssp:{options.staleness}{sign}{rest}"
        complete.append(name)
    if options.staleness is not None and complete == names:
        raise ValueError("--staleness is the bound of ssp; give it with the protocol ssp alone")
    return [_contender(name, options) for name in dict.fromkeys(complete)]


def _contender(text: str, options: argparse.Namespace) -> Contender:
    """One protocol, and the learning rates that it is to have."""
    from ..protocols import parse_protocol

    name, at, behind = text.partition("@")
    protocol = parse_protocol(name, options.workers)
    if at:
        allowed = f"the learning rate of {name} as {name}@0.1, a finite number >= 0"
        return Contender(name, protocol, (number(behind, float, 0, allowed),), shows_rate=True)
    if options.learning_rates is not None:
        return Contender(name, protocol, options.learning_rates, shows_rate=True)
    rate = options.learning_rate
    if rate is None:
        rate = _default_rate(protocol, options.workers)
    return Contender(name, protocol, (rate,), shows_rate=False)


def _default_rate(protocol: Protocol, num_workers: int) -> float:
    """Large where no gradient is stale; else stable for gradients as stale as they come to be."""
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
        # without the errno, which says nothing to who reads the line
        raise type(error)(f"argument {option}: {error.filename!r} {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"argument {option}: {error}") from error


_count = argument(lambda text: number(text, int, 0, "a whole number >= 0"))
_secs = argument(lambda text: number(text, float, 0, "virtual seconds >= 0"))
_rate = argument(lambda text: number(text, float, 0, "a finite number >= 0"))


@argument
def _secs_above_zero(text: str) -> float:
    secs: float = number(text, float, 5e-324, "virtual seconds > 0")
    return secs


@argument
def _rates(text: str) -> tuple[float, ...]:
    allowed = "finite numbers >= 0 with commas between them, as 0.05,0.1,0.2"
    return tuple(dict.fromkeys(number(each, float, 0, allowed) for each in text.split(",")))


@argument
def _delay(text: str) -> Delay:
    from ..simulation import parse_delay

    return parse_delay(text)
