"""What an update does to the parameters: real numbers, bit by bit."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.protocols import (
    Asynchronous,
    KBatchAsync,
    Synchronous,
    staleness_aware,
)

from ..simulation.clusters import new_cluster
from .worlds import server_of


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_synchronous_training_equals_full_batch_gradient_descent_bit_for_bit(seed: int) -> None:
    targets = np.random.default_rng(seed).normal(size=(5, 3)).astype(np.float32)
    weights = np.zeros(3, np.float32)
    for _ in range(7):
        total = weights - targets[0]
        for target in targets[1:]:
            total = total + (weights - target)
        weights = weights - 0.03 * (total / 5)
    cluster = new_cluster(
        5, seed=seed, parameters=np.zeros(3, np.float32), protocol=Synchronous(), learning_rate=0.03
    )
    cluster.run(gradient=lambda now, worker: now - targets[worker.index], updates=7)
    assert cluster.server.parameters.dtype == np.float32
    assert cluster.server.parameters.tobytes() == weights.tobytes()


def test_an_update_does_not_depend_on_the_order_of_arrival() -> None:
    gradients = np.array([0.1, 1e8, -1e8], np.float32)
    results = set()
    for order in itertools.permutations(range(3)):
        server = server_of(np.zeros(1, np.float32), Synchronous(), 3)
        for worker in order:
            server.push(worker, gradients[worker : worker + 1], 0)
        results.add(server.parameters.tobytes())
    assert len(results) == 1


def test_arrays_are_copied_on_entry_and_a_snapshot_stays_what_it_was() -> None:
    own, gradient = np.ones(3, np.float32), np.ones(3)
    server = server_of(own, KBatchAsync(2), learning_rate=0.5)
    own[:] = 7.0
    snapshot = server.pull(0)
    for _ in range(2):
        server.push(0, gradient, 0)
        gradient[:] = 3.0
    np.testing.assert_array_equal(snapshot.parameters, np.ones(3))
    np.testing.assert_array_equal(server.parameters, np.zeros(3))
    assert server.parameters.dtype == np.float32  # though gradients are doubles


def test_the_servers_arrays_cannot_be_changed() -> None:
    server = server_of({"w": np.ones(3)})
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            server.pull(0).parameters["w"][0] = 7.0
        server.pull(0).parameters["w"] = None
        server.push(0, {"w": np.ones(3)}, server.version)
    assert server.parameters["w"].shape == (3,)


def test_named_parameters_are_updated_each_by_an_update_of_ones_own() -> None:
    velocity = np.zeros(2)

    def momentum(parameters: Any, gradient: Any, rate: float) -> Any:
        velocity[:] = 0.5 * velocity + gradient["w"]
        return {"w": parameters["w"] - rate * velocity, "b": parameters["b"]}

    for update, w, b in ((None, [-2.0, -4.0], 1.0), (momentum, [-2.5, -5.0], 3.0)):
        server = server_of(
            {"w": np.zeros(2), "b": np.float32(3.0)}, update=update, learning_rate=1.0
        )
        for version in range(2):
            server.push(0, {"b": 1.0, "w": [1.0, 2.0]}, version)
        np.testing.assert_array_equal(server.parameters["w"], w)
        assert (server.parameters["b"].dtype, server.parameters["b"]) == (np.float32, b)


def test_an_update_that_fails_changes_nothing() -> None:
    def broken(parameters: Any, gradient: Any, rate: float) -> Any:
        raise OverflowError("too much")

    for protocol, num_collected in ((Asynchronous(), 0), (KBatchAsync(2), 1)):
        server = server_of(np.zeros(2), protocol, update=broken)
        for _ in range(num_collected):
            server.push(0, np.ones(2), 0)
        with pytest.raises(OverflowError, match="too much"):
            server.push(1, np.ones(2), 0)
        assert (server.version, server.num_applied, server.clock(1)) == (0, 0, 0)
        assert (server.num_collected, server.has_collected(1)) == (num_collected, False)


def test_gradients_with_different_rates_are_weighted_by_them() -> None:
    server = server_of(np.zeros(1), KBatchAsync(2), learning_rate=staleness_aware(1.0))
    for version in (0, 0, 0, 0):
        server.push(0, np.zeros(1), version)
    server.push(0, np.array([4.0]), 0)  # stale by 2: half the rate
    server.push(1, np.array([8.0]), 2)
    assert server.parameters[0] == -(0.5 * 4.0 + 1.0 * 8.0) / 2


NAMED = {"w": np.zeros(2)}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: server_of(np.zeros(3, int)), "parameters is of dtype int64.*floating-point"),
        (lambda: server_of({}), "parameters is empty"),
        (lambda: server_of(np.zeros(2), learning_rate=-1.0), r"learning_rate is -1\.0; give a fin"),
        (lambda: server_of(np.zeros(2)).push(0, np.zeros((1, 2)), 0), r"the shape \(1, 2\); ex"),
        (lambda: server_of(np.zeros(2)).push(0, {"w": 1}, 0), "gradient is a mapping; exp"),
        (lambda: server_of(NAMED).push(0, np.zeros(2), 0), "gradient is a ndarray"),
        (lambda: server_of(NAMED).push(0, {"v": 1}, 0), r"names \['v'\]; expected"),
        (
            lambda: server_of(NAMED, update=lambda *_: {"w": 1.0}).push(0, NAMED, 0),
            "the result of update.* has the shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make()
