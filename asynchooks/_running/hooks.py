"""HookList: calls a session's hooks in order, merges what they ask of runs, names them in errors.

It decides neither when a moment comes nor what becomes of an error.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from .._check import integer
from .._engine.base import Engine
from .._engine.current import current_engine
from .._engine.recording import Kind, Recorder, SessionRecord, current_recorder, ended
from .._engine.stacks import holds_loop
from .._engine.threads import is_async
from .._errors import (
    add_note,
    as_stop,
    input_ended,
    is_input_end,
    is_stop,
    no_input_end,
    note_once,
    shown,
    tensorflow_train,
)
from .._hook import (
    AnyHook,
    Begin,
    SessionHooks,
    SessionRunArgs,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
    begin_session,
)
from .._log import fields
from .._stopping.coordinator import Coordinator
from .._stopping.session_stop import SessionStop
from ..backends._creator import RestoredStep
from ..backends._raw_session import RawSession
from ..metrics._live import LiveMetrics
from .hook_check import FURTHER_MOMENTS, checked, overrides, warn_of_misspelt

logger = logging.getLogger("asynchooks")

CallPlain = Callable[[Callable[[], Any], Hashable, bool], Awaitable[Any]]
"""Calls a plain function where blocking steps run; those of one key take about the same time.

The last argument is whether a stop ends the wait for its turn.
"""


class HookCall:
    """One method of one hook, as what can be awaited.

    Args:
        place: the hook's in the list, as hooks may compare equal.
        hook: the hook.
        moment: the name of the method.
        fn: what is called in place of the method, and gives an awaitable.
    """

    __slots__ = ("fn", "hook", "moment", "place")

    def __init__(
        self, place: int, hook: Any, moment: str, fn: Callable[..., Awaitable[Any]]
    ) -> None:
        self.place, self.hook, self.moment, self.fn = place, hook, moment, fn

    def calling(self, fn: Callable[..., Awaitable[Any]]) -> HookCall:
        """The same, with another function that is called."""
        return HookCall(self.place, self.hook, self.moment, fn)

    @property
    def owner(self) -> str:
        return type(self.hook).__name__

    def __str__(self) -> str:
        return f"{self.moment} of {self.owner}"

    def log_fields(self, error: BaseException) -> dict[str, Any]:
        return fields(self.hook, reason=repr(error))


def needs(hook: Any, what: str) -> bool:
    """Whether it needs this: unless its own class, and not a base of it, says that it does not."""
    return bool(vars(type(hook)).get(what, True) or getattr(hook, what, True))


class HookList:
    """The hooks of one session. A method that a hook leaves alone costs it nothing.

    Args:
        hooks: any iterable of hooks, ours or TensorFlow's; one listed twice is called twice.
        call_plain: calls a plain method; the session sets it when it opens.
    """

    def __init__(
        self, hooks: Iterable[AnyHook] | None, call_plain: CallPlain | None = None
    ) -> None:
        self.hooks = checked(hooks)
        warn_of_misspelt(self.hooks)
        self.needs_graph_entered = any(needs(hook, "uses_default_graph") for hook in self.hooks)
        self.stop = SessionStop()
        if call_plain is not None:
            self.call_plain = call_plain
        self.current: HookCall | None = None  # that is being called
        self._num_begun = self._num_returned = 0  # of begins
        self._shared: SessionHooks | None = None  # from begin on, where a hook has joined
        # those that have, and their places in the list, or those of the wrappers that they are in
        self._joined: tuple[tuple[int, Any], ...] = ()
        self._watchers: tuple[SessionRunHook, ...] = ()  # called after the hooks, in runs only
        self._records: tuple[SessionRecord, ...] = ()
        self._is_planned = False  # hooks that act outside are left out
        self.live = LiveMetrics()
        self._find_runs()

    call_plain: CallPlain

    def _find_runs(self) -> None:
        before, after = tuple(self._calls("before_run")), tuple(self._calls("after_run"))
        for record in self._records:
            before, after = record.around_runs(before, after)
        self.before_runs, self.after_runs = before, after

    def _calls(self, moment: str) -> list[HookCall]:
        """The calls of this moment, in order.

        A hook that joined from within a wrapper is called itself where the wrapper does not have
        one of the moments that TensorFlow's hooks lack.
        """
        hooks = (*self.hooks, *self._watchers)
        found = [(place, hook) for place, hook in enumerate(hooks) if overrides(hook, moment)]
        if moment in FURTHER_MOMENTS:
            for place, hook in self._joined:
                is_wrapped = hook is not hooks[place] and not overrides(hooks[place], moment)
                if is_wrapped and overrides(hook, moment):
                    found.append((place, hook))
            found.sort(key=operator.itemgetter(0))
        return [self._call_of(*each, moment) for each in found if not self._leaves_out(each[1])]

    def _call_of(self, place: int, hook: Any, moment: str) -> HookCall:
        method = getattr(hook, moment)
        if not is_async(method) and moment not in ("begin", "on_drop"):
            method = self._plain(method, (moment, place), moment == "before_run")
        return HookCall(place, hook, moment, method)

    def _plain(
        self, method: Callable[..., Any], key: Hashable, ends_at_stop: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            result = await self.call_plain(lambda: method(*args), key, ends_at_stop)
            return await result if isinstance(result, Awaitable) else result

        return call

    def _leaves_out(self, hook: Any) -> bool:
        return self._is_planned and bool(getattr(hook, "acts_outside", False))

    def watch_runs(self, watcher: SessionRunHook) -> None:
        """Call this hook in runs, too, from the next one on, after all others."""
        self._watchers += (watcher,)
        self._find_runs()

    def culprit(self) -> str:
        """Which hook is being called, and when."""
        return "the session" if self.current is None else str(self.current)

    def held_in_run(self) -> str:
        """What a run is calling."""
        return "the step" if self.current is None else str(self.current)

    # --- recording --------------------------------------------------------------------------------

    def record(self, recorder: Recorder, name: str = "session") -> SessionRecord:
        """Record the session from now on, as it opens."""
        handle = self.stop.handle
        step = None if handle is None else handle.global_step
        record = recorder.open_session(current_engine(), name, step)
        self._records += (record,)
        self._find_runs()
        return record

    @contextmanager
    def _span(self, kind: Kind, name: str) -> Iterator[None]:
        """The block, as one span of the session."""
        with ExitStack() as stack:
            for record in self._records:
                stack.enter_context(ended(record.span(kind, name)))
            yield

    def recorded(
        self, fn: Callable[[], Awaitable[None]], what: str
    ) -> Callable[[], Awaitable[None]]:
        """What the hook that is called puts off to the end of the run, recorded if need be."""
        if self.current is None or not self._records:
            return fn
        name = f"{self.current.owner}: {what}"

        async def run() -> None:
            with self._span(Kind.FINISH, name):
                await fn()

        return run

    # --- moments, in the order of a session's life ------------------------------------------------

    async def begin(
        self,
        has_global_step: Callable[[], bool] = lambda: True,
        graph: Any = None,
        call: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
    ) -> None:
        """Call begin of all, a plain one by `call`; one that was called counts as begun."""
        if graph is begin_graph.get():  # setting it would cost each task 120 bytes for good
            await self._begin_all(has_global_step, call)
            return
        token = begin_graph.set(graph)
        try:
            await self._begin_all(has_global_step, call)
        finally:
            begin_graph.reset(token)

    @holds_loop(culprit)
    async def _begin_all(self, has_global_step: Callable[[], bool], call_begin: Any) -> None:
        self._num_begun = self._num_returned = 0
        self._shared, self._joined = None, ()
        if (recorder := current_recorder()) is not None:
            self._is_planned = recorder.stand_in is not None
            self.record(recorder)
        checks: list[tuple[HookCall, Callable[[], None]]] = []
        begins = {call.place: call for call in self._calls("begin")}
        for place, hook in enumerate(self.hooks):
            self._num_begun = place + 1
            call = begins.get(place) or HookCall(place, hook, "begin", hook.begin)
            with self._blaming(call):
                if getattr(hook, "needs_global_step", False) and not has_global_step():
                    raise RuntimeError(
                        f"Global step should be created to use {call.owner}. Create one "
                        "(tf.compat.v1.train.get_or_create_global_step()) before the session. If "
                        "there is one, it is in another graph: make the session inside "
                        "`with graph.as_default():`"
                    )
                if place in begins:
                    await self._begin_one(call, call_begin)
            self._num_returned = place + 1
            if self._shared is not None:
                checks += [(call, check) for check in self._shared.checks]
                self._shared.checks.clear()
        for call, check in checks:
            with self._blaming(call):
                check()
        self.current = None

    async def _begin_one(self, call: HookCall, call_begin: Any) -> None:
        """Call it; meanwhile it may join this session, and tasks that it starts may not."""
        begin = Begin(self)
        is_joining = needs(call.hook, "needs_session_in_begin")
        token = begin_session.set(begin) if is_joining else None
        try:
            with self._span(Kind.HOOK, f"{call.owner}.begin"):
                # a plain one, too, on the event loop: it builds a graph
                is_here = call_begin is None or is_async(call.fn)
                result = call.fn() if is_here else await call_begin(call.fn)
                if isinstance(result, Awaitable):
                    await result
        finally:
            begin.hooks = None
            if token is not None:
                begin_session.reset(token)

    def join(self, hook: SessionRunHook) -> SessionHooks:
        """A hook in its begin asks what it shares with the others of its session."""
        if self._shared is None:
            self._shared = SessionHooks(self.hooks, self.stop, self.live, self.record)
        self._shared.begun.append(hook)
        self._joined += ((self._num_begun - 1, hook),)
        return self._shared

    def names_of_restoring(self) -> str:
        """The hooks that may restore a model, for people; "" if none may."""
        return ", ".join(dict.fromkeys(call.owner for call in self._calls("restore_model")))

    async def restore(self, raw: RawSession) -> RestoredStep:
        """Bring back what was saved of a raw session's model, by the first hook that does."""
        # `current` stays as it is: another worker may have this one's hooks restore their model
        for call in self._calls("restore_model"):
            try:
                step: RestoredStep = await self._called(call, raw.exposed)
            except BaseException as error:
                raised = no_input_end(error, f"{call},")
                raised = self._blamed(raised, str(call), is_stopping=self.stop.is_set)
                if raised is error:
                    raise
                raise raised from error
            if step is None:
                return None
            if step is not NotImplemented:
                expected = "an integer >= 0, None or NotImplemented"
                return integer(f"what {call} returned", step, least=0, expected=expected)
        return NotImplemented  # type: ignore[no-any-return]  # to mypy it is Any

    @holds_loop(culprit)
    async def after_create_session(self, raw: RawSession, coord: Coordinator) -> None:
        for call in self._calls("after_create_session"):
            with self._blaming(call):
                await self._called(call, raw.exposed, coord)
                if needs(call.hook, "uses_default_graph"):
                    await raw.take_up_step()  # the hooks after it count from there
        self.current = None

    def explained(
        self, error: BaseException, call: HookCall | None, merged: MergedRun | None
    ) -> BaseException:
        """What an error in a run becomes; `call` is that of the hook, None in the step.

        An iterator that ended in before_run, or in the step, ends training.
        """
        for record in self._records:
            record.cut_run(error)
        error = as_stop(error)
        if call is not None and call.moment == "after_run":
            return self._blamed(error, str(call), is_stopping=self.stop.is_set)
        if is_input_end(error):
            return input_ended(error, "the step" if call is None else str(call))
        if call is not None:
            note_once(error, f"in {call}")
        elif merged is not None and isinstance(error, (TypeError, ValueError, LookupError)):
            merged.blame(error)
        return error

    @holds_loop(culprit)
    async def end(self, session: Any) -> BaseException | None:
        """Call before_end and end of all, also after one failed; returns the first error."""
        engine = current_engine()
        first: BaseException | None = None
        for call in [*self._calls("before_end"), *self._calls("end")]:
            try:
                with self._blaming(call):
                    await self._called(call, session)
            except BaseException as error:
                is_exit = isinstance(error, (KeyboardInterrupt, SystemExit))  # perhaps a signal's
                if is_exit or engine.failure_in(error) is not error:  # or a cancellation
                    if first is not None:
                        add_note(error, f"after {first!r}")
                    return error
                if first is not None:
                    add_note(first, f"then, in {call}: {error!r}")
                first = first or error
        return first

    @holds_loop(culprit)
    async def on_error(
        self, session: Any, error: BaseException, engine: Engine, grace_secs: float
    ) -> None:
        """Call on_error of all that have begun, in reverse; shielded, for the grace period."""
        until, leaving = engine.now() + grace_secs, None
        for call in reversed(self._calls("on_error")):
            if call.place >= self._num_begun:
                continue
            self.current = call
            try:
                with engine.shielded(max(0.0, until - engine.now())) as scope:
                    await self._called(call, session, error)
                if scope.cancelled_caught:
                    extra = call.log_fields(error)
                    logger.warning("%s took longer than %g s", call, grace_secs, extra=extra)
            except BaseException as second:
                add_note(error, f"then, in {call}: {second!r}")
                logger.error("%s failed: %r", call, second, extra=call.log_fields(second))
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    leaving = leaving or second  # the other hooks let go of what they hold
        if leaving is not None:
            raise leaving

    @holds_loop(culprit)
    async def after_close(self, error: BaseException | None) -> BaseException | None:
        """Call after_close of those that have begun; returns what leaves the session."""
        for call in self._to_leave("after_close"):
            self.current = call
            try:
                error = None if await self._called(call, error) else error
            except BaseException as raised:
                if raised is not error and not isinstance(raised, (KeyboardInterrupt, SystemExit)):
                    raised = self._blamed(raised, str(call), is_stopping=True)
                if error is not None and raised is not error:
                    raised.__context__ = raised.__context__ or error
                error = raised
        self.current = None
        for record in reversed(self._records):
            await record.aclose(error)
        while self._shared is not None and self._shared.leave:
            error = await self._shared.leave.pop()(error)
        return error

    def on_drop(self) -> None:
        """Call on_drop of those that have begun, here and now; errors are logged."""
        for call in self._to_leave("on_drop"):
            try:
                call.fn()
            except Exception as error:
                extra = call.log_fields(error)
                logger.error("A dropped session: %s failed: %r", call, error, extra=extra)
        for record in self._records:
            record.drop()

    def _to_leave(self, moment: str) -> list[HookCall]:
        """The calls to hooks that have begun: one that was refused in its begin holds nothing."""
        joined = {place for place, _ in self._joined}
        begun = {*range(self._num_returned), *joined}
        num_hooks = len(self.hooks)  # behind them are those that watch the runs
        return [
            call for call in self._calls(moment) if call.place in begun or call.place >= num_hooks
        ]

    async def _called(self, call: HookCall, *args: Any) -> Any:
        """Call one method, perhaps in a task of another session."""
        if not self._records:
            return await call.fn(*args)
        with self._span(Kind.HOOK, f"{call.owner}.{call.moment}"):
            return await call.fn(*args)

    @contextmanager
    def _blaming(self, call: HookCall) -> Iterator[None]:
        """Calls the hook; its error names it."""
        self.current = call
        try:
            yield
        except BaseException as error:
            blamed = self._blamed(error, str(call))
            if blamed is error:
                raise
            raise blamed from error

    def _blamed(
        self, error: BaseException, culprit: str, *, is_stopping: bool = False
    ) -> BaseException:
        """Name hook and moment; the end of an input, where none is read, is the hook's bug."""
        if is_input_end(error) or (is_stop(error) and not is_stopping):
            cause = error.__cause__ if type(error) is RuntimeError else error
            bug = RuntimeError(
                f"{culprit} raised {cause!r}, but no input is read there; "
                "catch it in the hook, or read the input in before_run"
            )
            bug.__cause__ = error
            return bug
        note_once(error, f"in {culprit}")
        return error


