"""Hosts of trainings in a Dask server: the scheduler counts steps, a worker holds parameters.

They run on the event loop of that server. A process has one connection to the host of each of its
trainings, over which its calls and their answers go; `_link.py` is its other end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from .._version import __version__
from ._counter import Counter
from ._membership import Host, Line
from ._messages import FOLLOW, Message

logger = logging.getLogger("asynchooks")


def hosts_of(server: Any) -> dict[str, Host]:
    """All hosts of a scheduler or a worker, by the names of their trainings."""
    if not hasattr(server, "asynchooks_hosts"):
        server.asynchooks_hosts = {}

        async def follow(comm: Any, **about: Any) -> Any:  # by its first parameter Dask knows it
            return await _follow(server.asynchooks_hosts, comm, **about)

        server.handlers[FOLLOW] = follow
    hosts: dict[str, Host] = server.asynchooks_hosts
    return hosts


async def _follow(
    hosts: dict[str, Host],
    comm: Any,
    training: str,
    counts: bool,
    version: str,
    uid: str,
    lease_secs: float,
    message: tuple[Any, ...],
) -> Any:
    """Serve one process until its connection ends.

    Args:
        counts: whether the training has no parameters: then its first process begins it.
    """
    host = hosts.get(training)
    if host is not None and host.is_forgotten:  # the ends of its connections come later
        host = None
    if version != __version__ or (host is None and not counts):
        await comm.write({"version": __version__, "is_gone": host is None and not counts})
        return Status.dont_reply
    if host is None:
        host = hosts[training] = Counter()
    has_news = asyncio.Event()
    line = Line(has_news.set, comm.abort)
    member = host.join(uid, line, lease_secs, Message(*message))
    try:
        about = {"version": __version__, "lease_secs": host.lease_secs, "welcome": host.welcome()}
        await comm.write({**about, **host.news(member)})
        async with asyncio.TaskGroup() as group:
            group.create_task(_send_news(comm, host, member, line, has_news))
            while True:
                host.take(member, line, Message(*await comm.read()))
    except* OSError as ended:  # it left, or its process died: handled alike
        logger.info("%s has left the training %r: %r", uid, training, ended.exceptions[0])
    finally:
        host.ended(member, line)
        # perhaps another training has its name by now
        if host.is_forgotten and hosts.get(training) is host:
            del hosts[training]
        comm.abort()
    return Status.dont_reply


async def _send_news(
    comm: Any, host: Host, member: Any, line: Line, has_news: asyncio.Event
) -> None:
    """Send the newest state: a slow process gets fewer messages, not a longer queue."""
    while await has_news.wait():
        has_news.clear()
        if member.line is line:  # else they go over another connection
            await comm.write(host.news(member))


class StepPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask has no types
    """Brings the hosts to a scheduler. `DaskCluster` registers it; it ends with the scheduler."""

    name = "asynchooks"
    idempotent = True  # a second registration keeps the step

    async def start(self, scheduler: Any) -> None:
        hosts_of(scheduler)


def dask_setup(scheduler: Any) -> None:
    """For `dask scheduler --preload asynchooks.distributed._dask_plugin`."""
    hosts_of(scheduler)
