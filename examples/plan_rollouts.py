"""Record a learner with rollouts for some seconds, then predict what it does at other settings.

    python examples/plan_rollouts.py [--secs 3]

The service of the rollouts answers all its requests in one batch, so each is slower the more there
are. It is recorded at two loads, and planned between and beyond them. Then one of the planned
settings is run, to see how far off the plan is. What takes time only sleeps: no model is needed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import FeedHook, MonitoredSession, TimeLimitHook
from asynchooks.data import rollouts
from asynchooks.planning import Plan, Trace, record, timed

rng = np.random.default_rng(1)


class Service:
    """Gives all its requests a token at a time, and takes longer the more there are."""

    def __init__(self) -> None:
        self.num_active = 0

    async def generate(self, num_tokens: int) -> int:
        self.num_active += 1
        try:
            for _ in range(num_tokens):
                await anyio.sleep(0.004 + 0.0004 * self.num_active)
        finally:
            self.num_active -= 1
        return num_tokens


service = Service()


@timed("rollout", output_size=float, returns=lambda prompt, drawn: int(drawn.size))
async def rollout(prompt: int) -> int:
    return await service.generate(int(rng.integers(3, 12)))


@timed("learn", input_size=sum, returns={"loss": 0.5})
async def learn(num_tokens: Sequence[int]) -> dict[str, float]:
    await anyio.sleep(0.005 + 0.0002 * sum(num_tokens))
    return {"loss": 0.5}


async def main(concurrency: int = 8, batch_size: int = 4, secs: float = 3.0) -> None:
    async def step(groups: Any) -> dict[str, float]:
        return await learn([group.result for group in groups])

    groups = rollouts(rollout, range(10**9), batch_size, concurrency=concurrency, max_staleness=4)
    hooks = [FeedHook(groups, "groups"), TimeLimitHook(secs)]
    async with MonitoredSession(hooks, step) as session:
        while not session.should_stop():
            await session.run([])


def recorded(path: Path, **settings: Any) -> Trace:
    with record(path, settings=settings):
        anyio.run(lambda: main(**settings))
    return Trace.read(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--secs", type=float, default=3.0, help="of each real run")
    secs = parser.parse_args().secs
    with tempfile.TemporaryDirectory() as directory:
        traces = [
            recorded(Path(directory) / f"{num}.pftrace", concurrency=num, secs=secs)
            for num in (4, 32)
        ]
        plan = Plan(traces)
        for num in (4, 16, 32, 64):
            print(plan.predict(main, concurrency=num, num_runs=4))
        print(plan)
        measured = recorded(Path(directory) / "16.pftrace", concurrency=16, secs=secs).figures()
        rate = plan.predict(main, concurrency=16, num_runs=4).rate
        print(
            f"concurrency=16, measured: {measured.rate:.1f} updates/s, planned: {rate.value:.1f} "
            f"({rate.low:.1f} to {rate.high:.1f})"
        )
