"""Seats: what a worker's session asks of a parameter server, wherever the parameters are."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .._global_step import GlobalStep


class Seats(ABC):
    """A training's workers, each of which takes its seat, keeps step with the others, and leaves.

    `ProtocolHook` knows no more than this of a server. `ParameterServer` is one for the workers of
    this event loop; asynchooks.distributed has one for those of many processes.

    Example:
        class Free(Seats):
            \"\"\"Nobody waits for anybody.\"\"\"

            global_step = GlobalStep(keeps_limit=True)
            def check_worker(self, worker): ...
            def attach(self, worker, global_step): ...
            async def take_seat(self, worker): ...
            async def leave_seat(self, worker): ...
            async def begin_step(self, worker): ...
            async def end_step(self, worker): ...
    """

    global_step: GlobalStep
    """Counts the updates; sessions of the workers count on it, too."""

    @abstractmethod
    def check_worker(self, worker: int) -> None:
        """Raise ValueError if there is no such worker."""

    @abstractmethod
    def attach(self, worker: int, global_step: GlobalStep) -> None:
        """Let the waits of this worker end with its session, whose view of the step this is."""

    @abstractmethod
    async def take_seat(self, worker: int) -> None:
        """The worker's session begins: it is present, if it had left before."""

    @abstractmethod
    async def leave_seat(self, worker: int) -> None:
        """The worker's session has ended well: it holds nobody back."""

    @abstractmethod
    async def begin_step(self, worker: int) -> None:
        """Wait until this worker may pull.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
        """

    @abstractmethod
    async def end_step(self, worker: int) -> None:
        """Wait until this worker may go on; at a stop or the limit it returns."""
