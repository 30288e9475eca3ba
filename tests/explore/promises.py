"""The published promises, each as a program that checks itself in whatever order it runs.

Workers take 1 s of virtual time for a step, all alike, so that they are ready together again and
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.data import prefetch, rollouts
from asynchooks.simulation import Simulation

NUM_WORKERS, NUM_STEPS = 3, 3


Program = Callable[[Simulation], Any]


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


async def workers(
    simulation: Simulation, worker: Callable[[int], Any], num: int = NUM_WORKERS
) -> set[int]:
    """Run the workers together; those that were not cancelled."""
    whole = set()

    async def run(i: int) -> None:
        await worker(i)
        whole.add(i)

    tasks = [simulation.start(run, i, name=f"worker {i}") for i in range(num)]
    for each in tasks:
        await each.wait()
    return whole


def exact_stop(num_workers: int) -> Program:
    async def main(simulation: Simulation) -> None:
        model, ends = Model(simulation), {}
        creator = SharedSessionCreator(model.step, num_workers=num_workers)

        async def worker(i: int) -> None:
            ends[i] = await train(creator, [StopAtStepHook(last_step=NUM_STEPS)])

        whole = await workers(simulation, worker, num_workers)
        assert ends == dict.fromkeys(whole, NUM_STEPS), ends
        assert model.steps == NUM_STEPS or not whole, model.steps

    return main


async def waits_end(simulation: Simulation) -> None:
    model, begun, ended = Model(simulation), [], []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def wait(session: Any, step: int) -> None:
        begun.append(step)
        try:
            assert await session.global_step.wait_for(step) >= step
        finally:
            ended.append(step)

    async def worker(i: int) -> None:
        hooks = [GlobalStepWaiterHook(i), StopAtStepHook(last_step=NUM_STEPS)]

        def body(session: Any) -> None:
            for step in (NUM_STEPS, NUM_STEPS + 1):
                session.start_soon(wait, session, step)

        try:
            await train(creator, hooks, body if i == 0 else None)
        except StepUnreachableError:
            assert model.steps < NUM_STEPS  # whoever was to make it is cancelled

    await workers(simulation, worker)
    assert sorted(begun) == sorted(ended), (begun, ended)


async def first_error_leaves(simulation: Simulation) -> None:
    model, left = Model(simulation, error_at=2), []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        try:
            await train(creator, [StopAtStepHook(last_step=10)])
        except Boom as error:
            left.append(error)

    whole = await workers(simulation, worker)
    assert len(left) == 1 or len(whole) < NUM_WORKERS, left


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

    await workers(simulation, worker, 2)


async def each_item_once(simulation: Simulation) -> None:
    """Two lives of two workers; the second goes on where the first stopped."""
    taken: list[int] = []
    num_taken = np.zeros(1)
    saver = StateDictSaver(model={"num": num_taken})

    async def step(row: int) -> dict[str, Any]:
        await simulation.sleep(1.0)
        taken.append(row)
        num_taken[:] += 1.0
        return {}

    async def worker(creator: Any, source: Any) -> None:
        async with MonitoredSession([FeedHook(source, "row")], creator) as session:
            while not session.should_stop():
                await session.run([])

    with TemporaryDirectory() as place:
        for last_step in (2, 10):
            num_taken[:] = 0.0
            source, creator = prefetch(range(5), 1), SharedSessionCreator(step, num_workers=2)
            hooks = [
                CheckpointSaverHook(place, save_steps=10, saver=saver),
                FeedHook(source, "row"),
                StopAtStepHook(last_step=last_step),
            ]
            async with MonitoredSession(hooks, creator) as session:
                session.start_soon(worker, creator, source, name="worker")
                while not session.should_stop():
                    await session.run([])
            assert num_taken[0] == len(taken) == min(last_step, 5), (num_taken, taken)
    assert sorted(taken) == list(range(5)), taken


async def who_opens_first_restores(simulation: Simulation) -> None:
    """Workers open together; the one with the saver restores for all, or is refused."""
    weights, refused = np.zeros(1), []

    async def step() -> dict[str, Any]:
        await simulation.sleep(1.0)
        weights[:] += 1.0
        return {}

    async def worker(creator: Any, last_step: int, hooks: Any, i: int) -> None:
        try:
            await train(creator, [*hooks[i], StopAtStepHook(last_step=last_step)])
        except CheckpointError as error:
            refused.append(error)

    with TemporaryDirectory() as place:
        for last_step in (1, 3):
            weights[:] = 0.0
            saver = StateDictSaver(model={"weights": weights})
            hooks = [[CheckpointSaverHook(place, save_steps=10, saver=saver)], []]
            run = partial(worker, SharedSessionCreator(step), last_step, hooks)
            await workers(simulation, run, 2)
            assert refused or weights[0] == last_step, weights


class Recorded(SessionRunHook):
    """Notes the step of each run, and the count of steps that the model had made then."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs("steps")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.rows.append((run_context.step, run_values.results))


