"""When a process requests tickets, how many, and when it returns them.

The policy is private: its requests are seen in another process only by their effect.
"""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.distributed import Demand
from asynchooks.distributed._credits import LARGEST_BATCH, CreditPolicy, Move


def demand(
    *, limit: int | None = 1000, short: int = 0, spare: int = 0, out: int = 0, granted: int = 0,
    workers: int = 1,
) -> Demand:  # fmt: skip
    return Demand(math.inf, limit, short, spare, out, granted, workers, 0)


def idle_move(**what: Any) -> Move:
    """Of one that has seen no run for a while."""
    policy = CreditPolicy()
    policy.next_move(demand(), -1.0)
    return policy.next_move(demand(**what), 0.0)


@pytest.mark.parametrize(
    ("what", "move"),
    [
        ({}, Move(is_idle=True)),
        ({"short": 3}, Move(ask=3)),
        ({"short": 2, "workers": 0}, Move(ask=2)),
        ({"limit": None, "spare": 3, "out": 2}, Move(give_back=3, is_idle=True)),
        ({"workers": 0, "spare": 3}, Move(give_back=3, is_idle=True)),
        # the end of a run that nobody awaits any longer has to be detected
        ({"limit": None, "workers": 0, "out": 1}, Move(look_at=0.1, is_idle=True)),
        ({"out": 1}, Move(look_at=0.1, is_idle=True)),
        ({"out": 1, "short": 1}, Move(ask=1, look_at=0.1)),
    ],
    ids=str,
)
def test_a_process_that_is_not_busy_asks_only_for_its_waiters(what: Any, move: Move) -> None:
    assert idle_move(**what) == move


def test_a_busy_process_asks_before_it_runs_out() -> None:
    policy = CreditPolicy()
    policy.take_note(8, demand(workers=8), 0.0)
    assert policy.next_move(demand(spare=5, granted=3), 0.05) == Move(look_at=0.05 + 0.1)
    assert policy.next_move(demand(spare=4, granted=4), 0.07) == Move(ask=8, look_at=0.07 + 0.1)


def test_spare_tickets_go_back_when_no_run_has_begun_for_a_tenth_of_a_second() -> None:
    policy = CreditPolicy()
    policy.take_note(8, demand(), 0.0)
    for secs, granted, move in (
        (0.0, 1, Move(look_at=0.1)),
        (0.099, 2, Move(look_at=0.099 + 0.1)),  # a run has begun meanwhile
        (0.198, 2, Move(look_at=0.099 + 0.1)),
        # a run may begin before they are taken away: then they are not, and it looks again
        (0.2, 2, Move(give_back=7, look_at=0.2 + 0.1, is_idle=True)),
    ):
        assert policy.next_move(demand(spare=7, granted=granted), secs) == move


def test_batches_double_while_they_are_used_up_quickly_and_halve_when_not() -> None:
    policy, now, batches = CreditPolicy(), 0.0, []
    for secs in [0.01] * 8 + [1.0] * 3:
        now += secs
        policy.take_note(1, demand(), now)
        batches.append(policy.next_move(demand(short=1), now).ask)
    assert batches == [1, 2, 4, 8, 16, 32, LARGEST_BATCH, LARGEST_BATCH, 32, 16, 8]


def test_pauses_between_vain_requests_double_up_to_half_a_second_and_end_with_a_grant() -> None:
    policy, now, pauses = CreditPolicy(), 0.0, []
    policy.next_move(demand(), -1.0)
    for _ in range(7):
        policy.take_note(0, demand(), now)
        move = policy.next_move(demand(short=1), now)
        assert move.ask == 0
        pauses.append(round(move.look_at - now, 6))
        now = move.look_at
        assert policy.next_move(demand(short=1), now).ask == 1
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5]
    # a run that has begun is looked after meanwhile
    assert policy.next_move(demand(short=1, granted=1), now).ask == 1
    policy.take_note(0, demand(), now)
    assert policy.next_move(demand(short=1, granted=1), now) == Move(look_at=now + 0.1)
    policy.take_note(1, demand(), now)
    assert policy.next_move(demand(short=1), now).ask >= 1
    policy.take_note(0, demand(), now)
    assert policy.next_move(demand(short=1), now).look_at == now + 0.01


EVENTS = ["take", "end", "ask", "grant", "deny", "close", "open", "wait"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 0.3)), max_size=60))
def test_a_process_that_looks_when_due_holds_no_idle_ticket(
    events: list[tuple[str, float]],
) -> None:
    """It looks after each event, and at `look_at`; a request is answered much later."""
    policy, now, looks_at = CreditPolicy(), 0.0, 0.0
    spare = out = short = granted = asked = 0
    workers, last_taken = 1, 0.0

    def look() -> float:
        nonlocal spare, asked
        what = demand(short=short, spare=spare, out=out, granted=granted, workers=workers)
        move = policy.next_move(what, now)
        assert not (move.ask and move.give_back)
        assert 0 <= move.ask <= max(LARGEST_BATCH, short)
        assert move.look_at > now
        asked = asked or move.ask
        spare -= move.give_back
        if spare:
            assert move.look_at <= now + 0.1
            assert now - last_taken < 0.1
        return move.look_at

    for what, secs in events:
        until = now + secs
        while looks_at <= until:
            now = max(now, looks_at)
            looks_at = look()
        now = until
        if what == "take" and spare and workers:
            spare, out, granted, last_taken = spare - 1, out + 1, granted + 1, now
        elif what == "end":
            out = max(0, out - 1)
        elif what == "ask" and not spare:
            short += 1
        elif what in ("grant", "deny") and asked:
            num = asked if what == "grant" else 0
            policy.take_note(num, demand(workers=workers), now)
            used = min(short, num)
            spare += num - used
            short, out, granted = short - used, out + used, granted + used
            asked = 0
            if num:
                last_taken = now
        elif what in ("close", "open"):
            workers = int(what == "open")
            short *= workers
        looks_at = look()
