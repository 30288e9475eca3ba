"""What a bound on the staleness of rollouts costs, by policy; which sandboxes stay behind.

    python -m tests.benchmarks.rollouts [policies] [bias] [sandboxes]

A rollout takes a log-normal time with a mean of 2 s and a sigma of 1, always the same for a prompt.
A step takes 1 s, and 8 rollouts. Figures are of 300 steps with each of 4 seeds. The time is
virtual, so they are the same on every machine.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    StopAtStepHook,
)
from asynchooks.data import Rollout, Stage, WhenStale, batch, map_concurrent, rollouts, shielded
from asynchooks.simulation import Simulation

from ._report import print_table

BATCH_SIZE, NUM_STEPS, STEP_SECS = 8, 300, 1.0
MEAN_SECS, SIGMA = 2.0, 1.0
SEEDS = range(4)
NUM_PROMPTS = 20_000
CONCURRENCIES = (16, 24, 32)

BARS: dict[str, tuple[str, str, str]] = {
    "map_concurrent, ordered": ("30, 2.7", "38, 3.8", "44, 4.8"),
    "map_concurrent, unordered": ("95, 2.9", "100, 4.0", "100, 4.9"),
    "WAIT, 2": ("26, 2.0", "31, 2.0", "31, 2.0"),
    "WAIT, 4": ("41, 2.0", "41, 3.0", "41, 4.0"),
    "WAIT, 8": ("59, 2.0", "62, 3.0", "62, 4.0"),
    "ACCEPT, 4": ("75, 2.0", "99, 3.0", "100, 4.0"),
    "DROP, 4": ("80, 1.7", "100, 2.5", "100, 3.4"),
}
"""What is to be reached: the learner's busy share in %, the mean age."""

Rollouts = Callable[[int], Any]
"""An async function of a prompt."""
MakeSource = Callable[[Rollouts], Stage[Any]]


@dataclass(frozen=True)
class Training:
    """What one training came to."""

    secs: float
    ages: Counter[int]
    num_dropped: int
    spent_secs: float
    """Seconds of rollouts that have ended, whether they were of use or not."""
    trained_secs: list[float]
    """What each rollout that was trained on took."""


class Figures:
    """The figures of several trainings with the same policy."""

    def __init__(self, trainings: Sequence[Training]) -> None:
        work_secs = NUM_STEPS * STEP_SECS
        self.busy = float(np.mean([work_secs / each.secs for each in trainings]))
        ages = sum((each.ages for each in trainings), Counter[int]())
        self.mean_age = sum(age * num for age, num in ages.items()) / ages.total()
        self.greatest_age = max(ages)
        num_dropped = sum(each.num_dropped for each in trainings)
        self.dropped = num_dropped / (num_dropped + ages.total())
        self.trained_secs = [secs for each in trainings for secs in each.trained_secs]
        self.useful = sum(self.trained_secs) / sum(each.spent_secs for each in trainings)
        self.length = float(np.mean(self.trained_secs)) / MEAN_SECS

    def __str__(self) -> str:
        return f"{100 * self.busy:.0f}, {self.mean_age:.1f}/{self.greatest_age}"


def prompt_secs(seed: int) -> list[float]:
    """How long the rollout of each prompt takes."""
    rng = np.random.default_rng(seed)
    mean_of_log = np.log(MEAN_SECS) - SIGMA**2 / 2
    lengths: list[float] = rng.lognormal(mean_of_log, SIGMA, NUM_PROMPTS).tolist()
    return lengths


