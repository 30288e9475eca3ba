"""What a bound on the staleness of rollouts costs, by policy.

    python -m tests.benchmarks.rollouts

A rollout takes a log-normal time with a mean of 2 s and a sigma of 1, always the same for a prompt.
A step takes 1 s, and 8 rollouts. Figures are of 300 steps with each of 4 seeds. The time is
virtual, so they are the same on every machine: docs/benchmarks.md has them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from asynchooks import FeedHook
from asynchooks.data import Stage, WhenStale, batch, map_concurrent, rollouts
from asynchooks.simulation import Simulation

from ..support.step_loops import run_steps
from ._report import print_table

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
                prompt, version = getattr(group, "result", group)
                self.ages[num_trained_steps - version] += 1
                self.trained_secs.append(lengths[prompt])
            await simulation.sleep(STEP_SECS)
            num_trained_steps += 1
            return {}

        source = make_source(rollout)

        async def main() -> None:
            await run_steps(step, NUM_STEPS, FeedHook(source, "groups"))
            self.secs += simulation.now

        simulation.run(main)
        self.num_dropped += getattr(source.statistics(), "num_dropped", 0)

    def busy_and_ages(self) -> str:
        mean_age = sum(age * num for age, num in self.ages.items()) / self.ages.total()
        busy = len(SEEDS) * NUM_STEPS * STEP_SECS / self.secs
        return f"{100 * busy:.0f}, {mean_age:.1f}/{max(self.ages)}"

    def costs(self) -> str:
        """The share of prompts dropped, and of what is trained on the mean length and chi-square.

        The mean is by that of all prompts; chi-square is of ten bins with as many prompts each, so
        that 9 is expected.
        """
        dropped = self.num_dropped / (self.num_dropped + self.ages.total())
        every_prompt = np.concatenate([prompt_secs(seed) for seed in SEEDS])
        edges = np.quantile(every_prompt, np.linspace(0, 1, 11)[1:-1])
        counts = np.bincount(np.searchsorted(edges, self.trained_secs), minlength=10)
        expected = len(self.trained_secs) / 10
        chi_square = ((counts - expected) ** 2 / expected).sum()
        length = np.mean(self.trained_secs) / MEAN_SECS
        return f"{dropped:.2f}, {length:.2f}, {chi_square:.1f}"


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


def main() -> None:
    sources: dict[str, Callable[[int], MakeSource]] = {
        "map_concurrent, ordered": partial(mapped, ordered=True),
        "map_concurrent, unordered": partial(mapped, ordered=False),
    }
    for policy, bounds in {
        WhenStale.WAIT: (0, 1, 2, 4, 8), WhenStale.ACCEPT: (4,), WhenStale.DROP: (2, 4, 8),
    }.items():  # fmt: skip
        for bound in bounds:
            sources[f"{policy.name}, {bound}"] = partial(bounded, policy, bound)
    found = {name: [Figures(new(num)) for num in CONCURRENCIES] for name, new in sources.items()}
    header = ["policy, max_staleness", *(f"concurrency {num}" for num in CONCURRENCIES)]
    for title, cell in (
        ("busy share of the learner in %, mean/greatest age", Figures.busy_and_ages),
        ("share dropped, and of the rest mean length, chi-square (1 %: 21.7)", Figures.costs),
    ):
        print_table(title, header, [[name, *map(cell, row)] for name, row in found.items()])


if __name__ == "__main__":
    main()
