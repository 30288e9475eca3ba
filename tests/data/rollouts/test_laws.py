"""rollouts beside the synchronous loop, and what queueing theory and statistics say of them."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asynchooks import FeedHook, MonitoredSession, StopAtStepHook
from asynchooks.data import RolloutStatistics, WhenStale, rollouts
from asynchooks.simulation import Simulation

from .learning import on_loops

# max_staleness=0


class Policy:
    """Weights that answer, and learn from their answers."""

    def __init__(self) -> None:
        self.weights = np.linspace(-1.0, 1.0, 7)

    def answer(self, item: int) -> Any:
        noise = np.random.default_rng(item).normal(size=self.weights.shape)
        return np.tanh(self.weights * noise + item / 7)

    def learn(self, answers: list[Any]) -> None:
        gradient = np.zeros_like(self.weights)
        for each in answers:  # sums of floats depend on their order
            gradient += (each - self.weights) * np.abs(each)
        self.weights = self.weights + 0.1 * gradient / len(answers)


def synchronous(num_items: int, batch_size: int) -> list[Any]:
    """The weights after each step of the plain loop."""
    policy, history = Policy(), []
    for begin in range(0, num_items, batch_size):
        items = range(begin, min(begin + batch_size, num_items))
        policy.learn([policy.answer(item) for item in items])
        history.append(policy.weights)
    return history


@pytest.mark.parametrize("when_stale", WhenStale)
@pytest.mark.parametrize("concurrency", [5, 19])
@on_loops
def test_with_a_bound_of_0_the_weights_are_those_of_the_synchronous_loop_bit_for_bit(
    backend: Any, concurrency: int, when_stale: WhenStale
) -> None:
    num_items, batch_size = 53, 5  # the last batch has three
    simulation, policy = Simulation(concurrency, backend, shuffle_ties=True), Policy()
    history: list[Any] = []
    rng = random.Random(concurrency)

    async def answer(item: int) -> Any:
        weights = policy.answer(item)
        await simulation.sleep(rng.lognormvariate(0, 1))
        return weights

    async def step(groups: Any) -> dict[str, float]:
        await simulation.sleep(rng.random())
        policy.learn([each.result for each in groups])
        history.append(policy.weights)
        return {"loss": 0.0}

    async def main() -> None:
        stage = rollouts(
            answer, range(num_items), batch_size, concurrency=concurrency, max_staleness=0,
            when_stale=when_stale,
        )  # fmt: skip
        async with MonitoredSession([FeedHook(stage, "groups")], step) as session:
            while not session.should_stop():
                await session.run("loss")

    simulation.run(main)
    expected = synchronous(num_items, batch_size)
    assert [each.tobytes() for each in history] == [each.tobytes() for each in expected]


# A learner of batches of 8, steps of 1 s, and calls whose seconds are log-normal with mean 2

BATCH = 8


@dataclass
class Run:
    busy: float
    """Share of the time."""
    secs: list[float] = field(default_factory=list)
    """Of the calls whose results were trained with."""
    num_begun: int = 0
    statistics: RolloutStatistics | None = None

    @property
    def known(self) -> RolloutStatistics:
        assert self.statistics is not None
        return self.statistics


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="asynchooks")


def run_learner(
    when_stale: WhenStale, max_staleness: int, concurrency: int, *, seed: int = 0,
    num_steps: int = 200, sigma: float = 1.0,
) -> Run:  # fmt: skip
    simulation, run = Simulation(seed, "turbo"), Run(0.0)
    rng = random.Random(seed)

    async def answer(item: int) -> float:
        secs = rng.lognormvariate(math.log(2) - sigma**2 / 2, sigma)
        await simulation.sleep(secs)
        return secs

    async def step(groups: Any) -> dict[str, float]:
        await simulation.sleep(1.0)
        run.secs += [each.result for each in groups]
        return {"loss": 0.0}

    async def main() -> None:
        stage = rollouts(
            answer, range(10**6), BATCH, concurrency=concurrency, max_staleness=max_staleness,
            when_stale=when_stale,
        )  # fmt: skip
        hooks = [FeedHook(stage, "groups"), StopAtStepHook(last_step=num_steps)]
        async with MonitoredSession(hooks, step) as session:
            while not session.should_stop():
                await session.run("loss")
            run.busy = num_steps / simulation.now
        statistics = stage.statistics()
        assert isinstance(statistics, RolloutStatistics)
        run.statistics = statistics

    simulation.run(main)
    return run


@pytest.mark.parametrize(
    ("when_stale", "max_staleness", "concurrency"),
    [
        (WhenStale.ACCEPT, 40, 24),
        (WhenStale.ACCEPT, 40, 44),
        (WhenStale.WAIT, 60, 32),
        (WhenStale.DROP, 60, 32),
    ],
)
def test_the_mean_age_of_a_busy_learner_is_concurrency_by_batch_size(
    when_stale: WhenStale, max_staleness: int, concurrency: int
) -> None:
    run = run_learner(when_stale, max_staleness, concurrency, num_steps=400)
    assert run.busy > 0.98
    assert run.known.num_dropped == 0
    assert run.known.mean_staleness == pytest.approx(concurrency / BATCH, rel=0.02)


def chi_square(run: Run, sigma: float = 1.0, num_bins: int = 10) -> float:
    """How far the seconds of what was trained with are from those of all calls; mean 9."""
    normal = [(math.log(secs) - math.log(2) + sigma**2 / 2) / sigma for secs in run.secs]
    shares = [0.5 * (1 + math.erf(each / math.sqrt(2))) for each in normal]
    counts = np.bincount([min(int(each * num_bins), num_bins - 1) for each in shares])
    expected = len(run.secs) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


SURE = 27.88
"""Above it chi-square of 9 degrees of freedom is in one of 1,000."""


@pytest.mark.parametrize(
    ("when_stale", "max_staleness"),
    [(WhenStale.WAIT, 8), (WhenStale.ACCEPT, 4), (WhenStale.DROP, 4)],
)
def test_short_calls_are_favoured_only_where_late_ones_are_dropped(
    when_stale: WhenStale, max_staleness: int
) -> None:
    run = run_learner(when_stale, max_staleness, 24, num_steps=800, seed=3)
    mean, num_dropped = float(np.mean(run.secs)), run.known.num_dropped
    if when_stale is WhenStale.DROP:
        assert chi_square(run) > 5 * SURE
        assert mean / 2.0 == pytest.approx(0.65, abs=0.04)
        assert num_dropped / (len(run.secs) + num_dropped) == pytest.approx(0.12, abs=0.02)
    else:
        assert chi_square(run) < SURE
        assert mean == pytest.approx(2.0, rel=0.06)
