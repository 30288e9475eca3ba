"""Membership: what a worker's session needs of a parameter server, wherever the parameters are."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .._step.global_step import GlobalStep


class Membership(ABC):
    """The workers of a training: they join, synchronise their steps, and leave.

    `ProtocolHook` uses no more than this of a server. `ParameterServer` implements it for the
    workers of one event loop; asynchooks.distributed, for those of many processes.

    Example:
        class Unsynchronised(Membership):
            \"\"\"No worker waits.\"\"\"

            global_step = GlobalStep(keeps_limit=True)
            def check_worker(self, worker): ...
            def attach(self, worker, global_step): ...
            async def begin_session(self, worker): ...
            async def end_session(self, worker): ...
            async def begin_step(self, worker): ...
            async def end_step(self, worker): ...
    """

    global_step: GlobalStep
    """Counts the updates; the workers' sessions use it as their step."""

    @abstractmethod
    def check_worker(self, worker: int) -> None:
        """Raise ValueError if there is no such worker."""

    @abstractmethod
    def attach(self, worker: int, global_step: GlobalStep) -> None:
        """Let the waits of this worker end with its session, whose view of the step this is."""

    @abstractmethod
    async def begin_session(self, worker: int) -> None:
        """The worker's session begins: it is present, also if it had left before."""

    @abstractmethod
    async def end_session(self, worker: int) -> None:
        """The worker's session has ended cleanly: no other worker waits for it."""

    @abstractmethod
    async def begin_step(self, worker: int) -> None:
        """Wait until this worker may pull.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
        """

    @abstractmethod
    async def end_step(self, worker: int) -> None:
        """Wait until this worker may go on; at a stop or the limit it returns."""
