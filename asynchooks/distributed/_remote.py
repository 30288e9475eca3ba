"""RemoteParameterServer: a parameter server in another process, on a Dask worker.

It calls and waits; the server handles the gradients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any, Self

from distributed.protocol import serialize, to_serialize

from .._check import instance, number
from .._engine.base import AsyncOnly, Slot
from .._engine.recording import current_recorder
from .._engine.stop import Stop
from .._errors import StepSourceLostError, StopTraining
from .._step.global_step import GlobalStep
from ..protocols import Pushed, Snapshot
from ..protocols._membership import Membership
from ..protocols._server import record_push
from ..protocols._waits import ABANDONED, compute_unless
from ._link import Call, Link
from ._loop import DaskLoop
from ._messages import ServerAddress
from ._stream import Place, Stream

_GIVE_UP_SECS = 30.0
"""How long neither the worker nor the scheduler may answer."""
_ASK_SECS = 2.0
"""How long to wait for the scheduler, which may be stopped, each time that it is asked."""


class WorkerPlace(Place):
    """A Dask worker that hosts a parameter server."""

    counts = False
    role = "parameter server"
    error = StepSourceLostError
    remedy = "is its Dask worker still there?"

    async def check_lost(self, secs: float) -> None:
        """Ask the scheduler: a worker that has left never answers again."""
        try:
            async with asyncio.timeout(_ASK_SECS):
                known = await self._owner.scheduler.ncores(workers=[self.address])
        except OSError as error:  # the network may be cut; not for ever
            if secs > _GIVE_UP_SECS:
                raise StepSourceLostError(
                    f"{self.what} is lost, and so is the scheduler: {error!r}"
                ) from error
        else:
            if self.address not in known:
                raise StepSourceLostError(f"{self.what} is gone: its worker has left")

    def refusal(self, welcome: Any, cause: Exception | None) -> Exception:
        why = "was its host closed, or its worker restarted?"
        return StepSourceLostError(f"{self.what} is gone: {why}")


class RemoteParameterServer(AsyncOnly, Membership):
    """A process's view of a parameter server elsewhere, with the verbs of `ParameterServer`.

    `host_parameter_server` makes the server; each process that trains opens one of these by
    `async with`, for all its workers, on the event loop that they run on. Unlike there, `pull` and
    `push` are awaited. A step takes two requests: `begin_step` returns with the parameters, and
    `push` has the wait of `end_step` begin. Workers wait in this process: one connection brings the
    ends of all their waits, so that a cancelled worker leaves at once.

    The workers of a process that is silent for the lease have left: the others do not wait for them
    any longer. So have those of a process that dies, 5 s after its last message; but one that ends
    with an error has the lease to be started again. With an infinite lease the others wait. A
    process that comes back, perhaps because the network was cut, goes on, and its workers join
    again.

    Its `global_step` counts the server's updates: a limit that a process sets is sent with its
    next request, and no update goes beyond it.

    Args:
        address: `server.address` of the one that `host_parameter_server` gave.
        client: a `distributed.Client`, asynchronous on this event loop, or synchronous: its
            thread makes the calls, as from trio. None within a task on a Dask worker.
        open_secs: seconds that opening may take, > 0.

    Raises:
        StepSourceLostError: on entering: the server cannot be reached.
        TypeError, ValueError: an argument is not what it should be.

    Example:
        async with RemoteParameterServer(address) as server:
            await server.begin_step(worker)
            parameters, version = await server.pull(worker)
            await server.push(worker, 2 * (parameters - 1), version)
            await server.end_step(worker)
    """

    _in_with = "server"

    def __init__(
        self, address: ServerAddress, client: Any = None, *, open_secs: float = 30.0
    ) -> None:
        self.address = instance("address", address, ServerAddress, "server.address of its host")
        self._client = client
        self._open_secs = number(
            "open_secs", open_secs, above=0.0, finite=False, expected="seconds > 0"
        )
        self.global_step = GlobalStep(multi_process=True, published_only=True)
        self._link: Link | None = None
        self._watchers: dict[Slot, int] = {}  # slot: the version that it works on
        self._num_workers = 0
        self._stops: dict[int, Stop | None] = {}  # of each worker's session
        self._begun: dict[int, Snapshot] = {}  # the result of `begin_step`, until it is pulled
        self._ends: dict[int, Call] = {}  # the waits that `push` has begun

    async def __aenter__(self) -> Self:
        if self._link is not None:
            raise RuntimeError(f"{self!r} was opened before; make a new one")
        owner = own_worker() if self._client is None else self._client
        loop, place = DaskLoop(owner.loop.asyncio_loop), WorkerPlace(owner, self.address.worker)
        link = Link(
            self.global_step,
            counts=False,
            lost=StepSourceLostError,
            packed=_serialized,
            when_told=self._abandon,
        )
        self._stream = stream = Stream(link, loop, place, self.address.key)
        await stream.open(self._open_secs)
        about = stream.welcome
        self._num_workers, self._protocol, self._abandons_stale, self._waits_after = about
        self._link = link
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose(f"this process has left {self.address.key}")

    @property
    def _server(self) -> Link:
        if self._link is None:
            raise RuntimeError(
                "the server is not open; write: async with RemoteParameterServer(address) as server"
            )
        return self._link

    @property
    def num_workers(self) -> int:
        """Of all processes."""
        _ = self._server
        return self._num_workers

    @property
    def version(self) -> int:
        """The number of updates, as far as this process knows."""
        return self._server.step.last_known

    @property
    def is_over(self) -> bool:
        """Whether no update will come, as far as this process knows."""
        return self._server.is_over

    def check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker is {worker!r}; give one from 0 to {self.num_workers - 1}")

    def attach(self, worker: int, global_step: GlobalStep) -> None:
        """Let the waits of this worker end with its session, whose view of the step this is."""
        self.check_worker(worker)
        self._stops[worker] = global_step.stop

    async def join(self, worker: int) -> None:
        """Count a worker that had left as present again; when all had left, all of them."""
        await self._server.call("join", worker)

    async def leave(self, worker: int) -> None:
        """Count a worker as gone for good; as in `ParameterServer`."""
        self._drop_step(worker)
        self._stops.pop(worker, None)
        await self._server.call("leave", worker)

    begin_session = join
    end_session = leave

    async def begin_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker pull. Cancellation safe.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
            StepSourceLostError: the server cannot be reached.
        """
        server = self._server
        self._drop_step(worker)
        what = f"permission to begin a step, as worker {worker}"
        call = server.begin("begin_step", worker, what=what)
        self._begun[worker] = await server.answer_to(call, self._stops.get(worker))

    async def pull(self, worker: int) -> Snapshot:
        """The present parameters, read-only, and their version.

        Those that came with `begin_step`, unless this process knows of a later version.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        snapshot: Snapshot | None = self._begun.pop(worker, None)
        if snapshot is None or snapshot.version != self.version:
            snapshot = await self._server.call("pull")
        return snapshot

    async def push(self, worker: int, gradient: Any, version: int) -> Pushed:
        """Send a gradient that was computed at a version; waits only for the answer.

        When cancelled, it is unknown whether the gradient was taken.

        Raises:
            ValueError, TypeError: an argument does not fit; nothing has changed.
            StepSourceLostError: the server cannot be reached; it may have taken the gradient.
        """
        server = self._server
        self._drop_step(worker)
        call = server.begin("push", worker, gradient, version)
        if self._waits_after:  # one message carries both
            self._ends[worker] = self._begin_end(worker)
        result: Pushed = await server.answer_to(call)
        if (recorder := current_recorder()) is not None:
            record_push(recorder, worker, result, self.version)
        return result

    async def end_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker go on; at a stop or the limit it returns.

        Cancellation safe.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        server = self._server
        if self._waits_after:
            wait = self._ends.pop(worker, None) or self._begin_end(worker)
            with suppress(StopTraining):
                await server.answer_to(wait, self._stops.get(worker))

    def _begin_end(self, worker: int) -> Call:
        what = f"permission to end a step, as worker {worker}"
        return self._server.begin("end_step", worker, what=what)

    def watch_update(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken when this process learns that work on a version is useless.

        As in `ParameterServer`; also when the server is lost for good.
        """
        self._watchers[slot] = version  # before the look: news may come in another thread
        self._server.wants_each_step = self._abandons_stale
        self._server.look_again()
        self._abandon()
        return lambda: self._watchers.pop(slot, None)

    def _abandon(self) -> None:
        """Wake those that work on a version which has become useless."""
        for slot, version in list(self._watchers.items()):
            ahead = version - self.version
            if self.is_over or ahead > 0 or (ahead < 0 and self._abandons_stale):
                self._watchers.pop(slot, None)
                slot.wake(ABANDONED)

    async def compute(
        self, version: int, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> tuple[bool, Any]:
        """Await `fn(*args)` in a task of its own, and cancel it when work on `version` is useless.

        As in `ParameterServer`.
        """
        return await compute_unless(lambda slot: self.watch_update(version, slot), fn, args)

    async def close(self) -> None:
        """Have the server make no further update: every wait of every process ends."""
        await self._server.call("close")

    async def state_dict(self) -> dict[str, Any]:
        """The state to continue training from, as `ParameterServer.state_dict`; a copy.

        Savers do not await it: save the result, `StateDictSaver(server=state)`, and `restore` into
        that for `load_state_dict`.
        """
        # of arrays that are not read-only, as the server's own are
        state: dict[str, Any] = deepcopy(await self._server.call("ask", "state_dict"))
        return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the server continue from a `state_dict`; all processes are notified.

        Raises:
            ValueError, TypeError: as `ParameterServer.load_state_dict`.
        """
        await self._server.call("ask", "load_state_dict", dict(state))

    async def staleness_counts(self, worker: int | None = None) -> dict[int, int]:
        """How many gradients took part in an update, by staleness; of one worker, or of all."""
        counts: dict[int, int] = await self._server.call("ask", "staleness_counts", worker)
        return counts

    async def statistics(self) -> dict[str, int]:
        """The server's present counts, of all processes.

        Of gradients that were applied, discarded, or are collected; of workers that are present; of
        processes, those that are away (gone, or silent for too long) among them; of waits.
        """
        found: dict[str, int] = await self._server.call("statistics")
        return found

    def _drop_step(self, worker: int) -> None:
        """Drop the results of an earlier step of the worker."""
        self._begun.pop(worker, None)
        wait = self._ends.pop(worker, None)
        if wait is not None:
            self._server.release(wait)

    def __repr__(self) -> str:
        if self._link is None:
            return f"<RemoteParameterServer at {self.address.worker}, not open>"
        where = f"{self._protocol} at {self.address.worker}"
        return f"<RemoteParameterServer {where}, version {self.version}>"


def _serialized(args: Any) -> Any:
    """What is sent: made here, as an error in a message would end the connection."""
    try:
        header, frames = serialize(args, on_error="raise")
    except TypeError as error:
        raise TypeError(
            f"{args!r} cannot be sent to another process ({error}); give arrays and numbers"
        ) from error
    # packed twice, so that it is read only where an error there can answer the call
    return to_serialize((header, [bytearray(each) for each in frames]))


def own_worker() -> Any:
    """The Dask worker that this code runs on; ValueError if this is no Dask task."""
    try:
        from distributed import get_worker

        return get_worker()
    except ValueError:
        raise ValueError(
            "no client is given, and this is no task on a Dask worker; give a distributed.Client"
        ) from None
