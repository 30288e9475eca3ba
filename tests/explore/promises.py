"""The published promises, each as a program that checks itself in whatever order it runs.

Workers take 1 s of virtual time for a step, all alike, so that they are ready together again and
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    PreemptionError,
    Retention,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import map_concurrent, prefetch, rollouts
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
    made_at: dict[int, float] = field(default_factory=dict)
    """When each step was made, in virtual seconds."""

    async def step(self) -> dict[str, Any]:
        await self.simulation.sleep(self.secs)
        if self.steps + 1 == self.error_at:
            self.error_at = -1
            raise Boom
        self.steps += 1
        self.made_at[self.steps] = self.simulation.now
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
    """At their step, or at the stop, also if they begin after that; none takes further time."""
    model, sessions, begun, ended = Model(simulation), [], [], []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def wait(session: Any, step: int, secs: float = 0.0) -> None:
        begun.append(step)
        try:
            await simulation.sleep(secs)
            await session.global_step.wait_for(step)
            assert simulation.now == max(secs, model.made_at[step])
        finally:
            ended.append(step)

    async def worker(i: int) -> None:
        hooks = [GlobalStepWaiterHook(i), StopAtStepHook(last_step=NUM_STEPS)]

        def body(session: Any) -> None:
            sessions.append(session)
            session.start_soon(wait, session, 2)
            session.start_soon(wait, session, NUM_STEPS + 1)
            session.start_soon(wait, session, NUM_STEPS + 1, 4.0)

        try:
            await train(creator, hooks, body if i == 0 else None)
        except StepUnreachableError:
            assert model.steps < NUM_STEPS  # whoever was to make it is cancelled

    await workers(simulation, worker)
    for each in sessions:
        assert each.global_step.statistics().tasks_waiting_for_step == 0
    assert sorted(begun) == sorted(ended), (begun, ended)
    assert simulation.now <= 4.0, simulation.now


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
    """And what they wait for by `or_stop` has ended before, with its clean-up."""
    model, running = Model(simulation), set()
    creator = SharedSessionCreator(model.step, num_workers=2)

    async def call(name: str) -> None:
        running.add(name)
        try:
            await simulation.sleep(math.inf)
        finally:
            try:
                await simulation.sleep(0.0)
            finally:
                running.remove(name)

    async def task(session: Any, name: str) -> None:
        running.add(name)
        try:
            await session.or_stop(call, f"call of {name}")
        finally:
            assert f"call of {name}" not in running
            running.remove(name)

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            session.start_soon(task, session, f"task {i}")

        try:
            await train(creator, [StopAtStepHook(last_step=NUM_STEPS)], body)
        finally:
            assert not running & {f"task {i}", f"call of task {i}"}, running

    await workers(simulation, worker, 2)
    assert simulation.now <= NUM_STEPS, simulation.now


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
    """Notes the step of each run, and the count of steps that the model had made then.

    The hook before it waits, while other workers make further steps.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.sleep = simulation.sleep
        self.rows: list[tuple[int, int]] = []

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs("steps")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.sleep(1.0)
        self.rows.append((run_context.step, run_values.results))


async def values_carry_their_step(simulation: Simulation) -> None:
    model, hooks = Model(simulation), [Recorded(simulation) for _ in range(NUM_WORKERS)]
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        await train(creator, [hooks[i], StopAtStepHook(last_step=NUM_STEPS)])

    whole = await workers(simulation, worker)
    rows = sorted(row for each in hooks for row in each.rows)
    assert all(step == steps for step, steps in rows), rows
    if len(whole) == NUM_WORKERS:
        assert [step for step, _ in rows] == list(range(1, NUM_STEPS + 1)), rows


async def one_stops_all(simulation: Simulation) -> None:
    """Also the one that opens just then."""
    model = Model(simulation)
    stopped: list[int] = []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        if i == 2:
            await simulation.sleep(2.0)
        async with MonitoredSession([StopAtStepHook(last_step=9)], creator) as session:
            while not session.should_stop():
                await session.run([])
                if session.global_step.value >= 4 and not stopped:
                    session.request_stop(all_workers=True)
                    stopped.append(model.steps)
        assert session.should_stop()

    whole = await workers(simulation, worker)
    if stopped and len(whole) == NUM_WORKERS:
        assert model.steps < stopped[0] + NUM_WORKERS, (model.steps, stopped)


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


async def no_step_runs_beside_the_exclusive_side(simulation: Simulation) -> None:
    """One task holds it twice, for half a step; two workers train."""
    model, under_way, held = Model(simulation), 0, 0

    async def step() -> dict[str, Any]:
        nonlocal under_way
        assert not held, "a step begins within the exclusive side"
        under_way += 1
        try:
            return await model.step()
        finally:
            under_way -= 1

    creator = SharedSessionCreator(step, num_workers=2)

    async def hold(session: Any) -> None:
        nonlocal held
        for _ in range(2):
            async with session.global_step.exclusive():
                assert not under_way, "a step is under way within the exclusive side"
                held += 1
                try:
                    await simulation.sleep(0.5)
                finally:
                    held -= 1
            await session.or_stop(simulation.sleep, 0.5)

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            session.start_soon(hold, session)

        await train(creator, [StopAtStepHook(last_step=NUM_STEPS)], body if i == 0 else None)

    await workers(simulation, worker, 2)


