"""Runs that a scheduler counts: no process runs beyond the limit, and none starves.

The counter is private: only so can a test give the order in which messages come and are lost.
"""

import math
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import __version__
from asynchooks.distributed._counter import Counter
from asynchooks.distributed._dask_plugin import hosts_of
from asynchooks.distributed._membership import Member
from asynchooks.distributed._messages import FOLLOW, Message

from ..support.helpers import in_task, settle
from .by_hand import ByHand

# A Dask server runs on asyncio.
pytestmark = [pytest.mark.faults, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class Process(ByHand):
    """One process that keeps to the protocol: `runs` under way, `spare` credits, `queued` runs."""

    granted = spare = runs = queued = 0
    limit: int | None = None
    epoch = ""

    def connect(self) -> None:
        self.spare = self.granted = 0
        super().connect()
        self.receive()

    @property
    def held(self) -> int:
        return self.spare + self.runs + self.queued

    def receive(self) -> list[Any]:
        """The answers, as (call, value)."""
        news = self.host.news(self.member)
        self.limit, self.epoch = news["limit"], news["epoch"]
        self.spare += news["num_granted"] - self.granted
        self.granted = news["num_granted"]
        return [(call, value) for call, value, _ in news["answers"]]

    def state(self) -> Message:
        return Message(
            epoch=self.epoch, limit=self.limit, num_held=self.held, num_granted=self.granted
        )

    def send(self, *calls: tuple[Any, ...], **changes: Any) -> int:
        """With the runs that have ended."""
        if self.queued:
            calls = (*calls, ("count", self.epoch, self.queued))
            self.queued = 0
        return super().send(*calls, **changes)

    def end_runs(self, num: int = 1) -> None:
        self.runs -= num
        self.queued += num
        self.send()

    def count(self, num_runs: int, least: int = 0) -> None:
        self.send(("count", self.epoch, num_runs, least))

    def run(self) -> None:
        if self.limit is None or self.spare:
            self.spare -= self.limit is not None
            self.runs += 1


def step_of(host: Counter) -> int:
    return host.state.step


def num_held(host: Counter) -> int:
    held: int = host.do_statistics(Member("nobody", 1.0))["num_held"]
    return held


def some(*names: str, limit: int | None = None) -> Any:
    """A host and processes, which know the limit."""
    host = Counter()
    processes = [Process(host, name) for name in names]
    for each in [*processes, *processes]:
        each.send(limit=limit)
        each.receive()
    return host, *processes


def ask(process: Process, num_wanted: int) -> int:
    """How many credits that request, and it alone, brings."""
    before = process.member.granted
    process.receive()
    process.send(num_wanted=num_wanted)
    num: int = process.member.granted - before
    return num


def begin_run(process: Process) -> None:
    assert ask(process, 1) == 1
    process.receive()
    process.run()


async def test_each_call_is_answered_by_the_step_after_it_and_not_a_later_one() -> None:
    host, first, second = some("1", "2")
    first.send(("count", host.epoch, 1), ("count", host.epoch, 1))
    second.count(5)
    assert [first.receive(), second.receive(), first.receive()] == [[(1, 1), (2, 2)], [(1, 7)], []]


async def test_a_waiter_is_woken_once_when_its_step_is_reached_or_was_meanwhile() -> None:
    _, near, far, mover = some("near", "far", "mover")
    near.send(next_step=3)
    far.send(next_step=4)
    mover.count(0, 3)
    assert (near.num_woken, far.num_woken) == (1, 0)
    near.receive()
    mover.count(0, 5)
    assert (near.num_woken, far.num_woken) == (1, 1)
    near.send(next_step=3)
    assert near.num_woken == 2
    near.receive()
    assert near.member.next_step == math.inf


async def test_a_call_that_comes_again_after_a_cut_counts_once_and_is_answered_again() -> None:
    host, process = some("p")
    process.count(3)
    assert process.receive() == [(1, 3)]
    assert process.receive() == []
    process.end()
    for received, answers in (((), [(1, 3)]), ((1,), [])):
        repeated = [(1, "count", (host.epoch, 3))]
        hello = Message(calls=repeated, epoch=host.epoch, received=received)
        process.member = host.join("p", process.line, 1e9, hello)
        assert process.receive() == answers
    assert step_of(host) == 3


async def test_a_message_on_a_connection_that_was_replaced_counts_on_the_new_one_alone() -> None:
    host, process = some("p")
    old = process.line
    process.connect()
    assert process.num_hung_up == 1
    calls = [(1, "count", (host.epoch, 3))]
    message = Message(calls=calls, epoch=host.epoch, limit=9, num_wanted=1)
    for line, step, granted in ((old, 0, 0), (process.line, 3, 1)):
        host.take(process.member, line, message)
        assert (step_of(host), process.member.granted) == (step, granted)
    host.ended(process.member, old)
    assert list(host.members) == ["p"]


async def test_a_restart_ends_its_epoch_once_with_its_runs_and_credits() -> None:
    host, one, other = some("one", "other", limit=20)
    begin_run(one)
    first = host.epoch
    one.send(("restart", 7, first))
    assert (one.member.granted, num_held(host)) == (0, 0)
    other.send(("restart", 3, first), ("count", first, 1), ("count", first, 0, 90))
    assert (step_of(host), host.state.epoch) == (7, 1)
    assert other.receive()[0] == (1, 7)
    other.send(("restart", 3, ""))
    assert (step_of(host), host.state.epoch) == (3, 2)


async def test_no_credit_is_granted_before_all_have_reported_runs_without_one() -> None:
    _, slow, asker = some("slow", "asker")
    slow.run()
    asker.send(limit=1, num_wanted=1)
    assert asker.member.granted == 0
    slow.receive()
    slow.send()  # one run under way: that is the last step
    assert asker.member.granted == 0
    slow.runs = 0  # it failed
    slow.send()
    assert asker.member.granted == 1


@pytest.mark.parametrize(("step", "num"), [(0, 3), (8, 2), (12, 0)])
async def test_late_runs_count_where_there_is_room(step: int, num: int) -> None:
    host, late, other = some("late", "other", limit=10)
    late.end()
    other.count(0, step)
    late.runs = 3
    late.connect()
    assert num_held(host) == num
    late.end_runs(3)
    assert step_of(host) == step + num


async def test_a_process_that_connects_again_keeps_the_credits_of_its_runs() -> None:
    host, again, other = some("again", "other", limit=1)
    begin_run(again)
    assert ask(other, 1) == 0
    again.connect()  # before the end of its last connection was noticed
    assert other.member.granted == 0
    again.end_runs()
    assert (step_of(host), num_held(host)) == (1, 0)


async def test_a_run_counts_although_the_answer_about_another_one_was_lost() -> None:
    host, process = some("p", limit=2)
    for _ in range(2):
        begin_run(process)
    process.end_runs()
    process.end()  # the answer was under way
    process.queued = 1  # so that the process has to say it again
    process.num_calls -= 1
    process.connect()
    process.send()
    assert step_of(host) == 1
    process.end_runs()
    assert step_of(host) == 2


async def test_a_change_other_than_of_the_step_wakes_all() -> None:
    host, one, other = some("one", "other", limit=9)
    for calls, limit, num_woken in (
        ([("count", host.epoch, 0, 4)], 9, 0),
        ([], 10, 1),
        ([("restart", 3, "")], 10, 1),
    ):
        other.num_woken = 0
        one.send(*calls, limit=limit)
        assert other.num_woken == num_woken
        other.receive()


async def test_a_process_is_silent_after_a_longer_time_than_its_lease_of_short_pauses() -> None:
    host, silent, other = some("silent", "other")
    silent.member.lease_secs = 3.0
    host.tick(10.0)  # it may have joined during this pause
    for _ in range(7):
        host.tick(0.375)
    assert silent.num_hung_up == 0
    host.tick(0.375)
    assert (silent.num_hung_up, other.num_hung_up) == (1, 0)
    assert list(host.members) == ["other"]


async def test_a_process_gets_at_most_half_of_its_share_and_at_least_one_credit() -> None:
    _, a, b = some("a", "b", limit=9)
    assert ask(a, 64) == 2  # of 9 free ones a quarter
    assert [ask(b, 64) for _ in range(8)] == [1] * 7 + [0]


class Comm:
    """A connection of Dask that says nothing more, and whose end is noticed late."""

    def __init__(self) -> None:
        self.ended = anyio.Event()

    async def write(self, message: Any) -> None: ...

    async def read(self) -> Any:
        await self.ended.wait()
        raise ConnectionAbortedError

    def abort(self) -> None: ...


async def test_a_forgotten_training_leaves_another_one_of_its_name_to_its_processes() -> None:
    server: Any = SimpleNamespace(handlers={})
    hosts, old, new = hosts_of(server), Comm(), Comm()
    about = {"training": "it", "counts": True, "version": __version__, "lease_secs": 1e9}

    async def follow(comm: Comm, *calls: tuple[int, str, Any]) -> None:
        message = tuple(Message(calls=calls))
        await server.handlers[FOLLOW](comm, **about, uid="a", message=message)

    async with in_task(follow, old, (1, "forget", ()), (2, "bye", ())):
        forgotten = hosts["it"]
        async with in_task(follow, new):
            assert (training := hosts["it"]) is not forgotten
            old.ended.set()
            await settle()
            assert hosts == {"it": training}
            new.ended.set()


ACTS = ["run", "end", "fail", "send", "receive", "ask", "give back", "die", "cut", "limit"]


@settings(max_examples=80, deadline=None)
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
            host.ended(process.member, process.line)
            processes[place] = Process(host, f"{process.name}+")
        elif act == "cut":
            process.connect()
        elif act == "receive":
            process.receive()
        elif act == "limit" and host.state.limit is None:
            # with what is under way already it may be passed, and then nothing else runs
            lowest = max(20, host.state.step + sum(each.held for each in processes))
            process.limit = lowest
            process.send()
        elif act in ("send", "ask"):
            process.send(num_wanted=3 * (act == "ask"))
        if host.state.limit is not None:
            assert host.state.step + sum(each.held for each in processes) <= lowest
    if host.state.limit is None:
        return
    for _ in range(200):
        for process in processes:
            process.receive()
            process.queued += process.runs
            process.runs = 0
            process.run()
            process.send(num_wanted=1 if not process.spare else 0)
    assert host.state.step == host.state.limit
