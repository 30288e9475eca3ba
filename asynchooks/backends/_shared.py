"""SharedSessionCreator: one raw session and one global step for many workers of an event loop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from .._check import integer
from .._engine.base import Engine
from .._engine.stop import StopReason
from .._engine.sync import CallLock, Condition, Lock
from .._errors import add_note
from .._stopping.coordinator import Coordinator, CoordinatorOwner
from .._stopping.session_stop import InputHold, SessionInput
from ._creator import (
    PATIENCE_SECS,
    Restore,
    RestoredStep,
    SessionCreator,
    SessionHandle,
    check_creator,
    close_raw,
    completed,
    take_alone,
)
from ._raw_session import RawSession

logger = logging.getLogger("asynchooks")


class SharedSessionCreator(SessionCreator):
    """Lends one raw session and one global step to many `MonitoredSession`s.

    You make it and give it to each worker's session. The first to open creates the raw session,
    the last to close closes it. When it is lost, it is recreated once and all workers go on.
    An error that leaves one stops the others, and so does `session.request_stop(all_workers=True)`,
    until the last of them has closed.

    Workers may open in any order. Those that begin to open together wait for each other's hooks
    to begin, so that all start from the checkpoint that one of them restores. One that opens later
    takes the model back to its checkpoint between two steps: the steps made until then
    are undone, a run that has not made its step calls its hooks again, and loops over
    `session.batches` first use up the item that they have.

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
                "share, such as FunctionSessionCreator(step)"
            )
        if num_workers is not None:
            expected = "an integer >= 1, or None if unknown"
            integer("num_workers", num_workers, least=1, expected=expected)
        self._creator = creator
        self._num_workers = num_workers
        self._common: _Common | None = None

    @property
    def call_lock(self) -> CallLock:
        return self._creator.call_lock

    def create_session(self) -> Any:
        return self._creator.create_session()

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        if self._common is None:
            self._common = _Common(self._creator.handle(self._num_workers))
        return _SharedHandle(self, self._common)

    def __repr__(self) -> str:
        workers = "" if self._num_workers is None else f", num_workers={self._num_workers}"
        return f"{type(self).__name__}({self._creator!r}{workers})"


class _Common(CoordinatorOwner):
    """What the workers share; only tasks of their event loop touch it."""

    def __init__(self, handle: SessionHandle) -> None:
        self.handle = handle
        self.lock = Lock("the shared session")  # for opening, recreating and closing it
        self.late_lock = Lock("a checkpoint to be restored")  # taken before the other one
        self.users: dict[_SharedHandle, None] = {}  # in order of opening
        self.failure: StopReason | None = None  # of the first user that failed
        self.raw: RawSession | None = None
        self.replaced: RawSession | None = None  # the one before it, given up
        self.has_created = False  # a raw session, for these users
        self.is_restored = False  # from a checkpoint, if there is one
        self.inputs = InputHold()
        # closes inputs from which users may still come to draw
        self.kept: dict[Callable[[], Awaitable[None]], None] = {}
        self.arrivals = Condition()  # notified as users come to `acquire`, or leave
        # The threads of the raw session (queue runners) belong to it, not to the worker that came
        # first; what stops them by an error stops all workers.
        self.coord: Coordinator | None = None
        self.worker_coords: list[Coordinator] = []

    def start_threads(self, raw: RawSession, worker_coord: Coordinator) -> None:
        self.worker_coords = [each for each in self.worker_coords if not each.joined]
        self.worker_coords.append(worker_coord)
        if self.coord is None:
            self.coord = self.handle.new_coordinator()
            self.coord.attach(self)
            self.handle.start_threads(raw, self.coord)
        elif self.coord.error is not None:
            worker_coord.request_stop(self.coord.error, reason=self.coord.stop_reason)

    async def wait_for_begins(self, engine: Engine) -> None:
        """Wait for the hooks' begin of those users that open together: one may restore the model.

        Not for ever: what they wait for may be this user.
        """

        def are_there() -> bool:
            return all(each._has_arrived for each in list(self.users))

        await engine.checkpoint()  # workers that are started together begin to open
        until = engine.now() + PATIENCE_SECS
        await self.arrivals.wait_until(are_there, "begin of other workers' hooks", until)
        if not are_there():
            logger.warning(
                "Hooks of another worker have been in their begin for %g s. This worker starts "
                "without it; if it restores a checkpoint, the model goes back to that.",
                PATIENCE_SECS,
            )

    async def create(
        self, engine: Engine, grace_secs: float, restore: Restore | None
    ) -> RawSession:
        """A raw session, restored from a checkpoint if there is one; call it with the lock."""
        self.is_restored = False
        noted = None if restore is None else self._noting(restore)
        self.raw = raw = await self.handle.acquire(engine, grace_secs, restore=noted)
        if self.replaced is not None:
            self.replaced.successor, self.replaced = raw, None
        self.has_created = True
        return raw

    def _noting(self, restore: Restore) -> Restore:
        async def noting(raw: RawSession) -> RestoredStep:
            step = await restore(raw)
            self.is_restored = step is not NotImplemented
            return step

        return noting

    def stop_changed(self, is_set: bool) -> None:
        coord = self.coord
        if is_set and coord is not None and coord.error is not None:
            for each in list(self.worker_coords):
                if not each.joined:
                    each.request_stop(coord.error, reason=coord.stop_reason)

    async def close_raw(self, engine: Engine, grace_secs: float) -> None:
        """Stop its threads and close the raw session, or let the last run on it do so."""
        raw, self.raw = self.raw, None
        self.replaced = raw if self.users else None
        coord, self.coord = self.coord, None
        self.worker_coords.clear()
        if raw is None:
            return
        is_idle = raw.retire()
        try:
            if coord is not None:
                coord.detach()
                until = engine.now() + grace_secs
                await coord.end(engine, until, cancel_tasks=True, lost_peer=raw.lost_peer)
        finally:
            if is_idle:
                await close_raw(raw, engine, grace_secs)

    async def close_kept(self) -> None:
        """Close the inputs that are left; the first error leaves, with notes of the others."""
        first: BaseException | None = None
        while self.kept and not self.users:  # one that opens meanwhile may draw from the others
            close = next(iter(self.kept))
            del self.kept[close]
            try:
                await close()
            except BaseException as error:
                if first is not None:
                    add_note(first, f"then, closing another input: {error!r}")
                first = first or error
        if first is not None:
            raise first


