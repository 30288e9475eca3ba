"""Session creators, which make raw sessions, and the handles by which sessions hold them.

Nothing here runs a step, or calls a hook but for what restores a new raw session's model.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

from .._engine.base import Engine
from .._engine.stop import Stop, StopReason
from .._engine.sync import NO_LOCK, CallLock
from .._engine.threads import Outcome, is_async, run_blocking
from .._step.global_step import GlobalStep, GlobalStepStatistics
from .._stopping.coordinator import Coordinator
from ._raw_session import RawSession, RestoredStep

logger = logging.getLogger("asynchooks")


class SessionCreator(ABC):
    """Makes raw sessions, the first one and those that replace a lost one.

    You make it and give it to a session, which closes what it made.

    Example:
        class EchoCreator(SessionCreator):
            def create_session(self):
                return Echo()
    """

    @property
    def call_lock(self) -> CallLock:
        """What keeps calls on its raw sessions' model from overlapping, where they may not."""
        return NO_LOCK

    @property
    def in_flight(self) -> int:
        """How many steps of one session may be under way at once: 1, or more by `submit`."""
        return 1

    @abstractmethod
    def create_session(self) -> Any:
        """Make one `RawSession`; may be a coroutine."""

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        """The hold of one `MonitoredSession`, made together with it."""
        return SessionHandle(self, GlobalStep(num_workers=num_workers))


PATIENCE_SECS = 30.0
"""How long a model that is to be saved or restored waits for steps on it that are under way."""


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


async def completed(engine: Engine, fn: Callable[[], Awaitable[None]]) -> None:
    """Await `fn()` in a task of its own: when the caller is cancelled, it goes on to its end."""
    outcome, has_left = Outcome(), False

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

    try:
        await engine.start(run).wait()
    except BaseException:
        has_left = True
        raise
    outcome.unwrap()


class Restore(NamedTuple):
    """One hook that may bring back what was saved of a raw session's model."""

    hook: str
    """Its class, for messages."""
    model: Callable[[RawSession], Awaitable[RestoredStep]]
    """Does so, and returns the step of what it has restored."""


async def restore_by_first(raw: RawSession, restores: Sequence[Restore]) -> RestoredStep:
    """Have the model restored by the first hook that does so; returns what that returned."""
    for each in restores:
        raw.restored_step = await each.model(raw)
        if raw.restored_step is not NotImplemented:
            break
    return raw.restored_step


