"""Calls of a Dask actor's methods from any event loop; they go straight to the actor's worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from ..._engine.base import STOPPED, TIMED_OUT, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop, LostPeer, Stop
from ..._engine.threads import Outcome
from ..._errors import StepSourceLostError, StopTraining
from ..dask._loop import DaskLoop
from ._messages import ServerAddress


class ActorGoneError(StepSourceLostError):
    """The worker answers, but does not hold the actor: it will not come back."""


class ActorCalls:
    """Makes the calls of one process to one actor, over the connections of its client or worker."""

    def __init__(self, address: ServerAddress, client: Any) -> None:
        owner = client if client is not None else own_worker()
        self._owner = owner
        self._loop = DaskLoop(owner.loop.asyncio_loop)
        self.place: str | None = owner.address if client is None else None
        """The address of this process's Dask worker, if it is one."""
        self.address = address
        self.where = f"the parameter server at {address.worker}"
        self.lost_peer = LostPeer()
        """Set when no call will be answered any more: all calls that are under way end."""

    async def call(
        self,
        function: str,
        *args: Any,
        until: float = math.inf,
        stop: Stop | None = None,
        when_late: Callable[[], object] = lambda: None,
    ) -> Any:
        """Call a method and return its result, or raise its error.

        When cancelled, the call still goes on, so that no message is cut.

        Args:
            until: when to give up, on the engine's clock.
            stop: ends the wait.
            when_late: called in any thread, perhaps twice, when a call has ended that was
                cancelled or timed out.

        Raises:
            StepSourceLostError: the actor's worker cannot be reached, or has not answered in time.
            StopTraining: the stop came first.
        """
        what = f"{function} of {self.address.key}"
        return await self._run(what, lambda: self._execute(function, args), until, stop, when_late)

    async def is_gone(self, until: float) -> bool:
        """Whether the scheduler says that the actor's worker has left; raises if it is silent."""
        place = self.address.worker

        async def look() -> bool:
            try:
                return place not in await self._owner.scheduler.ncores(workers=[place])
            except OSError as error:
                raise StepSourceLostError(f"the scheduler cannot be reached: {error}") from error

        gone: bool = await self._run(f"the scheduler's answer about {place}", look, until)
        return gone

    async def _run(
        self,
        what: str,
        work: Callable[[], Awaitable[Any]],
        until: float,
        stop: Stop | None = None,
        when_late: Callable[[], object] = lambda: None,
    ) -> Any:
        slot = Slot(current_engine(), what)
        has_ended = has_left = False

        def end(outcome: Outcome) -> None:
            nonlocal has_ended
            has_ended = True
            slot.wake(outcome)
            if has_left:
                when_late()

        def leave() -> None:
            # set before the other is read: of two threads at least one sees the other
            nonlocal has_left
            has_left = True
            if has_ended:
                when_late()

        left = StepSourceLostError("this process has left the parameter server")
        self._loop.spawn(work, end, left)
        try:
            outcome = await self.park(slot, stop, until)
            if outcome is TIMED_OUT:
                raise StepSourceLostError(f"no answer from {self.address.worker}: {what}")
        except BaseException:
            leave()
            raise
        return outcome.unwrap()

    async def park(self, slot: Slot, stop: Stop | None, until: float = math.inf) -> Any:
        """Wait until the slot is woken, or until a time; returns its value.

        Raises:
            StopTraining: the stop came first.
            StepSourceLostError: the server is lost for good.
        """
        self.lost_peer.add(slot)
        try:
            with EndsAtStop(slot, stop):
                value = await slot.engine.park(slot, until)
        finally:
            self.lost_peer.discard(slot)
        if value is not STOPPED:
            return value
        if self.lost_peer.is_set:
            raise self.lost_peer.error_now()
        raise StopTraining(f"a stop was requested while waiting for {slot.what}")

    async def _execute(self, function: str, args: tuple[Any, ...]) -> Any:
        from distributed.protocol import to_serialize

        try:
            reply = await self._owner.rpc(self.address.worker).actor_execute(
                function=function,
                actor=self.address.key,
                args=[to_serialize(each) for each in args],
                kwargs={},
            )
        except OSError as error:
            raise StepSourceLostError(f"{self.where} cannot be reached: {error}") from error
        except Exception as error:
            raise ActorGoneError(
                f"{self.where} is gone: {error!r}. Was its host closed, or its worker restarted?"
            ) from error
        if reply["status"] == "OK":
            return reply["result"]
        raise reply["exception"]

    def cancel(self) -> None:
        """Cancel the calls that are under way, in whichever thread they are."""
        self._loop.cancel_all()


def own_worker() -> Any:
    """The Dask worker that this code runs on; ValueError if this is no Dask task."""
    try:
        from distributed import get_worker

        return get_worker()
    except ImportError as error:
        raise ImportError("Dask is missing; run: pip install 'asynchooks[dask]'") from error
    except ValueError:
        raise ValueError(
            "no client is given, and this is no task on a Dask worker; give a distributed.Client"
        ) from None


async def gone_workers(worker: Any, places: Collection[str], secs: float) -> set[str]:
    """The addresses that the scheduler does not know; none, if it does not answer in time."""
    if not places:
        return set()
    try:
        async with asyncio.timeout(secs):
            return set(places).difference(await worker.scheduler.ncores(workers=list(places)))
    except (OSError, TimeoutError):
        return set()
