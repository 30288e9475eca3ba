"""The published promises, each as a program that checks itself in whatever order it runs.

Workers take 1 s of virtual time for a step, all alike, so that they are ready together again and
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asynchooks import (
    GlobalStepWaiterHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.simulation import Simulation

NUM_WORKERS, NUM_STEPS = 3, 3


class Boom(Exception):  # noqa: N818
    """An error of the program."""


@dataclass
class Model:
    """What workers train: it counts its steps."""

    simulation: Simulation
    steps: int = 0
    secs: float = 1.0
    error_at: int = -1

    async def step(self) -> dict[str, Any]:
        await self.simulation.sleep(self.secs)
        self.steps += 1
        if self.steps == self.error_at:
            raise Boom
        return {"steps": self.steps}


async def train(creator: Any, hooks: Any, body: Callable[[Any], Any] | None = None) -> int:
    async with MonitoredSession(hooks, creator) as session:
        if body is not None:
            body(session)
        while not session.should_stop():
            await session.run([])
    return session.global_step.value


async def all_done(tasks: Any) -> None:
    for each in tasks:
        await each.wait()


def exact_stop(num_workers: int) -> Callable[[Simulation], Any]:
    async def main(simulation: Simulation) -> None:
        model, ends = Model(simulation), []
        creator = SharedSessionCreator(model.step, num_workers=num_workers)

        async def worker() -> None:
            ends.append(await train(creator, [StopAtStepHook(last_step=NUM_STEPS)]))

        await all_done([simulation.start(worker, name=f"worker {i}") for i in range(num_workers)])
        assert model.steps == NUM_STEPS, model.steps
        assert ends == [NUM_STEPS] * num_workers, ends

    return main


async def waits_end(simulation: Simulation) -> None:
    model, ends = Model(simulation), set()
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def wait(session: Any, step: int) -> None:
        try:
            assert await session.global_step.wait_for(step) >= step
        finally:
            ends.add(step)

    async def worker(i: int) -> None:
        hooks = [GlobalStepWaiterHook(i), StopAtStepHook(last_step=NUM_STEPS)]

        def body(session: Any) -> None:
            for step in (NUM_STEPS, NUM_STEPS + 1):
                session.start_soon(wait, session, step)

        await train(creator, hooks, body if i == 0 else None)

    await all_done([simulation.start(worker, i, name=f"worker {i}") for i in range(NUM_WORKERS)])
    assert model.steps == NUM_STEPS, model.steps
    assert ends == {NUM_STEPS, NUM_STEPS + 1}, ends


async def first_error_leaves(simulation: Simulation) -> None:
    model, left = Model(simulation, error_at=2), []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        try:
            await train(creator, [StopAtStepHook(last_step=10)])
        except Boom as error:
            left.append(error)

    await all_done([simulation.start(worker, i, name=f"worker {i}") for i in range(NUM_WORKERS)])
    assert len(left) == 1, left


async def side_tasks_end_with_their_session(simulation: Simulation) -> None:
    model, running = Model(simulation), set()
    creator = SharedSessionCreator(model.step, num_workers=2)

    async def task(session: Any, name: int) -> None:
        running.add(name)
        try:
            while True:
                await session.or_stop(simulation.sleep, 1.0)
        finally:
            running.remove(name)

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            session.start_soon(task, session, i)
            session.start_soon(task, session, i + 2)

        await train(creator, [StopAtStepHook(last_step=NUM_STEPS)], body)
        assert not running & {i, i + 2}, running

    await all_done([simulation.start(worker, i, name=f"worker {i}") for i in range(2)])


PROMISES: Mapping[str, Callable[[Simulation], Any]] = {
    **{f"exact stop, {n} workers": exact_stop(n) for n in (1, 2, 3, 4)},
    "waits end": waits_end,
    "first error leaves": first_error_leaves,
    "side tasks end": side_tasks_end_with_their_session,
}
