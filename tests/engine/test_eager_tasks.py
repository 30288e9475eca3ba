"""Programs whose event loop starts tasks at once: `asyncio.eager_task_factory`, since Python 3.12.

`python -m pytest --eager-tasks` runs all other tests so.
"""

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import prefetch

from ..support.eager import Backend, OwnTask, eager_backends
from ..support.moments import at


@pytest.fixture(params=["asyncio", "trio", *eager_backends()])
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


async def test_a_side_task_begins_once_its_starter_waits() -> None:
    log: list[str] = []

    async def side() -> None:
        log.append("side task")

    async with MonitoredSession([], dict) as session:
        session.start_soon(side)
        log.append("started")
    assert log == ["started", "side task"]


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
    log, in_step = list[str](), asyncio.Event()

    async def side() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("side task")

    hook = at(
        begin=lambda: log.append("begin"),
        after_create_session=lambda _, coord: coord.start_soon(side),
        after_close=lambda _: log.append("closed"),
    )

    async def step(number: int) -> dict[str, int]:
        in_step.set()
        await anyio.sleep_forever()
        return {}

    async def train() -> None:
        feed = FeedHook(prefetch(range(9), 2), "number")
        async with MonitoredSession([hook, feed], step) as session:
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
