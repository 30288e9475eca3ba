"""Protocols: which workers wait, and which gradients make an update; parse_protocol."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
    parse_protocol,
)
from asynchooks.simulation import Cluster, Worker

from ..simulation.clusters import new_cluster, speeds, times_of_updates, trained
from .worlds import make_server


def at_speeds(protocol: Protocol, updates: int, *secs: float) -> Cluster:
    """It has trained with workers that take always as long."""
    return trained("turbo", protocol, updates, len(secs), compute=speeds(*secs))


@pytest.mark.parametrize(
    ("protocol", "secs", "updates", "counts"),
    [
        (Synchronous(), [1, 2, 5], [5, 10, 15], [{0: 3}] * 3),
        (KSync(2), [1, 2, 3, 4], [2, 4, 6], [{0: 3}, {0: 3}, {}, {}]),
        # worker 0 at 1 s and 2 s, worker 1 at 2 s
        (KBatchSync(3), [1, 2, 3, 4], [2, 4], [{0: 4}, {0: 2}, {}, {}]),
        # more gradients than workers; the first abandons what the others compute at an update
        (KBatchSync(5), [1, 1, 1, 1], [2, 4, 6], [{0: 6}, {0: 3}, {0: 3}, {0: 3}]),
        (
            KBatchAsync(5), [1, 1, 1, 1], [2, 3, 4],
            [{0: 3, 1: 1}, {0: 3, 1: 1}, {0: 2, 1: 2}, {0: 1, 1: 2}],
        ),
        # 0 at 1 s waits for 1 at 2 s; both start again, 0 comes at 3 s and waits for 2 at 3.5 s,
        # which began at version 0; then 1 comes at 4 s, from version 1, and waits for 0
        (KAsync(2), [1, 2, 3.5], [2, 3.5, 4.5], [{0: 3}, {0: 1, 1: 1}, {1: 1}]),
        # 0 at 1 s and 2 s, 1 at 2 s; then 0 and 2 at 3 s, and 1 at 4 s, both still of version 0
        (KBatchAsync(3), [1, 2, 3], [2, 4], [{0: 3}, {0: 1, 1: 1}, {1: 1}]),
    ],
    ids=str,
)  # fmt: skip
def test_updates_come_at_their_times_of_the_gradients_that_the_protocol_says(
    protocol: Protocol, secs: list[float], updates: list[float], counts: list[dict[int, int]]
) -> None:
    cluster = at_speeds(protocol, len(updates), *secs)
    assert times_of_updates(cluster) == updates
    assert [each.staleness for each in cluster.report().workers] == counts


@pytest.mark.parametrize(
    ("protocol", "pushes", "outcomes"),
    [
        (Synchronous(), [0, 0, 1], "collected discarded applied"),  # one does not count twice
        (KSync(1), [0, 0], "applied discarded"),  # all work on one version
        (KBatchSync(1), [0, 0], "applied discarded"),
        (DiscardStale(KSync(1), 3), [0, 0], "applied discarded"),
        (KBatchAsync(3), [0, 0, 0, 1], "collected collected applied collected"),
        (DiscardStale(Asynchronous(), 1), [0, 1, 0], "applied applied discarded"),
    ],
    ids=str,
)
def test_what_comes_too_late_or_twice_is_discarded_where_the_protocol_says_so(
    protocol: Protocol, pushes: list[int], outcomes: str
) -> None:
    server = make_server(protocol)
    found = [server.push(worker, np.ones(2), 0).outcome.value for worker in pushes]
    assert " ".join(found) == outcomes


def test_workers_that_wait_for_an_update_wake_in_the_order_of_their_waits() -> None:
    spans = at_speeds(Synchronous(), 2, 2, 1, 4, 3).timeline.spans
    assert [each.worker for each in spans if each.kind == "wait"][:3] == [1, 0, 3]


@settings(max_examples=60)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_the_bound_of_stale_synchronous_is_never_broken(
    staleness: int, num_workers: int, seed: int
) -> None:
    draws = random.Random(seed)
    cluster = new_cluster(num_workers, protocol=StaleSynchronous(staleness))
    server = cluster.server

    async def program(worker: Worker) -> None:
        while True:
            await worker.pull()
            slowest = min(server.clock(each) for each in range(num_workers))
            assert server.clock(worker.index) - slowest <= staleness
            await worker.compute(draws.choice([0.0, 1.0, draws.random()]))
            await worker.push(np.zeros(1))

    assert cluster.run(program, updates=8 * num_workers).updates == 8 * num_workers


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
