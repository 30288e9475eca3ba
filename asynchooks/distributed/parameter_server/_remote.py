"""RemoteParameterServer: a parameter server in another process, on a Dask worker.

It sends requests and waits; the server handles the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from ..._check import instance, number
from ..._engine.base import AsyncOnly, Slot
from ..._engine.current import current_engine
from ..._engine.recording import Kind, begun_span, current_recorder, ended
from ..._errors import StopTraining
from ..._step.global_step import GlobalStep
from ...protocols import Membership, Pushed, Snapshot
from ...protocols._server import record_push
from ...protocols._waits import compute_unless
from ._calls import ActorCalls
from ._client import PendingWait, ServerClient
from ._messages import Ending, HostStatistics, ServerAddress


class RemoteParameterServer(AsyncOnly, Membership):
    """A process's view of a parameter server elsewhere, with the verbs of `ParameterServer`.

    `host_parameter_server` makes the server; each process that trains opens one of these by
    `async with`, for all its workers, on the event loop that they run on. Unlike there, `pull` and
    `push` are awaited. A step takes two requests: `begin_step` returns with the parameters, and
    `push` learns whether `end_step` may pass. Workers wait in this process: one blocked request
    brings the ends of all their waits, so that a cancelled worker leaves at once.

    The workers of a process that dies, or is silent for the lease, have left: the others do not
    wait for them any longer; at its next request they join again. With an infinite lease the others
    wait. A process that ends with an error has the lease to be restarted.

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
        self._opened: ServerClient | None = None
        self._steps: dict[int, GlobalStep] = {}  # each as its session sees it
        self._begun: dict[int, Snapshot] = {}  # the result of `begin_step`, until it is pulled
        self._ends: dict[int, tuple[PendingWait, Ending | None]] = {}  # the result of `push`

    async def __aenter__(self) -> Self:
        engine = current_engine()
        server = ServerClient(ActorCalls(self.address, self._client), self.global_step, engine)
        await server.open(engine.now() + self._open_secs)
        self._opened = server
        return self

    async def __aexit__(self, *_: object) -> None:
        server = self._server
        with current_engine().shielded(math.inf):  # which takes a bounded time
            await server.aclose(f"this process has left {self.address.key}")

    @property
    def _server(self) -> ServerClient:
        if self._opened is None:
            raise RuntimeError(
                "the server is not open; write: async with RemoteParameterServer(address) as server"
            )
        return self._opened

    @property
    def num_workers(self) -> int:
        """Of all processes."""
        return self._server.welcome.num_workers

    @property
    def version(self) -> int:
        """The number of updates, as far as this process knows."""
        return self._server.view.state.step

    @property
    def is_over(self) -> bool:
        """Whether no update will come, as far as this process knows."""
        return self._server.view.state.is_over

    def check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker is {worker!r}; give one from 0 to {self.num_workers - 1}")

    def attach(self, worker: int, global_step: GlobalStep) -> None:
        """Let the waits of this worker end with its session, whose view of the step this is."""
        self.check_worker(worker)
        self._steps[worker] = global_step

    async def join(self, worker: int) -> None:
        """Count a worker that had left as present again; when all had left, all of them."""
        self.check_worker(worker)
        await self._server.ask("begin_session", worker)

    async def leave(self, worker: int) -> None:
        """Count a worker as gone for good; as in `ParameterServer`."""
        self.check_worker(worker)
        self._drop_step(worker)
        self._steps.pop(worker, None)
        await self._server.ask("end_session", worker)

    begin_session = join
    end_session = leave

    async def begin_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker pull. Cancellation safe.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        server, stop = self._server, self._stop_of(worker)
        self._drop_step(worker)
        wait = server.waits.begin(f"permission to begin a step, as worker {worker}")
        with _request("begin_step", worker):
            ending, snapshot = await server.ask(
                "begin_step", worker, wait.number, stop=stop, wait=wait
            )
        begun = await server.waits.end_of(wait, ending, snapshot, stop)
        assert begun is not None
        self._begun[worker] = begun

    async def pull(self, worker: int) -> Snapshot:
        """The present parameters, read-only, and their version.

        Those that came with `begin_step`, unless this process knows of a later version.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        snapshot = self._begun.pop(worker, None)
        if snapshot is None or snapshot.version != self.version:
            with _request("pull", worker):
                snapshot = await self._server.ask("pull")
        return _frozen(snapshot)

    async def push(self, worker: int, gradient: Any, version: int) -> Pushed:
        """Send a gradient that was computed at a version; waits only for the answer.

        When cancelled, it is unknown whether the gradient was taken.

        Raises:
            ValueError, TypeError: an argument does not fit; nothing has changed.
            StepSourceLostError: the server cannot be reached; it may have taken the gradient.
        """
        self.check_worker(worker)
        server = self._server
        self._drop_step(worker)
        wait = server.waits.begin(f"permission to end a step, as worker {worker}")
        result: Pushed
        with _request("push", worker):
            result, ending = await server.ask(
                "push", worker, gradient, version, wait.number, wait=wait
            )
        self._ends[worker] = (wait, ending)
        if (recorder := current_recorder()) is not None:
            record_push(recorder, worker, result, self.version)
        return result

    async def end_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker go on; at a stop or the limit it returns.

        Cancellation safe.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        self.check_worker(worker)
        server, stop = self._server, self._stop_of(worker)
        wait, ending = self._ends.pop(worker, (None, None))
        if wait is None and not server.welcome.waits_after:
            return
        try:
            if wait is None:
                wait = server.waits.begin(f"permission to end a step, as worker {worker}")
                with _request("end_step", worker):
                    ending = await server.ask("end_step", worker, wait.number, stop=stop, wait=wait)
            await server.waits.end_of(wait, ending, None, stop)
        except StopTraining:
            return

    def watch_update(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken with `ABANDONED` when this process learns that work is useless.

        As in `ParameterServer`; also when the server is lost for good.
        """
        return self._server.watch(version, slot)

    async def compute(
        self, version: int, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> tuple[bool, Any]:
        """Await `fn(*args)` in a task of its own, and cancel it when work on `version` is useless.

        As in `ParameterServer`.
        """
        return await compute_unless(lambda slot: self.watch_update(version, slot), fn, args)

    async def close(self) -> None:
        """Have the server make no further update: every wait of every process ends."""
        await self._server.ask("close_server")

    async def state_dict(self) -> dict[str, Any]:
        """The state to continue training from, as `ParameterServer.state_dict`; a copy.

        Savers do not await it: save the result, `StateDictSaver(server=state)`, and `restore` into
        that for `load_state_dict`.
        """
        state: dict[str, Any] = _writeable(await self._server.ask("state_dict"))
        return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the server continue from a `state_dict`; all processes are notified.

        Raises:
            ValueError, TypeError: as `ParameterServer.load_state_dict`.
        """
        await self._server.ask("load_state_dict", dict(state))

    async def staleness_counts(self, worker: int | None = None) -> dict[int, int]:
        """How many gradients took part in an update, by staleness; of one worker, or of all."""
        counts: dict[int, int] = await self._server.ask("staleness_counts", worker)
        return counts

    async def statistics(self) -> HostStatistics:
        """The server's present counts, of all processes."""
        statistics: HostStatistics = await self._server.ask("statistics")
        return statistics

    def _stop_of(self, worker: int) -> Any:
        step = self._steps.get(worker)
        return None if step is None else step.stop

    def _drop_step(self, worker: int) -> None:
        """Drop the results of an earlier step of the worker."""
        self._begun.pop(worker, None)
        wait, _ = self._ends.pop(worker, (None, None))
        if wait is not None:
            self._server.waits.release(wait)

    def __repr__(self) -> str:
        if self._opened is None:
            return f"<RemoteParameterServer at {self.address.worker}, not open>"
        return (
            f"<RemoteParameterServer {self._server.welcome.protocol} at {self.address.worker}, "
            f"version {self.version}>"
        )


def _request(function: str, worker: int) -> AbstractContextManager[None]:
    """The block, from a request to its answer, is recorded if the task is."""
    return ended(begun_span(current_engine(), Kind.REQUEST, function, worker))


def _frozen(snapshot: Snapshot) -> Snapshot:
    parameters, version = snapshot
    if not isinstance(parameters, Mapping):
        return Snapshot(_read_only(parameters), version)
    return Snapshot({name: _read_only(each) for name, each in parameters.items()}, version)


def _read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array


def _writeable(state: Any) -> Any:
    """A writeable copy of a received state, whose arrays may be views of the message."""
    import numpy as np

    if isinstance(state, dict):
        return {key: _writeable(each) for key, each in state.items()}
    if isinstance(state, list):
        return [_writeable(each) for each in state]
    return np.array(state) if isinstance(state, np.ndarray) else state
