"""Where a Dask scheduler is, and how our plugin gets there. It keeps no connection."""

from __future__ import annotations

import inspect
from typing import Any

import distributed
from distributed.comm import connect

from ._dask_plugin import StepPlugin


class Place:
    """Where a scheduler is, and how its plugin gets there: by a client, or an address alone."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self.address = address

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed by whoever made it, or gave up reconnecting."""
        return self._client is not None and self._client.status in ("closed", "closing")

    async def connect(self, timeout_secs: float) -> Any:
        if self._client is None:
            arguments = distributed.Security().get_connection_args("client")
        else:
            arguments = self._client.security.get_connection_args("client")
        try:
            return await connect(self.address, timeout=timeout_secs, **arguments)
        except ValueError as error:  # no address at all
            raise ConnectionError(str(error)) from error
        except TypeError:  # Dask's word for it
            if arguments.get("ssl_context") is not None or not self.address.startswith("tls:"):
                raise
            raise ConnectionError(
                f"there are no certificates for {self.address}; give a Client that has them "
                "(security=...), or set distributed.comm.tls in Dask's configuration"
            ) from None

    async def register(self, timeout_secs: float) -> None:
        if self._client is not None:
            await _awaited(self._client.register_plugin(StepPlugin()))
            return
        async with distributed.Client(
            self.address, asynchronous=True, set_as_default=False, timeout=timeout_secs
        ) as client:
            await _awaited(client.register_plugin(StepPlugin()))


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
