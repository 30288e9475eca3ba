"""The end of training, as workers see it that ask for their next step."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from asynchooks import StopTraining
from asynchooks.protocols import (
    Asynchronous,
    KBatchAsync,
    ParameterServer,
    StaleSynchronous,
    Synchronous,
)

from ..support.helpers import settle
from .worlds import make_server

pytestmark = pytest.mark.anyio


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


async def _is_refused(server: ParameterServer) -> None:
    with pytest.raises(StopTraining, match="has made its last update"):
        await server.begin_step(0)


async def test_who_waits_for_the_slowest_is_woken_at_the_limit() -> None:
    server = make_server(StaleSynchronous(0), 3, limit=2)
    server.push(0, np.ones(2), 0)
    async with anyio.create_task_group() as group:
        group.start_soon(_is_refused, server)
        await settle()
        server.push(1, np.ones(2), 0)  # worker 2 has not finished a step


async def test_who_waits_for_the_last_update_begins_no_step_after_it() -> None:
    server = make_server(Synchronous(), 2, limit=1)
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
