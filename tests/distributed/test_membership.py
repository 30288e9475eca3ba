"""A membership table: which members are silent, have news, or get tickets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.distributed._membership import Member, MembershipTable, State


class Woken:
    """Members of one table, and the order in which they were woken."""

    def __init__(self, *names: str, lease_secs: float = 3) -> None:
        self.table: MembershipTable[Member] = MembershipTable()
        self.names: list[str] = []
        self.lease_secs = lease_secs
        self.members = [self.join(name) for name in names]
        for member in self.members:
            self.table.has_sent(member)

    def join(self, name: str) -> Member:
        member = Member(name, lambda: self.names.append(name), self.lease_secs)
        return self.table.join(member)

    def ask(self, member: Member, num_wanted: int) -> int:
        """How many tickets that request, and it alone, brought the member."""
        before = member.granted
        member.knows_limit = True
        self.table.request(member, num_wanted)
        return member.granted - before


def test_a_change_other_than_of_the_step_is_numbered_and_wakes_all() -> None:
    woken = Woken("a", "b")
    table = woken.table
    assert table.update(0, 4, None) == State(0, 0, 4, None)
    assert woken.names == []
    for number, (epoch, limit, is_closed) in enumerate(
        [(0, 9, False), (1, 9, False), (1, 9, True)], 1
    ):
        state = table.update(epoch, 4, limit, is_closed=is_closed)
        assert state == State(number, epoch, 4, limit, is_closed)
        assert woken.names == ["a", "b"] * number
        assert state.is_over == is_closed


def test_a_step_wakes_members_that_wait_for_it_until_the_news_are_sent() -> None:
    woken = Woken("near", "far", "idle")
    table, (near, far, _) = woken.table, woken.members
    near.next_step, far.next_step = 3, 5
    for step, names in ((2, []), (3, ["near"]), (4, ["near"]), (5, ["near", "far"])):
        woken.names.clear()
        table.update(0, step, None)
        assert woken.names == names
    table.has_sent(near)
    assert not near.has_news(table.state)
    woken.names.clear()
    table.update(0, 6, None)
    assert woken.names == ["far"]


def test_a_step_that_the_member_knows_is_no_news() -> None:
    woken = Woken("a")
    table, (member,) = woken.table, woken.members
    member.next_step = 3
    state = table.update(0, 3, None)
    member.known = state
    assert not member.has_news(state)
    member.known = state._replace(step=2)
    assert member.has_news(state)
    member.known = None
    assert member.has_news(state)


def test_a_member_with_news_of_its_own_is_woken_until_they_are_sent() -> None:
    woken = Woken("a", "b")
    table, (member, other) = woken.table, woken.members
    member.answer(1, None)
    assert woken.names == ["a"]
    assert (member.has_news(table.state), other.has_news(table.state)) == (True, False)
    table.has_sent(member)
    assert not member.has_news(table.state)


def test_a_member_is_silent_after_a_longer_time_than_its_lease() -> None:
    woken = Woken("a", lease_secs=3)
    (member,) = woken.members
    assert [member.tick(1.0) for _ in range(5)] == [False] * 3 + [True] * 2


def test_a_member_that_comes_back_continues_its_calls() -> None:
    woken = Woken("a")
    (member,) = woken.members
    member.taken = 6
    member.answer(6, "done")
    woken.table.leave(member)
    assert woken.table.members == {}
    again = woken.join("a")
    assert woken.table.members == {"a": again}
    assert again.taken == 6
    assert [each.value for each in again.unsent()] == ["done"]


def test_a_second_member_of_a_name_takes_the_place_of_the_first() -> None:
    woken = Woken("a")
    (first,) = woken.members
    first.taken = 2
    second = woken.join("a")
    woken.table.leave(first)  # its connection ends later
    assert woken.table.members == {"a": second}
    assert second.taken == 2


def test_of_members_that_have_left_the_last_thousand_are_remembered() -> None:
    woken = Woken()
    for number in range(1001):
        member = woken.join(str(number))
        member.taken = 1
        woken.table.leave(member)
    assert woken.join("0").taken == 0
    assert woken.join("1").taken == 1


def test_tickets_are_granted_below_a_limit_once_all_members_know_it() -> None:
    woken = Woken("a", "b")
    table, (a, b) = woken.table, woken.members
    assert woken.ask(a, 2) == 0
    table.update(0, 0, 8)
    assert woken.ask(a, 2) == 0  # the other one has runs without tickets, perhaps
    woken.names.clear()
    assert woken.ask(b, 0) == 0
    assert (a.granted, a.wanted, table.num_wanting) == (2, 0, 0)
    assert woken.names == ["a"]
    assert table.num_held == 2


def test_a_member_gets_half_of_its_share_and_the_first_one_to_ask_comes_first() -> None:
    woken = Woken("a", "b")
    table, (a, b) = woken.table, woken.members
    table.update(0, 0, 9)
    woken.ask(b, 0)
    assert woken.ask(a, 64) == 2  # of 9 free ones a quarter
    assert woken.ask(b, 64) == 1  # of 7
    assert [woken.ask(a, 64) for _ in range(6)] == [1] * 6
    assert woken.ask(b, 5) == woken.ask(a, 5) == 0
    table.leave(woken.join("c"))
    assert table.num_wanting == 2
    a.held -= 1
    table.request(a, 5)  # the other one has asked before
    assert (a.granted, b.granted) == (8, 2)


def test_the_tickets_of_a_member_that_leaves_are_granted_to_others() -> None:
    woken = Woken("a", "b")
    table, (a, b) = woken.table, woken.members
    table.update(0, 0, 1)
    woken.ask(b, 0)
    assert woken.ask(a, 1) == 1
    assert woken.ask(b, 1) == 0
    table.leave(a)
    assert b.granted == 1


def test_a_member_that_no_longer_wants_tickets_gets_none() -> None:
    woken = Woken("a", "b")
    table, (a, b) = woken.table, woken.members
    table.update(0, 0, 1)
    woken.ask(b, 0)
    woken.ask(a, 1)
    woken.ask(b, 1)
    woken.ask(b, 0)
    table.leave(a)
    assert b.granted == 0


def test_tickets_end_with_their_epoch() -> None:
    woken = Woken("a")
    table, (member,) = woken.table, woken.members
    table.update(0, 0, 4)
    assert woken.ask(member, 2) == 2
    table.update(1, 2, 4)
    assert (member.held, member.granted, table.num_held) == (0, 0, 0)


@pytest.mark.parametrize(("step", "free"), [(0, 3), (7, 3), (8, 2), (10, 0), (12, 0)])
def test_runs_of_a_member_that_comes_back_count_where_there_is_room(step: int, free: int) -> None:
    woken = Woken("a")
    table, (member,) = woken.table, woken.members
    table.update(0, step, 10)
    table.resume(member, 3)
    assert (member.held, table.num_held) == (3, free)
    counted = [table.settle(member, 1) for _ in range(3)]
    assert counted == [0] * (3 - free) + [1] * free  # those that others got come first


def test_without_a_limit_all_runs_of_a_member_that_comes_back_count() -> None:
    woken = Woken("a")
    table, (member,) = woken.table, woken.members
    table.resume(member, 3)
    assert table.settle(member, 3) == 3


ACTS = ["ask", "run", "return", "leave", "join"]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ACTS)), max_size=60))
def test_step_and_tickets_never_exceed_the_limit(acts: list[tuple[int, str]]) -> None:
    woken = Woken("0", "1", "2")
    table, limit = woken.table, 12
    table.update(0, 0, limit)
    for place, act in acts:
        member = woken.members[place]
        is_present = table.members.get(member.name) is member
        if act == "ask" and is_present:
            woken.ask(member, 3)
        elif act == "run" and member.held:
            member.held -= 1
            table.update(0, table.state.step + table.settle(member, 1), limit)
        elif act == "return" and member.held:
            member.held, member.uncounted = 0, 0
        elif act == "leave":
            table.leave(member)
        elif act == "join" and not is_present:
            held, woken.members[place] = member.held, woken.join(member.name)
            table.resume(woken.members[place], held)
        assert table.state.step + table.num_held <= limit
