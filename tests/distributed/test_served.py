"""What a parameter server does for processes whose messages are late, lost, or missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import distributed
import numpy as np
import pytest

from asynchooks import StepSourceLostError, StopTraining
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

    def __init__(self, server: ServedParameters, name: str, place: str | None = None) -> None:
        self.server, self.name = server, name
        self.num_calls = self.received = 0
        self.connect()
        self.member.place = place

    def connect(self) -> None:
        self.wake = anyio.Event().set  # another one for each connection
        self.member = self.server.join(self.name, self.wake, 1e9, Message())

    def send(self, *calls: tuple[Any, ...], **changes: Any) -> int:
        """Returns the number of the last call."""
        numbered = []
        for function, *args in calls:
            self.num_calls += 1
            numbered.append((self.num_calls, function, args))
        message = Message(calls=numbered, received=self.received)
        self.server.take(self.member, self.wake, message._replace(**changes))
        return self.num_calls

    async def answers(self) -> dict[int, Any]:
        """Value or error, by call."""
        await settle()
        return {each.call: each.error or each.value for each in self.member.unsent()}

    async def ask(self, function: str, *args: Any) -> Any:
        number = self.send((function, *args))
        found = (await self.answers())[number]
        self.received = self.member.num_answers
        if isinstance(found, Exception):
            raise found
        return found


@asynccontextmanager
async def a_server(lease_secs: float = float("inf")) -> AsyncIterator[ServedParameters]:
    server = ServedParameters(None, np.ones(2), Synchronous(), 2, lease_secs, {}, None)
    try:
        yield server
    finally:
        server.table.members.clear()  # ends its watch
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
        one.connect()
        assert waiting in await one.answers()
        one.received = one.member.num_answers
        one.send()
        one.connect()
        assert await one.answers() == {}


async def test_a_wait_goes_on_over_a_new_connection() -> None:
    async with a_server() as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0))
        server.ended(one.member, one.wake)
        one.connect()
        assert (await other.ask("statistics")).waits == 1
        other.send(push(1))
        assert waiting in await one.answers()


async def test_a_released_wait_ends_at_once() -> None:
    async with a_server() as server:
        one = Process(server, "a")
        waiting = one.send(push(0), ("end_step", 0))
        assert (await one.ask("statistics")).waits == 1
        one.send(("release", waiting))
        assert (await one.ask("statistics")).waits == 0


async def test_workers_of_a_process_that_leaves_stay_until_others_claim_them() -> None:
    async with a_server() as server:
        one, other = Process(server, "a"), Process(server, "b")
        one.send(push(0), ("end_step", 0), ("bye",))
        server.ended(one.member, one.wake)
        assert (await other.ask("statistics")).processes == 2
        other.send(("join", 0))
        assert (await other.ask("statistics")).processes == 1


async def test_workers_of_a_silent_process_leave_and_its_waits_go_on_when_it_is_back() -> None:
    async with a_server(lease_secs=8.0) as server:
        one, other = Process(server, "a"), Process(server, "b")
        waiting = one.send(push(0), ("end_step", 0))
        one.member.tick(9.0)
        server._is_silent(one.member)
        statistics = await other.ask("statistics")
        assert (statistics.workers_present, statistics.processes_away) == (1, 1)
        assert waiting not in await one.answers()
        one.send()
        statistics = await other.ask("statistics")
        assert (statistics.workers_present, statistics.processes_away) == (2, 0)
        other.send(push(1))
        assert waiting in await one.answers()


async def test_workers_of_a_dask_worker_that_is_gone_leave_if_it_is_silent_too() -> None:
    class Scheduler:
        async def ncores(self, workers: list[str]) -> dict[str, int]:
            return {"tcp://127.0.0.1:2": 1}

    async with a_server() as server:
        server._worker = type("Worker", (), {"scheduler": Scheduler()})
        one = Process(server, "a", "tcp://127.0.0.1:1")
        other = Process(server, "b", "tcp://127.0.0.1:2")
        one.send(push(0))
        await server._look_for_gone(1.0)
        assert (await other.ask("statistics")).workers_present == 2  # a message came since
        for each in (one, other):
            each.member.tick(2.0)
        await server._look_for_gone(1.0)
        statistics = await other.ask("statistics")
        assert (statistics.workers_present, statistics.processes_away) == (1, 1)


async def test_the_scheduler_knows_which_workers_are_gone(client: Any) -> None:
    nowhere, address = "tcp://127.0.0.1:1", client.scheduler.address
    async with (
        a_server() as server,
        distributed.Client(address, asynchronous=True, set_as_default=False) as own,
    ):
        server._worker = own
        here = Process(server, "here", min(client.nthreads()))
        gone = Process(server, "gone", nowhere)
        for worker, process in enumerate((here, gone)):
            process.send(push(worker))
            process.member.tick(30.0)
        await server._look_for_gone(20.0)
        assert (here.member.is_away, gone.member.is_away) == (False, True)


async def test_a_closed_server_ends_waits_and_refuses_calls() -> None:
    async with a_server() as server:
        one = Process(server, "a")
        waiting = one.send(push(0), ("end_step", 0), ("begin_step", 0))
        await settle()
        await server.aclose()
        assert isinstance((await one.answers())[waiting], StopTraining)
        with pytest.raises(StepSourceLostError, match="is gone: its host has closed it"):
            await one.ask("pull")
