"""A network between processes that can be cut and healed: a proxy on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import SocketStream

from .processes import PORT, Scheduler, own_host


class Proxy:
    """Carries what comes to its address to a scheduler, and back. `a_proxy` makes it."""

    def __init__(self, target: str, host: str) -> None:
        self.address = f"tcp://{host}:{PORT}"
        self._target = target
        self._is_closed = False
        self._connections: set[anyio.CancelScope] = set()
        self._healed = anyio.Event()
        self._healed.set()

    def fall_silent(self) -> None:
        """From now on nothing passes, without an error at either end."""
        self._healed = anyio.Event()

    def close(self) -> None:
        """End all connections, and each one that is tried."""
        self._is_closed = True
        for each in self._connections:
            each.cancel()

    def heal(self) -> None:
        self._is_closed = False
        self._healed.set()

    async def carry(self, near: SocketStream) -> None:
        async with near:
            if self._is_closed:
                return
            async with await anyio.connect_tcp(self._target, PORT) as far:
                async with anyio.create_task_group() as group:
                    scope = group.cancel_scope
                    self._connections.add(scope)
                    try:
                        group.start_soon(self._pump, far, near, scope)
                        await self._pump(near, far, scope)
                    finally:
                        self._connections.discard(scope)

    async def _pump(self, source: SocketStream, to: SocketStream, scope: anyio.CancelScope) -> None:
        try:
            while True:
                data = await source.receive()
                await self._healed.wait()
                await to.send(data)
        except (anyio.EndOfStream, anyio.BrokenResourceError):  # one end closes the other
            scope.cancel()


@asynccontextmanager
async def a_proxy(scheduler: Scheduler) -> AsyncIterator[Proxy]:
    host = own_host()
    async with (
        await anyio.create_tcp_listener(local_host=host, local_port=PORT) as listener,
        anyio.create_task_group() as group,
    ):
        proxy = Proxy(scheduler.host, host)
        group.start_soon(listener.serve, proxy.carry)
        yield proxy
        group.cancel_scope.cancel()
