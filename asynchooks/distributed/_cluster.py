"""DaskCluster: one process of a training whose step a Dask scheduler counts."""

from __future__ import annotations

import logging
from typing import Any, Self

from .._check import instance, integer, number, seconds
from .._engine.base import AsyncOnly
from .._errors import StepUnreachableError
from .._step.global_step import GlobalStep
from ..backends._creator import SessionCreator
from ..backends._function import StepFunction
from ._link import Link
from ._old_objects import OldObjects
from ._session import DaskSessionCreator

try:
    import distributed

    from ._loop import DaskLoop
    from ._stream import Place, Stream
except ModuleNotFoundError as error:
    if error.name not in ("dask", "distributed"):
        raise
    raise ImportError(
        "DaskCluster needs Dask, which is not installed: pip install 'asynchooks[dask]'"
    ) from error

logger = logging.getLogger("asynchooks")


class DaskCluster(AsyncOnly):
    """Step, limit and credits of a training on many processes, kept by a Dask scheduler.

    Every process makes one, shares it among all its sessions and closes it (`async with`). It
    holds one connection to the scheduler, which sends what concerns the process: a task that waits
    for a step waits for one of all processes, and makes no request.

    A run counts when it has finished: the step after it is the true one, for one round trip. At
    a limit, which holds for all as soon as one `StopAtStepHook` sets it, training stops exactly:
    no run begins without a credit of the scheduler. Only runs that were under way when the limit
    was set may end beyond it. The credits of a process that dies are freed when its connection
    ends; those of a silent one after `lease_secs`. Runs that a silent process still finishes are
    then counted only below the limit.

    The scheduler holds no parameters and remembers the step as long as it runs: a process that
    opens later continues the training, until `forget`. A scheduler that is restarted begins at
    step 0: sessions recover then as after `PreemptionError`, and the one that restores a
    checkpoint sets its step for all others.

    On asyncio it works on the client's event loop, if that is the running one; else, and always
    on trio, that of a synchronous client or of a thread of its own carries its connection.

    Dask has no authentication without its `Security` (TLS), and any program that reaches a
    scheduler can run code there: keep to a trusted network and give it a `host`. A scheduler serves
    HTTP, too, at port 8787 by default; `dashboard_address="127.0.0.1:0"` keeps that to its machine.

    Args:
        client: a `distributed.Client` that is connected, asynchronous or not, or the address of
            the scheduler ("tcp://host:8786"). The caller closes the client, afterwards.
        name: which training; processes that give the same one train together.
        heartbeat_secs: seconds of silence after which the scheduler counts as lost, > 0; a third
            of it lies between two heartbeats.
        lease_secs: seconds of silence after which a process loses its credits, >= heartbeat_secs.
            Give more than a step may hold the event loop.
        timeout_secs: seconds that opening may take, > 0.

    Raises:
        ImportError: Dask is not installed.
        TypeError: `client` or a time is something else.
        ValueError: a name is empty, or a time is not in its range.

    Example:
        async with DaskCluster("tcp://127.0.0.1:8786") as cluster:
            creator = cluster.session_creator(step)
            async with MonitoredSession([StopAtStepHook(last_step=1000)], creator) as session:
                while not session.should_stop():
                    await session.run("loss")
    """

    _in_with = "cluster"

    def __init__(
        self,
        client: Any,
        name: str = "training",
        *,
        heartbeat_secs: float = 3.0,
        lease_secs: float = 30.0,
        timeout_secs: float = 10.0,
    ) -> None:
        hint = "; give Client(cluster)" if hasattr(client, "scheduler_address") else ""
        wanted = f"a distributed.Client or the address of a scheduler{hint}"
        self._client = instance("client", client, (str, distributed.Client), wanted)
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {name!r}; give a name that all processes use")
        seconds("heartbeat_secs", heartbeat_secs)
        wanted = f"finite seconds, no shorter than a heartbeat ({heartbeat_secs:g} s)"
        number("lease_secs", lease_secs, least=heartbeat_secs, expected=wanted)
        self._timeout_secs = seconds("timeout_secs", timeout_secs)
        self.name = name
        self._times = heartbeat_secs, lease_secs
        self._step = GlobalStep(multi_process=True)
        self._source: Link | None = None
        self._stream: Stream | None = None

    @property
    def global_step(self) -> GlobalStep:
        """The step of all processes, as far as this one knows it.

        It is updated after own runs, when a step is reached that a task here waits for, and with
        each heartbeat.
        """
        return self._step

    @property
    def source(self) -> Link:
        """The source that connects the step here with the scheduler.

        Raises:
            RuntimeError: it is not open.
        """
        if self._source is None:
            raise RuntimeError(
                f"{self!r} is not open; use `async with DaskCluster(...) as cluster:`"
            )
        return self._source

    async def open(self) -> Self:
        """Join the training; returns itself.

        Raises:
            ConnectionError: no scheduler answers in time, or the client is closed.
            RuntimeError: it was opened before; or the scheduler refuses asynchooks' plugin, or has
                one of another version.
        """
        if self._source is not None:
            raise RuntimeError(f"{self!r} was opened before; make a new one")
        loop, place = await self._find_scheduler()

        def lost(reason: str) -> Exception:
            return StepUnreachableError(f"{self._step!r} gets no more news: {reason}")

        link = Link(self._step, counts=True, lost=lost)
        stream = Stream(link, loop, place, self.name, *self._times)
        await stream.open(self._timeout_secs)
        self._source, self._stream = link, stream
        OldObjects.leave_out()
        step, limit = self._step.value, link.limit
        if limit is not None and step >= limit:
            logger.warning(
                "The training %r at %s has ended at step %d, its limit: sessions run no step. "
                "Call `await cluster.forget()` to begin again, or give another name",
                self.name,
                place.address,
                step,
            )
        return self

    async def aclose(self) -> None:
        """Leave the training, within two seconds; waits for its steps end. Safe to call twice."""
        stream, self._stream = self._stream, None
        if stream is not None:
            OldObjects.take_back()
            await stream.aclose("its DaskCluster is closed")

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def session_creator(
        self, step_fn: StepFunction, *, initial_step: int = 0, thread_safe: bool = False
    ) -> SessionCreator:
        """A creator of sessions on a function, as `FunctionSessionCreator`: sync or async."""
        return DaskSessionCreator(
            lambda: self.source,
            step_fn,
            global_step=self._step,
            initial_step=initial_step,
            thread_safe=thread_safe,
        )

    async def advance(self, num_steps: int = 1) -> int:
        """Count steps that were made without a session; returns the step after them."""
        num_steps = integer("num_steps", num_steps, least=0)
        after: int = await self.source.call("count", self.source.epoch, num_steps)
        return after

    async def restart(self, step: int) -> int:
        """Begin a new epoch at a step, for all processes; returns it.

        Runs that are under way do not count in it. A session that restores a checkpoint when it
        recovers does so by itself.
        """
        after: int = await self.source.call("restart", integer("step", step, least=0), "")
        return after

    async def forget(self) -> None:
        """Have the scheduler forget this training when the last process has left it."""
        await self.source.call("forget")

    async def statistics(self) -> dict[str, Any]:
        """The scheduler's state of this training at one moment: counts of steps, processes.

        Raises:
            RuntimeError: it is not open.
        """
        found: dict[str, Any] = await self.source.call("statistics")
        return found

    async def _find_scheduler(self) -> tuple[DaskLoop, Place]:
        client = self._client
        if isinstance(client, str):
            return DaskLoop.of_its_own(), Place(None, client)
        own = client.loop.asyncio_loop
        loop = DaskLoop(own)
        if loop.is_here:
            await client
        if client.status not in ("running", "connecting") or not own.is_running():
            raise ConnectionError(
                f"the Dask client {client!r} is {client.status}; give one that is connected, and "
                "keep its event loop running"
            )
        return loop, Place(client, client.scheduler.address)

    def __repr__(self) -> str:
        return f"<DaskCluster {self.name!r} of {self._client!r}: {self._step!r}>"
