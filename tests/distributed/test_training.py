"""A training at a scheduler: no process runs beyond the limit, and none starves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.distributed._membership import Member
from asynchooks.distributed.dask._training import Request, Training, message_of, request_of

pytestmark = pytest.mark.faults


class Process:
    """One process that keeps to the protocol: `runs` under way, `spare` tickets, `queued` runs."""

    def __init__(self, training: Training, uid: str) -> None:
        self.training = training
        self.uid = uid
        self.num_woken = 0
        self.number = self.granted = self.spare = self.runs = self.queued = 0
        self.limit: int | None = None
        self.member = self.join()

    def join(self) -> Member:
        self.spare = self.granted = 0
        how = Request(self.number, self.training.epoch, limit=self.limit, num_held=self.held)
        self.member = self.training.join(Member(self.uid, self.wake, 9), how)
        self.receive()
        return self.member

    @property
    def held(self) -> int:
        return self.spare + self.runs + self.queued

    def wake(self) -> None:
        self.num_woken += 1

    def receive(self) -> None:
        news = self.training.news(self.member)
        self.limit = news["limit"]
        self.spare += news["num_granted"] - self.granted
        self.granted = news["num_granted"]

    def send(self, *, acts: bool = True, **changes: Any) -> None:
        done = self.queued if acts else 0
        self.number += acts
        self.queued -= done
        state = Request(
            self.number, self.training.epoch, num_runs=done, limit=self.limit, num_held=self.held,
            num_granted=self.granted,
        )  # fmt: skip
        self.training.take(self.member, state._replace(**changes))

    def run(self) -> None:
        if self.limit is None or self.spare:
            self.spare -= self.limit is not None
            self.runs += 1


def test_a_second_process_takes_up_the_step_and_the_limit_of_the_first() -> None:
    training = Training("a")
    first = Process(training, "first")
    first.send(limit=9, published=5)
    assert training.news(Process(training, "second").member)["limit"] == 9
    assert training.table.state.step == 5


def test_the_answer_is_the_step_after_the_request_and_not_a_later_one() -> None:
    training = Training("a")
    first, second = Process(training, "1"), Process(training, "2")
    first.send(num_runs=2)
    second.send(num_runs=5)
    assert training.news(first.member)["answer"] == (1, 2)
    assert training.news(second.member)["answer"] == (1, 7)


def test_only_waiters_for_a_step_are_woken_by_it() -> None:
    training = Training("a")
    near, far, mover = (Process(training, name) for name in ("near", "far", "mover"))
    near.send(acts=False, next_step=3)
    far.send(acts=False, next_step=4)
    mover.send(published=3)
    assert (near.num_woken, far.num_woken) == (1, 0)
    near.receive()
    mover.send(published=5)
    assert (near.num_woken, far.num_woken) == (1, 1)


def test_a_waiter_for_a_step_that_was_reached_meanwhile_is_woken_at_once() -> None:
    training = Training("a")
    mover, late = Process(training, "mover"), Process(training, "late")
    mover.send(published=3)
    late.send(acts=False, next_step=3)
    assert late.num_woken == 1
    late.receive()
    assert late.member.next_step == math.inf


def test_a_request_that_comes_again_after_a_cut_counts_once() -> None:
    training = Training("a")
    process = Process(training, "p")
    process.send(num_runs=3)
    training.table.leave(process.member)
    process.join()
    training.take(process.member, Request(1, training.epoch, num_runs=3))
    assert training.table.state.step == 3
    assert training.news(process.member)["answer"] == (1, 3)


def test_a_request_on_a_connection_that_was_replaced_counts_on_the_new_one_alone() -> None:
    training = Training("a")
    process = Process(training, "p")
    old = process.member
    new = process.join()
    request = Request(1, training.epoch, num_runs=3, limit=9, num_wanted=1)
    training.take(old, request)
    assert (training.table.state.step, training.table.num_wanting) == (0, 0)
    training.take(new, request)
    assert training.table.state.step == 3
    assert new.granted == 1


def test_runs_of_an_earlier_epoch_do_not_count() -> None:
    training = Training("a")
    process = Process(training, "p")
    old = training.epoch
    process.send(restart_at=7)
    process.send(epoch=old, num_runs=1)
    assert training.table.state.step == 7


def test_a_restart_of_an_epoch_that_has_ended_already_changes_nothing() -> None:
    training = Training("a")
    one, other = Process(training, "one"), Process(training, "other")
    first = training.epoch
    one.send(restart_at=7, restart_of=first)
    other.send(restart_at=3, restart_of=first)
    assert (training.table.state.step, training.table.state.epoch) == (7, 1)
    assert training.news(other.member)["answer"] == (1, 7)
    other.send(restart_at=3)
    assert (training.table.state.step, training.table.state.epoch) == (3, 2)


def test_no_ticket_is_granted_before_all_have_reported_runs_without_one() -> None:
    training = Training("a")
    slow, asker = Process(training, "slow"), Process(training, "asker")
    slow.run()
    asker.send(limit=1, num_wanted=1)
    assert asker.member.granted == 0
    slow.receive()
    slow.send(acts=False)  # one run under way: that is the last step
    assert asker.member.granted == 0
    slow.runs, slow.queued = 0, 0  # it failed
    slow.send(acts=False)
    assert asker.member.granted == 1


def test_late_runs_of_a_process_that_was_given_up_count_only_where_there_is_room() -> None:
    training = Training("a")
    late, other = Process(training, "late"), Process(training, "other")
    for each in (late, other):
        each.send(acts=False, limit=2)
    for _ in range(2):
        late.receive()
        late.send(acts=False, num_wanted=1)
    late.receive()
    late.run()
    late.run()
    training.table.leave(late.member)
    other.receive()
    other.send(acts=False, num_wanted=1)
    other.receive()
    other.run()
    late.number = 1
    late.join()
    assert training.table.num_held == 2
    late.runs, late.queued = 0, 2
    late.send()
    other.runs, other.queued = 0, 1
    other.send()
    assert training.table.state.step == 2


def test_unknown_fields_of_a_message_are_ignored() -> None:
    assert request_of({"number": 1, "epoch": "a", "mood": "fine"}) == Request(1, "a")


def test_missing_fields_of_a_message_have_their_defaults() -> None:
    assert message_of(Request(1, "a", limit=0)) == {"number": 1, "epoch": "a", "limit": 0}
    for request in (Request(0, ""), Request(3, "b", restart_at=0, restart_of="a", next_step=7)):
        assert request_of(message_of(request)) == request


ACTS = ["run", "end", "fail", "send", "receive", "ask", "give back", "die", "limit"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ACTS)), max_size=120))
def test_step_and_tickets_never_exceed_the_limit_and_all_of_it_is_run(
    acts: list[tuple[int, str]],
) -> None:
    training = Training("a")
    processes = [Process(training, str(each)) for each in range(3)]
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
            training.table.leave(process.member)
            processes[place] = Process(training, f"{process.uid}+")
        elif act == "receive":
            process.receive()
        elif act == "limit" and training.table.state.limit is None:
            # with what is under way already it may be passed, and then nothing else runs
            lowest = max(20, training.table.state.step + sum(each.held for each in processes))
            process.limit = lowest
            process.send()
        elif act in ("send", "ask"):
            process.send(num_wanted=3 * (act == "ask"))
        if training.table.state.limit is not None:
            assert training.table.state.step + sum(each.held for each in processes) <= lowest
    if training.table.state.limit is None:
        return
    for _ in range(200):
        for process in processes:
            process.receive()
            process.queued += process.runs
            process.runs = 0
            process.run()
            process.send(num_wanted=1 if not process.spare else 0)
    assert training.table.state.step == training.table.state.limit
