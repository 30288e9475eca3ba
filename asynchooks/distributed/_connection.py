"""What a process asks of a parameter server elsewhere, beside its workers' steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from .._engine import current_engine
from .._global_step import GlobalStep
from ..protocols import Seats, Snapshot
from ._actor_calls import ActorCalls
from ._link import Link
from ._messages import Ending, HostStatistics, ServerAddress
from ._pending_waits import PendingWait


class Connection(Seats):
    """`RemoteParameterServer` is made of it: opened and closed, and asked for all but steps."""

    def __init__(
        self, address: ServerAddress, client: Any = None, *, open_secs: float = 30.0
    ) -> None:
        if not isinstance(address, ServerAddress):
            raise TypeError(f"address is {address!r}; give server.address of its host")
        if not (isinstance(open_secs, (int, float)) and open_secs > 0):
            raise ValueError(f"open_secs is {open_secs!r}; give seconds > 0")
        self.address = address
        self._client = client
        self._open_secs = open_secs
        self.global_step = GlobalStep(moved_elsewhere=True, keeps_limit=True)
        self._opened: Link | None = None
        self._steps: dict[int, GlobalStep] = {}  # each as its session sees it
        self._begun: dict[int, Snapshot] = {}  # what `begin_step` brought, until it is pulled
        self._ends: dict[int, tuple[PendingWait, Ending | None]] = {}  # what `push` brought

    async def __aenter__(self) -> Self:
        engine = current_engine()
        link = Link(ActorCalls(self.address, self._client), self.global_step, engine)
        await link.open(engine.now() + self._open_secs)
        self._opened = link
        return self

    async def __aexit__(self, *_: object) -> None:
        link = self._link
        with current_engine().shielded(math.inf):  # what it does is bounded
            await link.aclose(f"this process has left {self.address.key}")

    @property
    def _link(self) -> Link:
        if self._opened is None:
            raise RuntimeError(
                "the server is not open; write: async with RemoteParameterServer(address) as server"
            )
        return self._opened

    @property
    def num_workers(self) -> int:
        """Of all processes."""
        return self._link.welcome.num_workers

    @property
    def version(self) -> int:
        """The number of updates that this process has heard of."""
        return self._link.knowledge.state.version

    @property
    def is_over(self) -> bool:
        """Whether no update will come, as far as this process has heard."""
        return self._link.knowledge.state.is_over

    def check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker is {worker!r}; give one from 0 to {self.num_workers - 1}")

    async def close(self) -> None:
        """Have the server make no further update: every wait of every process ends."""
        await self._link.ask("close_server")

    async def state_dict(self) -> dict[str, Any]:
        """All that training goes on from, as `ParameterServer.state_dict` gives it; a copy.

        No saver awaits it: save what it gave, `StateDictSaver(server=state)`, and `restore` into
        that for `load_state_dict`.
        """
        state: dict[str, Any] = _writeable(await self._link.ask("state_dict"))
        return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the server go on from what `state_dict` gave; all processes hear of it.

        Raises:
            ValueError, TypeError: as `ParameterServer.load_state_dict`.
        """
        await self._link.ask("load_state_dict", dict(state))

    async def staleness_counts(self, worker: int | None = None) -> dict[int, int]:
        """How many gradients took part in an update, by staleness; of one worker, or of all."""
        counts: dict[int, int] = await self._link.ask("staleness_counts", worker)
        return counts

    async def statistics(self) -> HostStatistics:
        """What the server holds now, of all processes."""
        statistics: HostStatistics = await self._link.ask("statistics")
        return statistics

    def __repr__(self) -> str:
        if self._opened is None:
            return f"<RemoteParameterServer at {self.address.worker}, not open>"
        return (
            f"<RemoteParameterServer {self._link.welcome.what} at {self.address.worker}, "
            f"version {self.version}>"
        )


def _writeable(state: Any) -> Any:
    """What came over the wire, whose arrays may be views of what was received."""
    import numpy as np

    if isinstance(state, dict):
        return {key: _writeable(each) for key, each in state.items()}
    if isinstance(state, list):
        return [_writeable(each) for each in state]
    return np.array(state) if isinstance(state, np.ndarray) else state
