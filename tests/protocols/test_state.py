"""A parameter server that is saved and restored goes on with bounds, numbers and counts."""

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
    MonitoredSession,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks._engine.base import EngineTask, Slot
from asynchooks._running.hook_state import load_hooks, save_hooks
from asynchooks.protocols import (
    ABANDONED,
    Asynchronous,
    KBatchAsync,
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
    staleness_aware,
)

from ..support.helpers import settle
from ..support.virtual_kernel import Trampoline
from .worlds import ALL, World, fixed, make_server, pause

PARAMETERS = {"w": np.zeros((2, 3), np.float32), "b": np.float64(1.0)}


def new_server(protocol: Protocol, num_workers: int = 3) -> ParameterServer:
    rate = staleness_aware(0.5)
    return ParameterServer(PARAMETERS, protocol, num_workers=num_workers, learning_rate=rate)


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
        assert late.value is ABANDONED
        assert not early.is_woken
        outcome, staleness = server.push(1, np.ones(2), 1)
        assert (outcome.value, staleness) == ("discarded", -1)

    engine = Trampoline()
    engine.run(main)


@pytest.mark.parametrize("protocol", [Synchronous(), StaleSynchronous(0)], ids=repr)
def test_who_waits_looks_again_after_a_restore(protocol: Protocol) -> None:
    server = make_server(protocol, 2)
    first = server.state_dict()
    world = World(server, fixed(1, 3), num_steps=4)

    async def restore(tasks: list[EngineTask]) -> None:
        await pause(5)  # worker 0 has finished its second step, and waits for worker 1
        server.load_state_dict(first)

    world.run(restore)
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
