"""SharedSessionCreator: one raw session and one global step for many workers of an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from .._check import integer
from .._engine.base import Engine, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._engine.sync import Lock
from .._errors import CheckpointError, add_note, raised_by
from .._stopping.coordinator import Coordinator
from ._creator import (
    PATIENCE_SECS,
    Restore,
    SessionCreator,
    SessionHandle,
    close_raw,
    completed,
)
from ._function import checked_creator
from ._raw_session import RawSession


class SharedSessionCreator(SessionCreator):
    """Lends one raw session and one global step to many `MonitoredSession`s of one event loop.

    You make it and give it to each worker's session. The first to open creates the raw session,
    the last to close closes it. When it is lost, it is recreated once and all workers go on.
    An error that leaves one stops the others, and so does `session.request_stop(all_workers=True)`,
    until the last of them has closed.

    Workers may open in any order. The model is restored as the raw session is created, by the first
    hook that restores anything among those of the workers that open together: these wait for each
    other's hooks to begin. A worker whose hook restores the model and that opens later must do so
    before the first step, and before the others' first item: see "Resume training".

    Args:
        creator: what makes the raw session, or a step function.
        num_workers: how many sessions will open, when known: then a worker that waits for a step
            that can no longer come gets a StepUnreachableError as soon as all wait.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
        CheckpointError: out of the opening of a session whose hook restores the model too late.

    Example:
        creator = SharedSessionCreator(step, num_workers=8)
        async with anyio.create_task_group() as group:
            for i in range(8):
                group.start_soon(worker, i, creator)
    """

    def __init__(
        self, creator: SessionCreator | Callable[..., Any], num_workers: int | None = None
    ) -> None:
        self._creator = checked_creator(creator, "creator")
        if isinstance(creator, SharedSessionCreator):
            raise TypeError(
                f"SharedSessionCreator got {creator!r}; give it what the workers are to share, "
                "such as a step function"
            )
        if num_workers is not None:
            expected = "an integer >= 1, or None if unknown"
            integer("num_workers", num_workers, least=1, expected=expected)
        self._num_workers = num_workers
        self._common: _Common | None = None
        self.call_lock = self._creator.call_lock

    def create_session(self) -> Any:
        return self._creator.create_session()

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        if self._common is None:
            self._common = _Common(self._creator.handle(self._num_workers))
        return _SharedHandle(self, self._common)

    def __repr__(self) -> str:
        workers = "" if self._num_workers is None else f", num_workers={self._num_workers}"
        return f"{type(self).__name__}({self._creator!r}{workers})"


class _Common:
    """What the workers share; only tasks of their event loop touch it."""

    def __init__(self, handle: SessionHandle) -> None:
        self.handle = handle
        # for opening, recreating and closing it; those that open together queue here in turn
        hint = (
            "Another worker opens or restores it. If a hook's begin of that worker waits for this "
            "one, both wait for ever: let the hook wait in before_run"
        )
        self.lock = Lock("the shared session", hint)
        self.users: dict[_SharedHandle, None] = {}  # in order of opening
        self.engine: Engine | None = None  # of the event loop that they run in
        self.raw: RawSession | None = None
        self.replaced: RawSession | None = None  # the one before it, given up
        # what was given up and is not closed yet; whether that is for us, or for a run on it
        self.unclosed: list[tuple[RawSession, bool, Coordinator | None]] = []
        self.is_restored = False  # a hook has had a say about what the model begins with
        self.first_step = 0  # that it began with
        self.drawn_from: object = None  # the first stage of which a worker draws items
        self.restored = Stop()  # not set while one that opened late restores
        self.restored.set()
        # closes inputs from which users may still come to draw
        self.kept: dict[Callable[[], Awaitable[None]], None] = {}
        # The threads of the raw session (queue runners) belong to it, not to the worker that came
        # first; what stops them by an error stops all workers.
        self.coord: Coordinator | None = None

    async def create(self) -> RawSession:
        """A raw session, restored by the hooks of the users that are there; with the lock."""
        restores = [restore for each in self.users for restore in each.restores]
        raw = self.raw = await self.handle.acquire(restores=restores)
        is_restored = self.handle.restored is not NotImplemented
        outlived = self.replaced is not None and raw.outlived_by_model
        self.is_restored = is_restored or (self.is_restored and outlived)
        self.first_step = self.handle.global_step.last_known
        if self.replaced is not None:
            self.replaced.successor, self.replaced = raw, None
        return raw

    def start_threads(self, raw: RawSession) -> None:
        if self.coord is None:
            self.coord = self.handle.coordinator_type(())
            self.coord.on_stop = self._threads_stopped
            self.handle.start_threads(raw, self.coord)
        else:  # it may have stopped before this worker was there
            self._threads_stopped(self.coord.error, self.coord.stop_reason)

    def _threads_stopped(
        self, error: BaseException | None, reason: StopReason | None, _: bool = False
    ) -> None:
        for each in list(self.users) if error is not None else ():
            if each.coord is not None and not each.coord.joined:
                each.coord.request_stop(error, reason=reason)

    def give_up(self) -> None:
        """No run begins on the raw session any more; `close_raw` closes it."""
        if self.coord is not None:
            # a run that ends may close it before its threads have ended
            self.coord.on_stop = lambda *_: None
        if self.raw is not None:
            self.unclosed.append((self.raw, self.raw.retire(), self.coord))
        self.replaced = self.raw if self.users else None
        self.raw = self.coord = None

    async def close_raw(self) -> None:
        """Stop the threads of what was given up and close it, or let the last run on it do so."""
        while self.unclosed:
            raw, is_idle, coord = self.unclosed.pop()
            try:
                if coord is not None:
                    engine = current_engine()
                    until = engine.now() + raw.grace_secs
                    await coord.end(engine, until, cancel_tasks=True, lost_peer=raw.lost_peer)
            finally:
                if is_idle:
                    await close_raw(raw)

    async def close_kept(self) -> None:
        """Close the inputs that are left; the first error leaves, with notes of the others."""
        first: BaseException | None = None
        while self.kept and not self.users:  # one that opens meanwhile may draw from the others
            close = next(iter(self.kept))
            del self.kept[close]
            error = await raised_by(close())
            if first is not None and error is not None:
                add_note(first, f"then, closing another input: {error!r}")
            first = first or error
        if first is not None:
            raise first


class _SharedHandle(SessionHandle):
    """One worker's share."""

    def __init__(self, creator: SharedSessionCreator, common: _Common) -> None:
        super().__init__(creator, common.handle.global_step)
        self._common, handle = common, common.handle
        self.graph, self.savers = handle.graph, handle.savers
        self.has_global_step = handle.has_global_step  # type: ignore[method-assign]
        self.in_session_context = handle.in_session_context  # type: ignore[method-assign]
        self.call = handle.call  # type: ignore[method-assign]
        self.coordinator_type = handle.coordinator_type
        self.restores: Sequence[Restore] = ()  # once it takes part in creating, or has a say late
        self.coord: Coordinator | None = None

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        common, engine = self._common, current_engine()
        if common.users and common.engine is not engine:
            raise RuntimeError(
                f"{self.creator!r} is in use in another event loop; open the sessions of all its "
                "workers in one, or make a creator for each"
            )
        common.engine = engine
        common.users[self] = None  # at once: the others may finish while this one still opens
        async with common.lock:
            handle = common.handle
            self.close = handle.close  # type: ignore[method-assign]
            handle.grace_secs = self.grace_secs
            async with handle.opening():
                yield

    async def acquire(
        self, lost: RawSession | None = None, restores: Sequence[Restore] = ()
    ) -> RawSession:
        common = self._common
        if common.raw is not None and common.raw is lost:  # the first to notice
            common.give_up()  # at once: a cancellation may come while this waits
        if common.raw is None and common.replaced is None:
            self.restores = restores
            # workers that are started together begin to open; the lock is theirs before it is ours
            await current_engine().checkpoint()
        async with common.lock:
            await common.close_raw()
            raw = common.raw
            late = () if self.restores or common.is_restored else restores
            if late and raw is not None:
                await self._restore_late(raw, *late)
            elif late:  # others have lost it just now
                self._check_untrained(*late, now=self.global_step.last_known)
            self.restores = restores
            if raw is None:
                common.handle.grace_secs = self.grace_secs
                raw = await common.create()
            return raw

    async def _restore_late(self, raw: RawSession, restore: Restore) -> None:
        """Restore the model of others, unless they have begun to train it."""
        common, step = self._common, self.global_step
        try:
            release = await step.take_exclusive(timeout=PATIENCE_SECS)
        except TimeoutError:
            got = f"a step of another has been under way for {PATIENCE_SECS:g} s"
            raise self._too_late(restore, got) from None

        async def call() -> None:
            self._check_untrained(restore, now=await raw.call_blocking(lambda: step.value))
            common.restored.clear()
            try:
                restored = await restore.call(raw)
            finally:
                common.restored.set()
            common.is_restored = restored is not NotImplemented
            if isinstance(restored, int):
                step.restart(restored)
                raw.attach(step)
                common.first_step = restored

        await completed(call, release)

    def _check_untrained(self, restore: Restore, *, now: int) -> None:
        common = self._common
        if now != common.first_step:
            raise self._too_late(restore, f"others have trained the model to step {now}")
        if common.drawn_from is not None:
            raise self._too_late(restore, f"another draws items from {common.drawn_from!r}")

    def _too_late(self, restore: Restore, got: str) -> CheckpointError:
        self._common.users.pop(self, None)
        return CheckpointError(
            f"{restore.hooks} would restore the model, but its worker opens late: {got}. "
            "A model is restored before the first step of the workers that share it, and before "
            "their first item. Open the session with that hook first (enter its `async with` "
            "before the other workers are started), or give the hook to a worker that opens "
            "together with them"
        )

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        self.coord = coord
        self._common.start_threads(raw)

    async def release(self, raw: RawSession | None) -> None:
        common = self._common
        common.users.pop(self, None)  # a run that outlived its session releases it again
        if not common.users:
            common.drawn_from = None
            common.give_up()
            try:
                await common.close_raw()
            finally:
                await common.close_kept()

    def drop(self) -> None:
        self._common.users.pop(self, None)

    def fail(self, reason: StopReason) -> None:
        if self in self._common.users:  # one that was refused takes no part in the training
            self.global_step.gate.stop_all(reason)

    async def before_item(self, stage: object, stop: Stop) -> None:
        common = self._common
        while not (common.restored.is_set or stop.is_set):
            slot = Slot(current_engine(), "a checkpoint to be restored")
            with EndsAtStop(slot, stop, common.restored):
                await slot.engine.park(slot)
        common.drawn_from = common.drawn_from or stage
        if common.raw is not None:
            common.raw.inputs.add(stage)

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool:
        if all(user is self for user in self._common.users):
            return False
        self._common.kept[close] = None
        return True
