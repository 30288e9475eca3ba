"""Protocols: which workers wait, and which gradients make an update; parse_protocol."""

from __future__ import annotations

import random
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
        *((Collect(k), [1, 2, 3, 4], [at], None) for k, at in [(1, 1), (5, 3), (10, 6), (20, 10)]),
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


def test_ksync_abandons_what_is_too_late_and_synchronous_nothing() -> None:
    world = World(make_server(KSync(2), 4, limit=3), fixed(1, 2, 3, 4)).run()
    assert [entry for entry in world.log if entry[2] == "abandoned"] == [
        (time, worker, "abandoned") for time in (2, 4, 6) for worker in (2, 3)
    ]
    world = World(make_server(Synchronous(), 3, limit=3), fixed(1, 2, 5)).run()
    assert world.num_begun == [3, 3, 3]


def test_ksync_restarts_all_from_the_new_parameters() -> None:
    world = World(make_server(KSync(1), 3, limit=2), lambda w, n: [[1, 9], [2, 1], [3, 9]][w][n])
    world.run()
    assert world.updates == [1, 2]
    assert [entry for entry in world.log if entry[2] == "pulled 1"] == [
        (1, worker, "pulled 1") for worker in range(3)
    ]


@pytest.mark.parametrize("protocol", [Synchronous(), KSync(2)], ids=repr)
def test_one_worker_does_not_count_twice(protocol: Protocol) -> None:
    server = make_server(protocol, 2)
    gradient = np.ones(2)
    assert server.push(0, gradient, 0).is_collected
    assert server.push(0, gradient, 0).is_discarded
    assert server.push(1, gradient, 0).is_applied


@pytest.mark.parametrize("protocol", [Synchronous(), KSync(1), KBatchSync(1)], ids=repr)
def test_a_stale_gradient_is_discarded_where_all_work_on_one_version(protocol: Protocol) -> None:
    server = make_server(protocol, 1)
    assert server.push(0, np.ones(2), 0).is_applied
    assert server.push(0, np.ones(2), 0).is_discarded


def test_a_protocol_of_ones_own_may_need_fewer_gradients_as_training_goes_on() -> None:
    class Shrinking(Protocol):
        k = 2

        def num_gradients(self, server: ParameterServer) -> int:
            return self.k

    protocol = Shrinking()
    server = make_server(protocol, 1)
    server.push(0, np.ones(2), 0)
    protocol.k = 1
    assert server.push(0, np.ones(2), 0).is_applied
    assert (server.version, server.num_applied, server.num_collected) == (1, 2, 0)
    assert server.push(0, np.ones(2), 1).is_applied


def test_a_batch_stays_as_large_when_workers_leave() -> None:
    server = make_server(KBatchAsync(3), 2)
    server.push(0, np.ones(2), 0)
    server.leave(1)
    assert [server.push(0, np.ones(2), 0).is_applied for _ in range(2)] == [False, True]


def test_asynchronous_with_equal_times_has_a_constant_staleness() -> None:
    num_workers = 8
    world = World(make_server(Asynchronous(), num_workers, limit=800), fixed(*[1.0] * 8)).run()
    counts = world.server.staleness_counts()
    # in the first round worker i finds i updates before it, in each later one all but its own
    assert counts == {**dict.fromkeys(range(num_workers - 1), 1), num_workers - 1: 793}


@pytest.mark.parametrize(
    ("staleness", "secs", "begins"),
    [
        (2, [1, 10], [0, 1, 2, 10, 20, 30]),
        (0, [1, 2, 3], [0, 3, 6, 9]),
    ],
)
def test_stale_synchronous_holds_the_fast_worker_back(
    staleness: int, secs: list[float], begins: list[float]
) -> None:
    server = make_server(StaleSynchronous(staleness), len(secs))
    world = World(server, fixed(*secs), num_steps=len(begins)).run()
    pulls = [(time, worker) for time, worker, what in world.log if "pulled" in what]
    assert [time for time, worker in pulls if worker == 0] == begins
    if staleness == 0:  # all go side by side
        assert sorted(pulls) == [(time, worker) for time in begins for worker in range(len(secs))]


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
    outcomes = [what for _, _, what in world.log if what[:6] in ("applie", "discar")]
    assert outcomes[:3] == ["applied 0", "applied 1", "discarded 2"]
    assert max(world.server.staleness_counts()) == 1
    check_counts(world)


