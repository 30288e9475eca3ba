"""ParameterServer: arguments, counts, limit; workers that leave or crash; its saved state."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    GlobalStep,
    StateDictSaver,
    StopTraining,
)
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

from ..support.helpers import in_task
from .worlds import ALL, World, check_counts, fixed, make_server, pause, server_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("method", ["pull", "clock", "leave", "join", "staleness_counts", "push"])
@pytest.mark.parametrize("worker", [-1, 2])
def test_a_worker_that_the_server_does_not_have_is_refused(method: str, worker: int) -> None:
    more = [np.ones(2), 0] if method == "push" else []
    with pytest.raises(ValueError, match=f"worker is {worker}; give one from 0 to 1"):
        getattr(make_server(Asynchronous(), 2), method)(worker, *more)


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


@pytest.mark.parametrize("number", [None, 0, 2.5, True])
def test_a_number_of_gradients_that_is_none_is_refused_at_first_and_later(number: Any) -> None:
    class Fickle(Protocol):
        number: Any = 2

        def num_gradients(self, server: ParameterServer) -> int:
            return self.number  # type: ignore[no-any-return]

    protocol = Fickle()
    server = server_of(np.zeros(1), protocol)
    server.push(0, np.ones(1), 0)
    protocol.number = number
    for ask in (lambda: server_of(np.zeros(1), protocol), lambda: server.push(1, np.ones(1), 0)):
        with pytest.raises(
            TypeError, match=rf"Fickle.num_gradients returned {number!r}; return how"
        ):
            ask()
    assert (server.version, server.num_collected, server.clock(1)) == (0, 1, 0)
    protocol.number = 1  # as training goes on, fewer may be needed
    assert server.push(1, np.ones(1), 0).is_applied
    assert (server.version, server.num_applied) == (1, 2)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), None, True])
@pytest.mark.parametrize(("protocol", "num"), [(Asynchronous(), 1), (KBatchAsync(2), 2)])
def test_a_learning_rate_that_a_function_gives_is_checked_too(
    rate: Any, protocol: Protocol, num: int
) -> None:
    rates = iter([*[0.5] * num, *[rate] * num])
    server = server_of(np.zeros(1), protocol, learning_rate=lambda _: next(rates))
    for _ in range(2 * num - 1):
        server.push(0, np.ones(1), server.version)
    with pytest.raises((TypeError, ValueError), match=rf"learning_rate\(0\) is {rate!r}; give a"):
        server.push(0, np.ones(1), server.version)
    assert (server.version, server.num_applied, float(server.parameters[0])) == (1, num, -0.5)


def test_what_a_restore_undoes_is_counted_and_what_comes_of_it_is_discarded() -> None:
    server = make_server(KBatchAsync(2), 2)
    for _ in range(3):
        server.push(0, np.ones(2), 0)
    state = server.state_dict()
    for _ in range(4):
        server.push(1, np.ones(2), server.version)
    server.load_state_dict(state)
    assert (server.version, server.global_step.value, server.num_undone) == (1, 1, 4)
    assert (server.num_applied, server.num_collected, server.num_discarded) == (2, 1, 0)
    outcome, staleness = server.push(1, np.ones(2), 3)
    assert (outcome.value, staleness) == ("discarded", -2)


@pytest.mark.parametrize("protocol", [StaleSynchronous(0), Synchronous(), KAsync(2)], ids=str)
async def test_a_worker_that_waits_at_the_limit_is_woken_and_begins_no_step(
    protocol: Protocol,
) -> None:
    server = make_server(protocol, 2, limit=1)
    server.push(0, np.ones(2), 0)

    async with in_task(server.begin_step, 0) as box:  # as one that crashed and is back
        server.push(1, np.ones(2), 0)
    assert isinstance(box.error, StopTraining)
    assert server.is_over
    server.leave(1)
    with pytest.raises(StopTraining, match="has made its last update"):
        await server.begin_step(0)
    server.close()
    with pytest.raises(StopTraining, match="is closed"):
        await server.begin_step(0)


async def test_a_worker_that_has_left_begins_no_step_and_its_gradients_are_discarded() -> None:
    server = make_server(Asynchronous(), 2)
    server.leave(1)
    with pytest.raises(StopTraining, match="worker 1 has left"):
        await server.begin_step(1)
    assert server.push(1, np.ones(2), 0).is_discarded
    assert server.version == 0


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


@settings(max_examples=200)
@given(st.sampled_from(ALL), CRASHES, SECS)
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

    def check(worker: int) -> None:
        present = [w for w in range(NUM_WORKERS) if w not in world.ended]
        if isinstance(protocol, StaleSynchronous):
            ahead = server.clock(worker) - min(server.clock(w) for w in present)
            assert ahead <= protocol.staleness

    world.at_begin = check
    world.run(beside=crash)
    assert world.ended == set(range(NUM_WORKERS))
    assert server.num_present == 0
    check_counts(world)
    waits: Any = server._waits  # what it would go on holding shows nowhere else
    assert not waits._for_update
    assert not waits.watchers
    assert not any(waits._for_slowest.values())


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


def test_synchronous_training_waits_for_all_that_are_left_but_not_for_none() -> None:
    server = make_server(Synchronous(), 3)
    server.push(0, np.ones(2), 0)
    server.leave(0)
    for version, num_applied in ((0, 3), (1, 5)):
        assert server.push(1, np.ones(2), version).is_collected
        assert server.push(2, np.ones(2), version).is_applied
        assert server.num_applied == num_applied
    server.push(1, np.ones(2), 2)
    server.leave(1)
    server.leave(2)
    assert (server.version, server.num_collected) == (2, 1)
    server.join(0)
    assert server.push(0, np.ones(2), 2).is_collected  # none trains alone while others open


def test_closing_ends_every_wait() -> None:
    server = make_server(KSync(3), 3)
    world = World(server, fixed(1, 1, 100))
    world.run((7.0, server.close))
    assert {entry for entry in world.log if entry[0] > 1} == {
        (7.0, 2, "abandoned"), (7.0, 0, "stopped"), (7.0, 1, "stopped"), (7.0, 2, "stopped"),
    }  # fmt: skip
    assert server.push(0, np.ones(2), 0).is_discarded


def test_one_that_comes_back_late_starts_with_the_slowest() -> None:
    server = make_server(StaleSynchronous(1), 3)
    server.leave(2)
    for worker in (0, 1) * 5:
        server.push(worker, np.ones(2), server.version)
    server.join(2)
    assert [server.clock(worker) for worker in range(3)] == [5, 5, 5]


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


@pytest.mark.parametrize("saver", ["hook", "state dict"])
@settings(max_examples=40)
@given(protocol=st.sampled_from(ALL), seed=st.integers(0, 2**32), before=st.integers(0, 12))
def test_a_restored_server_goes_on_as_the_one_that_was_saved(
    saver: str, protocol: Protocol, seed: int, before: int
) -> None:
    server, other = new_server(protocol), new_server(protocol)
    push_some(server, seed, before)
    if saver == "hook":
        load_hooks([ProtocolHook(other, 0)], save_hooks([ProtocolHook(server, 0)]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            StateDictSaver(server=server).save(f"{directory}/state")
            StateDictSaver(server=other).restore(f"{directory}/state")
    for each in (server, other):
        push_some(each, seed + 1, 9)
    assert same_bits(server.parameters, other.parameters)
    assert not other.parameters["w"].flags.writeable
    for name in ("version", "num_applied", "num_collected", "num_discarded"):
        assert getattr(server, name) == getattr(other, name)
    assert server.staleness_counts() == other.staleness_counts()
    for worker in range(3):
        for method in ("staleness_counts", "clock", "has_collected"):
            assert getattr(server, method)(worker) == getattr(other, method)(worker)


@pytest.mark.parametrize(
    ("worker", "options", "saves"),
    [(0, {}, True), (1, {}, False), (0, {"saves_server": False}, False),
     (1, {"saves_server": True}, True)],
)  # fmt: skip
def test_only_the_hook_of_worker_0_saves_unless_it_is_set_otherwise(
    worker: int, options: dict[str, bool], saves: bool
) -> None:
    assert bool(ProtocolHook(new_server(Asynchronous()), worker, **options).state_dict()) is saves


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clocks": np.zeros(2, np.int64)}, "the state is of 2 workers; expected 3"),
        ({"parameters": {"w": np.zeros(2), "b": 0.0}}, r"parameters\['w'\] has the shape \(2,\)"),
        ({"collected": [{"worker": 0, "version": 0, "value": 3.0}]}, "a saved gradient is a float"),
    ],
)
def test_a_state_of_another_server_is_refused_and_changes_nothing(
    change: dict[str, Any], match: str
) -> None:
    server = new_server(KBatchAsync(3))
    push_some(server, 1, 10)
    before = server.state_dict()
    with pytest.raises((ValueError, TypeError), match=match):
        server.load_state_dict({**before, **change})
    assert str(server.state_dict()) == str(before)


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
