"""Protocols: which workers wait, and which gradients make an update; parse_protocol."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    ParameterServer,
    Protocol,
    StaleSynchronous,
    Synchronous,
    parse_protocol,
)

from .worlds import ALL, World, check_counts, fixed, make_server


@dataclass(frozen=True)
class Collect(Protocol):
    """A protocol of a user's own: as KBatchAsync."""

    k: int

    def num_gradients(self, server: ParameterServer) -> int:
        return self.k


@pytest.mark.parametrize(
    ("protocol", "secs", "updates", "counts"),
    [
        (Synchronous(), [1, 2, 5], [5, 10, 15], [{0: 3}] * 3),
        (KSync(2), [1, 2, 3, 4], [2, 4, 6], [{0: 3}, {0: 3}, {}, {}]),
        # worker 0 at 1 s and 2 s, worker 1 at 2 s
        (KBatchSync(3), [1, 2, 3, 4], [2, 4], [{0: 4}, {0: 2}, {}, {}]),
        # more gradients than workers; the first abandons what the others compute at an update
        (KBatchSync(5), [1, 1, 1, 1], [2, 4, 6], None),
        (KBatchAsync(5), [1, 1, 1, 1], [2, 3, 4], None),
        # 0 at 1 s waits for 1 at 2 s; both start again, 0 comes at 3 s and waits for 2 at 3.5 s,
        # which began at version 0; then 1 comes at 4 s, from version 1, and waits for 0
        (KAsync(2), [1, 2, 3.5], [2, 3.5, 4.5], [{0: 3}, {0: 1, 1: 1}, {1: 1}]),
        # 0 at 1 s and 2 s, 1 at 2 s; then 0 and 2 at 3 s, and 1 at 4 s, both still of version 0
        (KBatchAsync(3), [1, 2, 3], [2, 4], [{0: 3}, {0: 1, 1: 1}, {1: 1}]),
        (Collect(5), [1, 2, 3, 4], [3], None),
    ],
    ids=str,
)
def test_updates_come_at_their_times_of_the_gradients_that_the_protocol_says(
    protocol: Any, secs: list[float], updates: list[float], counts: list[dict[int, int]] | None
) -> None:
    world = World(make_server(protocol, len(secs), limit=len(updates)), fixed(*secs)).run()
    assert world.updates == updates
    if counts is None:
        assert world.server.num_applied == protocol.k * len(updates)
    else:
        assert [world.server.staleness_counts(worker) for worker in range(len(secs))] == counts


@pytest.mark.parametrize(
    ("protocol", "pushes", "outcomes"),
    [
        (Synchronous(), [0, 0, 1], "collected discarded applied"),  # one does not count twice
        (KSync(2), [0, 0, 1], "collected discarded applied"),
        (KSync(1), [0, 0], "applied discarded"),  # all work on one version
        (KBatchSync(1), [0, 0], "applied discarded"),
        (Synchronous(), [0, 1, 1], "collected applied discarded"),
        (DiscardStale(KSync(1), 3), [0, 0], "applied discarded"),
        (KBatchAsync(3), [0, 0, 0, 1], "collected collected applied collected"),
    ],
    ids=str,
)
def test_what_comes_too_late_or_twice_is_discarded_where_the_protocol_says_so(
    protocol: Protocol, pushes: list[int], outcomes: str
) -> None:
    server = make_server(protocol, 2)
    found = [server.push(worker, np.ones(2), 0).outcome.value for worker in pushes]
    assert " ".join(found) == outcomes


@pytest.mark.parametrize(("staleness", "begins"), [(2, [0, 1, 2, 10, 20]), (0, [0, 10, 20])])
def test_stale_synchronous_holds_the_fast_worker_back(staleness: int, begins: list[float]) -> None:
    server = make_server(StaleSynchronous(staleness), 2)
    world = World(server, fixed(1, 10), num_steps=len(begins)).run()
    assert [time for time, worker, what in world.log if not worker and "pull" in what] == begins


