"""DaskCluster: one process's part in a training that a Dask scheduler counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from .._engine import Slot, current_engine
from .._function_session import StepFunction
from .._global_step import GlobalStep
from .._work_thread import Outcome
from ._dask_session import DaskSessionCreator
from ._dask_source import Action, DaskSource
from ._dask_stream import DaskStream, Place

_CLOSE_SECS = 2.0


class DaskCluster:
    """Step, limit and tickets of a training on many processes, kept by a Dask scheduler.

    Every process makes one for all its sessions and closes it (`async with`).

    Args:
        client: a `distributed.Client`, synchronous or not, or the scheduler's address.
        name: which training; processes that give the same one train together.
        heartbeat_secs: seconds of silence after which the scheduler counts as lost, > 0.
        lease_secs: seconds of silence after which a process loses its tickets, > 0.
        timeout_secs: seconds for opening, > 0.

    Example:
        async with DaskCluster("tcp://127.0.0.1:8786") as cluster:
            creator = cluster.session_creator(step_fn)
            async with MonitoredSession([StopAtStepHook(last_step=1000)], creator) as session:
                while not session.should_stop():
                    await session.run("loss")
    """

    def __init__(
        self,
        client: Any,
        name: str = "training",
        *,
        heartbeat_secs: float = 3.0,
        lease_secs: float = 30.0,
        timeout_secs: float = 10.0,
    ) -> None:
        self._client = client
        self.name = name
        self._heartbeat_secs = heartbeat_secs
        self._lease_secs = lease_secs
        self._timeout_secs = timeout_secs
        self.global_step = GlobalStep(moved_elsewhere=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stream: DaskStream | None = None
        self._source: DaskSource | None = None

    @property
    def source(self) -> DaskSource:
        if self._source is None:
            raise RuntimeError(f"{self!r} is not open: `async with DaskCluster(...) as cluster:`")
        return self._source

    async def open(self) -> Self:
        client = self._client
        if isinstance(client, str):
            self._loop = _running_loop() or self._start_thread()
            place = Place(None, client)
        else:
            if client.loop.asyncio_loop is _running_loop():
                await client
            self._loop = client.loop.asyncio_loop
            place = Place(client, client.scheduler.address)
        stream = DaskStream(place, self.name, self._heartbeat_secs, self._lease_secs)
        source = DaskSource(self.global_step, stream.kick)
        self._stream, self._source = stream, source
        self.global_step.feed_from(source)
        try:
            await self._there(stream.open(source, self._timeout_secs))
        except BaseException:
            self._end_thread()
            raise
        return self

    async def aclose(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                with current_engine().shielded(2 * _CLOSE_SECS):
                    await self._there(stream.close(_CLOSE_SECS))
            finally:
                self._end_thread()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def session_creator(self, step_fn: StepFunction, *, initial_step: int = 0) -> DaskSessionCreator:
        """What makes sessions whose step is a call of `step_fn`; see `FunctionSessionCreator`."""
        return DaskSessionCreator(self, step_fn, initial_step)

    async def advance(self, num_steps: int = 1) -> int:
        """Count steps that were made without a session; returns the step after them."""
        return await self.source.do(Action(num_runs=num_steps))

    async def publish(self, step: int) -> int:
        """Say that the step is reached, for who counts itself; returns the step then."""
        return await self.source.do(Action(published=step))

    def publish_soon(self, step: int) -> None:
        """As `publish`, without waiting for the scheduler; from any thread."""
        self.source.do_soon(Action(published=step))

    async def restart(self, step: int) -> int:
        """Begin a new epoch at a step, for all processes; runs under way do not count in it."""
        return await self.source.do(Action(restart_at=step))

    async def forget(self) -> None:
        """Have the scheduler forget this training as soon as the last process has left it."""
        await self.source.do(Action(is_done=True))

    async def statistics(self) -> dict[str, Any] | None:
        """What the scheduler holds of this training."""
        assert self._stream is not None
        found: dict[str, Any] | None = await self._there(self._stream.statistics())
        return found

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await on the event loop of Dask."""
        assert self._loop is not None
        if self._loop is _running_loop():
            return await work
        slot = Slot(current_engine(), "Dask's event loop")

        async def carry() -> None:
            try:
                outcome = Outcome(await work)
            except BaseException as error:
                outcome = Outcome(error=error)
            slot.wake(outcome)

        future = asyncio.run_coroutine_threadsafe(carry(), self._loop)
        try:
            outcome = await slot.engine.park(slot)
        except BaseException:
            future.cancel()
            raise
        return outcome.unwrap()

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()

        def serve() -> None:
            loop.run_forever()
            loop.close()

        self._thread = threading.Thread(target=serve, name="asynchooks-dask", daemon=True)
        self._thread.start()
        return loop

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_CLOSE_SECS)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
