"""Protocol: who waits for whom, and which gradients make an update. It holds no state itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._server import ParameterServer


class Protocol(ABC):
    """Says which gradients make an update, and when a worker waits.

    You make it and give it to a `ParameterServer`, which asks it; it is closed by nobody. All
    state is the server's, so that one protocol may serve several. `num_gradients` is enough for
    one of your own. To wait, await `server.wait_for_update`, `server.wait_for_slowest` or
    `server.global_step.wait_for`.

    Example:
        class Patient(Protocol):
            \"\"\"Two gradients make an update, and nobody begins a step on a half-made one.\"\"\"

            def num_gradients(self, server):
                return min(2, server.num_contributing)

            async def begin_step(self, server, worker):
                await server.wait_for_update(worker)

        server = ParameterServer(np.zeros(3), Patient(), num_workers=4)
    """

    abandons_stale = False
    """Whether an update makes the computations under way useless, which are cancelled then."""

    @abstractmethod
    def num_gradients(self, server: ParameterServer) -> int:
        """How many gradients make one update; asked at each push, and when a worker has left."""

    def accepts(self, server: ParameterServer, worker: int, version: int) -> bool:
        """Whether a gradient counts that was computed at this version; else it is discarded."""
        return True

    async def begin_step(self, server: ParameterServer, worker: int) -> None:  # noqa: B027
        """Wait before the pull, if need be."""

    async def end_step(self, server: ParameterServer, worker: int) -> None:  # noqa: B027
        """Wait after the push, if need be."""

    def check(self, num_workers: int) -> None:  # noqa: B027
        """Raise ValueError if this is nothing for so many workers."""
