"""Session creators, which make raw sessions, and the leases by which sessions hold them.

Nothing here runs a step or calls a hook.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from ._coordinator import Coordinator
from ._engine import Engine
from ._global_step import GlobalStep, GlobalStepStatistics
from ._raw_session import RawSession
from ._runner import is_async
from ._stop_reason import StopReason
from ._work_thread import Outcome, run_blocking

logger = logging.getLogger("asynchooks")


class SessionCreator(ABC):
    """Makes raw sessions, the first one and those that replace a lost one.

    You make it and give it to a session, which closes what it made.

    Example:
        class EchoCreator(SessionCreator):
            def create_session(self):
                return Echo()
    """

    @abstractmethod
    def create_session(self) -> Any:
        """Make one `RawSession`; may be a coroutine."""

    def lease(self, num_workers: int | None = None) -> Lease:
        """The hold of one `MonitoredSession`, made together with it."""
        return Lease(self, GlobalStep(num_workers=num_workers))


_PATIENCE_SECS = 30.0
"""How long a model that is to be restored waits for steps on it that are under way."""


async def take_alone(step: GlobalStep) -> Callable[[], None]:
    """Stand alone with the model, as a model may outlive its raw session; returns what ends it.

    Not for ever: a step under way may wait for whoever asks here.
    """
    try:
        return await step.take_exclusive(timeout=_PATIENCE_SECS)
    except TimeoutError:
        logger.warning(
            "Steps have been under way for %g s while a checkpoint is to be restored: %r. It is "
            "restored beside them, and may be changed by them.",
            _PATIENCE_SECS, step,
        )  # fmt: skip
        return lambda: None


class Listener(Protocol):
    """Who holds a lease, as other holders see it."""

    def stop_for(self, reason: StopReason) -> None: ...


Restore = Callable[[RawSession], Awaitable["int | None"]]
"""Brings back what was saved of a new raw session's model; returns its step, or None."""


class Lease:
    """One `MonitoredSession`'s hold on its creator, and what surrounds its hooks.

    The session makes it in its constructor, asks it for raw sessions and closes it at its end. It
    may be opened again afterwards.
    """

    graph: Any = None
    """The TensorFlow graph that is run, if any."""

    __slots__ = ("_has_created", "creator", "global_step", "listener")

    def __init__(self, creator: SessionCreator, global_step: GlobalStep) -> None:
        self.creator = creator
        self.listener: Listener | None = None  # the session, from its making to its end
        self.global_step = global_step
        self._has_created = False

    @property
    def has_global_step(self) -> bool:
        """Whether there is anything that counts steps."""
        return True

    def opening(self, engine: Engine, grace_secs: float) -> AbstractAsyncContextManager[None]:
        """Around the hooks' begin: nobody else changes the model, which is complete at its end."""
        return _nothing()

    async def acquire(
        self,
        engine: Engine,
        grace_secs: float,
        lost: RawSession | None = None,
        restore: Restore | None = None,
    ) -> RawSession:
        """A raw session that is ready to run; `lost` is the one it replaces, which is closed."""
        if lost is not None:
            await close_raw(lost, engine, grace_secs)
        known = self.global_step.statistics()
        raw, value = await self._create(engine, grace_secs)
        if restore is None:
            self._start_from(value, known)
        else:
            raw.grace_secs = grace_secs
            release = await take_alone(self.global_step)
            try:
                restored = await restore(raw)
                self._start_from(value if restored is None else restored, known)
            except BaseException:
                await close_raw(raw, engine, grace_secs)
                raise
            finally:
                release()
        self._has_created = True
        raw.grace_secs = grace_secs
        raw.attach(self.global_step)
        return raw

    def _start_from(self, value: int, known: GlobalStepStatistics) -> None:
        """Take up the step where a new raw session begins; what was `known` before it was made."""
        if self._has_created:
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

    def close(self) -> None:
        """Undo what `opening` did to the model; called once for each `opening`, at the end."""

    def drive(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        """The coroutine, run in what surrounds this session; `culprit` names it in errors."""
        return coroutine

    async def drive_call(self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        """Call and await `fn(*args)` in what surrounds this session, in whichever task."""
        return await self.drive(_call(fn, args), lambda: f"{fn!r}")

    def fail(self, reason: StopReason) -> None:
        """The session has failed: tell the others that share its creator."""

    def call(self, fn: Callable[[], Any]) -> Any:
        """Call a plain function in what surrounds this session, in any thread."""
        return fn()

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        """Start the threads that belong to a new raw session (a graph's queue runners)."""

    def new_coordinator(self) -> Coordinator:
        """A coordinator for one raw session; it has no clean stop types."""
        return Coordinator(clean_stop_exception_types=())


async def _call(fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
    result = fn(*args)
    if not isinstance(result, Awaitable):
        raise TypeError(
            f"{fn!r} is no async function: it returned {result!r}, which cannot be awaited, and "
            "held the event loop. Call it through anyio.to_thread.run_sync"
        )
    return await result


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
                engine, close, grace_secs, "asynchooks-close", log_error, until, raw.loss
            )
        except Exception as loss:
            log_error(Outcome(error=loss))


def check_creator(creator: object, name: str) -> None:
    """Raise TypeError, with the likely mistake, unless it is a session creator."""
    if isinstance(creator, SessionCreator):
        return
    if isinstance(creator, type) and issubclass(creator, SessionCreator):
        hint = f"that is the class; give an instance: {creator.__name__}(...)"
    elif type(creator).__module__.startswith("tensorflow."):
        hint = f"that is TensorFlow's own; give asynchooks.{type(creator).__name__}(...)"
    elif callable(creator):
        hint = "give FunctionSessionCreator(step_fn) to run a step function"
    else:
        hint = "such as ChiefSessionCreator() or FunctionSessionCreator(step_fn)"
    raise TypeError(f"{name} is {creator!r}; give an asynchooks.SessionCreator: {hint}")


def default_creator() -> SessionCreator:
    """TensorFlow's ChiefSessionCreator: the one place that reaches up, when nobody gave one.

    Raises:
        ImportError: TensorFlow is not installed (names the extra).
    """
    tf = importlib.import_module(".tf", __package__)
    creator: SessionCreator = tf.ChiefSessionCreator()
    return creator
