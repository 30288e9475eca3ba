"""A user's program: run from an installed wheel, and checked there by mypy and pyright.

Two workers share a model, items, and a checkpoint, and then a protocol trains in virtual time.
"""

import sys
from collections.abc import Mapping
from typing import Any, assert_type

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    StopReason,
    __version__,
)
from asynchooks.data import Stage, map_concurrent, prefetch, repeat
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import Exponential, Report, Simulation

weights: NDArray[np.float64] = np.zeros(3)


async def fetch(number: int) -> NDArray[np.float64]:
    await anyio.lowlevel.checkpoint()
    return np.full(3, float(number))


async def step(target: NDArray[np.float64]) -> dict[str, float]:
    error = target - weights
    weights[:] += 0.1 * error
    return {"loss": float(np.square(error).mean())}


class Losses(SessionRunHook):
    def __init__(self) -> None:
        self.values: list[float] = []

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        assert_type(run_context.global_step, GlobalStep)
        self.values.append(run_values.results)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = state["values"]


async def train(hooks: list[SessionRunHook], creator: SharedSessionCreator) -> None:
    async with MonitoredSession(hooks, creator) as session:
        while not session.should_stop():
            await session.run([])
    assert_type(session.stop_reason, StopReason | None)


async def main(directory: str) -> None:
    items = prefetch(map_concurrent(fetch, repeat(range(1, 5)), concurrency=2), 2)
    assert_type(items, Stage[NDArray[np.float64]])
    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    saver = StateDictSaver(model={"weights": weights})
    saving = CheckpointSaverHook(directory, save_steps=10, saver=saver, background=True)
    losses = Losses(), Losses()
    async with anyio.create_task_group() as group:
        for each in losses:
            hooks: list[SessionRunHook] = [
                StopAtStepHook(last_step=20),
                FeedHook(items, "target"),
                each,
            ]
            group.start_soon(train, [saving, *hooks] if each is losses[0] else hooks, creator)
    print("asynchooks", __version__)
    num_losses = sum(len(each.values) for each in losses)
    print("trained:", num_losses, bool(1.0 < weights[0] < 4.0))


def simulate() -> None:
    cluster = Simulation(seed=1).cluster(8, protocol=StaleSynchronous(2), compute=Exponential(1.0))
    report = cluster.run(updates=100)
    assert_type(report, Report)
    print("simulated:", report.updates)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
    simulate()
