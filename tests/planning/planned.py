"""Programs with timed work, and services to plan them from."""

import math
from typing import Any

import numpy as np

from asynchooks import FeedHook
from asynchooks.data import rollouts
from asynchooks.planning import Dependence, Plan, Service, timed
from asynchooks.protocols import parse_protocol
from asynchooks.simulation import Worker, current_simulation

from ..support.step_loops import run_steps


def service_of(name: str, samples: Any, **options: Any) -> Service:
    """A service of these samples, which has no sizes, and whose workers are alike."""
    work = np.asarray(samples, np.float64)
    usual: dict[str, Any] = {
        "dependence": Dependence.FREE, "sizes": np.full(len(work), math.nan),
        "workers": np.full(len(work), -1), "load_high": 1e9,
    }  # fmt: skip
    return Service(name, samples=work, **usual | options)


def plan_of(*services: Service) -> Plan:
    return Plan([], services={each.name: each for each in services})


@timed("rollout", returns=lambda prompt, drawn: prompt)
async def rollout(prompt: int) -> int:
    await current_simulation().sleep(0.5)
    return prompt


@timed("learn", returns={"loss": 0.0})
async def learn(groups: Any) -> dict[str, float]:
    await current_simulation().sleep(0.25)
    return {"loss": 0.0}


async def train_on_rollouts(concurrency: int = 16, size: int = 8, steps: int = 100) -> None:
    """A learner that takes batches of rollouts, which take their time elsewhere."""

    async def step(groups: Any) -> dict[str, float]:
        return await learn(groups)

    async with rollouts(
        rollout, range(10**6), size, concurrency=concurrency, max_staleness=10**6
    ) as source:
        await run_steps(step, steps, FeedHook(source, "groups"))


@timed("compute", worker=lambda worker: worker)
async def compute(worker: int) -> None:
    await current_simulation().sleep(0.08)


@timed("service")
async def serve() -> None:
    await current_simulation().sleep(0.006)


async def train_with_server(workers: int = 8, protocol: str = "async", updates: int = 400) -> None:
    """Workers around a parameter server; only the turbo kernel's own tasks."""
    cluster = current_simulation().cluster(workers, protocol=parse_protocol(protocol, workers))

    async def program(worker: Worker) -> None:
        async def step() -> dict[str, float]:
            version = (await worker.pull()).version
            await compute(worker.index)
            await serve()
            await worker.push(np.zeros(1), version)
            return {"loss": 0.0}

        async with worker.session(step=step) as session:
            while not session.should_stop():
                await session.run([])

    await cluster.train(program, updates=updates)
