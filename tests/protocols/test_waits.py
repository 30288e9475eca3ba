"""Computations that end early where an update has made them useless."""

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks.protocols import Asynchronous, KSync, ParameterServer, Protocol, Synchronous
from asynchooks.simulation import Simulation

from ..support.helpers import cancelled_when_settled, in_task
from .worlds import make_server


def push(server: ParameterServer, _: object = None) -> None:
    server.push(0, np.ones(2), server.version)


@pytest.mark.parametrize("protocol", [Asynchronous(), Synchronous()], ids=repr)
async def test_a_computation_gives_its_value_where_no_update_makes_it_useless(
    protocol: Protocol,
) -> None:
    server, is_done = make_server(protocol), anyio.Event()

    async def answer() -> int:
        await is_done.wait()
        return 42

    async with in_task(server.compute, 0, answer) as box:
        push(server)
        is_done.set()
    assert box.value == (True, 42)


@pytest.mark.parametrize(
    ("protocol", "end"),
    [
        (KSync(1), push),
        (Asynchronous(), push),  # it is the last one
        (Asynchronous(), lambda server, _: server.close()),
        (Asynchronous(), ParameterServer.load_state_dict),  # of the version before
    ],
)
async def test_work_that_no_update_can_use_is_cancelled_at_once(
    protocol: Protocol, end: Callable[..., None]
) -> None:
    server = make_server(protocol, limit=2 if protocol == Asynchronous() else 9)
    before = server.state_dict()
    push(server)
    async with in_task(server.compute, 1, anyio.sleep_forever) as box:
        end(server, before)
    assert box.value == (False, None)
    assert await server.compute(1, pytest.fail) == (False, None)  # it is not even begun


def test_computations_that_an_update_cancels_end_in_the_order_of_their_begins() -> None:
    simulation, server, order = Simulation(backend="turbo"), make_server(KSync(1)), list[str]()

    async def work(name: str) -> None:
        try:
            await simulation.sleep(100.0)
        finally:
            order.append(name)

    async def main() -> None:
        tasks = [simulation.start(server.compute, 0, work, name) for name in "cab"]
        await simulation.sleep(1.0)
        push(server)
        for each in tasks:
            await each.wait()

    simulation.run(main)
    assert (order, simulation.now) == (["c", "a", "b"], 1.0)


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

    server = make_server(protocol)
    async with in_task(server.compute, 0, fail) as box:
        push(server)
    assert isinstance(box.error, KeyError)
    assert not server._waits.watchers  # what it would go on holding shows nowhere else


async def test_cancelling_the_caller_cancels_the_computation_and_waits_for_its_end() -> None:
    log: list[Any] = []

    async def slow() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            log.append("ended")

    server = make_server(Asynchronous(), 1)
    assert await cancelled_when_settled(server.compute, 0, slow)
    assert log == ["ended"]
    assert not server._waits.watchers
