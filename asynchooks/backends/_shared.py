"""SharedSessionCreator: one raw session and one global step for many workers of an event loop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from .._check import integer
from .._engine.base import STOPPED, Engine, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._engine.sync import CallLock, Condition, Lock
from .._errors import CheckpointError, StopTraining, add_note
from .._stopping.coordinator import Coordinator, CoordinatorOwner
from ._creator import (
    PATIENCE_SECS,
    Restore,
    SessionCreator,
    SessionHandle,
    check_creator,
    close_raw,
    completed,
    restore_by_first,
)
from ._raw_session import RawSession

logger = logging.getLogger("asynchooks")


class SharedSessionCreator(SessionCreator):
    """Lends one raw session and one global step to many `MonitoredSession`s.

    You make it and give it to each worker's session. The first to open creates the raw session,
    the last to close closes it. When it is lost, it is recreated once and all workers go on.
    An error that leaves one stops the others, and so does `session.request_stop(all_workers=True)`,
    until the last of them has closed.

    Workers that begin to open together wait for each other's hooks to begin. Then the model is
    restored, by the first of these hooks that does so (`CheckpointSaverHook`, or `restore_model` of
    your own). One in a worker that opens later restores it only if none has, and before the first
    step and the first item of an input; after that, opening that worker is a CheckpointError, and
    the others go on. So open the session of the worker that restores first, or with the others.

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

    @property
    def in_flight(self) -> int:
        return self._creator.in_flight

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
        self.users: dict[_SharedHandle, None] = {}  # in order of opening
        self.failure: StopReason | None = None  # of the first user that failed
        self.raw: RawSession | None = None
        self.replaced: RawSession | None = None  # the one before it, given up
        self.has_created = False  # a raw session, for these users
        self.first_step = 0  # of these users
        self.drawn_from: object = None  # the first stage of which one of them has drawn an item
        self.restoring: Condition | None = None  # there while one that is late restores the model
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
                "without it; if it restores a checkpoint, it must open before the first step.",
                PATIENCE_SECS,
            )

    async def acquire(
        self, engine: Engine, grace_secs: float, lost: RawSession | None
    ) -> RawSession:
        """The raw session, a new one where there is none but the lost one; call it with the lock.

        A new one is restored by the hooks of the users that have opened, or open together.
        """
        if self.raw is not None and self.raw is lost:  # the first to notice recreates it
            await self.close_raw(engine, grace_secs)
        if self.raw is not None:
            return self.raw
        is_first = not self.has_created
        users = [
            each for each in self.users if each._has_joined or (is_first and each._has_arrived)
        ]
        restores = [restore for each in users for restore in each._restores]
        raw = self.raw = await self.handle.acquire(engine, grace_secs, restores=restores)
        for each in users:
            each._has_joined = True
        if is_first:
            self.has_created, self.first_step = True, self.handle.global_step.last_known
        if self.replaced is not None:
            if raw.outlived_by_model and raw.restored_step is NotImplemented:
                raw.restored_step = self.replaced.restored_step
            self.replaced.successor, self.replaced = raw, None
        return raw

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

    __slots__ = ("_common", "_has_arrived", "_has_joined", "_has_opened", "_restores")

    def __init__(self, creator: SharedSessionCreator, common: _Common) -> None:
        super().__init__(creator, common.handle.global_step)
        self._common = common
        self._has_opened = False
        self._has_arrived = False  # its hooks have begun
        self._has_joined = False  # it has the raw session, or its hooks were asked to restore it
        self._restores: Sequence[Restore] = ()

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
            self.stop_for(self._common.failure)
        async with self._common.lock:
            self._has_opened = True
            async with self._common.handle.opening(engine, grace_secs):
                yield

    async def acquire(
        self,
        engine: Engine,
        grace_secs: float,
        lost: RawSession | None = None,
        restores: Sequence[Restore] = (),
    ) -> RawSession:
        common, self._restores, self._has_arrived = self._common, restores, True
        common.arrivals.notify()
        if not common.has_created:
            await common.wait_for_begins(engine)
        async with common.lock:
            is_late = common.has_created and not self._has_joined
            raw = await common.acquire(engine, grace_secs, lost)
            if is_late and restores and raw.restored_step is NotImplemented:
                await self._restore_late(raw, engine)
            self._has_joined = True
        return raw

    async def _restore_late(self, raw: RawSession, engine: Engine) -> None:
        """Restore the model of others, unless they have begun to train it."""
        try:
            release = await self.global_step.take_exclusive(timeout=PATIENCE_SECS)
        except TimeoutError:
            got = f"a step of another has been under way for {PATIENCE_SECS:g} s"
            raise self._refusal(got) from None
        await completed(engine, lambda: self._restore_alone(raw, release))

    async def _restore_alone(self, raw: RawSession, release: Callable[[], None]) -> None:
        """Restore model and step together, and have no item drawn meanwhile."""
        common, global_step = self._common, self.global_step
        try:
            step = await raw.call_blocking(lambda: global_step.value)
            if step != common.first_step:
                raise self._refusal(f"others have trained the model to step {step}")
            if common.drawn_from is not None:
                raise self._refusal(f"another has drawn an item from {common.drawn_from!r}")
            common.restoring = restoring = Condition()
            try:
                restored = await restore_by_first(raw, self._restores)
                if isinstance(restored, int):
                    global_step.restart(restored)
                    raw.attach(global_step)
            finally:
                common.restoring = None
                restoring.notify()
        finally:
            release()

    def _refusal(self, got: str) -> CheckpointError:
        self._common.users.pop(self, None)
        return CheckpointError(
            f"{self._restores[0].hook} would restore the model, but its worker opens late: {got}. "
            "A model is restored before the first step of the workers that share it, and before "
            "their first item. Open the session with that hook first (enter its `async with` "
            "before the other workers are started), or give the hook to a worker that opens "
            "together with them"
        )

    async def release(self, raw: RawSession | None, engine: Engine, grace_secs: float) -> None:
        self._common.users.pop(self, None)  # a run that outlived its session releases it again
        self._has_joined = self._has_arrived = False
        self._common.arrivals.notify()
        if not self._common.users:
            self._common.failure = self._common.drawn_from = None
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
        # one that was refused takes no part in the training
        if self._common.failure is None and self in self._common.users:
            self._common.failure = reason
            for each in list(self._common.users):
                if each is not self:
                    each.stop_for(reason)

    def note_item(self, stage: object) -> bool:
        if self._common.restoring is not None:
            return False
        if self._common.drawn_from is None:
            self._common.drawn_from = stage
        return True

    async def wait_for_restore(self, stop: Stop | None) -> None:
        while (restoring := self._common.restoring) is not None:
            slot = Slot(current_engine(), "a checkpoint to be restored")
            restoring.slots += (slot,)
            with EndsAtStop(slot, stop):
                if await slot.engine.park(slot) is STOPPED:
                    raise StopTraining("a stop was requested while a checkpoint was restored")

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
