"""`asynchooks simulate`: its help and its arguments, which are checked before anything runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from . import argument, count, new_file, number, plot_file, positive
from .output import check_rich

SUMMARY = "Train with many workers in virtual time, and compare protocols."
DESCRIPTION = """\
Train with many workers around one parameter server, in virtual time, and
print a table of the results. The workers fit a small built-in least-squares
problem (16 weights, 256 examples, batches of 8), so the losses are those of
real training. The same arguments always give the same results.

DELAY is a number of seconds (constant:0.1) or a distribution of them:
exponential:MEAN, shifted-exponential:SHIFT,EXCESS, uniform:LOW,HIGH,
pareto:SCALE,SHAPE, lognormal:MU,SIGMA, weibull:SCALE,SHAPE, empirical:PATH
(a recorded trace) or stragglers:PROBABILITY,FACTOR,DELAY."""
EPILOG = """\
examples:
Compare four protocols, each at its best learning rate:
  asynchooks simulate --compare async,ssp:3,ksync:48,sync --learning-rates 0.01,0.1,1 --until 10
Let workers crash, and write what each of them did for ui.perfetto.dev:
  asynchooks simulate --workers 8 --mtbf exponential:100 --repair constant:5 --trace out.pftrace
Print the results of stale synchronous training as JSON:
  asynchooks simulate --protocol ssp:3 --updates 500 --json"""
DEFAULT_UPDATES = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    add = parser.add_argument_group("workers and protocols").add_argument
    add(
        "--workers",
        type=positive,
        default=64,
        metavar="N",
        help="Train with N workers (default: 64).",
    )
    add(
        "--protocol",
        "--compare",
        dest="protocols",
        action="extend",
        type=_protocols,
        metavar="NAMES",
        help="Train by these protocols, such as async,ksync:6,sync@0.2, and print a row for each: "
        "async (the default), sync, ksync:K, kbatch-sync:K, kasync:K, kbatch-async:K or ssp:S. Add "
        "+discard:B to discard gradients staler than B, and @RATE to set the learning rate.",
    )
    add(
        "--learning-rates",
        type=_rates,
        metavar="RATES",
        help="Train each protocol without @RATE with each of these rates, such as 0.05,0.1,0.2, "
        "and print the one that ends with the lowest loss. The default is 0.2 if no gradient is "
        "stale, as with sync. Otherwise it is a stable rate: 0.5 / workers times the gradients of "
        "an update, at most 0.05.",
    )
    add(
        "--seed",
        type=count,
        default=0,
        metavar="N",
        help="Draw all random numbers from this seed (default: 0).",
    )
    add(
        "--seeds",
        type=positive,
        default=1,
        metavar="N",
        help="Train with N seeds, from --seed on, in parallel, and print means with 90 %% "
        "intervals (default: 1).",
    )
    add = parser.add_argument_group("time and failures").add_argument
    add(
        "--delay",
        type=_delay,
        default="exponential:1.0",
        metavar="DELAY",
        help="Compute a gradient in this time (default: exponential:1.0).",
    )
    for name, what in (
        ("--pull", "Let parameters arrive at a worker after this time (default: at once)."),
        ("--push", "Let a gradient arrive at the server after this time (default: at once)."),
        ("--service", "Let the server take this time for each gradient, one at a time."),
        ("--mtbf", "Crash a worker after this time. This needs --repair."),
        ("--repair", "Let a crashed worker work again after this time. This needs --mtbf."),
    ):
        add(name, type=_delay, metavar="DELAY", help=what)
    add = parser.add_argument_group("end of the training").add_argument
    add(
        "--updates",
        type=positive,
        metavar="N",
        help="Stop after N updates of the parameters (default: 10000, unless --until is given).",
    )
    add(
        "--until",
        type=number(float, "virtual seconds >= 0"),
        metavar="SECS",
        help="Stop at this virtual time, unless --updates stops earlier.",
    )
    add(
        "--max-secs-without-update",
        type=number(float, "virtual seconds > 0", 5e-324),
        metavar="SECS",
        help="Fail when no update comes for so many virtual seconds (default: never).",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--trace",
        type=new_file,
        metavar="PATH",
        help="Write a trace of one protocol, which ui.perfetto.dev shows.",
    )
    add(
        "--plot",
        type=plot_file,
        metavar="PATH",
        help="Write plots as .png, .svg or .pdf. This needs the extra plot.",
    )
    add(
        "--json",
        action="store_true",
        help="Print JSON instead of the table, which needs the extra cli.",
    )


def checked(options: argparse.Namespace) -> Callable[[], int]:
    """The function that trains and prints the results, and returns the exit code.

    Raises:
        ValueError: arguments do not go together.
        ImportError: the table cannot be printed.
    """
    from ..simulation import Crashes
    from .trainings import contenders, train_all

    if not options.json:
        check_rich()
    if (options.mtbf is None) != (options.repair is None):
        raise ValueError("--mtbf and --repair go together; give both")
    options.failures = [] if options.mtbf is None else [Crashes(options.mtbf, options.repair)]
    if options.updates is None and options.until is None:
        options.updates = DEFAULT_UPDATES
    protocols = contenders(options)
    if options.trace is not None:
        if len(protocols) > 1:
            raise ValueError("--trace takes one protocol; give a single --protocol")
        if options.trace == options.plot:
            raise ValueError(f"--trace and --plot are both {options.trace!r}; give two paths")
    return partial(train_all, options, protocols)


_rate = number(float, "a learning rate, a finite number >= 0")


def _protocols(text: str) -> list[tuple[str, float | None]]:
    """Names of protocols, each with the learning rate behind it if it has one of its own."""
    # not within the parentheses of one as it prints, such as DiscardStale(KAsync(k=2), 3)
    names = re.split(r",(?![^(]*\))", text)
    parts = (each.strip().partition("@") for each in names)
    return [(name, _rate(own) if at else None) for name, at, own in parts]


def _rates(text: str) -> list[float]:
    return [_rate(each) for each in text.split(",")]


@argument
def _delay(text: str) -> Any:
    from ..simulation import parse_delay

    return parse_delay(text)
