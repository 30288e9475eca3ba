"""Sessions from their beginning to their end, as most tests of hooks make them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from asynchooks import (
    Coordinator,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

from ..support.helpers import counting_creator
from .inputs import SHORT_SECS


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
    takes_turns: bool = False,
) -> None:
    """Open a session, run it until it is to stop, and close it.

    Args:
        runs: how many there are instead.
        to: the global step to which there are runs instead.
        takes_turns: whether other tasks run between its runs.
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
                if takes_turns:
                    await anyio.lowlevel.checkpoint()


async def run_session(
    hooks: Iterable[Any], creator: Any = None, *, runs: int | None = None, to: int | None = None,
    fetches: Any = (), **options: Any,
) -> MonitoredSession:  # fmt: skip
    """Make a session, by default of a step that counts its calls, and `run_and_close` it."""
    session = MonitoredSession(hooks, creator or counting_creator(), **options)
    await run_and_close(session, runs=runs, to=to, fetches=fetches)
    return session


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


class Calls(SessionRunHook):
    """Calls, or awaits, what is given for a moment, with what the hook is given then."""

    def __init__(self, **moments: Callable[..., Any]) -> None:
        self._moments = moments

    async def _at(self, moment: str, *given: Any) -> None:
        if moment in self._moments:
            result = self._moments[moment](*given)
            if isinstance(result, Awaitable):
                await result

    async def begin(self) -> None:
        await self._at("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self._at("after_create_session", session, coord)

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._at("before_run", run_context)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._at("after_run", run_context, run_values)

    async def before_end(self, session: Any) -> None:
        await self._at("before_end", session)

    async def end(self, session: Any) -> None:
        await self._at("end", session)


class Holds(Calls):
    """Holds its worker up at a moment, such as "before_run", until an event comes."""

    def __init__(self, moment: str, until: anyio.Event) -> None:
        super().__init__(**{moment: self._hold})
        self.has_come = anyio.Event()
        self._until = until

    async def _hold(self, *_: Any) -> None:
        self.has_come.set()
        await self._until.wait()
