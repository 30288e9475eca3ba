"""SessionRunHook and what it is given: the protocol between a session and its hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ._stop_reason import StopReason, reason_for

if TYPE_CHECKING:
    from ._coordinator import Coordinator
    from ._global_step import GlobalStep
    from ._session_stop import SessionStop


begin_graph: ContextVar[Any] = ContextVar("asynchooks_graph", default=None)
"""In a hook's begin: the TensorFlow graph that its session runs, None for a step function."""


class SessionRunArgs(NamedTuple):
    """What a hook adds to a run, or what the caller asked of it.

    Args:
        fetches: as for `session.run`: for graph sessions what `tf.compat.v1.Session.run` takes,
            for function sessions names of outputs, nested in lists, tuples and dicts. None adds
            nothing.
        feed_dict: values to feed, by tensor or by name of a parameter; None or a mapping.
        options: a `tf.compat.v1.RunOptions` to merge into the run's, for graph sessions.

    Example:
        args = SessionRunArgs(["loss", "accuracy"], feed_dict={"rate": 0.1})
    """

    fetches: Any
    feed_dict: Any = None
    options: Any = None


class SessionRunValues(NamedTuple):
    """What a run gave the hook: `results` nested as its fetches, None if it asked for nothing.

    `options` and `run_metadata` are the run's own, merged over all hooks (None for function
    sessions).
    """

    results: Any
    options: Any
    run_metadata: Any


class Pending:
    """What hooks ask of a run's end; few runs have any."""

    __slots__ = ("last", "ranks", "stop_reason")

    def __init__(self) -> None:
        self.stop_reason: StopReason | None = None
        self.last: list[tuple[Any, Callable[[], Awaitable[None]]]] = []  # and who asked
        self.ranks: list[int] = []  # of those


class NamesCulprit(Protocol):
    """The list of hooks that are being called."""

    current: Any

    def culprit(self) -> str: ...


class SessionRunContext:
    """One run, as its hooks see it; the same object in `before_run` and in `after_run`.

    `MonitoredSession.run` makes it; it lives as long as that call.
    """

    __slots__ = ("_hooks", "_original_args", "_pending", "_session", "_step")

    def __init__(
        self, original_args: tuple[Any, ...], session: Any, global_step: GlobalStep | None = None
    ) -> None:
        self._original_args: tuple[Any, ...] = original_args
        self._session = session
        self._step: GlobalStep = session.global_step if global_step is None else global_step
        self._hooks: NamesCulprit | None = None
        self._pending: Pending | None = None

    @property
    def original_args(self) -> SessionRunArgs:
        """What the caller of `run` asked for."""
        args = self._original_args
        return args if isinstance(args, SessionRunArgs) else SessionRunArgs(*args[:2])

    @property
    def session(self) -> Any:
        """The raw session; running it bypasses the hooks."""
        return self._session

    @property
    def global_step(self) -> GlobalStep:
        """The session's global step. Waiting for it here counts as the worker's own waiting."""
        return self._step

    @property
    def stop_requested(self) -> bool:
        """Whether a hook asked, during this run, to stop."""
        return self._pending is not None and self._pending.stop_reason is not None

    def request_stop(self, reason: StopReason | str | None = None) -> None:
        """Let training stop after this run: every `after_run` still takes place.

        Args:
            reason: why, for `session.stop_reason`; the first one stands.

        Raises:
            TypeError: `reason` is something else.
        """
        who = "a hook" if self._hooks is None else self._hooks.culprit()
        why = reason_for(None, reason, who)
        pending = self._pending = self._pending or Pending()
        pending.stop_reason = pending.stop_reason or why

    def finish_with(self, fn: Callable[[], Awaitable[None]]) -> None:
        """Have `fn` awaited as the last thing in this run, when every `after_run` has returned.

        So it finds all hooks in the state that belongs to the step. An error in it leaves the run
        as one in `after_run` of the hook that asked. It is dropped when the run fails before.
        """
        self._finish(0, fn)

    def _finish(self, rank: int, fn: Callable[[], Awaitable[None]]) -> None:
        """As `finish_with`, by rank: evaluations (0), what looks at them (1), saves (2)."""
        pending = self._pending = self._pending or Pending()
        call = None if self._hooks is None else self._hooks.current
        place = sum(each <= rank for each in pending.ranks)
        pending.ranks.insert(place, rank)
        pending.last.insert(place, (call, fn))


async def finish_run(context: SessionRunContext) -> None:
    """Await what hooks asked for through `finish_with`; for those who drive hooks by themselves."""
    if context._pending is not None:
        for call, fn in context._pending.last:
            if context._hooks is not None:
                context._hooks.current = call
            await fn()


class SessionRunHook:
    """Extends `MonitoredSession.run`; override the coroutines you need.

    You make it and give it to a session, which calls its methods in the order of the list. A
    method that is left alone is never called. A plain method (`def` instead of `async def`) runs
    where blocking steps run, perhaps in a thread; `begin` runs on the event loop. Source:
    TensorFlow's `SessionRunHook`; `on_error` is ours.

    Example:
        class LogLoss(SessionRunHook):
            async def before_run(self, run_context):
                return SessionRunArgs("loss")

            async def after_run(self, run_context, run_values):
                print(run_context.global_step.value, run_values.results)
    """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold for this hook to go on where it was; {} if nothing.

        Called between two runs. Values are those of JSON, NumPy arrays, and lists and dicts (with
        keys that are texts) of them; tuples come back as lists.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, perhaps in another process.

        Called before `after_create_session` when a checkpoint was restored that holds any.
        """

    def _meet(self, hooks: Sequence[Any], stops: SessionStop) -> None:
        """Before begin: all hooks of the session, and what stops it, for those that need them."""

    async def _restore(self, raw: Any) -> int | None:
        """Bring a new raw session's model back to what was saved, before anybody runs it.

        Called once for each raw session; returns the global step of it, None to leave that alone.
        """
        return None

    def _owns(self, error: BaseException) -> bool:
        """Whether an error out of a run is this hook's news, not something that the run did."""
        return False

    def _ending(self) -> None:
        """Before `end` of the first hook: all are as the last run has left them."""

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        """The session is closed, however that came; returns what leaves it, `error` as a rule."""
        return error

    needs_global_step = False
    """Whether opening fails, in this hook's begin, when the graph has no global step."""
    _has_only_timers = False
    # True in hooks of ours whose state is no more than when they are due next
    _looks_at_default_graph: bool = True
    # False only in hooks of ours that run no code of users: entering a graph costs 5 us a run

    async def begin(self) -> None:
        """Called once, before the raw session exists; may still add ops to the default graph.

        Not called again when a lost session is recreated.
        """

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Called for each raw session, also for one that replaces a lost one.

        Args:
            session: the raw session (a TensorFlow session, or what the creator made), with the
                attribute `global_step`.
            coord: its new coordinator, for threads, side tasks and stopping.
        """

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; returns what to add to it, or None.

        Raising StopIteration, StopAsyncIteration or StopTraining here ends the training cleanly.
        """
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run that did not fail; may ask `run_context` to stop."""

    async def end(self, session: Any) -> None:
        """Called once at a clean end, while the raw session is still open."""

    async def on_error(self, session: Any, exception: BaseException) -> None:
        """Called once instead, or after `end`, when an error leaves the session.

        For each hook whose begin was called, in reverse order, shielded from cancellation, within
        the grace period. Free here what begin took; what is raised here becomes a note of the
        error.

        Args:
            session: the raw session, None if there was none (any more).
            exception: what leaves the session: an error, KeyboardInterrupt or a cancellation
                (unless a side task or thread fails only while it is waited for).
        """
