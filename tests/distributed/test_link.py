"""What a process sends to its host: each run is held until it is sent, and sent once."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from asynchooks import GlobalStep, StepUnreachableError
from asynchooks.distributed import SourceState
from asynchooks.distributed._link import Link
from asynchooks.distributed._messages import Message

from ..support.helpers import settle

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


def a_source(*, limit: int | None = 10, num_granted: int = 0) -> Link:
    step = GlobalStep(multi_process=True)

    def lost(reason: str) -> Exception:
        return StepUnreachableError(f"no more news: {reason}")

    source = Link(step, counts=True, lost=lost)
    source.kick = lambda: None
    step.feed_from(source)
    step.gate.open()
    news(source, limit=limit, num_granted=num_granted)
    return source


def news(source: Link, **changes: Any) -> None:
    plain = {"epoch": "a.0", "step": 0, "limit": 10, "num_granted": 0, "answers": ()}
    source.receive({**plain, "is_closed": False, **changes})


def sent_by(source: Link) -> Message:
    message = source.next_message()
    assert message is not None
    return message


async def counted(source: Link) -> int:
    return await source.step_after(source.begin("count", source.epoch, 1))


async def settled(source: Link, ticket: Any) -> None:
    source.step.gate.settle(ticket, await counted(source))


async def test_runs_that_were_not_sent_are_held_after_a_reconnection() -> None:
    source = a_source(num_granted=4)
    async with anyio.create_task_group() as group:
        tickets = [source.step.gate.take_ticket_nowait() for _ in range(2)]
        group.start_soon(settled, source, tickets[0])
        await settle()
        sent = sent_by(source)
        assert (sent.calls, sent.num_held) == (((1, "count", ("a.0", 1)),), 3)
        group.start_soon(settled, source, tickets[1])
        await settle()
        assert source.next_message() is None  # the first is under way
        again = source.hello()  # what was not used is void
        assert [number for number, _, _ in again.calls] == [1, 2]
        assert again.num_held == 0
        news(source, step=2, answers=[(1, 1, None), (2, 2, None)])
        await settle()
        assert sent_by(source).calls == ()
    assert source.step.value == 2


async def test_an_answer_that_comes_with_the_next_connection_ends_its_call() -> None:
    source = a_source(limit=None)
    found: list[int] = []

    async def count() -> None:
        found.append(await counted(source))

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await settle()
        sent_by(source)
        source.hello()  # the connection was cut, and the host has taken the call
        news(source, step=1, limit=None, answers=[(1, 1, None)])
    assert found == [1]
    assert source.next_message() is None


async def test_runs_that_end_together_share_a_message_and_get_a_step_each() -> None:
    source = a_source(limit=None)
    found: list[int] = []

    async def count() -> None:
        found.append(await counted(source))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(count)
        await settle()
        assert len(sent_by(source).calls) == 3
        news(source, step=20, limit=None, answers=[(i, 9 + i, None) for i in (1, 2, 3)])
    assert sorted(found) == [10, 11, 12]
    assert source.step.value == 20


async def test_a_cancelled_run_counts_all_the_same() -> None:
    source = a_source(num_granted=1)
    ticket = source.step.gate.take_ticket_nowait()
    assert ticket is not None
    with anyio.move_on_after(0.01):
        await counted(source)
    source.step.gate.settle(ticket)
    message = sent_by(source)
    assert (len(message.calls), message.num_held) == (1, 0)


async def test_a_wait_is_sent_once() -> None:
    source = a_source(limit=None)
    async with anyio.create_task_group() as group:
        group.start_soon(source.step.wait_for, 5)
        await settle()
        message = sent_by(source)
        assert (message.next_step, message.calls) == (5, ())
        assert source.next_message() is None
        news(source, step=5, limit=None)
    assert source.next_message() is None
    assert source.look_at == math.inf


async def test_a_received_limit_is_confirmed() -> None:
    source = a_source(limit=None)
    assert source.step.gate.take_ticket_nowait() is not None
    news(source, limit=9)
    message = sent_by(source)
    assert (message.limit, message.num_held) == (9, 1)
    assert source.step.gate.take_ticket_nowait() is None


async def test_the_limit_holds_for_the_next_session_when_the_last_one_has_closed() -> None:
    source = a_source(limit=9)
    source.step.gate.close(source.step.gate.open())
    for worker in list(source.step.gate.workers):
        source.step.gate.close(worker)
    assert source.step.limit == 9


async def test_the_limit_holds_for_the_next_session_when_the_last_one_was_thrown_away() -> None:
    source = a_source(limit=9)
    gate = source.step.gate
    for worker in list(gate.workers):
        gate.drop(worker)  # as the garbage collector does, which may call nothing else
    gate.open()
    assert gate.take_ticket_nowait() is None


async def test_an_abandoned_run_of_an_earlier_epoch_is_held_no_more() -> None:
    source = a_source(num_granted=1)
    ticket = source.step.gate.take_ticket_nowait()
    assert ticket is not None
    source.step.gate.abandon(ticket)
    assert sent_by(source).num_held == 1
    news(source, epoch="a.1")  # where its end would not count
    assert sent_by(source).num_held == 0


async def test_a_run_that_begins_during_a_reconnection_leaves_no_void_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = a_source(num_granted=2)
    read, tickets = source.step.demand, list[Any]()

    def demand() -> Any:
        found = read()
        if not tickets:  # in another thread, just now
            tickets.append(source.step.gate.take_ticket_nowait())
        return found

    monkeypatch.setattr(source.step, "demand", demand)
    assert source.hello().num_held == 1
    assert source.step.gate.take_ticket_nowait() is None


async def test_a_call_fails_when_there_will_be_no_answer() -> None:
    source = a_source()
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StepUnreachableError, match="no more news: cut off"):
                await source.call("count", "a.0", 1)

        group.start_soon(wait)
        await settle()
        source.next_message()
        group.start_soon(wait)
        await settle()
        source.set_state(SourceState.CLOSED, "cut off")
    with pytest.raises(StepUnreachableError, match="cut off"):
        await source.call("count", "a.0", 1)
