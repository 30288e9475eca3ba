"""A program for the command line and for records: rollouts that sleep, and a step that does."""

import itertools
from typing import Any

import anyio

from asynchooks import FeedHook, MonitoredSession, StopAtStepHook
from asynchooks.data import rollouts
from asynchooks.planning import span, timed

SECS = (0.008, 0.012, 0.01, 0.016)
_secs = itertools.cycle(SECS)


@timed("rollout", output_size=float, returns=lambda item, drawn: int(drawn.size))
async def rollout(item: int) -> int:
    await anyio.sleep(next(_secs))
    return item % 5 + 1


@timed("learn", returns={"loss": 0.5})
async def learn() -> dict[str, float]:
    await anyio.sleep(0.004)
    with span("reward"):
        pass
    return {"loss": 0.5}


async def main(
    concurrency: int = 4, max_staleness: int = 2, batch_size: int = 2, steps: int = 60
) -> None:
    """Sixty steps."""

    async def step(groups: Any) -> dict[str, float]:
        return await learn()

    source = rollouts(
        rollout, range(10**9), batch_size, concurrency=concurrency, max_staleness=max_staleness
    )
    hooks = [FeedHook(source, "groups"), StopAtStepHook(steps)]
    async with MonitoredSession(hooks, step) as session:
        while not session.should_stop():
            await session.run([])


def plain() -> None:
    """Not async."""
