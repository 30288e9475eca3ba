"""What a parameter server does for processes whose messages are late, lost, or missing.

The server is private: only so can a test give the order in which messages come and are lost.
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from distributed.protocol import serialize

from asynchooks.distributed._messages import Message
from asynchooks.distributed._served import ServedParameters
from asynchooks.protocols import Synchronous

from ..support.helpers import settle
from .by_hand import ByHand

# Dask's workers run on asyncio.
pytestmark = [pytest.mark.faults, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class Process(ByHand):
    received: tuple[int, ...] = ()

    def state(self) -> Message:
        return Message(received=self.received)

    def packed(self, args: Any) -> Any:
        return serialize(args)

    async def answers(self) -> dict[int, Any]:
        """Value or error, by call."""
        await settle()
        answers, self.member.unsent = self.member.unsent, []
        self.received = tuple(call for call, _, _ in answers)
        return {call: error or value for call, value, error in answers}

    async def ask(self, function: str, *args: Any) -> Any:
        number = self.send((function, *args))
        return (await self.answers())[number]

    async def counts(self, *names: str) -> tuple[int, ...]:
        found = await self.ask("statistics")
        return tuple(found[name] for name in names)


@asynccontextmanager
async def a_server(
    lease_secs: float = math.inf, **options: Any
) -> AsyncIterator[tuple[ServedParameters, Process, Process]]:
    """And two processes."""
    server = ServedParameters(np.ones(2), Synchronous(), 2, lease_secs, options)
    try:
        yield server, Process(server, "a"), Process(server, "b")
    finally:
        server.members.clear()  # ends its watch
        if server._watch is not None:
            server._watch.cancel()


def push(worker: int) -> tuple[Any, ...]:
    return ("push", worker, np.ones(2), 0)


def step_of(process: Process) -> int:
    """Worker 0 pushes and waits for the other one; returns the number of that call."""
    return process.send(push(0), ("end_step", 0))


def pass_the_lease(server: ServedParameters, other: Process) -> None:
    """Nine seconds, in which only one process says something."""
    for _ in range(9):
        other.send()
        server.tick(1.0)


async def test_an_end_is_sent_again_until_it_was_received() -> None:
    async with a_server() as (_, one, other):
        waiting = step_of(one)
        one.end()
        one.connect()  # the wait goes on
        assert waiting not in await one.answers()
        other.send(push(1), ("end_step", 1))
        assert waiting in await one.answers()
        assert waiting not in await one.answers()
        one.received = ()  # they were lost
        one.connect()
        assert waiting in await one.answers()
        one.connect()
        assert waiting not in await one.answers()


@pytest.mark.parametrize("are_claimed", [False, True], ids=["", "although others claimed them"])
async def test_workers_of_a_silent_process_leave_and_its_waits_go_on_when_it_is_back(
    are_claimed: bool,
) -> None:
    async with a_server(lease_secs=8.0) as (server, one, other):
        waiting = step_of(one)
        pass_the_lease(server, other)
        assert one.num_hung_up == 1
        assert await other.counts("workers_present", "processes_away") == (1, 1)
        assert waiting not in await one.answers()
        if are_claimed:
            other.send(("join", 0), ("join", 1))
        one.connect()
        assert await other.counts("workers_present", "processes_away") == (2, 0)
        other.send(push(1))
        assert waiting in await one.answers()


async def test_a_worker_joins_again_although_its_last_process_is_forgotten() -> None:
    async with a_server(lease_secs=8.0) as (server, one, other):
        one.send(("join", 0))
        pass_the_lease(server, other)
        for number in range(1000):
            Process(server, str(number)).end()
        assert one.name not in server.left
        other.send(push(0))
        assert await other.counts("workers_present") == (2,)


@pytest.mark.parametrize(
    ("lease_secs", "last", "num_present"),
    [(80.0, (), 1), (80.0, [("bye",)], 2), (math.inf, (), 2)],
    ids=["it died", "it ended with an error", "an infinite lease"],
)
async def test_workers_of_a_process_that_has_died_leave_after_five_seconds(
    lease_secs: float, last: Any, num_present: int
) -> None:
    async with a_server(lease_secs) as (server, one, other):
        one.send(push(0), *last)
        other.send(push(1))
        one.end()
        for num in (2, 2, 2, 2, 2, num_present):
            server.tick(1.0)
            assert await other.counts("workers_present") == (num,)


async def test_an_update_that_fails_when_a_process_is_gone_does_not_end_the_watch() -> None:
    def fail(*_: Any) -> Any:
        raise ArithmeticError

    async with a_server(lease_secs=8.0, update=fail) as (server, one, other):
        one.send(("join", 0))
        other.send(push(1))
        pass_the_lease(server, other)
        assert await other.counts("workers_present") == (1,)
