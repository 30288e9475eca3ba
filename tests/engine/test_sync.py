"""The lock for openings: first come, first served, whatever is cancelled."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asynchooks._engine.sync import Lock

from ..support.helpers import settle


@pytest.mark.anyio
async def test_tasks_enter_in_the_order_in_which_they_asked() -> None:
    lock, log = Lock("a test"), []

    async def enter(name: str) -> None:
        async with lock:
            log.append(name)
            await anyio.lowlevel.checkpoint()
            log.append(name)

    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(enter, name)
            await settle()
    assert log == [name for name in "abc" for _ in range(2)]


def test_a_lock_that_comes_together_with_a_cancellation_is_passed_on() -> None:
    async def main() -> None:
        lock, log = Lock("a test"), []

        async def enter(name: str) -> None:
            async with lock:
                log.append(name)

        await lock.__aenter__()
        cancelled = asyncio.create_task(enter("cancelled"))
        successor = asyncio.create_task(enter("successor"))
        await asyncio.sleep(0)
        await lock.__aexit__(None, None, None)
        cancelled.cancel()
        await asyncio.wait_for(successor, 5)
        assert log == ["successor"]

    asyncio.run(main())
