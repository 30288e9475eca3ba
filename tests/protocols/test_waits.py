"""Computations that end early where an update has made them useless."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.protocols import (
    Asynchronous,
    KSync,
    ParameterServer,
    Protocol,
    Synchronous,
)

from ..support.helpers import cancelled_when_settled, in_task
from ..support.virtual_kernel import Trampoline
from .worlds import make_server, pause


def in_virtual_time(main: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test without an event loop."""

    @wraps(main)
    def run(**arguments: Any) -> None:
        Trampoline().run(lambda: main(**arguments))

    return run


async def push_later(server: ParameterServer) -> None:
    await pause(2.0)
    server.push(0, np.ones(2), 0)


@pytest.mark.parametrize("protocol", [Asynchronous(), Synchronous()], ids=repr)
@in_virtual_time
async def test_a_computation_gives_its_value_where_no_update_makes_it_useless(
    protocol: Protocol,
) -> None:
    server = make_server(protocol, 2)
    current_engine().start(push_later, server)

    async def answer() -> int:
        await pause(3.0)
        return 42

    assert await server.compute(0, answer) == (True, 42)
    assert current_engine().now() == 3.0


@in_virtual_time
async def test_an_update_cancels_what_works_on_the_version_before_at_once() -> None:
    server = make_server(KSync(1), 2)
    engine = current_engine()
    ends: list[float] = []

    async def straggle() -> None:
        try:
            await pause(100.0)
        finally:
            ends.append(engine.now())

    engine.start(push_later, server)
    assert await server.compute(0, straggle) == (False, None)
    assert ends == [2.0]
    assert engine.now() == 2.0


@pytest.mark.parametrize("protocol", [Asynchronous(), KSync(1)], ids=repr)
@in_virtual_time
async def test_at_the_limit_any_work_is_abandoned(protocol: Protocol) -> None:
    server = make_server(protocol, 2, limit=1)
    current_engine().start(push_later, server)
    assert await server.compute(0, pause, 1000.0) == (False, None)
    assert current_engine().now() == 2.0


@in_virtual_time
async def test_waits_for_an_update_end_in_order_of_asking_and_at_once_for_an_old_version() -> None:
    server = make_server(KSync(1), 2)
    engine = current_engine()
    order: list[str] = []

    async def wait(name: str) -> None:
        slot = Slot(engine, name)
        server.watch_update(0, slot)
        await engine.park(slot)
        order.append(name)

    for name in "cab":
        engine.start(wait, name)
    await pause(1.0)
    server.push(0, np.ones(2), 0)
    await pause(0.0)
    await wait("at once")
    assert order == ["c", "a", "b", "at once"]
    assert await server.compute(0, pause, 9.0) == (False, None)  # it is not even begun
    assert engine.now() == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [Asynchronous(), KSync(1)], ids=repr)
async def test_an_error_leaves_as_itself_also_while_the_work_is_abandoned(
    protocol: Protocol,
) -> None:
    async def fail() -> None:
        try:
            if protocol == KSync(1):
                await anyio.sleep_forever()
        finally:
            raise KeyError("lost")

    server = make_server(protocol, 2)
    async with in_task(server.compute, 0, fail) as box:
        server.push(0, np.ones(2), 0)
    assert isinstance(box.error, KeyError)
    assert not server._waits.watchers  # what it would go on holding shows nowhere else


@pytest.mark.anyio
async def test_cancelling_the_caller_cancels_the_computation_and_waits_for_its_end() -> None:
    ended = False

    async def slow() -> None:
        nonlocal ended
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended = True

    server = make_server(Asynchronous(), 1)
    assert await cancelled_when_settled(server.compute, 0, slow)
    assert ended
    assert not server._waits.watchers
