"""A run of several processes around a parameter server, recorded: one trace of all their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks._engine.recording import Kind
from asynchooks.distributed import host_parameter_server
from asynchooks.planning import Trace
from asynchooks.protocols import Asynchronous, Protocol, Synchronous

from .clusters import addresses, native, results
from .programs import train_recorded

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

NUM_PROCESSES, NUM_WORKERS, NUM_STEPS = 2, 4, 10


async def recorded(client: Any, directory: Path, protocol: Protocol) -> Trace:
    """The trace of two processes, of two workers each, and of their server."""
    host, *places = addresses(client)
    server_path, *paths = (directory / f"{name}.pftrace" for name in ("server", "0", "1"))
    async with (
        native(client) as own,
        host_parameter_server(
            own, np.ones(2), protocol, num_workers=NUM_WORKERS, worker=host, trace=server_path
        ) as server,
    ):
        parts = [
            client.submit(
                train_recorded, server.address, process, NUM_STEPS, os.fspath(path),
                workers=[place], pure=False,
            )
            for process, (path, place) in enumerate(zip(paths, places[:NUM_PROCESSES], strict=True))
        ]  # fmt: skip
        await results(parts)
    return Trace.read(server_path, *paths)


async def test_requests_hold_what_the_server_does_for_them(client: Any, tmp_path: Path) -> None:
    trace = await recorded(client, tmp_path, Asynchronous())
    num = NUM_WORKERS * NUM_STEPS
    requests, served = (trace.find("push", each) for each in (Kind.REQUEST, Kind.SERVE))
    assert len(requests) == len(served) == num
    assert sorted(set(requests.worker)) == [0, 1, 2, 3]
    assert requests.is_on_session.all()
    assert requests.secs.mean() > served.secs.mean() > 0
    # on one clock, each is served between some request and its answer
    assert all(
        ((requests.begun <= begun) & (ended <= requests.ended)).any()
        for begun, ended in zip(served.begun, served.ended, strict=True)
    )
    assert len(trace.find("begin_step", Kind.REQUEST)) == num
    assert len(trace.find("compute", Kind.WORK)) == num
    assert trace.about["server"]["requests"]["push"] == num
    assert trace.about["server"]["processor_secs"] > 0
    assert trace.is_complete


async def test_pushes_and_updates_are_marked_once(client: Any, tmp_path: Path) -> None:
    trace = await recorded(client, tmp_path, Asynchronous())
    num = NUM_WORKERS * NUM_STEPS
    assert len(trace.marks["push"].time) == len(trace.marks["update"].time) == num
    figures = trace.figures()
    assert 0 < figures.staleness <= NUM_WORKERS
    assert figures.rate > 0


async def test_waits_for_the_protocol_are_no_requests(client: Any, tmp_path: Path) -> None:
    trace = await recorded(client, tmp_path, Synchronous())
    assert len(trace.marks["update"].time) == NUM_STEPS
    assert trace.figures().staleness == 0
    assert any("permission" in name for name in trace.spans[Kind.WAIT])


async def test_a_path_that_is_none_is_refused(client: Any) -> None:
    with pytest.raises(TypeError, match=r"trace is 3; give the path of a file, or None"):
        async with native(client) as own, host_parameter_server(
            own, np.ones(2), Asynchronous(), num_workers=1, trace=3,  # type: ignore[arg-type]
        ):  # fmt: skip
            raise AssertionError
