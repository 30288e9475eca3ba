"""Calls of a Dask actor's methods from any event loop: asyncio's own, another thread's, or trio's.

They go straight to the actor's worker, over Dask's pool of connections. The methods are not known
here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from contextvars import Context
from typing import Any

from ..._engine.base import STOPPED, TIMED_OUT, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop, Loss, Stop
from ..._engine.threads import Outcome
from ..._errors import StepSourceLostError, StopTraining
from ..parameter_server._messages import ServerAddress

WhenLate = Callable[[], object]
Work = Callable[[], Awaitable[Any]]


class ActorGoneError(StepSourceLostError):
    """The worker answers, but does not hold the actor: it will not come back."""


class SilentError(StepSourceLostError):
    """No answer came in time: the worker may be stopped, or the network cut. It may come back."""


class ActorCalls:
    """Makes the calls of one process to one actor.

    Args:
        address: of the actor.
        client: a `distributed.Client`, of this event loop or of another thread's; None within a
            task of Dask, whose worker's connections are used.
    """

    def __init__(self, address: ServerAddress, client: Any) -> None:
        owner = client if client is not None else own_worker()
        self._owner = owner
        self.place: str | None = owner.address if client is None else None
        """The address of this process's Dask worker, if it is one."""
        self._pool = owner.rpc
        self._loop: asyncio.AbstractEventLoop = owner.loop.asyncio_loop
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds weak references only
        self.address = address
        self.loss = Loss()
        """Set when no call will be answered any more: all calls that are under way end."""

    async def call(
        self,
        function: str,
        *args: Any,
        until: float = math.inf,
        stop: Stop | None = None,
        when_late: WhenLate | None = None,
    ) -> Any:
        """Call a method and return its result, or raise its error.

        When cancelled, the call still goes on, so that no message is cut.

        Args:
            until: when to give up, on the engine's clock.
            stop: ends the wait.
            when_late: called in any thread when a call ends that was cancelled or timed out.

        Raises:
            StepSourceLostError: the actor's worker cannot be reached, or has not answered in time.
            StopTraining: the stop came first.
        """
        what = f"{function} of {self.address.key}"
        return await self._run(what, lambda: self._execute(function, args), until, stop, when_late)

    async def is_gone(self, until: float) -> bool:
        """Whether the actor's worker has left its cluster, according to the scheduler.

        Raises:
            StepSourceLostError: the scheduler does not answer.
        """
        place = self.address.worker

        async def look() -> bool:
            try:
                return place not in await self._owner.scheduler.ncores(workers=[place])
            except OSError as error:
                raise StepSourceLostError(f"the scheduler cannot be reached: {error}") from error

        gone: bool = await self._run(
            f"the scheduler's answer about {place}", look, until, None, None
        )
        return gone

    async def _run(
        self,
        what: str,
        work: Work,
        until: float,
        stop: Stop | None,
        when_late: WhenLate | None,
    ) -> Any:
        engine = current_engine()
        slot = Slot(engine, what)
        request = _Request(slot, when_late)
        if self._is_here:
            self._spawn(request, work)
        else:
            # an empty context: that of the caller names another event loop
            self._loop.call_soon_threadsafe(self._spawn, request, work, context=Context())
        self.loss.add(slot)
        try:
            with EndsAtStop(slot, stop):
                outcome = await engine.park(slot, until)
        except BaseException:
            request.leave()
            raise
        finally:
            self.loss.discard(slot)
        if isinstance(outcome, Outcome):
            return outcome.unwrap()
        request.leave()
        if outcome is STOPPED and not self.loss.is_set:
            raise StopTraining(f"a stop was requested while waiting for {what}")
        if outcome is TIMED_OUT:
            raise SilentError(f"no answer from {self.address.worker}: {what}")
        raise self.loss.error()

    @property
    def _is_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # none of asyncio's
            return False

    def _spawn(self, request: _Request, work: Work) -> None:
        task = self._loop.create_task(self._carry(request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, request: _Request, work: Work) -> None:
        outcome = Outcome(error=StepSourceLostError("this process has left the parameter server"))
        try:
            outcome = Outcome(await work())
        except Exception as error:
            outcome = Outcome(error=error)
        finally:  # cancelled, too
            request.end(outcome)

    async def _execute(self, function: str, args: tuple[Any, ...]) -> Any:
        from distributed.protocol import to_serialize

        where = f"the parameter server at {self.address.worker}"
        try:
            reply = await self._pool(self.address.worker).actor_execute(
                function=function,
                actor=self.address.key,
                args=[to_serialize(each) for each in args],
                kwargs={},
            )
        except OSError as error:
            raise StepSourceLostError(f"{where} cannot be reached: {error}") from error
        except Exception as error:
            raise ActorGoneError(
                f"{where} is gone: {error!r}. Was its host closed, or its worker restarted?"
            ) from error
        if reply["status"] == "OK":
            return reply["result"]
        raise reply["exception"]

    def cancel(self) -> None:
        """Cancel the calls that are under way, in whichever thread they are."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


class _Request:
    """One call, whose caller may have left when its outcome comes."""

    __slots__ = ("_has_ended", "_has_left", "_slot", "_when_late")

    def __init__(self, slot: Slot, when_late: WhenLate | None) -> None:
        self._slot = slot
        self._when_late = when_late
        self._has_ended = self._has_left = False

    def end(self, outcome: Outcome) -> None:
        self._has_ended = True
        self._slot.wake(outcome)
        if self._has_left:
            self._report_late()

    def leave(self) -> None:
        self._has_left = (
            True  # set before `_has_ended` is read: of two threads at least one sees the other
        )
        if self._has_ended:
            self._report_late()

    def _report_late(self) -> None:
        if self._when_late is not None:  # perhaps twice, which is allowed
            self._when_late()


def own_worker() -> Any:
    """The Dask worker that this code runs on.

    Raises:
        ImportError, ValueError: Dask is not installed; or this is no Dask task.
    """
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
    """The addresses that the scheduler does not know; none, if it does not answer.

    Args:
        worker: a Dask worker or client, of this event loop.
        secs: how long the scheduler may take, > 0.
    """
    if not places:
        return set()
    try:
        async with asyncio.timeout(secs):
            return set(places).difference(await worker.scheduler.ncores(workers=list(places)))
    except (OSError, TimeoutError):
        return set()