def train(make_source: MakeSource, seed: int) -> Training:
    """One training in virtual time."""
    simulation, lengths = Simulation(seed=seed, backend="turbo"), prompt_secs(seed)
    ages, trained = Counter[int](), list[float]()
    spent, num_trained_steps, end = 0.0, 0, 0.0

    async def rollout(prompt: int) -> tuple[int, int]:
        nonlocal spent
        begun, version = simulation.now, num_trained_steps
        try:
            await simulation.sleep(lengths[prompt])
        finally:
            spent += simulation.now - begun
        return prompt, version

    async def step(groups: Sequence[Any]) -> dict[str, float]:
        nonlocal num_trained_steps
        for group in groups:
            is_rollout = isinstance(group, Rollout)
            prompt, version = group.result if is_rollout else group
            ages[group.staleness if is_rollout else num_trained_steps - version] += 1
            trained.append(lengths[prompt])
        await simulation.sleep(STEP_SECS)
        num_trained_steps += 1
        return {}

    source = make_source(rollout)

    async def main() -> None:
        nonlocal end
        hooks = [FeedHook(source, "groups"), StopAtStepHook(last_step=NUM_STEPS)]
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                await session.run([])
            end = simulation.now

    simulation.run(main)
    dropped = getattr(source.statistics(), "num_dropped", 0)
    return Training(end, ages, dropped, spent, trained)


def mapped(concurrency: int, *, ordered: bool) -> MakeSource:
    """The stages that there were before: no bound on staleness in steps."""

    def make(rollout: Rollouts) -> Stage[Any]:
        results = map_concurrent(rollout, range(NUM_PROMPTS), concurrency, ordered=ordered)
        return batch(results, BATCH_SIZE, collate=list)

    return make


def bounded(policy: WhenStale, max_staleness: int, concurrency: int) -> MakeSource:
    def make(rollout: Rollouts) -> Stage[Any]:
        return rollouts(
            rollout,
            range(NUM_PROMPTS),
            BATCH_SIZE,
            concurrency=concurrency,
            max_staleness=max_staleness,
            when_stale=policy,
        )

    return make


def figures(make_source: MakeSource) -> Figures:
    return Figures([train(make_source, seed) for seed in SEEDS])


def contenders(concurrency: int) -> dict[str, MakeSource]:
    found = {
        "map_concurrent, ordered": mapped(concurrency, ordered=True),
        "map_concurrent, unordered": mapped(concurrency, ordered=False),
    }
    for policy, bound in (
        (WhenStale.WAIT, 0),
        (WhenStale.WAIT, 1),
        (WhenStale.WAIT, 2),
        (WhenStale.WAIT, 4),
        (WhenStale.WAIT, 8),
        (WhenStale.ACCEPT, 4),
        (WhenStale.DROP, 2),
        (WhenStale.DROP, 4),
        (WhenStale.DROP, 8),
    ):
        found[f"{policy.name}, {bound}"] = bounded(policy, bound, concurrency)
    return found


def print_policies() -> None:
    found = {
        concurrency: {name: figures(make) for name, make in contenders(concurrency).items()}
        for concurrency in CONCURRENCIES
    }
    rows = []
    for name in contenders(CONCURRENCIES[0]):
        bars = BARS.get(name, ("",) * len(CONCURRENCIES))
        cells = [(str(found[num][name]), bar) for num, bar in zip(CONCURRENCIES, bars, strict=True)]
        rows.append([name, *(each for cell in cells for each in cell)])
    header = [
        "policy, max_staleness",
        *(each for num in CONCURRENCIES for each in (f"concurrency {num}", "bar")),
    ]
    print_table("busy share of the learner in %, mean/greatest age", header, rows)
    rows = []
    for bound in (2, 4, 8):
        for num in CONCURRENCIES:
            each = found[num][f"DROP, {bound}"]
            shares = (each.dropped, each.useful, each.length)
            rows.append([f"DROP, {bound}", str(num), *(f"{share:.2f}" for share in shares)])
    header = ["policy", "concurrency", "dropped", "seconds of use", "length of what is trained"]
    print_table("what dropping costs: shares of prompts, of seconds, of the mean", header, rows)


