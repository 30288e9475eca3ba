"""What a parameter server does for processes whose messages are late, lost, or missing.

The host is private: only here can a test give the order in which messages come and are lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from distributed.protocol import serialize

from asynchooks import StopTraining
from asynchooks.distributed._membership import Line
from asynchooks.distributed._messages import Message
from asynchooks.distributed._served import ServedParameters
from asynchooks.protocols import Synchronous

from ..support.helpers import settle

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.fixture
def anyio_backend() -> str:
    """Dask's workers have asyncio."""
    return "asyncio"


class Process:
    """One process of a server, whose messages a test sends by hand."""

    def __init__(self, server: ServedParameters, name: str) -> None:
        self.server, self.name = server, name
        self.num_calls = self.num_hung_up = 0
        self.received: tuple[int, ...] = ()
        self.connect()

    def connect(self) -> None:
        self.line = Line(anyio.Event().set, self.hang_up)
        self.member = self.server.join(self.name, self.line, 1e9, Message(received=self.received))

    def hang_up(self) -> None:
        self.num_hung_up += 1

    def end(self) -> None:
        self.server.ended(self.member, self.line)

    def send(self, *calls: tuple[Any, ...]) -> int:
        """Returns the number of the last call."""
        numbered = []
        for function, *args in calls:
            self.num_calls += 1
            numbered.append((self.num_calls, function, serialize(tuple(args))))
        self.server.take(self.member, self.line, Message(calls=numbered, received=self.received))
        return self.num_calls

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
    lease_secs: float = float("inf"), **options: Any
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
        assert waiting not in await one.answers()
        other.send(push(1), ("end_step", 1))
        assert waiting in await one.answers()
        assert waiting not in await one.answers()
        one.received = ()  # they were lost
        one.connect()
        assert waiting in await one.answers()
        one.connect()
        assert waiting not in await one.answers()


async def test_a_wait_goes_on_over_a_new_connection() -> None:
    async with a_server() as (_, one, other):
        waiting = step_of(one)
        one.end()
        one.connect()
        assert await other.counts("waits") == (1,)
        other.send(push(1))
        assert waiting in await one.answers()


async def test_a_released_wait_ends_at_once_and_is_answered_so_that_it_is_forgotten() -> None:
    async with a_server() as (_, one, _):
        waiting = step_of(one)
        assert await one.counts("waits") == (1,)
        one.send(("release", waiting))
        assert waiting in await one.answers()
        assert await one.counts("waits") == (0,)


async def test_workers_of_a_process_that_leaves_stay_until_others_claim_them() -> None:
    async with a_server() as (_, one, other):
        step_of(one)
        one.send(("bye",))
        one.end()
        assert await other.counts("processes") == (2,)
        other.send(("join", 0))
        assert await other.counts("processes") == (1,)


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
        other.send(push(0))
        assert await other.counts("workers_present") == (2,)


async def test_workers_of_a_process_whose_connection_has_ended_leave_before_its_lease() -> None:
    async with a_server(lease_secs=80.0) as (server, one, other):
        for worker, each in enumerate((one, other)):
            each.send(push(worker))
        one.end()
        for num_present in (2, 2, 2, 2, 2, 1):
            server.tick(1.0)
            assert await other.counts("workers_present") == (num_present,)


async def test_an_update_that_fails_when_a_process_is_gone_does_not_end_the_watch() -> None:
    def fail(*_: Any) -> Any:
        raise ArithmeticError

    async with a_server(lease_secs=8.0, update=fail) as (server, one, other):
        one.send(("join", 0))
        other.send(push(1))
        pass_the_lease(server, other)
        assert await other.counts("workers_present") == (1,)


async def test_a_closed_server_ends_waits_and_is_forgotten_once_all_have_left() -> None:
    async with a_server() as (server, one, other):
        step_of(one)
        waiting = one.send(("begin_step", 0))
        await other.ask("close")
        assert isinstance((await one.answers())[waiting], StopTraining)
        assert (await one.ask(*push(0))).is_discarded
        one.send(("bye",))
        assert not server.is_forgotten
        other.send(("bye",))
        assert server.is_forgotten
