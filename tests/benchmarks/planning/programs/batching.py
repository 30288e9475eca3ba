"""Rollouts on a service that generates for all requests at once, and a learner."""

import asyncio
from typing import Any, NamedTuple

import numpy as np

from asynchooks import FeedHook
from asynchooks.data import batch, map_concurrent, rollouts
from asynchooks.planning import timed

from . import train_for

TICK_SECS, SECS_PER_REQUEST = 0.008, 0.0005
STEP_SECS, STEP_SECS_PER_TOKEN = 0.03, 2.5e-4
MEAN_TOKENS, SIGMA = 20.0, 0.8
NO_BOUND = 10**6


class Rollout(NamedTuple):
    num_tokens: float


class BatchingService:
    """Each tick gives every request one more token, and takes longer the more there are."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._left: dict[asyncio.Event, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def generate(self) -> Rollout:
        mean = np.log(MEAN_TOKENS) - SIGMA**2 / 2
        num_tokens = max(1, round(self._rng.lognormal(mean, SIGMA)))
        done = asyncio.Event()
        self._left[done] = num_tokens
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        try:
            await done.wait()
        finally:
            self._left.pop(done, None)
        return Rollout(num_tokens)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._left:
            due += TICK_SECS + SECS_PER_REQUEST * len(self._left)
            await asyncio.sleep(max(0.0, due - loop.time()))
            for done in list(self._left):
                self._left[done] -= 1
                if self._left[done] <= 0:
                    done.set()


async def main(
    concurrency: int = 16,
    batch_size: int = 4,
    ordered: bool = False,
    max_staleness: int = NO_BOUND,
    secs: float = 20.0,
) -> None:
    """Train for so many seconds.

    Args:
        concurrency: rollouts under way and ready, together.
        batch_size: rollouts that a step trains on.
        ordered: whether batches come in the order of their prompts.
        max_staleness: steps, at most.
        secs: until the learner stops.
    """
    service = BatchingService(np.random.default_rng())

    @timed(
        "rollout",
        output_size=lambda each: each.num_tokens,
        returns=lambda prompt, drawn: Rollout(drawn.size),
    )
    async def rollout(prompt: int) -> Rollout:
        return await service.generate()

    @timed("learn", input_size=lambda tokens: tokens)
    async def learn(tokens: float) -> None:
        await asyncio.sleep(STEP_SECS + STEP_SECS_PER_TOKEN * tokens)

    async def step(group: list[Any]) -> dict[str, float]:
        results = [each if isinstance(each, Rollout) else each.result for each in group]
        await learn(sum(each.num_tokens for each in results))
        return {}

    prompts = range(10**7)
    source: Any = rollouts(
        rollout, prompts, batch_size, concurrency=concurrency, max_staleness=max_staleness
    )
    if ordered:
        mapped = map_concurrent(rollout, prompts, concurrency, ordered=True)
        source = batch(mapped, batch_size, collate=list)
    await train_for(secs, step, FeedHook(source, "group"))