class _SharedHandle(SessionHandle):
    """One worker's share."""

    __slots__ = ("_common", "_has_arrived", "_has_opened", "_has_raw", "_restore")

    def __init__(self, creator: SharedSessionCreator, common: _Common) -> None:
        super().__init__(creator, common.handle.global_step)
        self._common = common
        self._has_opened = False
        self._has_arrived = False  # its hooks have begun
        self._has_raw = False
        self._restore: Restore | None = None

    @property
    def graph(self) -> Any:
        return self._common.handle.graph

    @property
    def savers(self) -> list[Any]:
        return self._common.handle.savers

    @property
    def has_global_step(self) -> bool:
        return self._common.handle.has_global_step

    @asynccontextmanager
    async def opening(self, engine: Engine, grace_secs: float) -> AsyncIterator[None]:
        # counted from the first moment: the others may finish while this one still opens
        self._common.users[self] = None
        if self._common.failure is not None:
            self._stop_for(self._common.failure)
        async with self._common.lock:
            self._has_opened = True
            async with self._common.handle.opening(engine, grace_secs):
                yield

    async def acquire(
        self,
        engine: Engine,
        grace_secs: float,
        lost: RawSession | None = None,
        restore: Restore | None = None,
    ) -> RawSession:
        common, self._restore, self._has_arrived = self._common, restore, True
        common.arrivals.notify()
        if restore is None and not common.has_created:
            await common.wait_for_begins(engine)
        if restore is None or common.is_restored or not common.has_created:
            async with common.lock:
                raw = await self._acquire(engine, grace_secs, lost)
        else:
            raw = await self._acquire_late(engine, grace_secs, lost, restore)
        self._has_raw = True
        return raw

    async def _acquire(
        self, engine: Engine, grace_secs: float, lost: RawSession | None
    ) -> RawSession:
        common = self._common
        if common.raw is not None and common.raw is lost:  # the first to notice recreates it
            await common.close_raw(engine, grace_secs)
        if common.raw is not None:
            return common.raw
        # a worker that is late restores by itself: others may have drawn items meanwhile
        is_first = not common.has_created
        users = [user for user in list(common.users) if is_first or user._has_raw or user is self]
        restores = [user._restore for user in users if user._restore is not None]

        async def restore(raw: RawSession) -> RestoredStep:
            for each in restores:
                step = await each(raw)
                if step is not NotImplemented:
                    return step
            return NotImplemented  # type: ignore[no-any-return]  # to mypy it is Any

        return await common.create(engine, grace_secs, restore if restores else None)

    async def _acquire_late(
        self, engine: Engine, grace_secs: float, lost: RawSession | None, restore: Restore
    ) -> RawSession:
        """Take the model that others have trained already back to the checkpoint, if there is one.

        Loops over `session.batches` use up their items first, as nothing else could put them back.
        """
        common = self._common
        async with common.late_lock:
            if not common.is_restored:
                with common.inputs.held(self._inputs_of_others()):
                    await self._wait_for_items(engine)
                    async with common.lock:
                        raw = await self._acquire(engine, grace_secs, lost)
                        if common.is_restored:
                            return raw
                        return await self._restore_late(raw, engine, grace_secs, restore)
        async with common.lock:  # another late one has just done so
            return await self._acquire(engine, grace_secs, lost)

    def _inputs_of_others(self) -> list[SessionInput]:
        listeners = [user.listener for user in list(self._common.users) if user is not self]
        return [each.input for each in listeners if each is not None and each.input is not None]

    async def _wait_for_items(self, engine: Engine) -> None:
        """Wait until no loop has an item that a run is still to use, but not for ever."""
        inputs = self._common.inputs
        own = None if self.listener is None else self.listener.input

        def late() -> list[SessionInput]:
            return [each for each in inputs.inputs if each.has_item and each is not own]

        until = engine.now() + PATIENCE_SECS
        await inputs.wait_until(lambda: not late(), "the runs of other workers", until)
        if late():
            logger.warning(
                "Loops over session.batches have held an item for %g s while a checkpoint is "
                "to be restored: %r. What they have now is used with the restored model.",
                PATIENCE_SECS, late(),
            )  # fmt: skip

    async def _restore_late(
        self, raw: RawSession, engine: Engine, grace_secs: float, restore: Restore
    ) -> RawSession:
        common = self._common
        release = await take_alone(self.global_step, raw)
        try:
            # while no run is under way, which would move it just afterwards
            has_moved = raw.restored_step is not None and (
                await raw.call_blocking(raw.read_step) != raw.restored_step
            )
            # a wrapper may have the moment, and its hook may restore nothing
            if has_moved and await restore(raw) is NotImplemented:
                release()
                return raw
        except BaseException:
            release()
            raise
        if has_moved:
            # its creator restores it, which only a new one can do again; the others recover
            release()
            await common.close_raw(engine, grace_secs)
            return await common.create(engine, grace_secs, restore)
        await completed(engine, lambda: self._go_back(raw, restore, release))
        return raw

    async def _go_back(
        self, raw: RawSession, restore: Restore, release: Callable[[], None]
    ) -> None:
        """Take back the model, and all that belongs to its step: never the model alone."""
        try:
            step = await restore(raw)
            if isinstance(step, int):
                self.global_step.restart(step)
                raw.attach(self.global_step)
                for user in list(self._common.users):
                    if user is not self and user.listener is not None:
                        user.listener.model_restored()
        finally:
            release()
        self._common.is_restored = step is not NotImplemented

    async def release(self, raw: RawSession | None, engine: Engine, grace_secs: float) -> None:
        self._common.users.pop(self, None)  # a run that outlived its session releases it again
        self._has_raw = self._has_arrived = False
        self._common.arrivals.notify()
        if not self._common.users:
            self._common.failure = None
            self._common.has_created = False
            try:
                await self._common.close_raw(engine, grace_secs)
            finally:
                await self._common.close_kept()

    def drop(self) -> None:
        self._common.users.pop(self, None)

    def close(self) -> None:
        if self._has_opened:
            self._common.handle.close()

    def in_session_context(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        return self._common.handle.in_session_context(coroutine, culprit)

    def fail(self, reason: StopReason) -> None:
        if self._common.failure is None:
            self._common.failure = reason
            for each in list(self._common.users):
                if each is not self:
                    each._stop_for(reason)

    def _stop_for(self, reason: StopReason) -> None:
        if self.listener is not None:
            self.listener.stop_for(reason)

    def add_input(self, each: SessionInput) -> None:
        self._common.inputs.add(each)

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool:
        if all(user is self for user in self._common.users):
            return False
        self._common.kept[close] = None
        return True

    def call(self, fn: Callable[[], Any]) -> Any:
        return self._common.handle.call(fn)

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        self._common.start_threads(raw, coord)

    def new_coordinator(self) -> Coordinator:
        return self._common.handle.new_coordinator()
