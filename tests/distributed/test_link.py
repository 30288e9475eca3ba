"""What a process sends to its host: each run is held until it is sent, and sent once.

The link is private: only here can a test give the order of messages, and cut between two of them.
"""

import math
from typing import Any

import anyio
import pytest

from asynchooks import GlobalStep, StepUnreachableError
from asynchooks.distributed._link import Link
from asynchooks.distributed._messages import Message

from ..support.helpers import in_task, settle

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a credit that is idle for 0.1 s is returned."""
    monkeypatch.setattr("asynchooks.distributed._link.now", lambda: 0.0)


class Process:
    """One link, whose messages and news a test carries by hand."""

    def __init__(self, *, limit: int | None = None, num_granted: int = 0) -> None:
        self.step = GlobalStep(multi_process=True)
        self.gate = self.step.gate
        self.link = Link(
            self.step, counts=True, lost=lambda why: StepUnreachableError(f"no more news: {why}")
        )
        self.link.kick = lambda: None
        self.step.feed_from(self.link)
        self.gate.open()
        self.news(limit=limit, num_granted=num_granted)

    def news(self, **changes: Any) -> None:
        plain = {"epoch": "a.0", "step": 0, "limit": None, "num_granted": 0, "answers": ()}
        self.link.receive({**plain, "is_closed": False, **changes})

    def take(self) -> Any:
        """A ticket, if there is one now."""
        return self.gate.take_ticket_nowait()

    def sent(self) -> Message:
        message = self.link.next_message()
        assert message is not None
        return message

    async def count(self) -> int:
        return await self.link.step_after(self.link.begin("count", self.link.epoch, 1))

    async def end(self, ticket: Any) -> None:
        self.gate.settle(ticket, await self.count())


async def test_runs_that_were_not_sent_are_held_after_a_reconnection() -> None:
    process = Process(limit=10, num_granted=4)
    first, second = (process.take() for _ in range(2))
    async with in_task(process.end, first):
        sent = process.sent()
        assert (sent.calls, sent.num_held) == (((1, "count", ("a.0", 1)),), 3)
        async with in_task(process.end, second):
            assert process.link.next_message() is None  # the first is under way
            again = process.link.hello()  # what was not used is void
            assert [number for number, _, _ in again.calls] == [1, 2]
            assert again.num_held == 0
            process.news(limit=10, step=2, answers=[(1, 1, None), (2, 2, None)])
            await settle()
            assert process.sent().calls == ()
    assert process.step.value == 2


async def test_runs_that_end_together_share_a_message_and_get_a_step_each() -> None:
    process = Process()
    async with in_task(process.count) as one, in_task(process.count) as other:
        assert len(process.sent().calls) == 2
        process.news(step=20, answers=[(1, 10, None), (2, 11, None)])
    assert (one.value, other.value, process.step.value) == (10, 11, 20)


async def test_a_cancelled_run_counts_all_the_same() -> None:
    process = Process(limit=10, num_granted=1)
    ticket = process.take()
    with anyio.CancelScope() as scope:
        async with in_task(process.count):
            scope.cancel()
    process.gate.settle(ticket)
    message = process.sent()
    assert (len(message.calls), message.num_held) == (1, 0)


async def test_while_tasks_wait_nothing_is_sent_but_the_lowest_step_that_they_need() -> None:
    process = Process()
    async with in_task(process.step.wait_for, 5), in_task(process.step.wait_for, 7):
        assert (sent := process.sent()).next_step == 5
        assert sent.calls == ()
        assert process.link.next_message() is None
        assert process.link.look_at == math.inf
        process.news(step=5)
        await settle()
        assert process.sent().next_step == 7
        process.news(step=7)
    assert process.link.next_message() is None


async def test_a_received_limit_is_confirmed() -> None:
    process = Process()
    assert process.take() is not None
    process.news(limit=9)
    message = process.sent()
    assert (message.limit, message.num_held) == (9, 1)
    assert process.take() is None


@pytest.mark.parametrize("ending", ["close", "drop"])  # drop: as the garbage collector does
async def test_the_limit_holds_for_the_next_session_when_the_last_one_is_gone(ending: str) -> None:
    process = Process(limit=9)
    for worker in list(process.gate.workers):
        getattr(process.gate, ending)(worker)
    process.gate.open()
    assert process.step.limit == 9
    assert process.take() is None


async def test_an_abandoned_run_of_an_earlier_epoch_is_held_no_more() -> None:
    process = Process(limit=10, num_granted=1)
    ticket = process.take()
    process.gate.abandon(ticket)
    assert process.sent().num_held == 1
    process.news(limit=10, epoch="a.1")  # where its end would not count
    assert process.sent().num_held == 0


async def test_a_run_that_begins_during_a_reconnection_leaves_no_void_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(limit=10, num_granted=2)
    read, tickets = process.step.demand, list[Any]()

    def demand() -> Any:
        found = read()
        if not tickets:  # in another thread, just now
            tickets.append(process.take())
        return found

    monkeypatch.setattr(process.step, "demand", demand)
    assert process.link.hello().num_held == 1
    assert process.take() is None