NOTHING: Mapping[int, SessionRunValues] = {}
RunArguments = tuple[Any, Any, Any, Any]
"""(fetches, feed_dict, options, run_metadata)."""


class MergedRun:
    """What a raw run is asked for, and the way back from its outputs to hooks and caller.

    What the caller passed is never changed, and goes through untouched if no hook adds to it.
    """

    # where no hook asks for them
    _feeders: dict[Hashable, str] | None = None
    _fed: tuple[tuple[str, Mapping[Any, Any]], ...] = ()  # by which hook, and what
    _options: tuple[Any, ...] = ()

    def __init__(self, raw: RawSession, args: RunArguments, hooks: HookList) -> None:
        self._raw = raw
        self._args = args
        self._hooks = hooks.hooks
        self._fetches: dict[int, Any] = {}  # by the hook's place

    def add(self, call: HookCall, request: Any) -> None:
        """Add what a hook asks for."""
        if type(request) is not SessionRunArgs:
            request = _converted(request, call.owner)
        fetches, feeds, options = request
        if fetches is not None:
            self._fetches[call.place] = fetches
        if options is not None:
            self._options += (options,)
        if feeds:
            if not isinstance(feeds, Mapping):
                raise wrong_feeds(f"{call.owner}.before_run returned the feed_dict", feeds)
            self._add_feeds(feeds, call.owner)

    def _add_feeds(self, feeds: Mapping[Any, Any], feeder: str) -> None:
        fetches, own, *others = self._args
        if self._feeders is None:
            own = dict(own or {})
            self._feeders = {name: "" for key in own for name in self._raw.feed_names(key)}
        names = [name for key in feeds for name in self._raw.feed_names(key)]
        clashes = sorted({str(name) for name in names if name in self._feeders})
        if clashes:
            by_caller = any(self._feeders.get(name) == "" for name in names)
            pair = "a SessionRunHook and user" if by_caller else "two hooks"
            raise RuntimeError(
                f"Same tensor is fed by {pair}. Conflict(s): {', '.join(clashes)}; "
                f"{feeder} feeds them, too: leave them to one of the two"
            )
        self._feeders.update(dict.fromkeys(names, feeder))
        self._fed += ((feeder, feeds),)
        own.update(feeds)
        self._args = (fetches, own, *others)

    def finish(self, last_fetches: Any = None) -> RunArguments:
        """What to run: the caller's fetches, or a tuple of these and of each hook's.

        The last run's fetches if they are the same: a raw session may have compiled that object.
        """
        fetches, feed_dict, options, metadata = self._args
        if self._options:
            asked = self._options if options is None else (options, *self._options)
            options = self._raw.merge_options(list(asked))
        if options is not None:
            if self._hooks and metadata is None:
                metadata = self._raw.new_run_metadata()
            self._args = (fetches, feed_dict, options, metadata)
        if self._fetches:
            fetches, last = (fetches, *self._fetches.values()), last_fetches
            if type(last) is tuple and len(last) == len(fetches):
                fetches = last if all(map(operator.is_, last, fetches)) else fetches
        return fetches, feed_dict, options, metadata

    def split(
        self, outputs: Any, unasked: SessionRunValues
    ) -> tuple[Any, SessionRunValues, Mapping[int, SessionRunValues]]:
        """(what the caller gets, what a hook gets that asked for nothing, the others' by place).

        Args:
            unasked: what a hook gets where no options were asked for.
        """
        _, _, options, metadata = self._args
        if options is not None or metadata is not None:
            no_options, no_metadata = self._raw.no_options
            options = no_options if options is None else options
            unasked = SessionRunValues(None, options, no_metadata if metadata is None else metadata)
        if not self._fetches:
            return outputs, unasked, NOTHING
        _, options, metadata = unasked
        parts = iter(outputs)
        mine = next(parts)
        its = {place: SessionRunValues(next(parts), options, metadata) for place in self._fetches}
        return mine, unasked, its

    def blame(self, error: Exception) -> None:
        """Name the hooks whose fetches or feeds made the run fail, if that is the cause."""
        for place, fetches in self._fetches.items():
            if self._raw.rejects(fetches, error):
                hook = self._hooks[place]
                what = getattr(hook, "_fetches_are", "")
                where = f"fetched in before_run of {type(hook).__name__}"
                add_note(error, f"{where}, as {what}" if what else where)
        for feeder, feeds in self._fed if isinstance(error, TypeError) else ():
            if any(self._raw.rejects(key, error) for key in feeds):
                add_note(error, f"fed in before_run of {feeder}")


def wrong_feeds(what: str, feeds: object) -> TypeError:
    """The error for feeds that are no mapping, such as a batch as a loader gives it."""
    return TypeError(
        f"{what} {shown(feeds)}; give a mapping from names to values, such as "
        '{"batch": batch} for a step function with the parameter batch'
    )


def _converted(request: Any, hook: str) -> SessionRunArgs:
    """What one of TensorFlow's hooks asks for, or one of a subclass."""
    train = tensorflow_train()
    types = (SessionRunArgs,) if train is None else (SessionRunArgs, train.SessionRunArgs)
    if isinstance(request, types):
        return SessionRunArgs(*request)
    raise TypeError(
        f"{hook}.before_run returned {shown(request)}; "
        "expected SessionRunArgs(fetches, feed_dict, options) or None"
    )
