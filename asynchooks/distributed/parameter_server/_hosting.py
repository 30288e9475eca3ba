"""host_parameter_server: starts a parameter server on a Dask worker and closes it at the end."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from ..._check import number, path
from ..._engine.base import Engine, async_block
from ..._engine.current import current_engine
from ..._engine.threads import run_blocking
from ..._errors import StepSourceLostError
from ...protocols import Protocol
from ...protocols._updates import Update
from ._calls import ActorCalls
from ._host import Host
from ._messages import ServerAddress
from ._remote import RemoteParameterServer

_LEAST_LEASE_SECS = 0.1
_CLOSE_SECS = 5.0


@async_block("host_parameter_server(...)")
async def host_parameter_server(
    client: Any,
    parameters: Any,
    protocol: Protocol,
    *,
    num_workers: int,
    learning_rate: float | Callable[[int], float] = 0.1,
    update: Update | None = None,
    worker: str | None = None,
    training: str | None = None,
    lease_secs: float = 30.0,
    trace: str | os.PathLike[str] | None = None,
) -> AsyncIterator[RemoteParameterServer]:
    """Have a Dask worker hold the parameters of a training; at the end of the block it is closed.

    It is an actor there, on the worker's event loop: a step function that computes on that event
    loop delays all processes, so give it a worker of its own, or compute in threads. Processes
    reach it by `RemoteParameterServer(server.address)`. It opens no port: the ports of the workers,
    and the access to them, are Dask's (`host=`, `Security`). The state is lost with the worker:
    save what `await server.state_dict()` returns.

    Args:
        client: a `distributed.Client`, asynchronous on this event loop, or synchronous.
        parameters, protocol, learning_rate, update: as `ParameterServer` takes them; they are
            pickled.
        num_workers: of all processes together, >= 1; all count as present until they leave.
        worker: the address of the Dask worker; None: any one.
        training: the name of a `DaskCluster` whose step shows the updates to processes that do not
            train here, such as an evaluator, and whose limit holds here; None: none.
        lease_secs: seconds of silence after which a process's workers count as gone, >= 0.1: more
            than the longest computation on its event loop. Infinite: the others wait.
        trace: the path of a file, on the worker's machine, into which the server records what it
            does for each request, as `asynchooks.planning.record` does; None: none. With the files
            of the processes that train, which record their requests, it makes one trace.

    Raises:
        ValueError, TypeError: an argument is not what it should be.

    Example:
        async with Client(address, asynchronous=True) as client:
            protocol = StaleSynchronous(3)
            async with host_parameter_server(
                client, np.zeros(3), protocol, num_workers=12
            ) as server:
                await client.gather([client.submit(train, server.address, i) for i in range(3)])
    """
    expected = f"seconds >= {_LEAST_LEASE_SECS}, or math.inf"
    number("lease_secs", lease_secs, least=_LEAST_LEASE_SECS, finite=False, expected=expected)
    file = None if trace is None else path("trace", trace, "the path of a file, or None")
    engine = current_engine()
    options = {"learning_rate": learning_rate, "update": update}
    where = None if worker is None else [worker]
    actor = client.submit(
        Host, parameters, protocol, num_workers, lease_secs, training, options,
        file, actor=True, pure=False, workers=where,
    )  # fmt: skip
    try:
        await _result(engine, client, actor.result)
        found = await _result(engine, client, lambda: client.who_has([actor]))
        address = ServerAddress(found[actor.key][0], actor.key)
        calls = ActorCalls(address, client)
        await calls.call("open", client.scheduler.address)
        try:
            async with RemoteParameterServer(address, client) as server:
                yield server
        finally:
            with engine.shielded(math.inf), suppress(StepSourceLostError):  # it has died
                if not await calls.is_gone(engine.now() + _CLOSE_SECS):
                    await calls.call("aclose", until=engine.now() + _CLOSE_SECS)
    finally:
        actor.release()


async def _result(engine: Engine, client: Any, fn: Callable[[], Any]) -> Any:
    """The result of a call, awaited or blocking in a thread, depending on the client."""
    if client.asynchronous:
        return await fn()
    return await run_blocking(engine, fn, 0.0, "asynchooks-dask")
