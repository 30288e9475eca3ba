"""host_parameter_server: starts a parameter server on a Dask worker and closes it at the end."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from .._check import number
from .._engine.base import async_block
from .._engine.current import current_engine
from .._errors import StepSourceLostError
from ..protocols import ParameterServer, Protocol
from ..protocols._updates import Update
from ._dask_plugin import hosts_of
from ._loop import DaskLoop
from ._messages import ServerAddress
from ._remote import RemoteParameterServer
from ._served import ServedParameters

_LEAST_LEASE_SECS = 0.1
_CLOSE_SECS = 10.0


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
    lease_secs: float = 30.0,
) -> AsyncIterator[RemoteParameterServer]:
    """Have a Dask worker hold the parameters of a training, until the end of the block.

    Then the server is closed: processes that still train are stopped by StopTraining, and the state
    can be read until the last one has left.

    It runs on the event loop of that worker: a step function that computes on that event loop
    delays all processes, so give it a worker of its own, or compute in threads. Processes reach it
    by `RemoteParameterServer(server.address)`, those that do not train, too, such as an evaluator
    that waits for its `global_step`. It opens no port: the ports of the workers, and the access to
    them, are Dask's (`host=`, `Security`). The state is lost with the worker: save what
    `await server.state_dict()` returns.

    Args:
        client: a `distributed.Client`, asynchronous on this event loop, or synchronous.
        parameters, protocol, learning_rate, update: as `ParameterServer` takes them; they are
            pickled.
        num_workers: of all processes together, >= 1; all count as present until they leave.
        worker: the address of the Dask worker; None: any one.
        lease_secs: seconds of silence after which a process's workers count as gone, >= 0.1: more
            than the longest computation on its event loop. Those of a process whose connection has
            ended count as gone sooner, after 5 s. Infinite: the others wait.

    Raises:
        ValueError, TypeError: an argument is not what it should be, or the cluster has no worker.

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
    options: dict[str, Any] = {"learning_rate": learning_rate, "update": update}
    # a wrong argument is refused here, not over there
    ParameterServer(parameters, protocol, num_workers=num_workers, **options)
    loop = DaskLoop(client.loop.asyncio_loop)
    places = await loop.run(client.nthreads)
    if worker is None and not places:
        raise ValueError(f"{client!r} has no Dask worker; start one for the parameter server")
    address = ServerAddress(worker or min(places), f"asynchooks-{uuid.uuid4().hex[:12]}")

    about = address.key, parameters, protocol, num_workers, lease_secs, options
    await loop.run(client.run, open_host, *about, workers=[address.worker])
    async with RemoteParameterServer(address, client) as server:
        try:
            yield server
        finally:  # the last process to leave takes the host along
            with current_engine().shielded(_CLOSE_SECS), suppress(StepSourceLostError):
                await server.close()


async def open_host(key: str, *args: Any, dask_worker: Any) -> None:
    """On a Dask worker: make the host of this name."""
    hosts_of(dask_worker)[key] = ServedParameters(*args)
