"""PlannedParameterServer: in a plan, a parameter server in another process.

It computes what a real one does, in this process. How long requests take: `_requests.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from .._engine.base import AsyncOnly, Slot
from .._engine.current import current_engine
from .._engine.recording import Kind, Span, begun_span, current_recorder
from .._step.global_step import GlobalStep
from ..protocols import Membership, ParameterServer, Protocol, Pushed, Snapshot
from ..protocols._server import record_push
from ..protocols._updates import Update
from ._player import Player


class PlannedParameterServer(AsyncOnly, Membership):
    """Stands for a `RemoteParameterServer` in a plan, so that the same training function runs.

    A plan runs a program in one process. In place of the processes, `main` starts the workers of
    all of them with this server. Each request takes as long on its way as was recorded, and waits
    for its turn at the server, which does one at a time; waits of the protocol come of the plan.
    Record the processes with `record(path)` each, and the server with
    `host_parameter_server(..., trace=path)`: all files together are one recording. Without the
    server's file a request takes what the clients saw, and its queue is inferred from that.

    Outside of a plan requests take no time.

    Args:
        parameters, protocol, num_workers, learning_rate: as `ParameterServer` takes them.
        update: as there. It is called, but takes no virtual time: that of the server was recorded.
            Leave it out where it takes real time.

    Raises:
        ValueError, TypeError: as `ParameterServer`.

    Example:
        async def main(processes=3, per_process=4, protocol="async"):
            num = processes * per_process
            async with PlannedParameterServer(
                np.zeros(64), parse_protocol(protocol, num), num_workers=num
            ) as server:
                await train(server, range(num))

        plan = Plan.read(["server.pftrace", "0.pftrace", "1.pftrace", "2.pftrace"])
        print(plan.predict(main, processes=6))
    """

    _in_with = "server"

    def __init__(
        self,
        parameters: Any,
        protocol: Protocol,
        *,
        num_workers: int,
        learning_rate: float | Callable[[int], float] = 0.1,
        update: Update | None = None,
    ) -> None:
        self._server = ParameterServer(
            parameters, protocol, num_workers=num_workers, learning_rate=learning_rate,
            update=update,
        )  # fmt: skip
        self.global_step: GlobalStep = self._server.global_step
        self._begun: dict[int, Snapshot] = {}  # the result of `begin_step`, until it is pulled

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def num_workers(self) -> int:
        """Of all processes."""
        return self._server.num_workers

    @property
    def version(self) -> int:
        """The number of updates."""
        return self._server.version

    @property
    def is_over(self) -> bool:
        """Whether no update will come."""
        return self._server.is_over

    def check_worker(self, worker: int) -> None:
        self._server.check_worker(worker)

    def attach(self, worker: int, global_step: GlobalStep) -> None:
        self._server.attach(worker, global_step)

    async def join(self, worker: int) -> None:
        """Count a worker that had left as present again."""
        self._server.join(worker)

    async def leave(self, worker: int) -> None:
        """Count a worker as gone for good."""
        self._server.leave(worker)

    begin_session = join
    end_session = leave

    async def begin_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker pull. Cancellation safe.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
        """
        engine = current_engine()
        request = _Request("begin_step", worker)
        await request.arrive()
        before = engine.now()
        await self._server.begin_step(worker)
        self._begun[worker] = self._server.pull(worker)
        await request.answer(is_late=engine.now() > before)

    async def pull(self, worker: int) -> Snapshot:
        """The parameters, read-only, and their version: those that came with `begin_step`."""
        self.check_worker(worker)
        begun = self._begun.pop(worker, None)
        if begun is not None:
            return begun
        request = _Request("pull", worker)
        await request.arrive()
        snapshot = self._server.pull(worker)
        await request.answer()
        return snapshot

    async def push(self, worker: int, gradient: Any, version: int) -> Pushed:
        """Send a gradient that was computed at a version; waits only for the answer.

        Raises:
            ValueError, TypeError: an argument does not fit; nothing has changed.
        """
        request = _Request("push", worker)
        await request.arrive()
        pushed = self._server.push(worker, gradient, version)
        updated_to = self._server.version
        await request.answer()
        if (recorder := current_recorder()) is not None:
            record_push(recorder, worker, pushed, updated_to)
        return pushed

    async def end_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker go on; at a stop or the limit it returns."""
        if not self._server.waits_after_step:
            return
        engine = current_engine()
        before = engine.now()
        await self._server.end_step(worker)
        if engine.now() > before:  # else the answer to the push has said so
            await _Request("push", worker, is_recorded=False).answer()

    def watch_update(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken with `ABANDONED` when work on this version becomes useless."""
        return self._server.watch_update(version, slot)

    async def compute(
        self, version: int, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> tuple[bool, Any]:
        """Await `fn(*args)` in a task of its own, and cancel it when work on `version` is useless.

        As in `ParameterServer`.
        """
        return await self._server.compute(version, fn, *args)

    async def close(self) -> None:
        """Make no further update: every wait of every worker ends."""
        self._server.close()

    async def state_dict(self) -> dict[str, Any]:
        """The state to continue training from, as `ParameterServer.state_dict`."""
        return self._server.state_dict()

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError, TypeError: as `ParameterServer.load_state_dict`.
        """
        self._server.load_state_dict(state)

    async def staleness_counts(self, worker: int | None = None) -> dict[int, int]:
        """How many gradients took part in an update, by staleness; of one worker, or of all."""
        return self._server.staleness_counts(worker)

    def __repr__(self) -> str:
        return f"<PlannedParameterServer {self._server.protocol!r}, version {self.version}>"


class _Request:
    """One request of a worker, in virtual time if this is a plan."""

    def __init__(self, function: str, worker: int, *, is_recorded: bool = True) -> None:
        self._span: Span | None = None
        if is_recorded:
            self._span = begun_span(current_engine(), Kind.REQUEST, function, worker)
        recorder = current_recorder()
        self._player = recorder if isinstance(recorder, Player) else None
        self._function = function
        self._way_secs = 0.0 if self._player is None else self._player.way_secs(function)

    async def arrive(self) -> None:
        """Go to the server, and wait until it has served this."""
        if self._player is None:
            return
        try:
            await self._player.serve(self._function, self._way_secs / 2)
        except BaseException as error:
            self._end(error)
            raise

    async def answer(self, *, is_late: bool = False) -> None:
        """Come back with the answer, or with the message that the protocol's wait has ended."""
        if is_late:
            self._end()
        if self._way_secs > 0:
            assert self._player is not None
            await self._player.pause(self._way_secs / 2)
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end(error)