def test_workers_that_wait_for_an_update_wake_in_the_order_of_their_waits() -> None:
    world = World(make_server(Synchronous(), 4, limit=2), fixed(2, 1, 4, 3)).run()
    assert [worker for _, worker, what in world.log if what == "pulled 1"] == [2, 1, 0, 3]


@given(
    staleness=st.integers(0, 4), num_workers=st.integers(1, 6), seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 8),
)  # fmt: skip
def test_the_bound_of_stale_synchronous_is_never_broken(
    staleness: int, num_workers: int, seed: int, num_steps: int
) -> None:
    draws = random.Random(seed)
    server = make_server(StaleSynchronous(staleness), num_workers)
    world = World(server, lambda *_: draws.choice([0.0, 1.0, draws.random()]), num_steps)
    widest = 0

    def check(worker: int) -> None:
        nonlocal widest
        present = [w for w in range(num_workers) if w not in world.ended]
        ahead = server.clock(worker) - min(server.clock(w) for w in present)
        assert ahead <= staleness
        widest = max(widest, ahead)

    world.at_begin = check
    world.run()
    assert world.num_done == [num_steps] * num_workers
    assert server.version == num_workers * num_steps
    check_counts(world)


def test_discard_stale_drops_what_is_above_the_bound_only() -> None:
    world = World(make_server(DiscardStale(Asynchronous(), 1), 3, limit=6), fixed(1, 1, 1)).run()
    outcomes = [what for at, _, what in world.log if at == 1.0 and "pull" not in what]
    assert outcomes == ["applied 0", "applied 1", "discarded 2"]
    assert max(world.server.staleness_counts()) == 1


@pytest.mark.parametrize("backend", [None, "asyncio", "trio"])
@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_the_limit_is_kept_and_all_leave_alike_on_event_loops(
    protocol: Protocol, backend: str | None
) -> None:
    def world() -> World:
        return World(make_server(protocol, 4, limit=7), lambda w, n: [1, 1, 2, 3][w] + n % 2)

    found = world().run(backend=backend)
    assert found.server.version == 7
    assert found.ended == {0, 1, 2, 3}
    assert found.log == world().run().log
    check_counts(found)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KSync(0), "k is 0; give an integer >= 1"),
        (lambda: StaleSynchronous(-1), "staleness is -1; give an integer >= 0"),
        (lambda: DiscardStale(Asynchronous(), -2), "bound is -2; give an integer >= 0"),
        (
            lambda: make_server(DiscardStale(KAsync(5), 1), 4),
            r"KAsync\(k=5\) for 4 workers.* 1 to 4",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make()


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("async", Asynchronous()),
        ("sync", Synchronous()),
        ("ksync:48", KSync(48)),
        ("kbatch-sync:6", KBatchSync(6)),
        ("kasync:6", KAsync(6)),
        ("kbatch-async:6", KBatchAsync(6)),
        ("ssp:0", StaleSynchronous(0)),
        ("kasync:6+discard:8+discard:4", DiscardStale(DiscardStale(KAsync(6), 8), 4)),
        ("DiscardStale(Synchronous(), bound=2)", DiscardStale(Synchronous(), 2)),
    ],
)
def test_a_text_names_a_protocol_and_so_does_what_that_prints_as(
    text: str, protocol: Protocol
) -> None:
    assert parse_protocol(text, 64) == parse_protocol(f" {protocol!r} ", 64) == protocol


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ASYNC", "'ASYNC' is not known"),
        ("ksync:", "'ksync:' has no integer"),
        ("ssp:1.5", "'ssp:1.5' has no integer"),
        ("sync+discard:-1", "bound is -1"),
        ("sync+drop:1", "'drop:1' is no \"discard:B\""),
        ("KSync()", "missing 1 required positional argument"),
        ("KSync(k=__import__('os'))", "is not known"),
        ("KSync(k=[x for x in ()])", "holds what is no number and no protocol"),
        ("Protocol()", r"'Protocol\(\)' is not known"),
        ("Synchronous(**{})", "unexpected keyword|holds what"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_protocol(text, 64)
    assert "Allowed: async, sync, ksync:K, kbatch-sync:K, kasync:K" in str(caught.value)
