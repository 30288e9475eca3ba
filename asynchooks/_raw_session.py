"""Raw sessions, the creators that make them, and the leases by which sessions hold them.

Nothing here runs a step or calls a hook.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from ._coordinator import Coordinator
from ._engine import Engine, current_engine
from ._errors import FetchError, PreemptionError
from ._global_step import GlobalStep, GlobalStepStatistics
from ._runner import StepTimes, is_async
from ._stop import Loss
from ._stop_reason import StopReason
from ._work_thread import Outcome, run_blocking

logger = logging.getLogger("asynchooks")


class RawSession(ABC):
    """Runs steps, without hooks. A creator makes it; who holds its lease closes it.

    Subclass it for a backend of your own: `run` and `close` are enough.

    Example:
        class Echo(RawSession):
            def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
                return fetches

            def close(self):
                pass
    """

    is_async: bool
    """Whether `run` is a coroutine function, which suspends instead of blocking."""
    closes_at_once = False
    """Whether `close` never blocks."""
    no_options: tuple[Any, Any] = (None, None)
    """The run options and metadata that hooks see when nobody asked for any."""
    evaluates = False
    """Whether `evaluate` can compute fetches without running a step."""
    loss: Loss | None = None
    """Where what it runs on may fall silent: set then, and blocking calls are given up."""

    def __init__(self) -> None:
        self.is_async = is_async(self.run)
        self.global_step = GlobalStep()
        self.step_times = StepTimes()
        self.grace_secs = 120.0  # of the session that it was made for
        self._lock = threading.Lock()  # guards the next two
        self._num_runs = 0
        self.is_retired = False  # it was given up, and replaced, by a worker that shares it

    @abstractmethod
    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Run one step and return what was fetched, nested as `fetches`; may be a coroutine."""

    def run_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        """As `run(*args)`, for a caller that publishes the step.

        Returns:
            (what was fetched, the step after the run as `GlobalStep.settle` takes it), or what
            gives that tuple when it is awaited.
        """
        outputs = self.run(*args)
        if isinstance(outputs, Awaitable):
            return self._finish_step(outputs)
        return outputs, self.read_step()

    async def _finish_step(self, pending: Awaitable[Any]) -> tuple[Any, int | None]:
        return await pending, self.read_step()

    @abstractmethod
    def close(self) -> Any:
        """Free what the session holds; may block, or be a coroutine. Called once."""

    @property
    def exposed(self) -> Any:
        """What hooks are given as the session."""
        return self

    def attach(self, global_step: GlobalStep) -> None:
        """Count on this global step from now on."""
        self.global_step = global_step

    def read_step(self) -> int | None:
        """The global step now; None if this session does not count. May block."""
        return None

    async def call_blocking(
        self, fn: Callable[[], Any], when_late: Callable[[Outcome], None] = lambda outcome: None
    ) -> Any:
        """Call a function that blocks on this session off the event loop: a save, an evaluation.

        A cancellation waits for it, for the grace period at most; `when_late` then gets its
        outcome, once it has one.
        """
        engine, name = current_engine(), "asynchooks-call"
        return await run_blocking(engine, fn, self.grace_secs, name, when_late, loss=self.loss)

    async def evaluate(self, fetches: Any, feed_dict: Any = None) -> Any:
        """Compute fetches off the event loop, without a step; only where `evaluates` says so."""
        raise NotImplementedError(f"{type(self).__name__} computes nothing without a step")

    def first_step(self, last: int) -> int:
        """The global step that a new session begins with; `last` is where the one before ended."""
        step = self.read_step()
        return last if step is None else step

    def read_step_after(self, error: BaseException) -> int | None:
        """The global step after a run that failed; None if it did not move or cannot be told."""
        return None

    def run_key(self, fetches: Any) -> Hashable:
        """Equal for runs that take about the same time."""
        return None

    def feed_names(self, key: Any) -> tuple[Hashable, ...]:
        """What a key of a feed_dict stands for: two keys clash when they share a name."""
        return (key,)

    def rejects(self, fetches: Any, error: Exception) -> bool:
        """Whether a run failed with this error because of these fetches, one hook's or more."""
        return isinstance(error, FetchError) and _contains(fetches, error.fetch)

    def merge_options(self, requests: list[Any]) -> Any:
        """One set of run options out of several, the caller's first; none is changed."""
        raise ValueError(
            f"run options were given to {type(self).__name__}, which has none; "
            "leave them out, or use a TensorFlow graph session"
        )

    def new_run_metadata(self) -> Any:
        """An empty object for a run to put its metadata in."""
        return None

    def enter_run(self) -> None:
        """A run begins, in whichever thread; `leave_run` ends it.

        Raises:
            PreemptionError: the session is retired; its successor may run.
        """
        with self._lock:
            if self.is_retired:
                raise PreemptionError("the shared session was lost and replaced meanwhile")
            self._num_runs += 1

    def leave_run(self) -> None:
        if not self.leave():
            return
        if is_async(self.close):
            current_engine().start(self.close)
        else:
            self.close()

    def leave(self) -> bool:
        """A run ends, or what else has kept it open; returns whether the caller must close it."""
        with self._lock:
            self._num_runs -= 1
            return self.is_retired and self._num_runs == 0

    def retire(self) -> bool:
        """Close no later than the last run ends; returns whether the caller must close it now."""
        with self._lock:
            self.is_retired = True
            return self._num_runs == 0


def _contains(fetches: Any, fetch: Any) -> bool:
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return any(_contains(each, fetch) for each in fetches)
    return fetches is fetch or (isinstance(fetch, str) and fetches == fetch)


def raw_session_of(session: Any) -> RawSession:
    """The raw session behind what hooks are given as the session.

    Raises:
        RuntimeError: there is none: the body went on after recreating a lost one had failed.
    """
    if session is None:
        raise RuntimeError(
            "the session was lost for good, so nothing can be saved or computed at its end; let "
            "the error of `run` leave the block"
        )
    raw: RawSession = session if isinstance(session, RawSession) else session.asynchooks_raw
    return raw


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


class Listener(Protocol):
    """Who holds a lease, as other holders see it."""

    def stop_for(self, reason: StopReason) -> None: ...


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
        self, engine: Engine, grace_secs: float, lost: RawSession | None = None
    ) -> RawSession:
        """A raw session that is ready to run; `lost` is the one it replaces, which is closed."""
        if lost is not None:
            await close_raw(lost, engine, grace_secs)
        known = self.global_step.statistics()
        raw, value = await self._create(engine, grace_secs)
        self._start_from(value, known)
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
    return await fn(*args)


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
