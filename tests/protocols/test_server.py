"""ParameterServer: arguments, counts, limit; workers that leave or crash; its saved state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    StateDictSaver,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks._running.hook_state import load_hooks, save_hooks
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KBatchAsync,
    KSync,
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
    staleness_aware,
)

from ..support.helpers import settle
from ..support.virtual_kernel import Trampoline
from .worlds import ALL, World, check_counts, fixed, make_server, pause, server_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("method", ["pull", "clock", "leave", "join", "staleness_counts"])
def test_a_worker_that_the_server_does_not_have_is_refused(method: str) -> None:
    server = make_server(Asynchronous(), 2)
    for worker in (-1, 2):
        with pytest.raises(ValueError, match=f"worker is {worker}; give one from 0 to 1"):
            getattr(server, method)(worker)
        with pytest.raises(ValueError, match=f"worker is {worker}"):
            server.push(worker, np.ones(2), 0)


def test_a_server_says_what_it_needs() -> None:
    advice = r"protocol is 'sync'; give one, such as Asynchronous\(\), or parse_protocol\(text"
    with pytest.raises(TypeError, match=advice):
        ParameterServer(np.ones(2), "sync", num_workers=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers is 0; give an integer >= 1"):
        make_server(Asynchronous(), 0)
    with pytest.raises(ValueError, match=r"make it by GlobalStep\(published_only=True\)"):
        make_server(Asynchronous(), 1, global_step=GlobalStep())
    server = make_server(Asynchronous(), 1, global_step=GlobalStep(5, published_only=True))
    assert server.version == server.pull(0).version == 5
    with pytest.raises(TypeError, match="version is None; give an integer >= 0"):
        server.push(0, np.ones(2), None)  # type: ignore[arg-type]
    assert repr(server) == (
        "<ParameterServer Asynchronous() at version 5, 1 of 1 workers, 0 collected>"
    )


@pytest.mark.parametrize("number", [None, 0, -1, 2.5, 1.0, True])
@pytest.mark.parametrize("collected", [0, 1])
def test_a_number_of_gradients_that_is_none_is_refused_at_first_and_later(
    number: Any, collected: int
) -> None:
    class Fickle(Protocol):
        number: Any

        def num_gradients(self, server: ParameterServer) -> int:
            return self.number  # type: ignore[no-any-return]

    protocol = Fickle()
    protocol.number = number
    refused = rf"Fickle.num_gradients returned {number!r}; return how"
    with pytest.raises(TypeError, match=refused):
        server_of(np.zeros(1), protocol)
    protocol.number = 2
    server = server_of(np.zeros(1), protocol)
    for _ in range(collected):
        server.push(0, np.ones(1), 0)
    protocol.number = number
    with pytest.raises(TypeError, match=refused):
        server.push(1, np.ones(1), 0)
    assert (server.version, server.num_collected, server.num_applied) == (0, collected, 0)
    assert server.clock(1) == 0
    protocol.number = collected + 1
    assert server.push(1, np.ones(1), 0).is_applied


@pytest.mark.parametrize("rate", [-1.0, -1, float("nan"), float("inf"), None, "0.1", True])
@pytest.mark.parametrize("protocol", [Asynchronous(), KBatchAsync(2)], ids=repr)
def test_a_learning_rate_that_a_function_gives_is_checked_too(
    rate: Any, protocol: Protocol
) -> None:
    rates = iter([0.5, 0.5, rate, rate])
    server = server_of(np.zeros(1), protocol, learning_rate=lambda _: next(rates))
    for _ in range(2):
        server.push(0, np.ones(1), 0)
    pushes = 1 if protocol == Asynchronous() else 2
    before = (server.version, server.num_applied)
    for _ in range(pushes - 1):
        server.push(0, np.ones(1), server.version)
    with pytest.raises((TypeError, ValueError), match=rf"learning_rate\(0\) is {rate!r}; give a"):
        server.push(0, np.ones(1), server.version)
    assert (server.version, server.num_applied) == before
    assert server.parameters == -0.5 * before[0]


def test_a_function_may_give_any_real_number_as_the_rate() -> None:
    rates: list[Any] = [0, np.float32(0.5), np.float64(0.25), 1]
    server = server_of(np.zeros(1), learning_rate=rates.__getitem__)
    for staleness, moved in enumerate([0.0, 0.5, 0.75, 1.75]):
        server.push(0, np.ones(1), server.version - staleness)
        assert server.parameters == -moved


def test_what_a_restore_undoes_is_counted() -> None:
    server = make_server(KBatchAsync(2), 2)
    for _ in range(3):
        server.push(0, np.ones(2), 0)
    state = server.state_dict()
    for _ in range(4):
        server.push(1, np.ones(2), server.version)
    server.push(1, np.ones(2), 99)  # of a later version: discarded
    server.load_state_dict(state)
    assert (server.num_applied, server.num_collected, server.num_discarded) == (2, 1, 0)
    assert server.num_undone == 5
    fresh = make_server(KBatchAsync(2), 2)
    fresh.load_state_dict(state)
    assert fresh.num_undone == 0


async def test_at_the_limit_no_step_begins() -> None:
    server = make_server(KBatchAsync(1), 1, limit=1)
    await server.begin_step(0)
    server.push(0, np.ones(2), 0)
    assert server.is_over
    with pytest.raises(StopTraining, match="has made its last update"):
        await server.begin_step(0)
    await server.end_step(0)
    server.close()
    with pytest.raises(StopTraining, match="is closed"):
        await server.begin_step(0)


async def test_a_worker_that_has_left_begins_no_step() -> None:
    server = make_server(Asynchronous(), 2)
    server.leave(1)
    with pytest.raises(StopTraining, match="worker 1 has left"):
        await server.begin_step(1)


@pytest.mark.parametrize(
    ("protocol", "num_workers", "limit"),
    [
        (StaleSynchronous(0), 3, 2),  # worker 2 has not finished a step
        (Synchronous(), 2, 1), (KSync(2), 2, 1), (KAsync(2), 2, 1),
    ],
)  # fmt: skip
async def test_a_worker_that_waits_at_the_limit_is_woken_and_begins_no_step(
    protocol: Protocol, num_workers: int, limit: int
) -> None:
    server = make_server(protocol, num_workers, limit=limit)
    server.push(0, np.ones(2), 0)

    async def is_refused() -> None:  # as one that crashed and is back
        with pytest.raises(StopTraining, match="has made its last update"):
            await server.begin_step(0)

    async with anyio.create_task_group() as group:
        group.start_soon(is_refused)
        await settle()
        server.push(1, np.ones(2), 0)


async def test_what_was_collected_of_more_workers_is_applied_when_a_step_begins() -> None:
    server, fewer = make_server(Synchronous(), 3), make_server(Synchronous(), 3)
    for worker in (0, 1):
        server.push(worker, np.ones(2), 0)
    fewer.leave(2)
    fewer.load_state_dict(server.state_dict())
    assert fewer.version == 0
    await fewer.begin_step(0)
    assert (fewer.version, fewer.num_applied) == (1, 2)


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
    server = make_server(protocol, NUM_WORKERS)
    world = World(server, lambda w, n: secs[(3 * w + n) % len(secs)], num_steps=5)

    async def again(worker: int, after: float) -> None:
        await pause(after)
        await world.work(worker)

    async def crash() -> None:
        for after, worker, absence in crashes:
            await pause(after)
            world.cancel(worker)
            await world.tasks[worker].wait()
            if worker in world.ended:
                continue
            if absence is None:
                server.leave(worker)
                world.ended.add(worker)
            else:
                world.tasks[worker] = current_engine().start(again, worker, absence)

    bound = protocol.staleness if isinstance(protocol, StaleSynchronous) else None

    def check(worker: int) -> None:
        present = [w for w in range(NUM_WORKERS) if w not in world.ended]
        if bound is not None:
            assert server.clock(worker) - min(server.clock(w) for w in present) <= bound

    world.at_begin = check
    world.run(beside=crash)
    assert world.ended == set(range(NUM_WORKERS))
    assert server.num_present == 0
    check_counts(world)


@pytest.mark.parametrize("moment", [0.5, 1.0, 1.5, 2.0])
def test_the_others_go_on_when_the_one_they_wait_for_leaves(moment: float) -> None:
    server = make_server(Synchronous(), 3, limit=4)
    world = World(server, fixed(1, 1, 100))

    def lose_one() -> None:
        world.cancel(2)
        server.leave(2)

    world.run((moment, lose_one))
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

    world.run((1.5, lambda: world.cancel(1)), (20.0, lambda: world.restart(1)))
    begins = [time for time, worker, what in world.log if worker == 0 and "pulled" in what]
    assert begins == [0, 1, 2, 21]  # two steps ahead of the one step that worker 1 had finished


def test_a_synchronous_worker_that_crashed_after_its_push_waits_again_when_it_is_back() -> None:
    server = make_server(Synchronous(), 2, limit=2)
    world = World(server, fixed(1, 10))

    world.run((2.0, lambda: world.cancel(0)), (3.0, lambda: world.restart(0)))
    assert world.updates == [10, 20]
    assert world.num_begun == [2, 2]
    check_counts(world)


def test_a_worker_that_was_made_to_leave_ends_at_its_next_step() -> None:
    server = make_server(StaleSynchronous(0), 2, limit=20)
    world = World(server, fixed(1, 5))

    world.run((2.0, lambda: server.leave(0)))  # worker 0 waits for the slow one
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

    world.run((7.0, server.close))
    assert {entry for entry in world.log if entry[0] > 1} == {
        (7.0, 2, "abandoned"), (7.0, 0, "stopped"), (7.0, 1, "stopped"), (7.0, 2, "stopped"),
    }  # fmt: skip
    assert server.push(0, np.ones(2), 0).is_discarded
    assert (server.version, server.num_discarded) == (0, 1)


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

    world.run((50.0, lambda: [task.cancel() for task in world.tasks]))
    waits: Any = server._waits
    assert not waits._for_update
    assert not waits.watchers
    assert not any(waits._for_slowest.values())


PARAMETERS = {"w": np.zeros((2, 3), np.float32), "b": np.float64(1.0)}


def new_server(protocol: Protocol) -> ParameterServer:
    return server_of(PARAMETERS, protocol, 3, learning_rate=staleness_aware(0.5))


def push_some(server: ParameterServer, seed: int, num_pushes: int) -> None:
    draws, generator = random.Random(seed), np.random.default_rng(seed)
    for _ in range(num_pushes):
        version = max(0, server.version - draws.randrange(3))
        gradient = {"w": generator.normal(size=(2, 3)), "b": generator.normal()}
        server.push(draws.randrange(server.num_workers), gradient, version)


def same_bits(one: Any, other: Any) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in PARAMETERS)


@pytest.mark.parametrize("protocol", ALL, ids=repr)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), before=st.integers(0, 12))
def test_a_restored_server_goes_on_as_the_one_that_was_saved(
    protocol: Protocol, seed: int, before: int
) -> None:
    server, other = new_server(protocol), new_server(protocol)
    push_some(server, seed, before)
    load_hooks([ProtocolHook(other, 0)], save_hooks([ProtocolHook(server, 0)]))
    for each in (server, other):
        push_some(each, seed + 1, 9)
    assert same_bits(server.parameters, other.parameters)
    assert other.parameters["w"].dtype == np.float32
    for name in ("version", "num_applied", "num_collected", "num_discarded"):
        assert getattr(server, name) == getattr(other, name)
    for worker in (None, 0, 1, 2):
        assert server.staleness_counts(worker) == other.staleness_counts(worker)
    for worker in range(3):
        assert server.clock(worker) == other.clock(worker)
        assert server.has_collected(worker) == other.has_collected(worker)


def test_a_state_dict_saver_takes_a_server(tmp_path: Path) -> None:
    server, other = new_server(KBatchAsync(3)), new_server(KBatchAsync(3))
    push_some(server, 1, 10)
    assert server.num_collected == 1
    StateDictSaver(server=server).save(str(tmp_path / "state"))
    StateDictSaver(server=other).restore(str(tmp_path / "state"))
    for each in (server, other):
        push_some(each, 2, 5)
    assert same_bits(server.parameters, other.parameters)
    assert server.staleness_counts() == other.staleness_counts()


def test_only_the_hook_of_worker_0_saves_unless_it_is_set_otherwise() -> None:
    server = new_server(Asynchronous())
    assert ProtocolHook(server, 0).state_dict()["version"] == 0
    assert ProtocolHook(server, 1).state_dict() == {}
    assert ProtocolHook(server, 0, saves_server=False).state_dict() == {}
    assert ProtocolHook(server, 1, saves_server=True).state_dict()["version"] == 0


def test_a_restored_array_is_read_only() -> None:
    server = make_server(Asynchronous(), 1)
    server.load_state_dict({**server.state_dict(), "parameters": np.full(2, 7.0)})
    with pytest.raises(ValueError, match="read-only"):
        server.parameters[0] = 1.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clocks": np.zeros(2, np.int64)}, "the state is of 2 workers; expected 3"),
        ({"parameters": np.zeros(2)}, "the saved parameters is a ndarray; expected a mapping"),
        ({"parameters": {"w": np.zeros(2), "b": 0.0}}, r"parameters\['w'\] has the shape \(2,\)"),
        ({"collected": [{"worker": 0, "version": 0, "value": 3.0}]}, "a saved gradient is a float"),
    ],
)
def test_a_state_of_another_server_is_refused_and_changes_nothing(
    change: dict[str, Any], match: str
) -> None:
    server = new_server(KBatchAsync(3))
    push_some(server, 1, 10)
    before, parameters = server.version, server.parameters
    with pytest.raises((ValueError, TypeError), match=match):
        server.load_state_dict({**new_server(Asynchronous()).state_dict(), **change})
    assert server.version == before
    assert same_bits(server.parameters, parameters)
    assert server.num_collected == 1


def test_what_was_computed_on_a_version_that_is_undone_comes_to_nothing() -> None:
    async def main() -> None:
        server = make_server(Asynchronous(), 2)
        state = server.state_dict()
        server.push(0, np.ones(2), 0)
        late, early = Slot(engine, "version 1"), Slot(engine, "version 0")
        server.watch_update(1, late)
        server.watch_update(0, early)
        server.load_state_dict(state)
        assert (server.version, server.global_step.value) == (0, 0)
        assert late.is_woken
        assert not early.is_woken
        outcome, staleness = server.push(1, np.ones(2), 1)
        assert (outcome.value, staleness) == ("discarded", -1)

    engine = Trampoline()
    engine.run(main)


@pytest.mark.parametrize("protocol", [Synchronous(), StaleSynchronous(0)], ids=repr)
def test_a_worker_that_waits_checks_again_after_a_restore(protocol: Protocol) -> None:
    server = make_server(protocol, 2)
    first = server.state_dict()
    world = World(server, fixed(1, 3), num_steps=4)

    # worker 0 has finished its second step, and waits for worker 1
    world.run((5.0, lambda: server.load_state_dict(first)))
    assert world.ended == {0, 1}
    begins = [entry for entry in world.log if "pulled" in entry[2] and entry[0] == 5]
    # where worker 1 computed on a version that is undone, it begins again, too
    assert [worker for _, worker, _ in begins] == [0, 1]


@pytest.mark.anyio
async def test_the_bound_holds_in_training_that_is_resumed(tmp_path: Path) -> None:
    """Two workers are saved when worker 0 is ahead; resumed, it waits for the other one first."""
    order: list[int] = []

    async def train(server: ParameterServer, last_step: int) -> None:
        async def worker(index: int) -> None:
            async def step() -> dict[str, Any]:
                version = server.pull(index).version
                await anyio.lowlevel.checkpoint()
                server.push(index, np.ones(2), version)
                order.append(index)
                ahead = server.clock(index) - min(server.clock(0), server.clock(1))
                assert ahead <= 2
                return {"loss": 0.5}

            hooks: list[Any] = [ProtocolHook(server, index), StopAtStepHook(last_step=last_step)]
            if index == 0:
                saver = StateDictSaver(server=server)
                hooks.append(CheckpointSaverHook(str(tmp_path), save_steps=2, saver=saver))
            creator = FunctionSessionCreator(step, global_step=server.global_step)
            async with MonitoredSession(hooks, creator) as session:
                if index == 1 and last_step == 2:
                    return  # saved with a clock of 0
                while not session.should_stop():
                    await session.run("loss")

        async with anyio.create_task_group() as group:
            group.start_soon(worker, 0)
            await server.global_step.wait_for(2)  # made, or restored in a thread
            await settle()
            if last_step > 2:
                assert server.clock(0) - server.clock(1) == 2
                assert server.version == 2
            group.start_soon(worker, 1)

    server = make_server(StaleSynchronous(1), 2, learning_rate=0.5)
    await train(server, 2)
    assert order == [0, 0]
    order.clear()
    resumed = make_server(StaleSynchronous(1), 2, learning_rate=0.5)
    await train(resumed, 6)
    assert order[0] == 1
    assert resumed.version == 6
    assert resumed.num_applied == 6
    np.testing.assert_array_equal(resumed.parameters, np.full(2, 1.0 - 6 * 0.5))
