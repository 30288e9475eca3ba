"""A training that is recorded, to be killed."""

from __future__ import annotations

from collections.abc import Awaitable
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.lowlevel

from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession, TraceHook
from asynchooks.data import rollouts

FLUSH_SECS = 0.01


def record(backend: str, path: Path, connection: Connection) -> None:
    """Train until killed."""

    async def answer(item: int) -> int:
        await anyio.sleep(0.001)
        return item

    async def step(groups: object) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"loss": 0.5}

    async def main() -> None:
        groups = rollouts(answer, range(10**9), 2, concurrency=8, max_staleness=2)
        hooks = [TraceHook(path, flush_secs=FLUSH_SECS), FeedHook(groups, "groups")]
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            await session.run([])
            connection.send("begun")
            while True:
                await session.run([])

    run: Awaitable[None] | None = anyio.run(main, backend=backend)
    assert run is None