class SessionHandle:
    """One `MonitoredSession`'s hold on its creator, and what surrounds its hooks.

    The session makes it in its constructor and closes it at its end.
    """

    graph: Any = None
    """The TensorFlow graph that is run, if any."""

    __slots__ = ("_has_created", "_savers", "creator", "global_step", "stop_for")

    def __init__(self, creator: SessionCreator, global_step: GlobalStep) -> None:
        self.creator = creator
        # stops the session for what stops another one; the session sets it
        self.stop_for: Callable[[StopReason], None]
        self.global_step = global_step
        self._has_created = False
        self._savers: list[Any] = []

    @property
    def savers(self) -> list[Any]:
        """What saves the model now, in all sessions that share it: hooks put themselves there."""
        return self._savers

    @property
    def has_global_step(self) -> bool:
        """Whether there is anything that counts steps."""
        return True

    def opening(self, engine: Engine, grace_secs: float) -> AbstractAsyncContextManager[None]:
        """Around the hooks' begin: no other session changes the model, complete at its end."""
        return _nothing()

    async def acquire(
        self,
        engine: Engine,
        grace_secs: float,
        lost: RawSession | None = None,
        restores: Sequence[Restore] = (),
    ) -> RawSession:
        """A raw session that is ready to run; `lost` is the one it replaces, which is closed."""
        if lost is not None:
            await close_raw(lost, engine, grace_secs)
        known = self.global_step.statistics()
        raw, value = await self._create(engine, grace_secs)
        raw.replaces_lost = self._has_created
        if not restores:
            self._start_from(value, known, goes_on=raw.outlived_by_model)
        else:
            raw.grace_secs = grace_secs
            try:
                release = await take_alone(self.global_step, raw)

                async def start() -> None:
                    try:
                        restored = await restore_by_first(raw, restores)
                        goes_on = raw.outlived_by_model and not isinstance(restored, int)
                        first = restored if isinstance(restored, int) else value
                        self._start_from(first, known, goes_on=goes_on)
                    finally:
                        release()

                # whole also where the caller is cancelled: others may go on with the model
                await completed(engine, start)
            except BaseException:
                await close_raw(raw, engine, grace_secs)
                raise
        self._has_created = True
        raw.grace_secs = grace_secs
        raw.attach(self.global_step)
        return raw

    def _start_from(self, value: int, known: GlobalStepStatistics, *, goes_on: bool) -> None:
        """Take up the step where a new raw session begins.

        Args:
            known: before it was made.
            goes_on: whether it has the model of the one that it replaces: steps count on that are
                under way on that one.
        """
        if self._has_created and not goes_on:
            self.global_step.restart(value)
        else:
            self.global_step.publish(value)

    async def _create(self, engine: Engine, grace_secs: float) -> tuple[RawSession, int]:
        """A raw session and the global step that it begins with."""
        raw = self.creator.create_session()
        if inspect.isawaitable(raw):
            raw = await raw
        if not isinstance(raw, RawSession):
            raise TypeError(
                f"{type(self.creator).__name__}.create_session() returned {raw!r}; "
                "expected an asynchooks.RawSession"
            )
        return raw, raw.first_step(self.global_step.value)

    async def release(self, raw: RawSession | None, engine: Engine, grace_secs: float) -> None:
        """The session is over: close its raw session, if it has one."""
        if raw is not None:
            await close_raw(raw, engine, grace_secs)

    def drop(self) -> None:
        """The session was dropped without `release`; the garbage collector may call this."""

    def close(self) -> None:
        """Undo what `opening` did to the model; called once for each `opening`, at the end."""

    def in_session_context(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        """The coroutine, run in what surrounds this session; `culprit` names it in errors."""
        return coroutine

    def fail(self, reason: StopReason) -> None:
        """The session has failed: stop the others that share its creator."""

    def note_item(self, stage: object) -> bool:
        """An item was drawn from a stage, for a run of the session.

        Returns:
            False if the model is just being restored: then the item goes back, and another one is
            drawn after `wait_for_restore`.
        """
        return True

    async def wait_for_restore(self, stop: Stop | None) -> None:
        """Wait until the model has been restored; StopTraining if the stop comes first."""

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool:
        """Call `close` with the end of the last session that shares the creator.

        Returns:
            False if no other is open: then it is for the caller to close.
        """
        return False

    def call(self, fn: Callable[[], Any]) -> Any:
        """Call a plain function in what surrounds this session, in any thread."""
        return fn()

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        """Start the threads that belong to a new raw session (a graph's queue runners)."""

    def new_coordinator(self) -> Coordinator:
        """A coordinator for one raw session; it has no clean stop types."""
        return Coordinator(clean_stop_exception_types=())


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


async def close_raw(raw: RawSession, engine: Engine, grace_secs: float) -> None:
    """Close a raw session off the event loop, within the grace period; its errors are logged."""

    def log_error(outcome: Outcome) -> None:
        if outcome.error is not None:
            logger.error("Closing %s failed: %r", type(raw).__name__, outcome.error)

    def close() -> None:
        try:
            raw.close()
        except Exception as error:
            log_error(Outcome(error=error))

    if is_async(raw.close):
        with engine.shielded(grace_secs):
            try:
                await raw.close()
            except Exception as error:
                log_error(Outcome(error=error))
    elif raw.closes_at_once:
        close()
    else:
        until = engine.now() + grace_secs
        try:
            await run_blocking(
                engine, close, grace_secs, "asynchooks-close", log_error, until, raw.lost_peer
            )
        except Exception as error:
            log_error(Outcome(error=error))


def check_creator(creator: object, name: str) -> None:
    """Raise TypeError, with the likely mistake, unless it is a session creator."""
    if isinstance(creator, SessionCreator):
        return
    if isinstance(creator, type) and issubclass(creator, SessionCreator):
        hint = f"that is the class; give an instance: {creator.__name__}(...)"
    elif type(creator).__module__.startswith("tensorflow."):
        hint = f"that is TensorFlow's own; give asynchooks.{type(creator).__name__}(...)"
    elif callable(creator):
        hint = "give FunctionSessionCreator(step) to run a step function"
    else:
        hint = "such as ChiefSessionCreator() or FunctionSessionCreator(step)"
    raise TypeError(f"{name} is {creator!r}; give an asynchooks.SessionCreator: {hint}")


MakeCreator = Callable[[], SessionCreator]
_make_default: MakeCreator | None = None


def set_default_creator(make: MakeCreator) -> None:
    """Have `make` called for a session that was given no creator; it may raise ImportError."""
    global _make_default
    _make_default = make


def default_creator() -> SessionCreator:
    """The creator of a session that was given none.

    Raises:
        ImportError: what it needs, TensorFlow, is not installed (names the extra).
    """
    assert _make_default is not None
    try:
        return _make_default()
    except ImportError as error:
        raise ImportError(
            "MonitoredSession got no session_creator. To train a step function, give it one: "
            "MonitoredSession(hooks, FunctionSessionCreator(step)). To train a TensorFlow "
            "graph, which is what it does without a creator, install TensorFlow: "
            "pip install 'asynchooks[tensorflow]'"
        ) from error