def test_discard_stale_abandons_what_its_protocol_abandons() -> None:
    assert DiscardStale(KSync(1), 3).abandons_stale
    assert not DiscardStale(KAsync(1), 3).abandons_stale


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_the_limit_is_kept_and_all_leave(protocol: Protocol) -> None:
    world = World(make_server(protocol, 4, limit=7), fixed(1, 1, 2, 3)).run()
    assert world.server.version == 7
    assert world.ended == {0, 1, 2, 3}
    check_counts(world)


@pytest.mark.parametrize(
    "protocol", [each for each in ALL if each != Synchronous()], ids=repr
)  # fmt: skip
def test_what_is_under_way_at_the_limit_is_abandoned(protocol: Protocol) -> None:
    world = World(make_server(protocol, 4, limit=1), fixed(1, 1, 1000, 1000)).run()
    assert world.ended == {0, 1, 2, 3}
    assert max(time for time, _, _ in world.log) <= 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_an_event_loop_gives_the_same_trace_as_none(protocol: Protocol, backend: str) -> None:
    def world() -> World:
        return World(make_server(protocol, 4, limit=6), lambda w, n: [1, 1, 2, 3][w] + n % 2)

    assert world().run(backend=backend).log == world().run().log


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KSync(0), "k is 0; give an integer >= 1"),
        (lambda: KAsync(True), "k is True; give an integer"),
        (lambda: KBatchAsync(1.5), r"k is 1\.5; give an integer"),  # type: ignore[arg-type]
        (lambda: StaleSynchronous(-1), "staleness is -1; give an integer >= 0"),
        (lambda: DiscardStale(Asynchronous(), -2), "bound is -2; give an integer >= 0"),
        (lambda: DiscardStale(3, 2), "protocol is 3; give one"),  # type: ignore[arg-type]
        (lambda: make_server(KAsync(5), 4), r"KAsync\(k=5\) for 4 workers.*from 1 to 4"),
        (lambda: make_server(DiscardStale(KSync(5), 1), 4), "for 4 workers"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises((ValueError, TypeError), match=match):
        make()


INTEGER: Any = np.int64(3)


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("async", Asynchronous()),
        ("sync", Synchronous()),
        ("ksync:48", KSync(48)),
        ("kbatch-sync:6", KBatchSync(6)),
        ("kasync:6", KAsync(6)),
        ("kbatch-async:6", KBatchAsync(6)),
        ("ssp:3", StaleSynchronous(3)),
        ("ssp:0", StaleSynchronous(0)),
        ("kasync:6+discard:8", DiscardStale(KAsync(6), 8)),
        ("KSync(3)", KSync(INTEGER)),
        ("StaleSynchronous(staleness=3)", StaleSynchronous(INTEGER)),
        ("DiscardStale(Synchronous(), bound=2)", DiscardStale(Synchronous(), 2)),
        ("kbatch-sync:9+discard:3+discard:4",
         DiscardStale(DiscardStale(KBatchSync(9), INTEGER), 4)),
    ],
)  # fmt: skip
def test_a_text_names_a_protocol_and_so_does_what_that_prints_as(
    text: str, protocol: Protocol
) -> None:
    assert parse_protocol(text, 64) == protocol
    assert parse_protocol(repr(protocol), 64) == protocol
    assert parse_protocol(f" {protocol} ", 64) == protocol


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"text is KSync\(k=2\); give the name of a protocol"):
        parse_protocol(KSync(2), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not known"),
        ("ASYNC", "'ASYNC' is not known"),
        ("async:3", "'async:3' is not known"),
        ("ksync", "'ksync' is not known"),
        ("ksync:", "'ksync:' has no integer"),
        ("ksync:0", "k is 0; give an integer >= 1"),
        ("ksync:65", r"KSync\(k=65\) for 64 workers; give k from 1 to 64"),
        ("ssp:-1", "staleness is -1"),
        ("ssp:1.5", "'ssp:1.5' has no integer"),
        ("sync+discard:-1", "bound is -1"),
        ("sync+drop:1", "'drop:1' is no \"discard:B\""),
        ("sync+discard", "has no integer"),
        ("KSync()", "missing 1 required positional argument"),
        ("KSync(k=0)", "k is 0; give an integer >= 1"),
        ("KSync(k=65)", "for 64 workers"),
        ("KSync(k=__import__('os'))", "is not known"),
        ("KSync(k=[x for x in ()])", "holds what is no number and no protocol"),
        ("Protocol()", r"'Protocol\(\)' is not known"),
        ("Synchronous())", "is not known"),
        ("DiscardStale(protocol=1, bound=2)", "protocol is 1; give one"),
        ("Synchronous(**{})", "unexpected keyword|holds what"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_protocol(text, 64)
    assert "Allowed: async, sync, ksync:K, kbatch-sync:K, kasync:K" in str(caught.value)
