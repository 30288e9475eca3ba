"""Silent processes: which task each is, and whether it may go on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from .cluster_processes import free_cluster

pytest.importorskip("tensorflow")
from asynchooks.tf._beats import Beats
from asynchooks.tf._owners import Owners

pytestmark = pytest.mark.tensorflow

EVERY_SECS = 0.5


@pytest.fixture
def addresses() -> dict[str, str]:
    """Of all tasks, where nobody listens."""
    cluster = free_cluster(ps=1, chief=1, worker=3)
    return {f"{job}:{at}": each for job in cluster for at, each in enumerate(cluster[job])}


@pytest.fixture
def owners(addresses: dict[str, str]) -> Owners:
    return Owners("worker:0", addresses)


def owner_of(addresses: dict[str, str], name: str) -> int:
    """What a process of that task would be called."""
    return Owners(name, addresses).new()


@pytest.fixture
def listening(addresses: dict[str, str]) -> Iterator[socket.socket]:
    """Where worker 2 should be; nobody accepts."""
    host, port = addresses["worker:2"].rsplit(":", 1)
    with socket.socket() as end:
        end.bind((host, int(port)))
        end.listen(0)
        yield end


def goes_on(owners: Owners, owner: int, seats: list[int]) -> bool:
    """The answer when its port was asked."""
    for _ in range(2):
        found = owners.may_go_on(owner, np.array(seats))
        for thread in threading.enumerate():
            if thread.name == "asynchooks-board-ask":
                thread.join()
    return found


def test_an_owner_tells_its_task_and_is_another_each_time(
    owners: Owners, addresses: dict[str, str]
) -> None:
    found = {owners.new() for _ in range(100)}
    assert len(found) == 100
    assert {owners.name(each) for each in found} == {"worker:0"}
    assert 0 < min(found) <= max(found) < 2**63
    assert owners.name(owner_of(addresses, "chief:0")) == "chief:0"
    assert owners.name(owner_of(addresses, "worker:2")) == "worker:2"


def test_whose_port_refuses_has_ended(owners: Owners, addresses: dict[str, str]) -> None:
    chief = owner_of(addresses, "chief:0")
    assert not goes_on(owners, chief, [0, chief, owners.new()])


def test_whose_port_is_there_again_may_go_on(owners: Owners, addresses: dict[str, str]) -> None:
    worker = owner_of(addresses, "worker:2")
    assert not goes_on(owners, worker, [worker])
    host, port = addresses["worker:2"].rsplit(":", 1)
    with socket.socket() as end:
        end.bind((host, int(port)))
        end.listen()
        assert goes_on(owners, worker, [worker])


@pytest.mark.usefixtures("listening")
def test_whose_port_is_there_may_go_on(owners: Owners, addresses: dict[str, str]) -> None:
    worker = owner_of(addresses, "worker:2")
    seats = [0, worker, owners.new()]
    assert goes_on(owners, worker, seats)
    host, port = addresses["worker:2"].rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(4):  # until nothing more is let in
            end = stack.enter_context(socket.socket())
            end.setblocking(False)
            end.connect_ex((host, int(port)))
        assert goes_on(owners, worker, seats)


@pytest.mark.usefixtures("listening")
def test_who_has_been_started_again_has_ended(owners: Owners, addresses: dict[str, str]) -> None:
    worker = owner_of(addresses, "worker:2")
    again = owner_of(addresses, "worker:2")
    assert not goes_on(owners, worker, [worker, again])
    assert goes_on(owners, again, [again])


def test_those_who_had_the_same_task_before_are_found(
    owners: Owners, addresses: dict[str, str]
) -> None:
    own, before, other = owners.new(), owners.new(), owner_of(addresses, "chief:0")
    assert owners.predecessors(own, np.array([0, before, other, own, before])) == [1, 4]
    nobody = Owners("", {})
    assert nobody.predecessors(nobody.new(), np.array([nobody.new()])) == []


def test_who_has_no_cluster_knows_nobody(addresses: dict[str, str]) -> None:
    owners = Owners("", {})
    assert owners.new() > 0
    assert owners.name(owners.new()) == "a process"
    assert not goes_on(owners, owner_of(addresses, "worker:1"), [owners.new()])


def test_silence_is_told_and_after_a_long_time_it_is_said_to_be_long() -> None:
    beats = Beats(EVERY_SECS)
    every = int(EVERY_SECS * 1e6)
    rows = np.array([[5, 0, 9, every], [6, 3, 1, every], [7, 2, 1, 2 * every], [0, 0, 0, 0]])
    told: dict[int, list[tuple[int, bool, bool]]] = {1: [], 2: []}
    for number in range(60):
        rows[0, 2] += 1  # it lives
        for each in beats.missed(rows, own_seat=3):
            assert (each.owner, each.held) == ({1: 6, 2: 7}[each.seat], {1: 3, 2: 2}[each.seat])
            told[each.seat].append((number, each.is_new, each.is_for_long))
    assert [each for each, is_new, _ in told[1] if is_new] == [4]
    assert [each for each, _, is_for_long in told[1] if is_for_long] == list(range(24, 60))
    assert [each for each, is_new, _ in told[2] if is_new] == [8], "it beats half as often"
    assert [each for each, _, is_for_long in told[2] if is_for_long] == list(range(48, 60))


def test_who_beats_again_is_silent_no_longer() -> None:
    beats = Beats(EVERY_SECS)
    rows = np.array([[5, 0, 1, 0]])
    assert [len(beats.missed(rows, own_seat=9)) for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    rows[0, 2] += 1
    assert beats.missed(rows, own_seat=9) == []
    assert [len(beats.missed(rows, own_seat=9)) for _ in range(4)] == [0, 0, 0, 1]
