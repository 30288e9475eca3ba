"""Silent processes: their tasks, and whether they may resume."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from .processes import free_cluster

pytest.importorskip("tensorflow")
from asynchooks.tf.cluster._failure_detector import FailureDetector, ProcessIds

pytestmark = pytest.mark.tensorflow

EVERY_SECS = 0.5


@pytest.fixture
def addresses() -> dict[str, str]:
    """Of all tasks; no process listens there."""
    cluster = free_cluster(ps=1, chief=1, worker=3)
    return {f"{job}:{at}": each for job in cluster for at, each in enumerate(cluster[job])}


@pytest.fixture
def process_ids(addresses: dict[str, str]) -> ProcessIds:
    return ProcessIds("worker:0", addresses)


def process_id_of(addresses: dict[str, str], name: str) -> int:
    """The id of a process of that task."""
    return ProcessIds(name, addresses).new()


@contextmanager
def listening(address: str, backlog: int = 128) -> Iterator[tuple[str, int]]:
    """A socket that never accepts; where it is."""
    host, port = address.rsplit(":", 1)
    with socket.socket() as end:
        end.bind((host, int(port)))
        end.listen(backlog)
        yield host, int(port)


def may_resume(process_ids: ProcessIds, process_id: int, slots: list[int]) -> bool:
    """The answer after its port was probed."""
    for _ in range(2):
        found = process_ids.may_resume(process_id, np.array(slots))
        for thread in threading.enumerate():
            if thread.name == "asynchooks-membership-probe":
                thread.join()
    return found


@pytest.mark.faults
def test_a_process_id_contains_its_task_and_is_new_each_time(
    process_ids: ProcessIds, addresses: dict[str, str]
) -> None:
    found = {process_ids.new() for _ in range(100)}
    assert len(found) == 100
    assert {process_ids.name(each) for each in found} == {"worker:0"}
    assert 0 < min(found) <= max(found) < 2**63
    assert process_ids.name(process_id_of(addresses, "chief:0")) == "chief:0"
    assert process_ids.name(process_id_of(addresses, "worker:2")) == "worker:2"


@pytest.mark.faults
def test_a_process_whose_port_refuses_has_ended_until_it_accepts_again(
    process_ids: ProcessIds, addresses: dict[str, str]
) -> None:
    worker = process_id_of(addresses, "worker:2")
    slots = [0, worker, process_ids.new()]
    assert not may_resume(process_ids, worker, slots)
    with listening(addresses["worker:2"]):
        assert may_resume(process_ids, worker, slots)


@pytest.mark.faults
def test_a_process_whose_port_accepts_may_resume_unless_it_has_a_successor(
    process_ids: ProcessIds, addresses: dict[str, str]
) -> None:
    worker, again = (process_id_of(addresses, "worker:2") for _ in range(2))
    with listening(addresses["worker:2"], backlog=0) as address, ExitStack() as stack:
        assert may_resume(process_ids, worker, [0, worker, process_ids.new()])
        assert not may_resume(process_ids, worker, [worker, again])
        assert may_resume(process_ids, again, [again])
        for _ in range(4):  # until nothing more is let in
            end = stack.enter_context(socket.socket())
            end.setblocking(False)
            end.connect_ex(address)
        assert may_resume(process_ids, worker, [0, worker, process_ids.new()])


@pytest.mark.faults
def test_other_processes_of_a_task_are_found(
    process_ids: ProcessIds, addresses: dict[str, str]
) -> None:
    own, before, other = process_ids.new(), process_ids.new(), process_id_of(addresses, "chief:0")
    assert process_ids.others_of_task(own, np.array([0, before, other, own, before])) == [1, 4]
    unknown = ProcessIds("", {})
    assert unknown.others_of_task(unknown.new(), np.array([unknown.new()])) == []


@pytest.mark.faults
def test_without_a_cluster_no_process_is_known(addresses: dict[str, str]) -> None:
    process_ids = ProcessIds("", {})
    assert process_ids.new() > 0
    assert process_ids.name(process_ids.new()) == "a process"
    assert not may_resume(process_ids, process_id_of(addresses, "worker:1"), [process_ids.new()])


def test_silence_is_reported_and_reported_as_long_later() -> None:
    detector = FailureDetector(EVERY_SECS)
    every = int(EVERY_SECS * 1e6)
    rows = np.array([[5, 0, 9, every], [6, 3, 1, every], [7, 2, 1, 2 * every], [0, 0, 0, 0]])
    found: dict[int, list[tuple[int, bool, bool]]] = {1: [], 2: []}
    for number in range(60):
        rows[0, 2] += 1  # it lives
        for each in detector.silent(rows, own_slot=3):
            assert (each.process_id, each.held) == {1: (6, 3), 2: (7, 2)}[each.slot]
            found[each.slot].append((number, each.is_new, each.is_for_long))
    assert [each for each, is_new, _ in found[1] if is_new] == [4]
    assert [each for each, _, is_for_long in found[1] if is_for_long] == list(range(24, 60))
    assert [each for each, is_new, _ in found[2] if is_new] == [8], "half as many heartbeats"
    assert [each for each, _, is_for_long in found[2] if is_for_long] == list(range(48, 60))


def test_a_process_with_a_new_heartbeat_is_not_silent() -> None:
    detector = FailureDetector(EVERY_SECS)
    rows = np.array([[5, 0, 1, 0]])
    assert [len(detector.silent(rows, own_slot=9)) for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    rows[0, 2] += 1
    assert detector.silent(rows, own_slot=9) == []
    assert [len(detector.silent(rows, own_slot=9)) for _ in range(4)] == [0, 0, 0, 1]
