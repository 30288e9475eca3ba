"""What a bound on the staleness of rollouts costs, by policy; which sandboxes stay behind.

    python -m tests.benchmarks.rollouts [policies] [bias] [sandboxes]

A rollout takes a log-normal time with a mean of 2 s and a sigma of 1, always the same for a prompt.
A step takes 1 s, and 8 rollouts. Figures are of 300 steps with each of 4 seeds. The time is
virtual, so they are the same on every machine: docs/benchmarks.md has them.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import numpy as np

from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession, StopAtStepHook
from asynchooks.data import Rollout, Stage, WhenStale, batch, map_concurrent, rollouts, shielded
from asynchooks.simulation import Simulation

from ._report import parts_of, print_table

BATCH_SIZE, NUM_STEPS, STEP_SECS = 8, 300, 1.0
MEAN_SECS, SIGMA = 2.0, 1.0
SEEDS = range(4)
PROMPTS = range(20_000)
CONCURRENCIES = (16, 24, 32)

MakeSource = Callable[[Callable[[int], Any]], Stage[Any]]
"""Of an async function of a prompt."""


def prompt_secs(seed: int) -> list[float]:
    """How long the rollout of each prompt takes."""
    rng, mean_of_log = np.random.default_rng(seed), np.log(MEAN_SECS) - SIGMA**2 / 2
    lengths: list[float] = rng.lognormal(mean_of_log, SIGMA, len(PROMPTS)).tolist()
    return lengths


class Figures:
    """What several trainings with the same policy came to."""

    def __init__(self, make_source: MakeSource) -> None:
        self.secs = 0.0
        self.num_dropped = 0
        self.ages = Counter[int]()
        self.trained_secs: list[float] = []  # what each rollout that was trained on took
        for seed in SEEDS:
            self._train(make_source, seed)

    def _train(self, make_source: MakeSource, seed: int) -> None:
        """One training in virtual time."""
        simulation, lengths = Simulation(seed=seed, backend="turbo"), prompt_secs(seed)
        num_trained_steps = 0

        async def rollout(prompt: int) -> tuple[int, int]:
            version = num_trained_steps
            await simulation.sleep(lengths[prompt])
            return prompt, version

        async def step(groups: Sequence[Any]) -> dict[str, float]:
            nonlocal num_trained_steps
            for group in groups:
                is_rollout = isinstance(group, Rollout)
                prompt, version = group.result if is_rollout else group
                self.ages[group.staleness if is_rollout else num_trained_steps - version] += 1
                self.trained_secs.append(lengths[prompt])
            await simulation.sleep(STEP_SECS)
            num_trained_steps += 1
            return {}

        source = make_source(rollout)

        async def main() -> None:
            hooks = [FeedHook(source, "groups"), StopAtStepHook(last_step=NUM_STEPS)]
            async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
                while not session.should_stop():
                    await session.run([])
                self.secs += simulation.now

        simulation.run(main)
        self.num_dropped += getattr(source.statistics(), "num_dropped", 0)

    def busy_and_ages(self) -> str:
        mean_age = sum(age * num for age, num in self.ages.items()) / self.ages.total()
        busy = len(SEEDS) * NUM_STEPS * STEP_SECS / self.secs
        return f"{100 * busy:.0f}, {mean_age:.1f}/{max(self.ages)}"

    def costs(self) -> list[str]:
        """The share of prompts dropped, and the mean length of what is trained by that of all."""
        dropped = self.num_dropped / (self.num_dropped + self.ages.total())
        return [f"{share:.2f}" for share in (dropped, np.mean(self.trained_secs) / MEAN_SECS)]


def mapped(concurrency: int, *, ordered: bool) -> MakeSource:
    """Stages without a bound on staleness in steps."""
    return lambda rollout: batch(
        map_concurrent(rollout, PROMPTS, concurrency, ordered=ordered), BATCH_SIZE, collate=list
    )


def bounded(policy: WhenStale, max_staleness: int, concurrency: int) -> MakeSource:
    return lambda rollout: rollouts(
        rollout, PROMPTS, BATCH_SIZE, concurrency=concurrency, max_staleness=max_staleness,
        when_stale=policy,
    )  # fmt: skip


def print_policies() -> None:
    found: dict[str, list[Figures]] = {
        f"map_concurrent, {'ordered' if ordered else 'unordered'}": [
            Figures(mapped(num, ordered=ordered)) for num in CONCURRENCIES
        ]
        for ordered in (True, False)
    }
    for policy, bounds in {
        WhenStale.WAIT: (0, 1, 2, 4, 8), WhenStale.ACCEPT: (4,), WhenStale.DROP: (2, 4, 8),
    }.items():  # fmt: skip
        for bound in bounds:
            found[f"{policy.name}, {bound}"] = [
                Figures(bounded(policy, bound, num)) for num in CONCURRENCIES
            ]
    header = ["policy, max_staleness", *(f"concurrency {num}" for num in CONCURRENCIES)]
    rows = [[name, *(each.busy_and_ages() for each in row)] for name, row in found.items()]
    print_table("busy share of the learner in %, mean/greatest age", header, rows)
    rows = [
        [name, str(num), *each.costs()]
        for name in found if name.startswith("DROP")
        for num, each in zip(CONCURRENCIES, found[name], strict=True)
    ]  # fmt: skip
    header = ["policy", "concurrency", "dropped", "length of what is trained"]
    print_table("what dropping costs: shares of prompts, and of the mean", header, rows)


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
        found = Figures(bounded(policy, 4, 24))
        rows.append([policy.name, f"{chi_square(found.trained_secs):.1f}", found.costs()[1]])
    header = ["policy", "chi-square, 9 degrees of freedom", "mean length"]
    print_table("lengths of what is trained against those of all prompts (1 %: 21.7)", header, rows)


@asynccontextmanager
async def sandbox(simulation: Simulation, rng: Random, live: set[int]) -> AsyncIterator[None]:
    """A resource of a service that creates it with the request, and answers later."""
    name = rng.getrandbits(60)
    live.add(name)
    await simulation.sleep(rng.uniform(0.2, 2.0))
    try:
        yield
    finally:
        await simulation.sleep(0.3)
        live.discard(name)


def leave_sandboxes(how: str, why: str, seed: int) -> tuple[int, int, float]:
    """How many were open when training ended, how many are left, and the seconds in between."""
    simulation = Simulation(seed=seed, backend=("asyncio", "trio", "turbo")[seed % 3])
    rng, live, at_end = Random(seed), set[int](), list[tuple[float, int]]()

    def note_end() -> None:
        at_end.append((simulation.now, len(live)))

    async def rollout(prompt: int) -> None:
        manager = sandbox(simulation, rng, live)
        async with shielded(manager) if how == "shielded" else manager:
            await simulation.sleep(rng.lognormvariate(0.0, 1.5))
            if why == "error" and simulation.now > 8.0 and not at_end:
                note_end()
                raise OSError

    async def step(groups: Any) -> dict[str, float]:
        await simulation.sleep(STEP_SECS)
        return {}

    async def train() -> None:
        hooks = [FeedHook(bounded(WhenStale.DROP, 8, 50)(rollout), "groups")]
        with suppress(OSError):
            async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
                while why != "end" or simulation.now < 12.0:
                    await session.run([])
                note_end()

    async def main() -> None:
        task = simulation.start(train)
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
            found = np.array([leave_sandboxes(how, why, seed) for seed in range(42)])
            num_open, num_left, _ = found.mean(axis=0)
            longest = found[:, 2].max()
            rows.append([how, why, f"{num_open:.1f}", f"{num_left:.1f}", f"{longest:.1f} s"])
    header = ["sandbox", "training ends by", "open then", "left behind", "the end takes at most"]
    print_table("sandboxes, 50 rollouts at a time, mean of 42 trainings", header, rows)


if __name__ == "__main__":
    parts = {"policies": print_policies, "bias": print_bias, "sandboxes": print_sandboxes}
    parts_of(parts, sys.argv[1:])
