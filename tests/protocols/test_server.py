"""ParameterServer: its arguments, its counts, and its limit."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import GlobalStep, StopTraining
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KBatchAsync,
    KSync,
    ParameterServer,
    Protocol,
    StaleSynchronous,
    Synchronous,
)

from ..support.helpers import settle
from .worlds import make_server

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


@pytest.mark.parametrize("number", [None, 0, 1.5, True])
def test_a_protocol_that_asks_for_no_number_of_gradients_is_refused(number: Any) -> None:
    class Undecided(Protocol):
        def num_gradients(self, server: ParameterServer) -> int:
            return number  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=rf"Undecided.num_gradients returned {number!r}; return"):
        ParameterServer(np.zeros(1), Undecided(), num_workers=2)


@pytest.mark.parametrize("number", [None, 0, -1, 2.5, 1.0, True])
@pytest.mark.parametrize("collected", [0, 1])
def test_a_later_number_of_gradients_that_is_none_is_refused(number: Any, collected: int) -> None:
    class Fickle(Protocol):
        number: Any = 2

        def num_gradients(self, server: ParameterServer) -> int:
            return self.number  # type: ignore[no-any-return]

    protocol = Fickle()
    server = ParameterServer(np.zeros(1), protocol, num_workers=2)
    for _ in range(collected):
        server.push(0, np.ones(1), 0)
    protocol.number = number
    with pytest.raises(TypeError, match=rf"Fickle.num_gradients returned {number!r}; return how"):
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
    server = ParameterServer(
        np.zeros(1), protocol, num_workers=2, learning_rate=lambda _: next(rates)
    )
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
    server = ParameterServer(
        np.zeros(1), Asynchronous(), num_workers=1, learning_rate=rates.__getitem__
    )
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


def test_a_gradient_for_a_closed_server_is_discarded() -> None:
    server = make_server(Asynchronous(), 1)
    server.close()
    assert server.push(0, np.ones(2), 0).is_discarded
    assert (server.version, server.num_discarded) == (0, 1)


async def test_a_worker_that_has_left_begins_no_step() -> None:
    server = make_server(Asynchronous(), 2)
    server.leave(1)
    with pytest.raises(StopTraining, match="worker 1 has left"):
        await server.begin_step(1)


async def _is_refused(server: ParameterServer) -> None:
    with pytest.raises(StopTraining, match="has made its last update"):
        await server.begin_step(0)


async def test_a_worker_that_waits_for_the_slowest_is_woken_at_the_limit() -> None:
    server = make_server(StaleSynchronous(0), 3, limit=2)
    server.push(0, np.ones(2), 0)
    async with anyio.create_task_group() as group:
        group.start_soon(_is_refused, server)
        await settle()
        server.push(1, np.ones(2), 0)  # worker 2 has not finished a step


@pytest.mark.parametrize("protocol", [Synchronous(), KSync(2), KAsync(2)])
async def test_a_worker_that_waits_for_the_last_update_begins_no_step_after_it(
    protocol: Protocol,
) -> None:
    server = make_server(protocol, 2, limit=1)
    server.push(0, np.ones(2), 0)
    async with anyio.create_task_group() as group:
        group.start_soon(_is_refused, server)  # as one that crashed and is back
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
