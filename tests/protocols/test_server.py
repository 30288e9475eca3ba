"""ParameterServer: arguments, counts, limit; workers that leave or crash; its saved state."""

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
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KBatchAsync,
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
    staleness_aware,
)

from ..support.helpers import in_task
from .worlds import ALL, make_server, server_of


@pytest.mark.parametrize("method", ["pull", "clock", "leave", "join", "staleness_counts", "push"])
@pytest.mark.parametrize("worker", [-1, 2])
def test_a_worker_that_the_server_does_not_have_is_refused(method: str, worker: int) -> None:
    more = [np.ones(2), 0] if method == "push" else []
    with pytest.raises(ValueError, match=f"worker is {worker}; give one from 0 to 1"):
        getattr(make_server(Asynchronous()), method)(worker, *more)


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
def test_a_number_of_gradients_that_is_none_is_refused_and_changes_nothing(number: Any) -> None:
    numbers = iter([number, 2, 2, number, 1])

    class Fickle(Protocol):
        def num_gradients(self, server: ParameterServer) -> Any:
            return next(numbers)

    match = rf"Fickle.num_gradients returned {number!r}; return how"
    with pytest.raises(TypeError, match=match):
        make_server(Fickle())
    server = make_server(Fickle())
    server.push(0, np.ones(2), 0)
    with pytest.raises(TypeError, match=match):
        server.push(1, np.ones(2), 0)
    assert (server.version, server.num_collected, server.clock(1)) == (0, 1, 0)
    assert server.push(1, np.ones(2), 0).is_applied  # as training goes on, fewer may be needed
    assert (server.version, server.num_applied) == (1, 2)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), None, True])
def test_a_learning_rate_that_a_function_gives_is_checked_too(rate: Any) -> None:
    rates = iter([0.5, 0.5, rate, rate])
    server = server_of(np.zeros(1), KBatchAsync(2), learning_rate=lambda _: next(rates))
    for _ in range(3):
        server.push(0, np.ones(1), server.version)
    with pytest.raises((TypeError, ValueError), match=rf"learning_rate\(0\) is {rate!r}; give a"):
        server.push(0, np.ones(1), server.version)
    assert (server.version, server.num_applied, float(server.parameters[0])) == (1, 2, -0.5)


def test_what_a_restore_undoes_is_counted_and_what_comes_of_it_is_discarded() -> None:
    server = make_server(KBatchAsync(2))
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
@pytest.mark.parametrize(
    ("over", "why"),
    [
        (lambda server: server.push(1, np.ones(2), server.version), "has made its last update"),
        (ParameterServer.close, "is closed"),
    ],
)
async def test_a_worker_that_waits_as_training_ends_is_woken_and_begins_no_step(
    protocol: Protocol, over: Any, why: str
) -> None:
    server = make_server(protocol, limit=1 + (protocol == StaleSynchronous(0)))
    server.push(0, np.ones(2), 0)
    async with in_task(server.begin_step, 0) as box:  # as one that crashed and is back
        over(server)
    assert isinstance(box.error, StopTraining)
    assert server.is_over
    with pytest.raises(StopTraining, match=why):
        await server.begin_step(0)
    assert server.push(0, np.ones(2), 0).is_discarded


async def test_a_worker_that_has_left_begins_no_step_and_its_gradients_are_discarded() -> None:
    server = make_server(StaleSynchronous(0))
    server.push(1, np.ones(2), 0)
    async with in_task(server.begin_step, 1) as box:
        server.leave(1)  # its own waits end
    assert "worker 1 has left the parameter server" in str(box.error)
    with pytest.raises(StopTraining, match="worker 1 has left"):
        await server.begin_step(1)
    assert server.push(1, np.ones(2), 1).is_discarded
    assert server.version == 1


async def test_what_was_collected_of_more_workers_is_applied_when_a_step_begins() -> None:
    server, fewer = make_server(Synchronous(), 3), make_server(Synchronous(), 3)
    for worker in (0, 1):
        server.push(worker, np.ones(2), 0)
    fewer.leave(2)
    fewer.load_state_dict(server.state_dict())
    assert fewer.version == 0
    await fewer.begin_step(0)
    assert (fewer.version, fewer.num_applied) == (1, 2)


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


@settings(max_examples=30)
@given(protocol=st.sampled_from(ALL), seed=st.integers(0, 2**32), before=st.integers(0, 12))
def test_a_restored_server_goes_on_as_the_one_that_was_saved(
    protocol: Protocol, seed: int, before: int
) -> None:
    server, of_hook, of_saver = (new_server(protocol) for _ in range(3))
    push_some(server, seed, before)
    ProtocolHook(of_hook, 0).load_state_dict(ProtocolHook(server, 0).state_dict())
    with tempfile.TemporaryDirectory() as directory:
        StateDictSaver(server=server).save(f"{directory}/state")
        StateDictSaver(server=of_saver).restore(f"{directory}/state")
    push_some(server, seed + 1, 9)
    for other in (of_hook, of_saver):
        push_some(other, seed + 1, 9)
        for name, array in server.parameters.items():
            assert other.parameters[name].tobytes() == array.tobytes()
            assert not other.parameters[name].flags.writeable
        assert str(other.state_dict()) == str(server.state_dict())


def test_only_the_hook_of_worker_0_saves_unless_it_is_set_otherwise() -> None:
    cases: list[tuple[int, dict[str, bool], bool]] = [
        (0, {}, True), (1, {}, False), (0, {"saves_server": False}, False),
        (1, {"saves_server": True}, True),
    ]  # fmt: skip
    for worker, options, saves in cases:
        hook = ProtocolHook(make_server(Asynchronous()), worker, **options)
        assert bool(hook.state_dict()) is saves


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
async def test_a_worker_that_waits_checks_again_after_a_restore(protocol: Protocol) -> None:
    server = make_server(protocol)
    first = server.state_dict()
    server.push(0, np.ones(2), 0)
    async with in_task(server.begin_step, 0) as box:
        server.load_state_dict(first)
    assert box.error is None
