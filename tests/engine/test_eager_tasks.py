"""Programs whose event loop starts tasks at once: `asyncio.eager_task_factory`, since Python 3.12.

`python -m pytest --eager-tasks` runs all other tests so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MetricsHook,
    MonitoredSession,
    Restart,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    rollouts,
    shuffle,
    take,
)
from asynchooks.simulation import Simulation

from ..support.eager import Backend, OwnTask, eager_backends

pytestmark = pytest.mark.anyio

NUMBERS = range(16)


@pytest.fixture(params=["asyncio", "trio", *eager_backends()])
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


async def same(number: int) -> int:
    await anyio.lowlevel.checkpoint()
    return number


async def same_at_once(number: int) -> int:
    return number


PIPELINES: dict[str, Callable[[], Stage[Any]]] = {
    "batch": lambda: batch(NUMBERS, 2),
    "shuffle": lambda: shuffle(NUMBERS, 4, seed=1),
    "interleave": lambda: interleave([NUMBERS[:8], NUMBERS[8:]]),
    "take": lambda: take(repeat(NUMBERS), len(NUMBERS)),
    "prefetch": lambda: prefetch(batch(shuffle(NUMBERS, 4, seed=1), 2), 2),
    "map_concurrent": lambda: map_concurrent(same, NUMBERS, concurrency=3),
    "batch of map_concurrent": lambda: batch(
        map_concurrent(same_at_once, NUMBERS, concurrency=3), 2
    ),
}


class Training:
    """Trains on a pipeline, in one session after the other, and keeps what it was trained on."""

    def __init__(self, directory: Path, make: Callable[[], Stage[Any]]) -> None:
        self.directory = directory
        self.make = make
        self.seen: list[int] = []

    def hooks(self, last_step: int) -> list[SessionRunHook]:
        saver = StateDictSaver(model={"w": np.zeros(1)})
        return [
            CheckpointSaverHook(self.directory, save_steps=100, saver=saver),
            StopAtStepHook(last_step=last_step),
        ]

    def step(self, numbers: Any) -> dict[str, Any]:
        self.seen += np.ravel(numbers).tolist()
        return {}

    async def by_hook(self, last_step: int) -> None:
        hooks = [FeedHook(self.make(), "numbers"), *self.hooks(last_step)]
        async with MonitoredSession(hooks, FunctionSessionCreator(self.step)) as session:
            while not session.should_stop():
                await session.run([])

    async def by_loop(self, last_step: int) -> None:
        pipeline = self.make()
        hooks = [*self.hooks(last_step), InputPositionHook(pipeline)]
        async with MonitoredSession(hooks, FunctionSessionCreator(self.step)) as session:
            async for numbers in session.batches(pipeline):
                await session.run([], {"numbers": numbers})


@pytest.mark.parametrize("way", [Training.by_hook, Training.by_loop], ids=["hook", "loop"])
@pytest.mark.parametrize("name", PIPELINES)
async def test_resumed_training_gets_each_item_once(
    tmp_path: Path, name: str, way: Callable[[Training, int], Any]
) -> None:
    training = Training(tmp_path, PIPELINES[name])
    for last_step in (2, 4, 100):
        await way(training, last_step)
    assert sorted(training.seen) == list(NUMBERS)


@pytest.mark.parametrize("fn", [same, same_at_once])
async def test_rollouts_make_their_calls(fn: Callable[[int], Any]) -> None:
    results: list[int] = []
    async with rollouts(fn, NUMBERS, 2, concurrency=4, max_staleness=1) as batches:
        async for each in batches:
            results += [rollout.result for rollout in each]
    assert sorted(results) == list(NUMBERS)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_option_makes_the_tasks_of_a_test_eager(pytestconfig: pytest.Config) -> None:
    log: list[str] = []

    async def begin() -> None:
        log.append("begun")

    task = asyncio.create_task(begin())
    assert bool(log) == pytestconfig.getoption("--eager-tasks")
    await task


async def test_a_side_task_begins_once_its_starter_waits() -> None:
    log: list[str] = []

    async def side() -> None:
        log.append("side task")

    async with MonitoredSession([], FunctionSessionCreator(dict)) as session:
        session.start_soon(side)
        log.append("started")
        while len(log) < 2:
            await anyio.lowlevel.checkpoint()
        log.append("waited")
    assert log == ["started", "side task", "waited"]


async def test_a_side_task_that_is_cancelled_before_it_begins_comes_to_its_first_wait() -> None:
    log: list[str] = []

    async def side() -> None:
        log.append("begun")
        try:
            await anyio.sleep_forever()
        finally:
            log.append("ended")

    with pytest.raises(OSError, match="of the block"):
        async with MonitoredSession([], FunctionSessionCreator(dict)) as session:
            session.start_soon(side, cancel_at_end=True)
            raise OSError("of the block")
    assert log == ["begun", "ended"]


async def test_a_side_task_that_fails_at_once_is_restarted_and_then_stops_the_session() -> None:
    num_calls = 0

    async def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        raise ConnectionError("at once")

    with pytest.raises(ConnectionError, match="at once"):
        async with MonitoredSession([], FunctionSessionCreator(dict)) as session:
            session.start_soon(fail, on_failure=Restart(max_attempts=2, first_pause_secs=0.0))
            while not session.should_stop():
                await session.run([])
    assert num_calls == 3


async def test_a_concurrent_evaluation_begins_before_the_next_step() -> None:
    steps: list[tuple[int, int]] = []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        steps.append((step, session.global_step.value))
        await anyio.lowlevel.checkpoint()
        return {"step": float(step)}

    evaluation = EvaluationHook(evaluate, every_n_steps=2)
    hooks = [evaluation, StopAtStepHook(last_step=6)]
    async with MonitoredSession(hooks, FunctionSessionCreator(dict)) as session:
        while not session.should_stop():
            await session.run([])
            await anyio.sleep(0.01)  # it ends meanwhile
    assert steps == [(2, 2), (4, 4), (6, 6)]
    assert evaluation.latest == {"step": 6.0}


async def test_metrics_of_each_step_are_written() -> None:
    points: list[tuple[int, dict[str, Any]]] = []
    hooks = [
        MetricsHook(lambda step, values: points.append((step, values)), "loss", every_n_steps=1),
        StopAtStepHook(last_step=3),
    ]
    async with MonitoredSession(hooks, FunctionSessionCreator(lambda: {"loss": 0.5})) as session:
        while not session.should_stop():
            await session.run([])
    assert points == [(step, {"loss": 0.5}) for step in (1, 2, 3)]


async def test_workers_of_one_model_make_exactly_the_steps_that_were_asked_for() -> None:
    num_steps = 0

    async def step() -> dict[str, int]:
        nonlocal num_steps
        await anyio.lowlevel.checkpoint()
        num_steps += 1
        return {}

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def work() -> None:
        async with MonitoredSession([StopAtStepHook(last_step=10)], creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(work)
    assert num_steps == 10


@pytest.mark.parametrize("anyio_backend", eager_backends())
async def test_a_session_in_a_task_that_has_begun_at_once_ends_when_the_task_is_cancelled() -> None:
    log: list[str] = []
    in_step = asyncio.Event()

    class Hook(SessionRunHook):
        async def begin(self) -> None:
            log.append("begin")

        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.side)

        async def side(self) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                log.append("side task")

        async def after_close(self, error: BaseException | None) -> None:
            log.append("closed")

    async def step(number: int) -> dict[str, int]:
        in_step.set()
        await anyio.sleep_forever()
        return {}

    async def train() -> None:
        feed = FeedHook(prefetch(repeat(NUMBERS), 2), "number")
        async with MonitoredSession([Hook(), feed], FunctionSessionCreator(step)) as session:
            await session.run([])

    async with asyncio.TaskGroup() as group:
        task = group.create_task(train())
        assert log == ["begin"]
        await in_step.wait()
        task.cancel()
    assert task.cancelled()
    assert sorted(log) == ["begin", "closed", "side task"]


@pytest.mark.parametrize(
    "anyio_backend", [each for each in eager_backends() if each.id == "own eager"]
)
async def test_the_program_s_own_factory_makes_our_tasks() -> None:
    tasks: list[Any] = []

    async def side() -> None:
        tasks.append(asyncio.current_task())

    async with MonitoredSession([], FunctionSessionCreator(dict)) as session:
        session.start_soon(side)
        assert not tasks
    assert [type(each) for each in tasks] == [OwnTask]


@pytest.mark.parametrize("anyio_backend", eager_backends())
def test_a_simulation_whose_tasks_are_eager_has_the_same_trace(anyio_backend: Any) -> None:
    def run(make_eager: bool) -> str:
        simulation = Simulation(backend="asyncio", seed=1, keep_trace=True)

        async def worker(index: int) -> None:
            for _ in range(3):
                await simulation.sleep(index % 2)
                simulation.note(f"worker {index}")

        async def main() -> None:
            if make_eager:
                factory: Any = anyio_backend[1]["loop_factory"]
                loop = factory()
                asyncio.get_running_loop().set_task_factory(loop.get_task_factory())
                loop.close()
            tasks = [simulation.start(worker, i) for i in range(4)]
            simulation.note("started")
            for task in tasks:
                await task.wait()

        simulation.run(main)
        return simulation.trace.digest()

    assert run(True) == run(False)
