"""SharedSessionCreator: one raw session and one global step for many workers of an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ._coordinator import Coordinator
from ._engine import Engine
from ._lock import Lock
from ._raw_session import RawSession
from ._session_creator import (
    Lease,
    Restore,
    SessionCreator,
    check_creator,
    close_raw,
    take_alone,
)
from ._stop_reason import StopReason


class SharedSessionCreator(SessionCreator):
    """Lends one raw session and one global step to many `MonitoredSession`s.

    You make it and give it to each worker's session. The first to open creates the raw session,
    the last to close closes it. When it is lost, it is recreated once and all workers go on.

    Args:
        creator: makes the raw session.
        num_workers: how many sessions will open, when known: then a worker that waits for a step
            that can no longer come gets a StepUnreachableError as soon as all wait.

    Example:
        creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=8)
        async with anyio.create_task_group() as group:
            for i in range(8):
                group.start_soon(worker, i, creator)
    """

    def __init__(self, creator: SessionCreator, num_workers: int | None = None) -> None:
        check_creator(creator, "creator")
        if isinstance(creator, SharedSessionCreator):
            raise TypeError(
                f"SharedSessionCreator got {creator!r}; give it the creator of the session to "
                "share, such as FunctionSessionCreator(step_fn)"
            )
        if num_workers is not None and not (isinstance(num_workers, int) and num_workers >= 1):
            raise ValueError(
                f"num_workers is {num_workers!r}; give an integer >= 1, or None if unknown"
            )
        self._creator = creator
        self._num_workers = num_workers
        self._common: _Common | None = None

    def create_session(self) -> Any:
        return self._creator.create_session()

    def lease(self, num_workers: int | None = None) -> Lease:
        if self._common is None:
            self._common = _Common(self._creator.lease(self._num_workers))
        return _SharedLease(self, self._common)


class _Common:
    """What the workers share; only tasks of their event loop touch it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.lock = Lock("the shared session")  # whoever opens, recreates or closes it
        self.users: dict[_SharedLease, None] = {}  # in order of opening
        self.failure: StopReason | None = None  # of the first user that failed
        self.raw: RawSession | None = None
        self.is_restored = False  # from a checkpoint, if there is one
        # The threads of the raw session (queue runners) belong to it, not to the worker that came
        # first; what stops them by an error stops all workers.
        self.coord: Coordinator | None = None
        self.worker_coords: list[Coordinator] = []

    def start_threads(self, raw: RawSession, worker_coord: Coordinator) -> None:
        self.worker_coords = [each for each in self.worker_coords if not each.joined]
        self.worker_coords.append(worker_coord)
        if self.coord is None:
            self.coord = self.lease.new_coordinator()
            self.coord.attach(self._on_change, lambda coroutine: coroutine)
            self.lease.start_threads(raw, self.coord)
        elif self.coord.error is not None:
            worker_coord.request_stop(self.coord.error)

    def stop_all(self, reason: StopReason) -> None:
        """Ask all workers to stop."""
        for each in list(self.users):
            each._stop_for(reason)

    def _on_change(self, is_set: bool) -> None:
        error = None if self.coord is None else self.coord.error
        if is_set and error is not None:
            for each in list(self.worker_coords):
                if not each.joined:
                    each.request_stop(error)

    async def close_raw(self, engine: Engine, grace_secs: float) -> None:
        """Stop its threads and close the raw session, or let the last run on it do so."""
        raw, self.raw = self.raw, None
        coord, self.coord = self.coord, None
        self.worker_coords.clear()
        if raw is None:
            return
        is_idle = raw.retire()
        try:
            if coord is not None:
                coord.detach()
                until = engine.now() + grace_secs
                await coord.end(engine, until, cancel_tasks=True, loss=raw.loss)
        finally:
            if is_idle:
                await close_raw(raw, engine, grace_secs)


class _SharedLease(Lease):
    """One worker's share."""

    __slots__ = ("_common", "_has_opened", "_restore")

    def __init__(self, creator: SharedSessionCreator, common: _Common) -> None:
        super().__init__(creator, common.lease.global_step)
        self._common = common
        self._has_opened = False
        self._restore: Restore | None = None

    @property
    def graph(self) -> Any:
        return self._common.lease.graph

    @property
    def has_global_step(self) -> bool:
        return self._common.lease.has_global_step

    @asynccontextmanager
    async def opening(self, engine: Engine, grace_secs: float) -> AsyncIterator[None]:
        # counted from the first moment: the others may finish while this one still opens
        self._common.users[self] = None
        if self._common.failure is not None:
            self._stop_for(self._common.failure)
        async with self._common.lock:
            self._has_opened = True
            async with self._common.lease.opening(engine, grace_secs):
                yield

    async def acquire(
        self,
        engine: Engine,
        grace_secs: float,
        lost: RawSession | None = None,
        restore: Restore | None = None,
    ) -> RawSession:
        common, self._restore = self._common, restore
        async with common.lock:
            if common.raw is not None and common.raw is lost:  # the first to notice recreates it
                await common.close_raw(engine, grace_secs)
            if common.raw is None:
                of_any = (user._restore for user in common.users if user._restore is not None)
                first = next(of_any, None)
                common.raw = await common.lease.acquire(engine, grace_secs, restore=first)
                common.raw.stop_workers = common.stop_all
                common.is_restored = first is not None
            elif restore is not None and not common.is_restored:
                await self._restore_late(common.raw, restore)
            return common.raw

    async def _restore_late(self, raw: RawSession, restore: Restore) -> None:
        """Others opened first, who did not know of the checkpoint: their steps go back to it."""
        release = await take_alone(self.global_step)
        try:
            step = await restore(raw)
            if step is not None:
                self.global_step.restart(step)
                raw.attach(self.global_step)
        finally:
            release()
        self._common.is_restored = True

    async def release(self, raw: RawSession | None, engine: Engine, grace_secs: float) -> None:
        self._common.users.pop(self, None)  # a run that outlived its session releases it again
        if not self._common.users:
            self._common.failure = None
            await self._common.close_raw(engine, grace_secs)

    def close(self) -> None:
        if self._has_opened:
            self._common.lease.close()

    def drive(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        return self._common.lease.drive(coroutine, culprit)

    def fail(self, reason: StopReason) -> None:
        if self._common.failure is None:
            self._common.failure = reason
            for each in list(self._common.users):
                if each is not self:
                    each._stop_for(reason)

    def _stop_for(self, reason: StopReason) -> None:
        if self.listener is not None:
            self.listener.stop_for(reason)

    def call(self, fn: Callable[[], Any]) -> Any:
        return self._common.lease.call(fn)

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        self._common.start_threads(raw, coord)

    def new_coordinator(self) -> Coordinator:
        return self._common.lease.new_coordinator()
