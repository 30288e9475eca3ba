"""SessionRunHook and what it is given: the protocol between a session and its hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from enum import IntEnum
from operator import itemgetter
from types import NotImplementedType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, Protocol, TypeVar

from ._engine.stop import StopReason, reason_for
from ._errors import call_text, public_dir
from .metrics._live import LiveMetrics

if TYPE_CHECKING:
    from ._engine.recording import Recorder, SessionRecord
    from ._step.global_step import GlobalStep
    from ._stopping.coordinator import Coordinator
    from ._stopping.session_stop import SessionStop

P = ParamSpec("P")
T = TypeVar("T")

begin_graph: ContextVar[Any] = ContextVar("asynchooks_graph", default=None)
"""In a hook's begin: the TensorFlow graph that its session runs, None for a step function."""


class SessionHooks:
    """What the hooks of one session share; a hook of ours asks for it in its begin.

    `SessionHooks.of` says to which session the hook belongs, also where it stands in a wrapper,
    whose further moments the session then calls on the hook itself if the wrapper has none. The
    session's own is a `HookList`.

    Args:
        hooks: as they were given to the session: wrappers, where there are any.
        stop: of the session, with what else hooks may know of it; None where no session calls
            the hook.
    """

    record: Callable[[Recorder, str], SessionRecord]
    """Have the session recorded from now on, under this name; not by hand."""
    watch_runs: Callable[[SessionRunHook], None]
    """Call this hook in runs, too, from the next one on, after all others; not by hand."""

    def __init__(self, hooks: Sequence[Any], stop: SessionStop | None = None) -> None:
        self.hooks, self.stop = hooks, stop
        self.live = LiveMetrics()
        """The session's metrics."""
        self.begun: list[Any] = []
        """Those that asked for this, in the order of their begin, in wrappers or not."""
        self.leave: list[Callable[[BaseException | None], Awaitable[BaseException | None]]] = []
        """Called in reverse order, after every hook's `after_close`; each is given what leaves the
        session, and returns what leaves it instead. It raises nothing."""
        self.epochs: Any = None
        """The first FeedHook that began, which knows the epochs; that room is above."""
        self.checks: list[Callable[[], None]] = []
        """Called when every hook has begun; what one raises is an error of this begin."""

    @property
    def is_by_hand(self) -> bool:
        """Whether no session calls the hook."""
        return self.stop is None

    @property
    def is_open(self) -> bool:
        """Whether the session that calls the hook is open."""
        return self.stop is not None and self.stop.worker is not None

    @classmethod
    def of(cls, hook: SessionRunHook) -> SessionHooks:
        """In a hook's begin: those of its session, or of the hook alone where none calls it."""
        begin = begin_session.get()
        hooks: SessionHooks = begin[0].join(hook) if begin else cls((hook,))
        return hooks


# of `HookList`, which is above
begin_session: ContextVar[Sequence[Any]] = ContextVar("asynchooks_session", default=())
"""In a hook's begin: the session's hooks, until it returns, so that a task which it starts finds
none later; empty where it is called by hand."""


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

    Example:
        class PrintLoss(SessionRunHook):
            async def before_run(self, run_context):
                return SessionRunArgs({"loss": "loss"})

            async def after_run(self, run_context, run_values):
                print(run_values.results["loss"])  # nested as the fetches
    """

    results: Any
    options: Any
    run_metadata: Any


class FinishPhase(IntEnum):
    """When `run_context.finish_with` has a function called, after every `after_run` of a run.

    Example:
        class Checked(SessionRunHook):
            async def after_run(self, run_context, run_values):
                # after evaluations, and before the step is saved
                run_context.finish_with(self.decide, phase=FinishPhase.DECIDE)

            async def decide(self):
                ...
    """

    EVALUATE = 0
    """First: what looks at the model as the run has left it."""
    DECIDE = 1
    """Then what decides by evaluations of the same run, such as to stop."""
    SAVE = 2
    """Then what saves the model, and with it what the others have found out."""


def worker_of(run_context: SessionRunContext) -> int | None:
    """The number of the session's worker, for the log; None where no hook of it says one."""
    hooks = run_context.called_by
    return None if hooks is None else hooks.stop.worker_number