async def checkpoints_are_of_one_step_and_have_its_metric(simulation: Simulation) -> None:
    """Each step changes two halves of the model, at two times; its loss is minus its number."""
    weights = np.zeros(2)

    async def step() -> dict[str, Any]:
        await simulation.sleep(1.0)
        weights[0] += 1.0
        made = weights[0]
        await simulation.sleep(0.0)
        weights[1] += 1.0
        return {"loss": -made}

    def hooks(place: str) -> list[SessionRunHook]:
        saver = StateDictSaver(model={"weights": weights})
        retention = Retention(max_to_keep=9, keep_best=1)
        saving = CheckpointSaverHook(
            place, save_steps=1, saver=saver, retention=retention, metric="loss"
        )
        return [saving, StopAtStepHook(last_step=NUM_STEPS)]

    with TemporaryDirectory() as place:
        creator = SharedSessionCreator(step, num_workers=2)

        async def other(session: Any) -> None:
            await train(creator, [])

        async with MonitoredSession(hooks(place), creator) as session:
            session.start_soon(other, session)
            while not session.should_stop():
                await session.run([])
        for each in CheckpointDirectory(place).checkpoints():
            StateDictSaver(model={"weights": weights}).restore(each.prefix)
            assert weights[0] == weights[1] == each.step, (weights, each)
            assert each.metric in (None, -each.step), each


async def lost_sessions_are_replaced_and_the_stop_is_exact(simulation: Simulation) -> None:
    """Two workers, each of which is lost once, at its first step."""
    model, lost = Model(simulation), set()

    async def step(worker: int) -> dict[str, Any]:
        await simulation.sleep(1.0)
        if worker not in lost:
            lost.add(worker)
            raise PreemptionError
        return await model.step()

    creator = SharedSessionCreator(step, num_workers=2)

    async def worker(i: int) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=NUM_STEPS)], creator) as session:
            while not session.should_stop():
                await session.run([], {"worker": i})
        assert session.global_step.value == NUM_STEPS, session.global_step

    whole = await workers(simulation, worker, 2)
    assert model.steps == NUM_STEPS or not whole, model.steps


async def maps_keep_items_and_their_order(simulation: Simulation) -> None:
    """Two consumers of one concurrent map; each sees its items in order."""
    taken: dict[int, list[int]] = {0: [], 1: []}
    is_closed = False

    async def double(item: int) -> int:
        await simulation.sleep(1.0 + item % 2)
        return 2 * item

    source = map_concurrent(double, range(6), concurrency=2)

    async def consumer(i: int) -> None:
        try:
            async for item in source:
                await simulation.sleep(1.0)
                taken[i].append(item)
        except RuntimeError:
            assert is_closed  # main was cancelled

    async with source:
        try:
            whole = await workers(simulation, consumer, 2)
        finally:
            is_closed = True
    assert all(each == sorted(each) for each in taken.values()), taken
    assert len(whole) < 2 or sorted(taken[0] + taken[1]) == list(range(0, 12, 2)), taken


async def errors_of_side_tasks_end_training(simulation: Simulation) -> None:
    model, left = Model(simulation), []
    creator = SharedSessionCreator(model.step, num_workers=2)

    async def fail(session: Any) -> None:
        await session.global_step.wait_for(1)
        await simulation.sleep(0.0)
        raise Boom

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            session.start_soon(fail, session)

        try:
            await train(creator, [StopAtStepHook(last_step=9)], body if i == 0 else None)
        except Boom:
            left.append(i)
            return
        assert model.steps < 9 or i == 1, "the error did not stop training"

    whole = await workers(simulation, worker, 2)
    assert left == [0] or 0 not in whole, left


PROMISES: Mapping[str, Callable[[Simulation], Any]] = {
    **{f"exact stop, {n} workers": exact_stop(n) for n in (1, 2, 3, 4)},
    "waits end": waits_end,
    "first error leaves": first_error_leaves,
    "each item once": each_item_once,
    "who opens first restores": who_opens_first_restores,
    "values carry their step": values_carry_their_step,
    "one stops all": one_stops_all,
    "rollouts within their bound": rollouts_stay_within_their_bound,
    "exclusive side": no_step_runs_beside_the_exclusive_side,
    "checkpoints and metrics": checkpoints_are_of_one_step_and_have_its_metric,
    "lost sessions": lost_sessions_are_replaced_and_the_stop_is_exact,
    "maps": maps_keep_items_and_their_order,
    "side task fails": errors_of_side_tasks_end_training,
    "errors leave": errors_leave_as_themselves,
    "side tasks end": side_tasks_end_with_their_session,
}
