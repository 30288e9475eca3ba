"""Sessions from their beginning to their end, as most tests of hooks make them."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from asynchooks import (
    HistoryHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
)

from ..support.helpers import counting_creator
from ..support.moments import at
from .inputs import SHORT_SECS

Calls = at
"""As tests of the data call it."""


async def run_to(session: MonitoredSession, step: int) -> None:
    """Run steps until the global step is there."""
    while session.global_step.value < step:
        await session.run([])


async def run_and_close(
    session: MonitoredSession,
    *,
    runs: int | None = None,
    to: int | None = None,
    fetches: Any = (),
) -> None:
    """Open a session, run it until it is to stop, and close it.

    Args:
        runs: how many there are instead.
        to: the global step to which there are runs instead.
    """
    async with session:
        if to is not None:
            await run_to(session, to)
        elif runs is not None:
            for _ in range(runs):
                await session.run(fetches)
        else:
            while not session.should_stop():
                await session.run(fetches)


async def run_session(
    hooks: Iterable[Any], creator: Any = None, *, runs: int | None = None, to: int | None = None,
    fetches: Any = (), **options: Any,
) -> MonitoredSession:  # fmt: skip
    """Make a session, by default of a step that counts its calls, and `run_and_close` it."""
    session = MonitoredSession(hooks, creator or counting_creator(), **options)
    await run_and_close(session, runs=runs, to=to, fetches=fetches)
    return session


def rows_of(history: HistoryHook) -> list[dict[str, Any]]:
    """Without the seconds."""
    return [{name: row[name] for name in row if name != "secs"} for row in history.rows]


async def suspending_step() -> dict[str, int]:
    """A step during which other tasks run."""
    await anyio.lowlevel.checkpoint()
    return {}


@asynccontextmanager
async def tasks() -> AsyncIterator[TaskGroup]:
    """A task group that fails where its tasks hang."""
    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            yield group


class Holds(SessionRunHook):
    """Holds its worker up at its begin, or before a run or its end, until an event comes."""

    def __init__(self, moment: str, until: anyio.Event) -> None:
        self.has_come = anyio.Event()
        self._moment, self._until = moment, until

    async def _at(self, moment: str) -> None:
        if moment == self._moment:
            self.has_come.set()
            await self._until.wait()

    async def begin(self) -> None:
        await self._at("begin")

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._at("before_run")

    async def end(self, session: Any) -> None:
        await self._at("end")