async def values_carry_their_step(simulation: Simulation) -> None:
    model, hooks = Model(simulation), [Recorded() for _ in range(NUM_WORKERS)]
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        await train(creator, [hooks[i], StopAtStepHook(last_step=NUM_STEPS)])

    await workers(simulation, worker)
    rows = sorted(row for each in hooks for row in each.rows)
    assert [step for step, _ in rows] == sorted({step for step, _ in rows}), rows
    assert all(step == steps for step, steps in rows), rows


async def one_stops_all(simulation: Simulation) -> None:
    model, after = Model(simulation), []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        async with MonitoredSession([], creator) as session:
            while not session.should_stop():
                await session.run([])
                if session.global_step.value == 2:
                    session.request_stop(all_workers=True)
                    after.append(model.steps)
        assert session.should_stop()

    await workers(simulation, worker)
    if after:
        assert model.steps < after[0] + NUM_WORKERS, (model.steps, after)


async def rollouts_stay_within_their_bound(simulation: Simulation) -> None:
    ages: list[int] = []

    async def rollout(prompt: int) -> int:
        await simulation.sleep(1.0 + prompt % 2)
        return prompt

    async def step(results: Any) -> dict[str, Any]:
        await simulation.sleep(1.0)
        seen.extend(each.result for each in results)
        ages.extend(each.staleness for each in results)
        return {}

    seen: list[int] = []
    source = rollouts(rollout, range(6), 2, concurrency=3, max_staleness=1)
    await train(FunctionSessionCreator(step), [FeedHook(source, "results")])
    assert max(ages) <= 1, ages
    assert sorted(seen) == list(range(6)), seen


class Waiting(SessionRunHook):
    """Waits in each of its moments."""

    def __init__(self, simulation: Simulation) -> None:
        self.sleep, self.is_begun, self.is_ended = simulation.sleep, False, False

    async def begin(self) -> None:
        await self.sleep(0.0)
        self.is_begun = True

    async def after_create_session(self, session: Any, coord: Any) -> None:
        await self.sleep(0.0)

    async def before_run(self, run_context: Any) -> None:
        await self.sleep(0.0)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.sleep(0.0)

    async def end(self, session: Any) -> None:
        self.is_ended = True
        await self.sleep(0.0)

    async def on_error(self, session: Any, error: BaseException) -> None:
        self.is_ended = True
        await self.sleep(0.0)


async def errors_leave_as_themselves(simulation: Simulation) -> None:
    """Of two workers, one has two hooks that wait; its error leaves it, and ends the other."""
    model, hooks = Model(simulation), [Waiting(simulation), Waiting(simulation)]
    creator = SharedSessionCreator(model.step, num_workers=2)

    async def other() -> None:
        await train(creator, [StopAtStepHook(last_step=NUM_STEPS)])

    task = simulation.start(other, name="other")
    try:
        await train(creator, [*hooks, StopAtStepHook(last_step=NUM_STEPS)])
    finally:
        await task.wait()
        for each in hooks:
            assert each.is_ended or not each.is_begun, "a hook that has begun was not ended"


PROMISES: Mapping[str, Callable[[Simulation], Any]] = {
    **{f"exact stop, {n} workers": exact_stop(n) for n in (1, 2, 3, 4)},
    "waits end": waits_end,
    "first error leaves": first_error_leaves,
    "each item once": each_item_once,
    "who opens first restores": who_opens_first_restores,
    "values carry their step": values_carry_their_step,
    "one stops all": one_stops_all,
    "rollouts within their bound": rollouts_stay_within_their_bound,
    "errors leave": errors_leave_as_themselves,
    "side tasks end": side_tasks_end_with_their_session,
}
