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


async def answer(seconds: float) -> int:
    await pause(seconds)
    return 42


@in_virtual_time
async def test_a_computation_that_is_done_in_time_gives_its_value() -> None:
    server = make_server(Synchronous(), 2)
    assert await server.compute(0, answer, 3.0) == (True, 42)
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


@in_virtual_time
async def test_an_update_leaves_others_alone_where_stale_work_counts() -> None:
    server = make_server(Asynchronous(), 2)
    current_engine().start(push_later, server)
    assert await server.compute(0, answer, 3.0) == (True, 42)


@pytest.mark.parametrize("protocol", [Asynchronous(), KSync(1)], ids=repr)
@in_virtual_time
async def test_at_the_limit_any_work_is_abandoned(protocol: Protocol) -> None:
    server = make_server(protocol, 2, limit=1)
    current_engine().start(push_later, server)
    assert await server.compute(0, answer, 1000.0) == (False, None)
    assert current_engine().now() == 2.0


@in_virtual_time
async def test_what_is_useless_already_is_not_begun() -> None:
    server = make_server(KSync(1), 2)
    server.push(0, np.ones(2), 0)

    async def never() -> None:
        raise AssertionError("begun")

    assert await server.compute(0, never) == (False, None)
    assert not server._waits.watchers


@in_virtual_time
async def test_slots_wake_in_order_of_asking_and_forgotten_ones_do_not() -> None:
    server = make_server(KSync(1), 2)
    engine = current_engine()
    order: list[str] = []

    async def wait(name: str, version: int) -> None:
        slot = Slot(engine, name)
        server.watch_update(version, slot)
        await engine.park(slot)
        order.append(name)

    for name in "cab":
        engine.start(wait, name, 0)
    forgotten = Slot(engine, "a forgotten one")
    server.watch_update(0, forgotten)()
    await pause(1.0)
    server.push(0, np.ones(2), 0)
    await pause(0.0)
    assert order == ["c", "a", "b"]
    assert not forgotten.is_woken
    at_once = Slot(engine, "an old version")
    server.watch_update(0, at_once)()
    assert at_once.is_woken


@pytest.mark.anyio
async def test_an_error_of_the_computation_leaves_as_itself() -> None:
    async def fail() -> None:
        raise KeyError("lost")

    server = make_server(Asynchronous(), 1)
    with pytest.raises(KeyError, match="lost"):
        await server.compute(0, fail)
    assert not server._waits.watchers


@pytest.mark.anyio
async def test_an_error_while_it_is_abandoned_leaves_too() -> None:
    async def fail_late() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError("lost")

    server = make_server(KSync(1), 2)
    async with anyio.create_task_group() as group:

        async def compute() -> None:
            with pytest.raises(KeyError, match="lost"):
                await server.compute(0, fail_late)

        group.start_soon(compute)
        await anyio.wait_all_tasks_blocked()
        server.push(0, np.ones(2), 0)


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
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await anyio.wait_all_tasks_blocked()
                scope.cancel()

            group.start_soon(cancel)
            await server.compute(0, slow)
    assert scope.cancelled_caught
    assert ended
    assert not server._waits.watchers
