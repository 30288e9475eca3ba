"""RawSession: what runs steps, without hooks. Nothing here makes one, or calls a hook.

A backend of your own is a subclass of `RawSession` (`run`, `close`, and `read_step` if it counts)
and a `SessionCreator` whose `create_session` makes it. `FunctionSession` is the one for step
functions.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

from .._engine.current import current_engine
from .._engine.stop import LostPeer
from .._engine.sync import NO_LOCK, CallLock
from .._engine.threads import Outcome, StepTimes, drop, is_async, run_blocking
from .._errors import FetchError, PreemptionError, public_dir
from .._step.global_step import GlobalStep

logger = logging.getLogger("asynchooks")


class RawSession(ABC):
    """Runs steps, without hooks. A creator makes it; the session closes it.

    Subclass it for a backend of your own: `run` and `close` are enough to run. For the global step
    to count, which limits and waiters go by, override `read_step`, too.

    Example:
        class Echo(RawSession):
            def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
                return fetches

            def close(self):
                pass
    """

    __dir__ = public_dir
    is_async: bool
    """Whether `run` is a coroutine function, which suspends instead of blocking."""
    outlived_by_model = False
    """Whether a new session goes on with the model of the one it replaces.

    Steps that are under way on that one count on, unless a checkpoint is restored.
    """
    replaces_lost = False
    """Whether it stands in for one that was lost."""
    closes_at_once = False
    """Whether `close` never blocks."""
    no_options: tuple[Any, Any] = (None, None)
    """The run options and metadata that hooks see when none were asked for."""
    evaluates = False
    """Whether `evaluate` can compute fetches without running a step."""
    begins_training = False
    """Whether each one is a training of its own, as each `fit` of another library is."""
    is_saved = False
    """Whether a hook makes checkpoints of its model, in whichever worker's session."""
    nan_step: int | None = None
    """The first step that is known to have given NaN, and so is to blame for those after it."""
    bad_from: int | None = None
    """The step from which on its model must not be saved, as its loss was NaN; None: all are good.

    It is the model's, so that a worker that sees NaN stops the one that saves.
    """
    is_lost = False
    """Whether a run has found that it was lost, perhaps in the middle of a step.

    Known before others may be alone with its model.
    """
    call_lock: CallLock = NO_LOCK
    """What keeps calls on its model from overlapping, where they may not."""
    lost_peer: LostPeer | None = None
    """Where what it runs on may fall silent: set then, and blocking calls are given up."""

    def __init__(self) -> None:
        self.is_async = is_async(self.run)
        self.global_step = GlobalStep()
        self.step_times = StepTimes()
        self.inputs: set[Any] = set()  # stages of which workers that share it draw items
        self.grace_secs = 120.0  # of the session that it was made for
        self._lock = threading.Lock()  # guards the next two
        self._num_runs = 0
        self.is_retired = False  # it was given up, and replaced, by a worker that shares it
        self.successor: RawSession | None = None  # that replaced it, once it is there

    @property
    def unfit(self) -> str | None:
        """Why its model must not be saved; None if it may be."""
        if self.bad_from is not None:
            return f"from {self.bad_from} on the loss was NaN"
        return "the session was lost, perhaps in the middle of a step" if self.is_lost else None

    @abstractmethod
    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Run one step and return what was fetched, nested as `fetches`; may be a coroutine."""

    def run_and_read_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        """As `run(*args)`, for a caller that publishes the step.

        Returns:
            (what was fetched, the step after the run as `Gate.settle` takes it: None where
            this session does not count, the outputs to keep for a save of that step), or what
            gives that tuple when it is awaited.
        """
        outputs = self.run(*args)
        if isinstance(outputs, Awaitable):
            return self._finish_step(outputs)
        return outputs, self.read_step(), None

    async def _finish_step(self, pending: Awaitable[Any]) -> tuple[Any, int | None, None]:
        return await pending, self.read_step(), None

    def keep_outputs(self, fetches: Any) -> bool:
        """For what looks at the present step: have runs say which they made, and what they gave.

        Returns:
            Whether these fetches are kept of the runs of all workers, for `kept_outputs`.
        """
        return False

    def kept_outputs(self, step: int) -> Mapping[str, Any]:
        """What is kept of the run that made this step, as far as it is known."""
        return {}

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
        self, fn: Callable[[], Any], when_late: Callable[[Outcome], None] = drop
    ) -> Any:
        """Call a function that blocks on this session off the event loop: a save, an evaluation.

        A cancellation waits for it, for the grace period at most; `when_late` then gets its
        outcome, once it has one.
        """
        engine, name = current_engine(), "asynchooks-call"
        return await run_blocking(
            engine, fn, self.grace_secs, name, when_late, lost_peer=self.lost_peer
        )

    async def call_alone(
        self, fn: Callable[[], Any], when_late: Callable[[Outcome], None] = drop
    ) -> Any:
        """As `call_blocking`, overlapping no call of a step function that is not thread-safe.

        Steps may go on before and after it; `GlobalStep.exclusive` keeps them away for longer.

        Args:
            when_late: as for `call_blocking`; it gets what interrupts the wait for the call, too.

        Raises:
            OverlappingCallError: such a call was abandoned, and has not returned.
        """
        lock = self.call_lock
        try:
            hold = await lock.take(current_engine(), self.grace_secs)
        except BaseException as error:
            when_late(Outcome(error=error))  # the call is not made
            raise
        try:
            return await self.call_blocking(hold.around(fn), when_late)
        finally:
            hold.abandon()  # unless it has ended

    async def call(self, fn: Callable[..., Any], *args: Any, is_alone: bool = False) -> Any:
        """Call a user's function beside the steps: a coroutine here, a plain function in a thread.

        On a graph session the graph is the default one meanwhile.

        Args:
            is_alone: whether a plain one is called as by `call_alone`.
        """
        if is_async(fn):
            return await fn(*args)
        call = self.call_alone if is_alone else self.call_blocking
        result = await call(lambda: fn(*args))
        return await result if isinstance(result, Awaitable) else result

    async def evaluate(self, fetches: Any, feed_dict: Any = None) -> Any:
        """Compute fetches off the event loop, without a step; only where `evaluates` says so."""
        raise NotImplementedError(f"{type(self).__name__} computes nothing without a step")

    def step_after(self, error: BaseException) -> tuple[Any, ...]:
        """Of a run that failed, as the end of `run_and_read_step`; () if it made no step."""
        return ()

    async def take_up_step(self) -> None:
        """A hook may have moved the step through the session itself: count on from where it is.

        Called when after_create_session of a hook has returned that runs code of users.
        """
        return

    def run_key(self, fetches: Any) -> Hashable:
        """Equal for runs that take about the same time."""
        return None

    def feed_names(self, key: Any) -> tuple[Hashable, ...]:
        """What a key of a feed_dict stands for: two keys clash when they share a name."""
        return (key,)

    def rejects(self, fetches: Any, error: Exception) -> bool:
        """Whether a run failed with this error because of these fetches, one hook's or more."""
        if isinstance(fetches, Mapping):
            fetches = list(fetches.values())
        if isinstance(fetches, (list, tuple)):
            return any(self.rejects(each, error) for each in fetches)
        return self._rejects(fetches, error)

    def _rejects(self, fetch: Any, error: Exception) -> bool:
        """As `rejects`, of one that is not nested."""
        if not isinstance(error, FetchError):
            return False
        failed = error.fetch
        are_names = isinstance(failed, str) and isinstance(fetch, str)  # an array's == is an array
        return fetch is failed or (are_names and fetch == failed)

    def tells_of_close(self, error: BaseException) -> bool:
        """Whether the error is that of a call on this session after its close."""
        return False

    def merge_options(self, requests: list[Any]) -> Any:
        """One set of run options out of several, the caller's first; none is changed."""
        raise ValueError(
            f"run options were given to {type(self).__name__}, which has none; "
            "leave them out, or use a TensorFlow graph session"
        )

    def new_run_metadata(self) -> Any:
        """An empty object for a run to put its metadata in."""
        return None

    def enter_run(self, *, is_held: bool = False) -> None:
        """A run begins, in whichever thread; `leave_run` ends it.

        Args:
            is_held: whether the caller has entered it before, which keeps it open.

        Raises:
            PreemptionError: the session is retired; its successor may run.
        """
        with self._lock:
            if self.is_retired and not (is_held and self._num_runs):
                raise PreemptionError("the shared session was lost and replaced meanwhile")
            self._num_runs += 1

    def leave_run(self) -> None:
        """A run ends; the last one on a retired session closes it."""
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
    while raw.successor is not None:  # another worker has replaced it meanwhile
        raw = raw.successor
    return raw
