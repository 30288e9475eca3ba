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
    MonitoredSession,
    Restart,
    SessionRunHook,
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
    shuffle,
    take,
)

from ..support.eager import Backend, OwnTask, eager_backends

pytestmark = pytest.mark.anyio

NUMBERS = range(16)


@pytest.fixture(params=["asyncio", "trio", *eager_backends()])
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


PIPELINES: dict[str, Callable[[Any], Stage[Any]]] = {
    "shuffled batches": lambda fn: prefetch(batch(shuffle(NUMBERS, 4, seed=1), 2), 2),
    "interleave": lambda fn: interleave([NUMBERS[:8], NUMBERS[8:]]),
    "take": lambda fn: take(repeat(NUMBERS), len(NUMBERS)),
    "map": lambda fn: batch(map_concurrent(fn, NUMBERS, concurrency=3), 2),
}


async def same(number: int) -> int:
    await anyio.lowlevel.checkpoint()
    return number


async def same_at_once(number: int) -> int:
    return number


@pytest.mark.parametrize(("fn", "by_hook"), [(same, True), (same_at_once, False)])
@pytest.mark.parametrize("name", PIPELINES)
async def test_resumed_training_gets_each_item_once(
    tmp_path: Path, name: str, fn: Any, by_hook: bool
) -> None:
    seen: list[int] = []

    def step(numbers: Any) -> dict[str, Any]:
        seen.extend(np.ravel(numbers).tolist())
        return {}

    for last_step in (2, 4, 100):
        pipeline = PIPELINES[name](fn)
        saver = StateDictSaver(model={"w": np.zeros(1)})
        hooks: list[SessionRunHook] = [
            CheckpointSaverHook(tmp_path, save_steps=100, saver=saver),
            StopAtStepHook(last_step=last_step),
        ]
        hooks.append(FeedHook(pipeline, "numbers") if by_hook else InputPositionHook(pipeline))
        async with MonitoredSession(hooks, step) as session:
            if by_hook:
                while not session.should_stop():
                    await session.run([])
            async for numbers in session.batches(pipeline):
                await session.run([], {"numbers": numbers})
    assert sorted(seen) == list(NUMBERS)


async def test_side_tasks_begin_once_their_starter_waits_and_evaluations_before_the_next_step() -> (
    None
):
    log: list[Any] = []

    async def side() -> None:
        log.append("side task")
        try:
            await anyio.sleep_forever()
        finally:
            log.append("ended")

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        log.append((step, session.global_step.value))
        await anyio.lowlevel.checkpoint()
        return {"step": float(step)}

    async def fail() -> None:
        log.append("fails")
        raise ConnectionError("at once")

    evaluation = EvaluationHook(evaluate, every_n_steps=2)
    with pytest.raises(ConnectionError, match="at once"):
        async with MonitoredSession([evaluation], dict) as session:
            session.start_soon(side, cancel_at_end=True)
            log.append("started")
            for _ in range(4):
                await session.run([])
                await anyio.sleep(0.01)  # what has begun ends meanwhile
            session.start_soon(fail, on_failure=Restart(max_attempts=2, first_pause_secs=0.0))
            await session.or_stop(anyio.sleep_forever)
    assert log == ["started", "side task", (2, 2), (4, 4), *["fails"] * 3, "ended"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_option_makes_the_tasks_of_a_test_eager(pytestconfig: pytest.Config) -> None:
    log: list[str] = []

    async def begin() -> None:
        log.append("begun")

    task = asyncio.create_task(begin())
    assert bool(log) == pytestconfig.getoption("--eager-tasks")
    await task


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

    async with MonitoredSession([], dict) as session:
        session.start_soon(side)
        assert not tasks
    assert [type(each) for each in tasks] == [OwnTask]
