"""What a parameter server refuses, and what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks import GlobalStep
from asynchooks.protocols import Asynchronous, KBatchAsync, ParameterServer, Protocol

from .worlds import make_server


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
