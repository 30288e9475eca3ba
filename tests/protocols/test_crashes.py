"""Workers that leave, crash and come back at any moment: nothing hangs, nothing counts twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks._engine.base import EngineTask
from asynchooks._engine.current import current_engine
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)

from .worlds import ALL, World, check_counts, fixed, make_server, pause

NUM_WORKERS = 4
# (seconds after the one before, worker, back after so many seconds; None: it leaves for good)
CRASHES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]),
        st.integers(0, NUM_WORKERS - 1),
        st.sampled_from([0.0, 0.5, 1.0, 7.0, None]),
    ),
    max_size=6,
)


SECS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=4, max_size=12)


@pytest.mark.parametrize("protocol", ALL, ids=repr)
@settings(max_examples=40)
@given(CRASHES, SECS)
def test_nothing_hangs_when_workers_crash_or_leave(
    protocol: Protocol, crashes: list[tuple[float, int, float | None]], secs: list[float]
) -> None:
    # not on the small kernel of event loops, which cannot cancel what waits in a shielded scope
    train_with_crashes(protocol, crashes, secs)


def train_with_crashes(
    protocol: Protocol, crashes: list[tuple[float, int, float | None]], secs: list[float]
) -> None:
    server = make_server(protocol, NUM_WORKERS)
    world = World(server, lambda w, n: secs[(3 * w + n) % len(secs)], num_steps=5)

    async def crash(tasks: list[EngineTask]) -> None:
        engine = current_engine()

        async def again(worker: int, after: float) -> None:
            await pause(after)
            await world.work(worker)

        for after, worker, absence in crashes:
            await pause(after)
            tasks[worker].cancel()
            await tasks[worker].wait()
            if worker in world.ended:
                continue
            if absence is None:
                server.leave(worker)
                world.ended.add(worker)
            else:
                tasks[worker] = engine.start(again, worker, absence)
        for each in tasks:
            await each.wait()

    bound = protocol.staleness if isinstance(protocol, StaleSynchronous) else None

    def check(worker: int) -> None:
        present = [w for w in range(NUM_WORKERS) if w not in world.ended]
        if bound is not None:
            assert server.clock(worker) - min(server.clock(w) for w in present) <= bound

    world.at_begin = check
    world.run(crash)
    assert world.ended == set(range(NUM_WORKERS))
    assert server.num_present == 0
    check_counts(world)


@pytest.mark.parametrize("moment", [0.5, 1.0, 1.5, 2.0])
def test_the_others_go_on_when_the_one_they_wait_for_leaves(moment: float) -> None:
    server = make_server(Synchronous(), 3, limit=4)
    world = World(server, fixed(1, 1, 100))

    async def lose_one(tasks: list[EngineTask]) -> None:
        await pause(moment)
        tasks[2].cancel()
        server.leave(2)

    world.run(lose_one)
    # those by a push; where the others wait already, the first update comes by the leaving
    by_push = [1.0, 2.0, 3.0, 4.0] if moment <= 1 else [moment + 1, moment + 2, moment + 3]
    assert world.updates == by_push
    assert server.version == 4


def test_k_is_at_most_the_number_of_workers_left() -> None:
    server = make_server(KAsync(3), 4)
    server.push(0, np.ones(2), 0)
    server.push(1, np.ones(2), 0)
    server.leave(3)
    assert server.version == 0
    server.leave(2)
    assert (server.version, server.num_applied, server.num_collected) == (1, 2, 0)


def test_synchronous_training_waits_for_all_that_are_left_also_beside_one_that_pushed_last() -> (
    None
):
    server = make_server(Synchronous(), 3)
    server.push(0, np.ones(2), 0)
    server.leave(0)
    assert server.push(1, np.ones(2), 0).is_collected
    assert server.push(2, np.ones(2), 0).is_applied
    assert server.num_applied == 3
    assert server.push(1, np.ones(2), 1).is_collected
    assert server.push(2, np.ones(2), 1).is_applied
    assert server.num_applied == 5


def test_the_last_to_leave_makes_no_update() -> None:
    server = make_server(Synchronous(), 2)
    server.push(0, np.ones(2), 0)
    server.leave(0)
    server.leave(1)
    assert (server.version, server.num_collected) == (0, 1)


def test_stale_synchronous_waits_for_one_that_crashed_until_it_is_back() -> None:
    server = make_server(StaleSynchronous(1), 2)
    world = World(server, fixed(1, 1), num_steps=4)

    async def crash(tasks: list[EngineTask]) -> None:
        await pause(1.5)
        tasks[1].cancel()
        await pause(18.5)
        tasks[1] = current_engine().start(world.work, 1)

    world.run(crash)
    begins = [time for time, worker, what in world.log if worker == 0 and "pulled" in what]
    assert begins == [0, 1, 2, 21]  # two steps ahead of the one step that worker 1 had finished


def test_a_synchronous_worker_that_crashed_after_its_push_waits_again_when_it_is_back() -> None:
    server = make_server(Synchronous(), 2, limit=2)
    world = World(server, fixed(1, 10))

    async def crash(tasks: list[EngineTask]) -> None:
        await pause(2)
        tasks[0].cancel()
        await pause(1)
        tasks[0] = current_engine().start(world.work, 0)

    world.run(crash)
    assert world.updates == [10, 20]
    assert world.num_begun == [2, 2]
    check_counts(world)


def test_a_worker_that_was_made_to_leave_ends_at_its_next_step() -> None:
    server = make_server(StaleSynchronous(0), 2, limit=20)
    world = World(server, fixed(1, 5))

    async def tell(tasks: list[EngineTask]) -> None:
        await pause(2)  # worker 0 waits for the slow one
        server.leave(0)

    world.run(tell)
    assert (2.0, 0, "stopped") in world.log
    assert server.clock(1) == 19


def test_what_comes_from_a_worker_that_has_left_is_discarded() -> None:
    server = make_server(Asynchronous(), 2)
    server.leave(1)
    assert server.push(1, np.ones(2), 0).is_discarded
    assert server.version == 0


def test_closing_ends_every_wait() -> None:
    server = make_server(KSync(3), 3)
    world = World(server, fixed(1, 1, 100))

    async def close(tasks: list[EngineTask]) -> None:
        await pause(7)
        server.close()

    world.run(close)
    assert {entry for entry in world.log if entry[0] > 1} == {
        (7.0, 2, "abandoned"), (7.0, 0, "stopped"), (7.0, 1, "stopped"), (7.0, 2, "stopped"),
    }  # fmt: skip
    assert server.push(0, np.ones(2), 0).is_discarded


def test_all_may_come_back_after_all_have_left() -> None:
    server = make_server(Synchronous(), 2)
    for worker in (0, 1):
        server.leave(worker)
    server.join(0)
    assert server.num_present == 2  # no worker trains alone while the other still opens
    assert server.push(0, np.ones(2), 0).is_collected
    server.join(1)
    assert server.push(1, np.ones(2), 0).is_applied


def test_one_that_comes_back_late_starts_with_the_slowest() -> None:
    server = make_server(StaleSynchronous(1), 3)
    server.leave(2)
    for worker in (0, 1) * 5:
        server.push(worker, np.ones(2), server.version)
    server.join(2)
    assert [server.clock(worker) for worker in range(3)] == [5, 5, 5]


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_a_cancelled_wait_leaves_nothing_behind(protocol: Protocol) -> None:
    server = make_server(protocol, NUM_WORKERS)
    world = World(server, fixed(1, 2, 3, 400))

    async def cancel(tasks: list[EngineTask]) -> None:
        await pause(50)
        for task in tasks:
            task.cancel()

    world.run(cancel)
    waits: Any = server._waits
    assert not waits.for_next
    assert not waits.watchers
    assert len(waits._for_slowest) == 0
    assert not any(waits._parked.values())
