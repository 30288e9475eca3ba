"""rollouts beside the synchronous loop, and what queueing theory and statistics say of them."""

import logging
import math
import random
from typing import Any

import numpy as np
import pytest

from asynchooks import FeedHook
from asynchooks.data import WhenStale, rollouts
from asynchooks.simulation import Simulation

from ...support.step_loops import run_steps
from .learning import Learner, made


@pytest.mark.parametrize("when_stale", WhenStale)
@pytest.mark.parametrize("concurrency", [5, 19])
def test_with_a_bound_of_0_batches_are_those_of_the_synchronous_loop(
    learner: Learner, concurrency: int, when_stale: WhenStale
) -> None:
    rng = random.Random(concurrency)

    async def answer(item: int) -> int:
        num_trained = len(learner.batches)
        await learner.sleep(rng.lognormvariate(0, 1))
        return num_trained

    stage = made(
        answer, range(53), 5, concurrency=concurrency, max_staleness=0, when_stale=when_stale
    )
    learner.train_with(stage)
    assert learner.items == [list(range(53))[at : at + 5] for at in range(0, 53, 5)]
    for num, batch in enumerate(learner.batches):  # by the weights of the step before
        assert [each.result for each in batch] == [num] * len(batch)


# A learner of batches of 8, steps of 1 s, and calls whose seconds are log-normal with mean 2


@pytest.mark.parametrize(
    ("when_stale", "max_staleness", "concurrency", "shorter"),
    [
        (WhenStale.WAIT, 60, 32, 1.0),
        (WhenStale.ACCEPT, 40, 44, 1.0),
        (WhenStale.DROP, 99, 32, 1.0),
        (WhenStale.DROP, 4, 24, 0.65),
    ],
)
def test_mean_age_is_concurrency_by_batch_size_and_drops_alone_favour_short_calls(
    when_stale: WhenStale,
    max_staleness: int,
    concurrency: int,
    shorter: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="asynchooks")
    simulation, rng, num_steps = Simulation(0, "turbo"), random.Random(3), 400
    used: list[float] = []

    async def answer(item: int) -> float:
        secs = rng.lognormvariate(math.log(2) - 0.5, 1.0)
        await simulation.sleep(secs)
        return secs

    async def step(groups: Any) -> dict[str, float]:
        await simulation.sleep(1.0)
        used.extend(each.result for each in groups)
        return {"loss": 0.0}

    stage = rollouts(
        answer,
        range(10**6),
        8,
        concurrency=concurrency,
        max_staleness=max_staleness,
        when_stale=when_stale,
    )
    simulation.run(lambda: run_steps(step, num_steps, FeedHook(stage, "groups")))
    found = stage.statistics()
    assert np.mean(used) == pytest.approx(2.0 * shorter, rel=0.06)
    if shorter < 1.0:
        share = found.num_dropped / (len(used) + found.num_dropped)
        assert share == pytest.approx(0.12, abs=0.02)
    else:
        assert num_steps / simulation.now > 0.98
        assert found.num_dropped == 0
        assert found.mean_staleness == pytest.approx(concurrency / 8, rel=0.02)
