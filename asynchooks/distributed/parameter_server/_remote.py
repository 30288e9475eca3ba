"""RemoteParameterServer: a parameter server that lives in another process, on a Dask worker.

What it does to gradients is the server's affair; this asks, and waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .._engine import Slot
from .._errors import StopTraining
from .._global_step import GlobalStep
from ..protocols import Pushed, Snapshot
from ..protocols._compute import compute_unless
from ._connection import Connection


class RemoteParameterServer(Connection):
    """A process's view of a parameter server elsewhere, with the verbs of `ParameterServer`.

    `host_parameter_server` makes the server; each process that trains opens one of these by
    `async with`, for all its workers, on the event loop that they run on. Unlike there, `pull` and
    `push` are awaited. A step takes two requests: `begin_step` brings the parameters with it, and
    `push` asks whether `end_step` may pass. Who has to wait does so here: one blocked request
    brings the process what its workers wait for, so that a cancelled one leaves at once.

    A process that dies, or is silent for the lease: its workers have left, and the others wait for
    them no longer; when it is heard of again they are back. A lease that is infinite has the
    others wait for it. A process that ends with an error is given a lease to be started again.

    Its `global_step` counts the server's updates: a limit that a process sets is told with its
    next request, and no update goes beyond it.

    Args:
        address: `server.address` of the one that `host_parameter_server` gave.
        client: a `distributed.Client`, asynchronous on this event loop, or synchronous: its
            thread does the talking, as from trio. None within a task on a Dask worker.
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

    def attach(self, worker: int, global_step: GlobalStep) -> None:
        """Let the waits of this worker end with its session, whose view of the step this is."""
        self.check_worker(worker)
        self._steps[worker] = global_step

    async def join(self, worker: int) -> None:
        """Count a worker that had left as present again; when all had left, all of them."""
        self.check_worker(worker)
        await self._link.ask("take_seat", worker)

    async def leave(self, worker: int) -> None:
        """Count a worker as gone for good; as in `ParameterServer`."""
        self.check_worker(worker)
        self._drop_step(worker)
        self._steps.pop(worker, None)
        await self._link.ask("leave_seat", worker)

    take_seat = join
    leave_seat = leave

    async def begin_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker pull. Cancellation safe.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        link, stop = self._link, self._stop_of(worker)
        self._drop_step(worker)
        wait = link.waits.begin(f"leave to begin a step, as worker {worker}")
        ending, snapshot = await link.ask("begin_step", worker, wait.number, stop=stop, wait=wait)
        if ending is None:
            ending, snapshot = await link.waits.end_of(wait, stop)
        link.waits.forget(wait)
        if ending.error is not None:
            raise ending.error
        self._begun[worker] = snapshot

    async def pull(self, worker: int) -> Snapshot:
        """The present parameters, read-only, and their version.

        What `begin_step` brought, unless this process has heard of a later version since.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        snapshot = self._begun.pop(worker, None)
        if snapshot is None or snapshot.version != self.version:
            snapshot = await self._link.ask("pull")
        return _frozen(snapshot)

    async def push(self, worker: int, gradient: Any, version: int) -> Pushed:
        """Have the server take a gradient that was computed at a version; waits for its word only.

        Cancelled, nobody knows whether it was taken.

        Raises:
            ValueError, TypeError: an argument does not fit; nothing has changed.
            StepSourceLostError: the server cannot be reached; it may have taken the gradient.
        """
        self.check_worker(worker)
        link = self._link
        self._drop_step(worker)
        wait = link.waits.begin(f"leave to end a step, as worker {worker}")
        pushed, ending = await link.ask("push", worker, gradient, version, wait.number, wait=wait)
        self._ends[worker] = (wait, ending)
        result: Pushed = pushed
        return result

    async def end_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker go on; at a stop or the limit it returns.

        Cancellation safe.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        link, stop = self._link, self._stop_of(worker)
        wait, ending = self._ends.pop(worker, (None, None))
        if wait is None and not link.welcome.waits_after:
            return
        try:
            if wait is None:
                wait = link.waits.begin(f"leave to end a step, as worker {worker}")
                ending = await link.ask("end_step", worker, wait.number, stop=stop, wait=wait)
            if ending is None:
                ending, _ = await link.waits.end_of(wait, stop)
        except StopTraining:
            return
        link.waits.forget(wait)
        if ending.error is not None:
            raise ending.error

    def watch_update(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken with `ABANDONED` when this process hears that work is useless.

        As in `ParameterServer`; also when the server is lost for good.
        """
        return self._link.watch(version, slot)

    async def compute(
        self, version: int, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> tuple[bool, Any]:
        """Await `fn(*args)` in a task of its own, and cancel it when work on `version` is useless.

        As in `ParameterServer`.
        """
        return await compute_unless(lambda slot: self.watch_update(version, slot), fn, args)

    def _stop_of(self, worker: int) -> Any:
        step = self._steps.get(worker)
        return None if step is None else step._stop

    def _drop_step(self, worker: int) -> None:
        """What an earlier step of it has left behind."""
        self._begun.pop(worker, None)
        wait, _ = self._ends.pop(worker, (None, None))
        if wait is not None:
            self._link.waits.release(wait)


def _frozen(snapshot: Snapshot) -> Snapshot:
    parameters, version = snapshot
    if not isinstance(parameters, Mapping):
        return Snapshot(_read_only(parameters), version)
    return Snapshot({name: _read_only(each) for name, each in parameters.items()}, version)


def _read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array