def chi_square(lengths: Sequence[float], num_bins: int = 10) -> float:
    """How far the lengths are from the distribution of the prompts; num_bins - 1 is expected."""
    every_prompt = np.concatenate([prompt_secs(seed) for seed in SEEDS])
    edges = np.quantile(every_prompt, np.linspace(0, 1, num_bins + 1)[1:-1])
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=num_bins)
    expected = len(lengths) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


def print_bias() -> None:
    rows = []
    for policy in WhenStale:
        found = figures(bounded(policy, 4, 24))
        distance = chi_square(found.trained_secs)
        rows.append([policy.name, f"{distance:.1f}", f"{found.length:.2f}"])
    header = ["policy", "chi-square, 9 degrees of freedom", "mean length"]
    print_table("lengths of what is trained against those of all prompts (1 %: 21.7)", header, rows)


NUM_SANDBOXES = 50


@asynccontextmanager
async def sandbox(simulation: Simulation, rng: Random, live: set[int]) -> AsyncIterator[int]:
    """A resource of a service that creates it with the request, and answers later."""
    name = len(live) + rng.getrandbits(60)
    live.add(name)
    await simulation.sleep(rng.uniform(0.2, 2.0))
    try:
        yield name
    finally:
        await simulation.sleep(0.3)
        live.discard(name)


def leave_sandboxes(how: str, why: str, seed: int) -> tuple[int, int, float]:
    """How many were open when training ended, how many are left, and the seconds in between."""
    simulation = Simulation(seed=seed, backend=("asyncio", "trio", "turbo")[seed % 3])
    rng, live, at_end = Random(seed), set[int](), list[tuple[float, int]]()

    def note_end() -> None:
        at_end.append((simulation.now, len(live)))

    async def rollout(prompt: int) -> int:
        manager = sandbox(simulation, rng, live)
        async with shielded(manager) if how == "shielded" else manager:
            await simulation.sleep(rng.lognormvariate(0.0, 1.5))
            if why == "error" and simulation.now > 8.0 and not at_end:
                note_end()
                raise OSError
            return prompt

    async def step(groups: list[Rollout]) -> dict[str, float]:
        await simulation.sleep(STEP_SECS)
        return {}

    async def train_for_a_while() -> None:
        source = rollouts(
            rollout,
            range(NUM_PROMPTS),
            BATCH_SIZE,
            concurrency=NUM_SANDBOXES,
            max_staleness=8,
            when_stale=WhenStale.DROP,
        )
        hooks = [FeedHook(source, "groups")]
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while why != "end" or simulation.now < 12.0:
                await session.run([])
            note_end()

    async def train_until_the_error() -> None:
        with suppress(OSError):
            await train_for_a_while()

    async def main() -> None:
        task = simulation.start(train_until_the_error if why == "error" else train_for_a_while)
        if why == "cancel":
            await simulation.sleep(rng.uniform(3.0, 15.0))
            note_end()
            task.cancel()
        await task.wait()

    logging.getLogger("asynchooks").setLevel(logging.CRITICAL)
    simulation.run(main)
    (ended, num_open), *_ = at_end
    return num_open, len(live), simulation.now - ended


def print_sandboxes() -> None:
    rows = []
    for how in ("async with", "shielded"):
        for why in ("end", "cancel", "error"):
            found = [leave_sandboxes(how, why, seed) for seed in range(42)]
            num_open, num_left = (np.mean([each[i] for each in found]) for i in (0, 1))
            longest = max(each[2] for each in found)
            rows.append([how, why, f"{num_open:.1f}", f"{num_left:.1f}", f"{longest:.1f} s"])
    header = ["sandbox", "training ends by", "open then", "left behind", "the end takes at most"]
    print_table("sandboxes, 50 rollouts at a time, mean of 42 trainings", header, rows)


PARTS: dict[str, Callable[[], None]] = {
    "policies": print_policies,
    "bias": print_bias,
    "sandboxes": print_sandboxes,
}


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - PARTS.keys():
        sys.exit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
