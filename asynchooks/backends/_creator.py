"""Session creators, which make raw sessions, and the handles by which sessions hold them.

Nothing here runs a step, or calls a hook but for what restores a new raw session's model.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from types import NotImplementedType
from typing import Any, NamedTuple

from .._engine.current import current_engine
from .._engine.stop import Stop, StopReason
from .._engine.sync import NO_LOCK, CallLock
from .._engine.threads import Outcome, is_async, run_blocking
from .._step.global_step import GlobalStep
from .._stopping.coordinator import Coordinator
from ._raw_session import RawSession

logger = logging.getLogger("asynchooks")

PATIENCE_SECS = 30.0
"""How long a model that is to be saved or restored waits for steps on it that are under way."""

RestoredStep = int | NotImplementedType | None
"""As of `SessionRunHook.restore_model`."""


class Restore(NamedTuple):
    """What brings back what was saved of a new raw session's model, and returns its step."""

    hooks: str
    """Whose it is, for people."""
    call: Callable[[RawSession], Awaitable[RestoredStep]]


class SessionCreator(ABC):
    """Makes raw sessions, the first one and those that replace a lost one.

    You make it and give it to a session, which closes what it made.

    Example:
        class EchoCreator(SessionCreator):
            def create_session(self):
                return Echo()
    """

    call_lock: CallLock = NO_LOCK
    """What keeps calls on its raw sessions' model from overlapping, where they may not."""
    _global_step: GlobalStep | None = None
    """What sessions count on; None for a step of its own for each."""

    @abstractmethod
    def create_session(self) -> Any:
        """Make one `RawSession`; may be a coroutine."""

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        """The hold of one `MonitoredSession`, made together with it."""
        return SessionHandle(self, self._global_step or GlobalStep(num_workers=num_workers))


