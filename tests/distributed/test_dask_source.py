"""A process's requests to the scheduler: each run is held until it is sent, and sent once."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from asynchooks import GlobalStep, StepUnreachableError
from asynchooks.distributed import SourceState
from asynchooks.distributed.dask._source import Action, DaskSource

from ..support.helpers import settle

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


def a_source(*, limit: int | None = 10, num_granted: int = 0) -> DaskSource:
    step = GlobalStep(multi_process=True)
    source = DaskSource(step, lambda: None)
    step.feed_from(source)
    step.gate.open()
    news(source, limit=limit, num_granted=num_granted)
    return source


def news(source: DaskSource, **changes: Any) -> None:
    plain = {"epoch": "a.0", "step": 0, "limit": 10, "num_granted": 0, "answer": (0, 0)}
    source.receive({**plain, **changes})


async def settled(source: DaskSource, ticket: Any, counted: Coroutine[Any, Any, int]) -> None:
    source.step.gate.settle(ticket, await counted)


async def test_runs_that_were_not_sent_are_held_after_a_reconnection() -> None:
    source = a_source(num_granted=4)
    async with anyio.create_task_group() as group:
        tickets = [source.step.gate.take_ticket_nowait() for _ in range(2)]
        begun = source.begin_run()
        group.start_soon(settled, source, tickets[0], source.count_run(begun))
        await settle()
        sent = source.next_request()
        assert sent is not None
        assert (sent.num_runs, sent.num_held) == (1, 3)
        group.start_soon(settled, source, tickets[1], source.count_run(begun))
        await settle()
        assert source.next_request() is None  # the first is under way
        assert source.first_request().num_held == 1  # what was not used is void
        again = source.last_request()
        assert again is not None
        assert (again.number, again.num_runs, again.num_held) == (1, 1, 1)
        news(source, step=1, answer=(1, 1))
        last = source.next_request()
        assert last is not None
        assert (last.number, last.num_runs, last.num_held) == (2, 1, 0)
        news(source, step=2, answer=(2, 2))
    assert source.step.value == 2


async def test_runs_of_one_request_get_a_step_each() -> None:
    source = a_source(limit=None)
    found: list[int] = []

    async def count() -> None:
        found.append(await source.count_run(source.begin_run()))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(count)
        await settle()
        request = source.next_request()
        assert request is not None
        assert request.num_runs == 3
        news(source, step=20, limit=None, answer=(1, 12))
    assert sorted(found) == [10, 11, 12]
    assert source.step.value == 20


async def test_a_cancelled_run_counts_all_the_same() -> None:
    source = a_source(num_granted=1)
    ticket = source.step.gate.take_ticket_nowait()
    assert ticket is not None
    with anyio.move_on_after(0.01):
        await source.count_run(source.begin_run())
    source.step.gate.settle(ticket)
    request = source.next_request()
    assert request is not None
    assert (request.num_runs, request.num_held) == (1, 0)


async def test_runs_of_an_earlier_epoch_are_answered_and_not_counted() -> None:
    source = a_source(limit=None)
    async with anyio.create_task_group() as group:
        group.start_soon(source.count_run, source.begin_run())
        await settle()
        news(source, epoch="b.0", limit=None)
        request = source.next_request()
        assert request is not None
        assert request.num_runs == 0
        news(source, epoch="b.0", limit=None, answer=(1, 0))
    assert source.step.epoch == 1


async def test_published_steps_do_not_accumulate_while_the_scheduler_is_lost() -> None:
    source = a_source(limit=None)
    for step in (3, 9, 5):
        source.publish_soon(step)
    assert len(source._actions) == 1
    async with anyio.create_task_group() as group:
        group.start_soon(source.count_run, source.begin_run())
        await settle()
        source.publish_soon(11)
        request = source.next_request()
        assert request is not None
        assert (request.published, request.num_runs) == (11, 1)
        news(source, step=12, limit=None, answer=(1, 12))


async def test_a_wait_is_sent_once() -> None:
    source = a_source(limit=None)
    async with anyio.create_task_group() as group:
        group.start_soon(source.step.wait_for, 5)
        await settle()
        request = source.next_request()
        assert request is not None
        assert (request.next_step, request.number) == (5, 0)
        assert source.next_request() is None
        news(source, step=5, limit=None)
    assert source.next_request() is None
    assert source.look_at == math.inf


async def test_a_received_limit_is_confirmed() -> None:
    source = a_source(limit=None)
    assert source.step.gate.take_ticket_nowait() is not None
    news(source, limit=9)
    request = source.next_request()
    assert request is not None
    assert (request.limit, request.num_held) == (9, 1)
    assert source.step.gate.take_ticket_nowait() is None


async def test_the_limit_holds_for_the_next_session_when_the_last_one_has_closed() -> None:
    source = a_source(limit=9)
    source.step.gate.close(source.step.gate.open())
    for worker in list(source.step.gate.workers):
        source.step.gate.close(worker)
    assert source.step.limit == 9


async def test_a_wait_for_an_answer_fails_when_there_will_be_none() -> None:
    source = a_source()
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StepUnreachableError, match="gets no more news: cut off"):
                await source.do(Action(num_runs=1))

        group.start_soon(wait)
        await settle()
        source.next_request()
        group.start_soon(wait)
        await settle()
        source.set_state(SourceState.CLOSED, "cut off")
    with pytest.raises(StepUnreachableError, match="cut off"):
        await source.do(Action(num_runs=1))
