"""Trainings that make no update for long are errors, if that is asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asynchooks import GlobalStepWaiterHook, StepUnreachableError
from asynchooks.protocols import (
    ParameterServer,
    Protocol,
)
from asynchooks.simulation import (
    Constant,
    Crashes,
    DeadlockError,
    Exponential,
    LivelockError,
    Worker,
)

from .clusters import new_cluster


class Never(Protocol):
    """No number of gradients makes an update; no worker waits."""

    def num_gradients(self, server: ParameterServer) -> int:
        return 1_000_000


class ForOthers(Protocol):
    """Every worker waits for an update that takes one gradient more than there are workers."""

    def num_gradients(self, server: ParameterServer) -> int:
        return server.num_workers + 1

    async def begin_step(self, server: ParameterServer, worker: int) -> None:
        await server.wait_for_update(worker)


def test_sessions_that_all_wait_end_by_their_own_error(backend: Any) -> None:
    """The step says so as soon as all sessions are open together."""
    cluster = new_cluster(3, backend, failures=[Crashes(Exponential(10.0), Exponential(5.0))])
    errors = []

    async def program(worker: Worker) -> None:
        try:
            async with worker.session([GlobalStepWaiterHook(100)]) as session:
                await session.run("computed")
        except StepUnreachableError as error:
            errors.append(str(error))

    cluster.run(program)
    assert errors


@pytest.mark.parametrize(
    ("options", "error", "how"),
    [
        ({"protocol": Never()}, LivelockError, "go on"),
        ({"protocol": ForOthers()}, DeadlockError, "wait"),
        (
            {"compute": Constant(10.0), "failures": [Crashes(Constant(3.0), Constant(1.0))]},
            LivelockError, "go on",
        ),
    ],
)  # fmt: skip
def test_training_that_makes_no_update_for_long_is_an_error(
    backend: Any, options: dict[str, Any], error: type[Exception], how: str
) -> None:
    cluster = new_cluster(3, backend, **options)
    with pytest.raises(error, match="no update came from virtual time 0.0 to 50.0") as caught:
        cluster.run(updates=10, max_secs_without_update=50.0)
    assert f"while the tasks {how}:\n" in str(caught.value)
    assert "worker 2" in str(caught.value)
    assert cluster.simulation.now == 50.0


def test_the_seconds_count_from_the_last_update(backend: Any) -> None:
    async def program(worker: Worker) -> None:
        for version in range(20):
            await worker.compute(4.0)
            await worker.push(np.zeros(1), version)
        while True:
            await worker.compute(4.0)

    with pytest.raises(LivelockError, match="from virtual time 80.0 to 85.0, for "):
        new_cluster(1, backend).run(program, max_secs_without_update=5.0)


@pytest.mark.parametrize("secs", [0, math.inf, "5"])
def test_other_seconds_than_that_are_refused(secs: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_secs_without_update is "):
        new_cluster(2).run(updates=1, max_secs_without_update=secs)