class SessionRunContext:
    """One run, as its hooks see it; the same object in `before_run` and in `after_run`.

    `MonitoredSession.run` makes it; it lives as long as that call. A test that calls a hook by
    hand makes its own, and awaits `finish` after the last `after_run`.

    Args:
        original_args: what the caller of `run` asked for: a `SessionRunArgs`.
        session: the raw session.
        global_step: the session's, if it is not the one that counts.

    Example:
        hook, raw_session = StopAtStepHook(last_step=3), Echo()
        run_context = SessionRunContext(SessionRunArgs("loss"), raw_session)
        await hook.before_run(run_context)
        await hook.after_run(run_context, SessionRunValues(0.5, None, None))
        await run_context.finish()
    """

    __dir__ = public_dir
    # of few runs
    called_by: Any = None  # the session's `HookList`, which is above; None by hand
    stop_reason: StopReason | None = None
    """Of the stop that a hook asked for in this run; None: no hook did."""
    stops_all = False
    """Whether that is for all workers."""
    step_is_made = False
    """Whether the step of this run was made, so that it counts; from any thread.

    True in `after_run` of all hooks, before that as soon as a thread has made the step, and from
    then on, also where the run was cancelled, or failed in a hook. So a hook that feeds knows in
    its next `before_run` whether what it fed last was used.
    """
    _made: int | None = None
    _last: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = ()  # things to do, by phase
    _release: Callable[[], None] | None = None  # ends access that is held since an evaluation

    def __init__(
        self, original_args: tuple[Any, ...], session: Any, global_step: GlobalStep | None = None
    ) -> None:
        self._original_args = original_args
        self.session = session
        """The raw session; running it bypasses the hooks."""
        self.global_step: GlobalStep = session.global_step if global_step is None else global_step
        """The session's global step. Waiting for it here counts as the worker's own waiting."""

    @property
    def original_args(self) -> SessionRunArgs:
        """What the caller of `run` asked for."""
        args = self._original_args
        return args if isinstance(args, SessionRunArgs) else SessionRunArgs(*args[:2])

    @property
    def step(self) -> int:
        """The global step that this run made, to which its values belong.

        Other workers may have moved `global_step.value` since. Before the step is made, and where
        the run cannot know (a graph's variable is read after the run), it is that value.
        """
        return self.global_step.value if self._made is None else self._made

    def say_made(self, step: int | None) -> None:
        """The step of this run is made; None where the run cannot know which one that is."""
        self._made, self.step_is_made = step, True

    @property
    def stop_requested(self) -> bool:
        """Whether a hook asked, during this run, to stop."""
        return self.stop_reason is not None

    def request_stop(
        self, reason: StopReason | str | None = None, *, all_workers: bool = False
    ) -> None:
        """Let training stop after this run: every `after_run` still takes place.

        Args:
            reason: why, for `session.stop_reason`; the first one stands.
            all_workers: whether all workers stop then that share the model, as by
                `session.request_stop`; no recovery makes that forgotten.

        Raises:
            TypeError: `reason` is something else.
        """
        culprit = "a hook" if self.called_by is None else self.called_by.culprit()
        why = reason_for(None, reason, culprit)
        self.stop_reason = self.stop_reason or why
        self.stops_all = self.stops_all or all_workers

    def finish_with(
        self,
        fn: Callable[[], Awaitable[None]],
        *,
        phase: FinishPhase = FinishPhase.EVALUATE,
        exclusive: bool = False,
    ) -> None:
        """Have `fn` awaited as the last thing in this run, when every `after_run` has returned.

        So it finds all hooks in the state that belongs to the step. An error in it leaves the run
        as one in `after_run` of the hook that asked. It is dropped when the run fails before.

        Args:
            fn: a coroutine function.
            phase: its place: after all functions of earlier phases, among those of one phase in
                order of asking. What such a function asks for in an earlier phase comes next.
            exclusive: whether no worker that shares the model may run a step meanwhile. Access that
                an evaluation has is kept until a save has copied the model, or else to the end of
                the run, so that what is saved is what was evaluated; but not where functions of
                the phase EVALUATE follow, which may wait.

        Raises:
            StopTraining: out of `run`: a stop came while other workers' steps were waited for.
        """
        fn = self._exclusively(fn) if exclusive else fn
        if self.called_by is not None:
            fn = self.called_by.put_off(fn, phase.name.lower())
        self._last = tuple(sorted((*self._last, (phase, fn)), key=itemgetter(0)))

    async def finish(self) -> None:
        """Await what hooks asked for through `finish_with`, in order; `MonitoredSession.run` does.

        Call it once, and only where you call hooks by hand.
        """
        try:
            while self._last:
                (_, fn), *left = self._last
                self._last = tuple(left)
                await fn()
        finally:
            self.end_exclusive()

    def _exclusively(self, fn: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def alone() -> None:
            if self._release is None:
                self._release = await self.global_step.take_exclusive(ends_at_stop=True)
            with self.global_step.gate.held_here("global_step.exclusive()"):
                await fn()
            if self._last and self._last[0][0] == FinishPhase.EVALUATE:
                self.end_exclusive()

        return alone

    def take_over_exclusive(self) -> Callable[[], None] | None:
        """For a save: what ends the exclusive access that an evaluation of this run holds.

        None if it holds none. The caller ends it, from any thread, once the model is copied.
        """
        release, self._release = self._release, None
        return release

    def end_exclusive(self) -> None:
        """End the access that is held since an evaluation; also where the run fails."""
        if (release := self.take_over_exclusive()) is not None:
            release()


def may_be_plain(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Awaitable[T] | T]:
    """The method as it is; for type checkers a plain method may override it, too."""
    return method


class SessionRunHook:
    """Extends `MonitoredSession.run`; override the coroutines you need.

    You make it and give it to a session, which calls its methods in the order of the list. A
    method that is left alone is never called. A plain method (`def` instead of `async def`) runs
    where blocking steps run, perhaps in a thread; `begin` runs on the event loop. A hook of yours
    that forwards all methods of this class to a shipped hook does what that one does. Source:
    TensorFlow's `SessionRunHook`; `on_error` and the moments after it are ours.

    A hook that saves and restores a model needs four things of a session, in this order:
    `restore_model` for each raw session; in `after_run`, `run_context.finish_with(save,
    phase=FinishPhase.SAVE)`; `before_end`, which comes before `end` of the first hook; and
    `after_close` or `on_drop`, to let go of its files.

    Example:
        class LogLoss(SessionRunHook):
            async def before_run(self, run_context):
                return SessionRunArgs("loss")

            async def after_run(self, run_context, run_values):
                print(run_context.global_step.value, run_values.results)
    """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for this hook to continue where it was; {} if nothing.

        Called between two runs. Values are those of JSON, NumPy arrays, and lists and dicts (with
        keys that are texts) of them; tuples come back as lists.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`, perhaps in another process.

        Called before `after_create_session` if a checkpoint that holds a state was restored.
        """

    __dir__ = public_dir

    def __repr__(self) -> str:
        if not self._shown:
            return object.__repr__(self)
        return call_text(self, **{key: _get(self, path) for key, path in self._shown})

    _fetches_are = ""  # what it asks runs for, where that is one thing, for messages
    _shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    # what its repr shows: arguments, and the attributes that have them
    state_name: str = ""
    """What tells its state from those of other hooks of its class, such as a metric."""
    needs_global_step = False
    """Whether opening fails, in this hook's begin, when the graph has no global step."""
    needs_session_in_begin: bool = True
    """Whether its `begin` needs to know its session, as that of a hook which wraps others does.

    False saves 0.1 KB a session. It counts for the class that sets it, not for its subclasses.
    """
    uses_default_graph: bool = True
    """Whether its coroutines use TensorFlow's default graph, as building an op does.

    False saves a graph session 5 us a run. It counts for the class that sets it, not for its
    subclasses.
    """
    acts_outside: bool = False
    """Whether it writes files, prints, or uses signals, threads or real time.

    A plan (`asynchooks.planning`) leaves such a hook out. A hook that calls such a one sets it too.
    """

    @may_be_plain
    async def begin(self) -> None:
        """Called once, before the raw session exists; may still add ops to the default graph.

        Not called again when a lost session is recreated.
        """

    @may_be_plain
    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Called for each raw session, also for one that replaces a lost one.

        Args:
            session: the raw session (a TensorFlow session, or what the creator made), with the
                attribute `global_step`.
            coord: its new coordinator, for threads, side tasks and stopping.
        """

    @may_be_plain
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; returns what to add to it, or None.

        Raising StopIteration, StopAsyncIteration or StopTraining here ends the training cleanly.
        """
        return None

    @may_be_plain
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run that did not fail; may ask `run_context` to stop."""

    @may_be_plain
    async def end(self, session: Any) -> None:
        """Called once at a clean end, while the raw session is still open."""

    @may_be_plain
    async def on_error(self, session: Any, exception: BaseException) -> None:
        """Called once when an error leaves the session, in place of `end` or after it.

        Called for each hook whose `begin` was called, in reverse order, shielded from cancellation,
        within the grace period. Release here what `begin` acquired. An error raised here becomes a
        note of the first one.

        Args:
            session: the raw session, None if there was none (any more).
            exception: what leaves the session: an error, KeyboardInterrupt or a cancellation
                (unless a side task or thread fails only while it is waited for).
        """

    @may_be_plain
    async def restore_model(self, session: Any) -> int | NotImplementedType | None:
        """Bring a new raw session's model back to what was saved, before anything runs it.

        Called for each raw session before `after_create_session` of all hooks, while no worker that
        shares the model runs a step. Of several hooks the first one decides that returns something
        else than NotImplemented; the others are not asked. Workers that share a model restore it
        once, by the hook of one of them. A worker that has such a hook, and opens when the others
        have begun to train a model that no hook has restored, gets a CheckpointError instead.

        Args:
            session: the raw session; its step is what this returns.

        Returns:
            The global step of what was restored; None if there is nothing to restore, so that the
            model stays as it is; NotImplemented, as here, if this hook restores nothing.
        """
        return NotImplemented  # type: ignore[no-any-return]  # to mypy it is Any

    @may_be_plain
    async def before_end(self, session: Any) -> None:
        """Called once at a clean end, before `end` of the first hook.

        All hooks are in the state that the last run left: `end` is not part of training.
        """

    @may_be_plain
    async def after_close(self, exception: BaseException | None) -> bool | None:
        """Called once, when side tasks and threads have stopped and the raw session is closed.

        For each session that began to open, also after an error, in the order of the list. What
        this raises leaves the session instead.

        Args:
            exception: what leaves the session; None after a clean end.

        Returns:
            True if the exception is to be swallowed, as of `__aexit__`; else nothing.
        """
        return None

    def on_drop(self) -> None:
        """Called when the session was dropped without being closed: release what is held at once.

        The garbage collector calls this, in any thread and while any code runs: take no lock, and
        wait for nothing. No other moment follows.
        """


def _get(hook: Any, path: str) -> Any:
    """An attribute of an attribute; None where a subclass has not made it."""
    for name in path.split("."):
        hook = getattr(hook, name, None)
    return hook


class TensorFlowHook(Protocol):
    """A hook that derives from `tf.compat.v1.train.SessionRunHook`, for type checkers.

    Example:
        def session_for(hook: SessionRunHook | TensorFlowHook) -> MonitoredSession:
            return MonitoredSession([hook], creator)
    """

    def begin(self) -> Any: ...

    def after_create_session(self, session: Any, coord: Any) -> Any: ...

    def before_run(self, run_context: Any) -> Any: ...

    def after_run(self, run_context: Any, run_values: Any) -> Any: ...

    def end(self, session: Any) -> Any: ...


AnyHook = SessionRunHook | TensorFlowHook
