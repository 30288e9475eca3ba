"""The plugin of Dask's scheduler that keeps every training's step, limit and credits.

It runs in the scheduler's process, on its event loop. A process has one connection to it for
each training; when that ends, the process has left, so that nothing of it remains.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from .._version import __version__
from ._membership import Member
from .dask._training import Training, request_of

logger = logging.getLogger("asynchooks")

FOLLOW, STATISTICS = "asynchooks_follow", "asynchooks_statistics"
"""The operations that the plugin adds to the scheduler."""


class StepPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask has no types
    """All trainings of one scheduler. `DaskCluster` registers it; it ends with the scheduler."""

    name = "asynchooks"
    idempotent = True  # a second registration keeps the step

    def __init__(self) -> None:
        self.trainings: dict[str, Training] = {}

    async def start(self, scheduler: Any) -> None:
        self._install(scheduler)

    def _install(self, scheduler: Any) -> None:
        scheduler.handlers[FOLLOW] = self._follow
        scheduler.handlers[STATISTICS] = self._statistics

    async def _follow(
        self,
        comm: Any,
        training: str,
        version: str,
        uid: str,
        interval_secs: float,
        lease_secs: float,
        request: dict[str, Any],
    ) -> Any:
        """Serve one process until its connection ends."""
        if version != __version__:
            await comm.write({"version": __version__})
            return Status.dont_reply
        state = self.trainings.get(training)
        if state is None:
            state = self.trainings[training] = Training(uuid.uuid4().hex[:12])
        news = asyncio.Event()
        member = state.join(Member(uid, news.set, lease_secs / interval_secs), request_of(request))
        try:
            await comm.write({"version": __version__, **state.news(member)})
            async with asyncio.TaskGroup() as group:
                group.create_task(_send_news(comm, state, member, news))
                group.create_task(_watch(comm, member, interval_secs))
                while True:
                    state.take(member, request_of(await comm.read()))
        except* OSError as ended:  # it left, or its process died: handled alike
            logger.info("%s has left the training %r: %r", uid, training, ended.exceptions[0])
        finally:
            state.table.leave(member)
            if state.is_done and not state.table.members:
                self.trainings.pop(training, None)
            comm.abort()
        return Status.dont_reply

    async def _statistics(self, training: str) -> dict[str, Any] | None:
        state = self.trainings.get(training)
        return None if state is None else state.statistics()


async def _send_news(comm: Any, state: Training, member: Member, news: asyncio.Event) -> None:
    """Send the newest state: a slow process gets fewer messages, not a longer queue."""
    while True:
        await news.wait()
        news.clear()
        await comm.write(state.news(member))


async def _watch(comm: Any, member: Member, interval_secs: float) -> None:
    """End the connection of a silent process."""
    is_silent = False
    while not is_silent:
        await asyncio.sleep(interval_secs)
        is_silent = member.tick()
    comm.abort()


def dask_setup(scheduler: Any) -> None:
    """For `dask scheduler --preload asynchooks.distributed._dask_plugin`."""
    plugin = StepPlugin()
    with suppress(ValueError):
        scheduler.add_plugin(plugin, name=plugin.name)
    plugin._install(scheduler)
