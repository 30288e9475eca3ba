"""Runs that a scheduler counts: no process runs beyond the limit, and none starves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.distributed._dask_plugin import Counter
from asynchooks.distributed._membership import Member
from asynchooks.distributed._messages import Message

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.fixture
def anyio_backend() -> str:
    """A Dask server has asyncio."""
    return "asyncio"


class Process:
    """One process that keeps to the protocol: `runs` under way, `spare` credits, `queued` runs."""

    def __init__(self, host: Counter, uid: str) -> None:
        self.host = host
        self.uid = uid
        self.num_woken = self.num_calls = 0
        self.granted = self.spare = self.runs = self.queued = 0
        self.limit: int | None = None
        self.is_known = False
        self.member = self.join()

    def join(self) -> Member:
        self.spare = self.granted = 0
        how = Message(
            epoch=self.host.epoch if self.is_known else "", limit=self.limit, num_held=self.held
        )
        self.is_known = True
        self.member = self.host.join(self.uid, self.wake, 1e9, how)
        self.receive()
        return self.member

    @property
    def held(self) -> int:
        return self.spare + self.runs + self.queued

    def wake(self) -> None:
        self.num_woken += 1

    def receive(self) -> list[Any]:
        """The answers, as (call, value)."""
        news = self.host.news(self.member)
        self.limit = news["limit"]
        self.spare += news["num_granted"] - self.granted
        self.granted = news["num_granted"]
        return [(call, value) for _, call, value, _ in news["answers"]]

    def send(self, *calls: tuple[Any, ...], **changes: Any) -> None:
        """Calls as (function, *arguments), and the runs that have ended."""
        if self.queued:
            calls = (*calls, ("count", self.host.epoch, self.queued))
            self.queued = 0
        numbered = [
            (number, function, args)
            for number, (function, *args) in enumerate(calls, self.num_calls + 1)
        ]
        self.num_calls += len(calls)
        state = Message(
            calls=numbered, epoch=self.host.epoch, limit=self.limit, num_held=self.held,
            num_granted=self.granted,
        )  # fmt: skip
        self.host.take(self.member, self.wake, state._replace(**changes))

    def count(self, num_runs: int) -> None:
        self.send(("count", self.host.epoch, num_runs))

    def publish(self, step: int) -> None:
        self.send(("publish", self.host.epoch, step))

    def run(self) -> None:
        if self.limit is None or self.spare:
            self.spare -= self.limit is not None
            self.runs += 1


def step_of(host: Counter) -> int:
    return host.table.state.step


async def test_a_second_process_takes_up_the_step_and_the_limit_of_the_first() -> None:
    host = Counter()
    Process(host, "first").send(("publish", host.epoch, 5), limit=9)
    assert Process(host, "second").limit == 9
    assert step_of(host) == 5


async def test_each_call_is_answered_by_the_step_after_it_and_not_a_later_one() -> None:
    host = Counter()
    first, second = Process(host, "1"), Process(host, "2")
    first.send(("count", host.epoch, 1), ("count", host.epoch, 1))
    second.count(5)
    assert first.receive() == [(1, 1), (2, 2)]
    assert second.receive() == [(1, 7)]
    assert first.receive() == []


async def test_only_waiters_for_a_step_are_woken_by_it() -> None:
    host = Counter()
    near, far, mover = (Process(host, name) for name in ("near", "far", "mover"))
    near.send(next_step=3)
    far.send(next_step=4)
    mover.publish(3)
    assert (near.num_woken, far.num_woken) == (1, 0)
    near.receive()
    mover.publish(5)
    assert (near.num_woken, far.num_woken) == (1, 1)


async def test_a_waiter_for_a_step_that_was_reached_meanwhile_is_woken_at_once() -> None:
    host = Counter()
    mover, late = Process(host, "mover"), Process(host, "late")
    mover.publish(3)
    late.send(next_step=3)
    assert late.num_woken == 1
    late.receive()
    assert late.member.next_step == math.inf


async def test_a_call_that_comes_again_after_a_cut_counts_once_and_is_answered_again() -> None:
    host = Counter()
    process = Process(host, "p")
    process.count(3)
    host.ended(process.member, process.wake)
    process.join()
    process.num_calls = 0
    process.count(3)
    assert step_of(host) == 3
    process.send(received=1)
    assert not process.member.answers


async def test_answers_are_sent_again_over_a_new_connection_until_they_are_received() -> None:
    host = Counter()
    process = Process(host, "p")
    process.count(3)
    assert process.receive() == [(1, 3)]
    assert process.receive() == []
    process.member = host.join("p", process.wake, 1e9, Message(epoch=host.epoch))
    assert process.receive() == [(1, 3)]
    process.send(received=1)
    process.member = host.join("p", process.wake, 1e9, Message(epoch=host.epoch))
    assert process.receive() == []


async def test_a_message_on_a_connection_that_was_replaced_counts_on_the_new_one_alone() -> None:
    host = Counter()
    process = Process(host, "p")
    old = process.member
    new = process.join()
    message = Message(
        calls=[(1, "count", (host.epoch, 3))], epoch=host.epoch, limit=9, num_wanted=1
    )
    host.take(old, process.wake, message)
    assert (step_of(host), host.table.num_wanting) == (0, 0)
    host.take(new, process.wake, message)
    assert step_of(host) == 3
    assert new.granted == 1


async def test_runs_of_an_earlier_epoch_do_not_count() -> None:
    host = Counter()
    process = Process(host, "p")
    old = host.epoch
    process.send(("restart", 7, ""))
    process.send(("count", old, 1), ("publish", old, 90))
    assert step_of(host) == 7


async def test_a_restart_of_an_epoch_that_has_ended_already_changes_nothing() -> None:
    host = Counter()
    one, other = Process(host, "one"), Process(host, "other")
    first = host.epoch
    one.send(("restart", 7, first))
    other.send(("restart", 3, first))
    assert (step_of(host), host.table.state.epoch) == (7, 1)
    assert other.receive() == [(1, 7)]
    other.send(("restart", 3, ""))
    assert (step_of(host), host.table.state.epoch) == (3, 2)


async def test_no_credit_is_granted_before_all_have_reported_runs_without_one() -> None:
    host = Counter()
    slow, asker = Process(host, "slow"), Process(host, "asker")
    slow.run()
    asker.send(limit=1, num_wanted=1)
    assert asker.member.granted == 0
    slow.receive()
    slow.send()  # one run under way: that is the last step
    assert asker.member.granted == 0
    slow.runs, slow.queued = 0, 0  # it failed
    slow.send()
    assert asker.member.granted == 1


async def test_late_runs_of_a_process_that_was_given_up_count_only_where_there_is_room() -> None:
    host = Counter()
    late, other = Process(host, "late"), Process(host, "other")
    for each in (late, other):
        each.send(limit=2)
    for _ in range(2):
        late.receive()
        late.send(num_wanted=1)
    late.receive()
    late.run()
    late.run()
    host.ended(late.member, late.wake)
    other.receive()
    other.send(num_wanted=1)
    other.receive()
    other.run()
    late.join()
    assert host.table.num_held == 2
    late.runs, late.queued = 0, 2
    late.send()
    other.runs, other.queued = 0, 1
    other.send()
    assert step_of(host) == 2


def test_messages_leave_out_what_is_plain_and_ignore_what_is_unknown() -> None:
    assert Message(epoch="a", limit=0).packed() == {"epoch": "a", "limit": 0}
    assert Message.unpacked({"epoch": "a", "mood": "fine"}) == Message(epoch="a")


ACTS = ["run", "end", "fail", "send", "receive", "ask", "give back", "die", "limit"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ACTS)), max_size=120))
async def test_step_and_credits_never_exceed_the_limit_and_all_of_it_is_run(
    acts: list[tuple[int, str]],
) -> None:
    host = Counter()
    processes = [Process(host, str(each)) for each in range(3)]
    lowest = 0
    for place, act in acts:
        process = processes[place]
        if act == "run":
            process.run()
        elif act == "end" and process.runs:
            process.runs, process.queued = process.runs - 1, process.queued + 1
        elif act == "fail" and process.runs:
            process.runs -= 1
        elif act == "give back":
            process.spare = 0
        elif act == "die":
            host.ended(process.member, process.wake)
            processes[place] = Process(host, f"{process.uid}+")
        elif act == "receive":
            process.receive()
        elif act == "limit" and host.table.state.limit is None:
            # with what is under way already it may be passed, and then nothing else runs
            lowest = max(20, host.table.state.step + sum(each.held for each in processes))
            process.limit = lowest
            process.send()
        elif act in ("send", "ask"):
            process.send(num_wanted=3 * (act == "ask"))
        if host.table.state.limit is not None:
            assert host.table.state.step + sum(each.held for each in processes) <= lowest
    if host.table.state.limit is None:
        return
    for _ in range(200):
        for process in processes:
            process.receive()
            process.queued += process.runs
            process.runs = 0
            process.run()
            process.send(num_wanted=1 if not process.spare else 0)
    assert host.table.state.step == host.table.state.limit
