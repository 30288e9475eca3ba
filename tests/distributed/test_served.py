"""What a parameter server does for processes whose messages are late, lost, or missing."""

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
        hello = Message(received=self.received)
        self.member = self.server.join(self.name, self.line, 1e9, hello)

    def hang_up(self) -> None:
        self.num_hung_up += 1

    def end(self) -> None:
        self.server.ended(self.member, self.line)

    def send(self, *calls: tuple[Any, ...], **changes: Any) -> int:
        """Returns the number of the last call."""
        numbered = []
        for function, *args in calls:
            self.num_calls += 1
            numbered.append((self.num_calls, function, serialize(tuple(args))))
        message = Message(calls=numbered, received=self.received)
        self.server.take(self.member, self.line, message._replace(**changes))
        return self.num_calls

    async def answers(self) -> dict[int, Any]:
        """Value or error, by call."""
        await settle()
        answers, self.member.unsent = self.member.unsent, []
        self.received = tuple(call for call, _, _ in answers)
        return {call: error or value for call, value, error in answers}

    async def ask(self, function: str, *args: Any) -> Any:
        number = self.send((function, *args))
        found = (await self.answers())[number]
        if isinstance(found, Exception):
            raise found
        return found


@asynccontextmanager
async def a_server(
    lease_secs: float = float("inf"), **options: Any
) -> AsyncIterator[ServedParameters]:
    server = ServedParameters(np.ones(2), Synchronous(), 2, lease_secs, options)
    try:
        yield server
    finally:
        server.members.clear()  # ends its watch
        if server._watch is not None:
            server._watch.cancel()


def push(worker: int) -> tuple[Any, ...]:
    return ("push", worker, np.ones(2), 0)


async def test_an_end_is_sent_again_until_it_was_received() -> None:
    async with a_server() as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0))
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
    async with a_server() as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0))
        one.end()
        one.connect()
        assert (await other.ask("statistics"))["waits"] == 1
        other.send(push(1))
        assert waiting in await one.answers()


async def test_a_released_wait_ends_at_once_and_is_answered_so_that_it_is_forgotten() -> None:
    async with a_server() as server:
        one = Process(server, "a")
        waiting = one.send(push(0), ("end_step", 0))
        assert (await one.ask("statistics"))["waits"] == 1
        one.send(("release", waiting))
        assert waiting in await one.answers()
        assert (await one.ask("statistics"))["waits"] == 0


async def test_workers_of_a_process_that_leaves_stay_until_others_claim_them() -> None:
    async with a_server() as server:
        one, other = Process(server, "a"), Process(server, "b")
        one.send(push(0), ("end_step", 0), ("bye",))
        one.end()
        assert (await other.ask("statistics"))["processes"] == 2
        other.send(("join", 0))
        assert (await other.ask("statistics"))["processes"] == 1


async def test_workers_of_a_silent_process_leave_and_its_waits_go_on_when_it_is_back() -> None:
    async with a_server(lease_secs=8.0) as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0))
        for _ in range(9):
            other.send()
            server.tick(1.0)
        assert one.num_hung_up == 1
        statistics = await other.ask("statistics")
        assert (statistics["workers_present"], statistics["processes_away"]) == (1, 1)
        assert waiting not in await one.answers()
        one.connect()
        statistics = await other.ask("statistics")
        assert (statistics["workers_present"], statistics["processes_away"]) == (2, 0)
        other.send(push(1))
        assert waiting in await one.answers()


async def test_a_worker_joins_again_although_its_last_process_is_forgotten() -> None:
    async with a_server(lease_secs=8.0) as server:
        one, other = Process(server, "a"), Process(server, "b")
        one.send(("join", 0))
        for _ in range(9):
            other.send()
            server.tick(1.0)
        for number in range(1000):
            Process(server, str(number)).end()
        await other.ask("join", 0)
        assert (await other.ask("statistics"))["workers_present"] == 2


async def test_a_silent_process_whose_workers_others_have_claimed_may_come_back() -> None:
    async with a_server(lease_secs=8.0) as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0))
        for _ in range(9):
            other.send()
            server.tick(1.0)
        other.send(("join", 0), ("join", 1))
        assert (await other.ask("statistics"))["workers_present"] == 2
        one.connect()
        other.send(push(1))
        assert waiting in await one.answers()


async def test_workers_of_a_process_whose_connection_has_ended_leave_before_its_lease() -> None:
    async with a_server(lease_secs=80.0) as server:
        one, other = Process(server, "a"), Process(server, "b")
        for worker, each in enumerate((one, other)):
            each.send(push(worker))
        one.end()
        for num_present in (2, 2, 2, 2, 2, 1):
            server.tick(1.0)
            assert (await other.ask("statistics"))["workers_present"] == num_present


async def test_an_update_that_fails_when_a_process_is_gone_does_not_end_the_watch() -> None:
    def fail(*_: Any) -> Any:
        raise ArithmeticError

    async with a_server(lease_secs=8.0, update=fail) as server:
        one, other = Process(server, "a"), Process(server, "b")
        one.send(("join", 0))
        other.send(push(1))
        for _ in range(9):
            other.send()
            server.tick(1.0)
        assert (await other.ask("statistics"))["workers_present"] == 1


async def test_a_closed_server_ends_waits_and_is_forgotten_once_all_have_left() -> None:
    async with a_server() as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0), ("begin_step", 0))
        await other.ask("close")
        assert isinstance((await one.answers())[waiting], StopTraining)
        assert (await one.ask(*push(0))).is_discarded
        one.send(("bye",))
        assert not server.is_forgotten
        other.send(("bye",))
        assert server.is_forgotten