class SessionHandle:
    """One `MonitoredSession`'s hold on its creator, and what surrounds its hooks.

    The session makes it in its constructor and closes it at its end.
    """

    graph: Any = None
    """The TensorFlow graph that is run, if any."""
    coordinator_type: type[Coordinator] = Coordinator
    """Of the coordinator of each raw session; it has no clean stop types."""

    def __init__(self, creator: SessionCreator, global_step: GlobalStep) -> None:
        self.creator = creator
        self.global_step = global_step
        self.savers: list[Any] = []
        """What saves the model now, in all sessions that share it: hooks put themselves there."""
        self.grace_secs = 0.0  # the session's, which sets it
        self.restored: RestoredStep = NotImplemented  # of the raw session acquired last
        self._has_created = False

    def has_global_step(self) -> bool:
        """Whether there is anything that counts steps."""
        return True

    def opening(self) -> AbstractAsyncContextManager[None]:
        """Around the hooks' begin: no other session changes the model, complete at its end."""
        return nullcontext()

    async def acquire(
        self, lost: RawSession | None = None, restores: Sequence[Restore] = ()
    ) -> RawSession:
        """A raw session that is ready to run; `lost` is the one it replaces, which is closed.

        The first that restores anything brings its model back, while no worker runs a step.
        """
        if lost is not None:
            await close_raw(lost)
        raw, value = await self._create()
        raw.replaces_lost, raw.grace_secs = self._has_created, self.grace_secs

        async def start() -> None:
            step: RestoredStep = NotImplemented
            for each in restores:
                step = await each.call(raw)
                if step is not NotImplemented:
                    break
            self.restored = step
            # steps under way on the one it replaces count on if it has that one's model
            is_new = isinstance(step, int) or not raw.outlived_by_model
            first = step if isinstance(step, int) else value
            self._start_from(first, is_restart=self._has_created and is_new)

        if restores:
            try:
                await completed(start, await take_alone(self.global_step, raw))
            except BaseException:
                await close_raw(raw)
                raise
        else:
            await start()
        self._has_created = True
        raw.attach(self.global_step)
        return raw

    def _start_from(self, value: int, *, is_restart: bool) -> None:
        """Take up the step where a new raw session begins, perhaps in a new epoch."""
        if is_restart:
            self.global_step.restart(value)
        else:
            self.global_step.publish(value)

    async def _create(self) -> tuple[RawSession, int]:
        """A raw session and the global step that it begins with."""
        raw = self.creator.create_session()
        if inspect.isawaitable(raw):
            raw = await raw
        if not isinstance(raw, RawSession):
            raise TypeError(
                f"{type(self.creator).__name__}.create_session() returned {raw!r}; "
                "expected an asynchooks.RawSession"
            )
        step = raw.read_step()
        return raw, self.global_step.value if step is None else step

    async def release(self, raw: RawSession | None) -> None:
        """The session is over: close its raw session, if it has one."""
        if raw is not None:
            await close_raw(raw)

    def drop(self) -> None:
        """The session was dropped without `release`; the garbage collector may call this."""

    def close(self) -> None:
        """Undo what `opening` did to the model; called once for each `opening`, at the end."""

    def in_session_context(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """The coroutine, run in what surrounds this session."""
        return coroutine

    def call(self, fn: Callable[[], Any]) -> Any:
        """Call a plain function in what surrounds this session, in any thread."""
        return fn()

    def fail(self, reason: StopReason) -> None:
        """The session has failed: stop the others that share its creator."""

    async def before_item(self, stage: object, stop: Stop) -> None:
        """The session is about to draw an item from a stage: its model is restored by now, or not.

        A restore that is under way is waited for, until the stop is set.
        """

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool:
        """Call `close` with the end of the last session that shares the creator.

        Returns:
            False if no other is open: then it is for the caller to close.
        """
        return False

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        """Start the threads that belong to a new raw session (a graph's queue runners)."""


def not_alone() -> None:
    """What ends the exclusive side of the gate where it was not to be had."""


async def take_alone(
    step: GlobalStep, raw: RawSession, act: str = "restored", patience_secs: float | None = None
) -> Callable[[], None]:
    """Exclusive access to the model, which may outlive its raw session; returns what ends it.

    Not for ever: a step under way may wait for the caller; then that is `not_alone`. But beside a
    call in a thread that is not thread-safe nothing may be saved or restored: a copy could hold
    half of an update, or end the process.

    Args:
        act: what is done with a checkpoint meanwhile, for people.
        patience_secs: seconds, >= 0; None: `PATIENCE_SECS`.
    """
    secs = PATIENCE_SECS if patience_secs is None else patience_secs
    try:
        return await step.take_exclusive(timeout=secs)
    except TimeoutError:
        must_wait = raw.call_lock.is_taken and not raw.is_async
    logger.warning(
        "Runs have been under way for %g s while a checkpoint to be %s waits for their end: %r. %s",
        secs,
        act,
        step,
        f"It waits on, as {raw.call_lock.what} is not thread-safe. If they wait for this worker, "
        "they never end."
        if must_wait
        else f"They may wait for this worker, so it is {act} beside them: the result may hold "
        "variables of more than one step.",
    )
    return await step.take_exclusive() if must_wait else not_alone


async def completed(fn: Callable[[], Awaitable[None]], release: Callable[[], None]) -> None:
    """Await `fn()` in a task of its own, and then call `release`.

    When the caller is cancelled, it goes on to its end: others may go on with the model.
    """
    engine, outcome, has_left = current_engine(), Outcome(), False

    async def run() -> None:
        try:
            await fn()
        except BaseException as error:
            failure = engine.failure_in(error)
            outcome.error = failure or error
            if failure is None:
                raise
            if has_left:
                logger.error("Restoring a checkpoint failed: %r", failure)
        finally:
            release()

    try:
        await engine.start(run).wait()
    except BaseException:
        has_left = True
        raise
    outcome.unwrap()


async def close_raw(raw: RawSession) -> None:
    """Close a raw session off the event loop, within its grace period; its errors are logged."""
    engine, secs = current_engine(), raw.grace_secs
    try:
        if is_async(raw.close):
            with engine.shielded(secs):
                await raw.close()
        elif raw.closes_at_once:
            raw.close()
        else:
            name, until = "asynchooks-close", engine.now() + secs
            await run_blocking(engine, raw.close, secs, name, until=until, lost_peer=raw.lost_peer)
    except Exception as error:
        logger.error("Closing %s failed: %r", type(raw).__name__, error)


default_creator: Callable[[], SessionCreator]
"""Makes the creator of a session that was given none; the package sets it.

Raises ImportError if what it needs, TensorFlow, is not installed (names the extra).
"""
