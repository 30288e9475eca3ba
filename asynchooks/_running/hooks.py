"""HookList: calls a session's hooks in order, merges what they ask of runs, names them in errors.

It decides neither when a moment comes nor what becomes of an error.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from .._check import integer
from .._engine.current import current_engine
from .._engine.recording import Kind, Recorder, SessionRecord, current_recorder, ended
from .._engine.stacks import holds_loop
from .._engine.stop import Stop
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
from .hook_check import FURTHER_MOMENTS, checked, overrides, warn_of_misspelt

logger = logging.getLogger("asynchooks")

T = TypeVar("T")


CallPlain = Callable[[Callable[[], Any], Hashable, Stop | None], Awaitable[Any]]
"""Calls a plain function where blocking steps run; those of one key take about the same time.

Without a key it is called on the event loop. The last argument ends the wait for its turn.
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

    @contextmanager
    def blaming(self, *, is_stopping: bool = False) -> Iterator[None]:
        """An error in the block becomes what `blamed` says."""
        try:
            yield
        except BaseException as error:
            blamed = self.blamed(error, is_stopping=is_stopping)
            if blamed is error:
                raise
            raise blamed from error

    def blamed(self, error: BaseException, *, is_stopping: bool = False) -> BaseException:
        """Name hook and moment; the end of an input ends training, or is the hook's bug."""
        ends, reads = is_input_end(error), self.moment == "before_run"
        if ends and reads:
            return input_ended(error, str(self))
        if not reads and (ends or (is_stop(error) and not is_stopping)):
            cause = error.__cause__ if type(error) is RuntimeError else error
            bug = RuntimeError(
                f"{self} raised {cause!r}, but no input is read there; "
                "catch it in the hook, or read the input in before_run"
            )
            bug.__cause__ = error
            return bug
        note_once(error, f"in {self}")
        if isinstance(error, AttributeError) and error.name in _OF_SESSION:
            note_once(
                error,
                "a hook gets the raw session: request_stop is a method of run_context and of "
                "coord, start_soon and or_stop are of coord, which after_create_session gets",
            )
        return error


_OF_SESSION = ("request_stop", "start_soon", "or_stop", "should_stop")


def needs(hook: Any, what: str) -> bool:
    """Whether it needs this: unless its own class, and not a base of it, says that it does not."""
    return bool(vars(type(hook)).get(what, True) or getattr(hook, what, True))


class HookList(SessionHooks):
    """The hooks of one session. A method that a hook leaves alone costs it nothing.

    Args:
        hooks: any iterable of hooks, ours or TensorFlow's; one listed twice is called twice.
    """

    stop: SessionStop
    call_plain: CallPlain  # set by what calls the hooks

    def __init__(self, hooks: Iterable[AnyHook] | None) -> None:
        super().__init__(checked(hooks), SessionStop())
        warn_of_misspelt(self.hooks)
        self.needs_graph_entered = any(needs(hook, "uses_default_graph") for hook in self.hooks)
        self.current: HookCall | None = None  # that is under way
        self._num_begun = 0
        self._begun: set[int] = set()  # places of hooks that have returned from begin, or joined
        self._joined: dict[int, list[Any]] = {}  # by place, as they may be in wrappers
        self._watchers: tuple[SessionRunHook, ...] = ()  # called after the hooks, in runs only
        self._records: tuple[SessionRecord, ...] = ()
        self.unasked = SessionRunValues(None, None, None)
        """What a hook gets of a run that asked for nothing, where no options were asked for."""
        self.last_fetches: tuple[Any, ...] = ()  # of the last run for which hooks asked for any
        self._is_planned = False  # hooks that act outside are left out
        self._find_runs()

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
        calls = []
        for place, hook in enumerate((*self.hooks, *self._watchers)):
            called = [hook]
            if moment in FURTHER_MOMENTS and not overrides(hook, moment):
                called = self._joined.get(place, [])
            for each in called:
                is_left_out = self._is_planned and getattr(each, "acts_outside", False)
                if overrides(each, moment) and not is_left_out:
                    calls.append(HookCall(place, each, moment, self._method(each, moment, place)))
        return calls

    def _method(self, hook: Any, moment: str, place: int) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(hook, moment)
        if moment == "before_run":
            return self.as_async(method, (moment, place), lambda: self.stop.run_stop)
        key = None if moment == "begin" else (moment, place)  # a plain begin may build a graph
        return method if moment == "on_drop" else self.as_async(method, key)

    def as_async(
        self, fn: Callable[..., Any], key: Hashable, stop: Callable[[], Stop | None] = lambda: None
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        """A coroutine function as it is; a plain one as `call_plain` calls it."""
        if is_async(fn):
            return fn

        async def call(*args: Any) -> Any:
            result = await self.call_plain(lambda: fn(*args), key, stop())
            return await result if isinstance(result, Awaitable) else result

        return call

    def culprit(self) -> str:
        """Which hook is being called, and when."""
        return str(self.current or "the session")

    def watch_runs(self, watcher: SessionRunHook) -> None:
        """Call this hook in runs, too, from the next one on, after all others."""
        self._watchers += (watcher,)
        self._find_runs()

    # --- recording --------------------------------------------------------------------------------

    def record(self, recorder: Recorder, name: str = "session") -> SessionRecord:
        """Record the session from now on, as it opens."""
        handle = self.stop.handle
        step = None if handle is None else handle.global_step
        record = recorder.open_session(current_engine(), name, step)
        self._records += (record,)
        self._find_runs()
        return record

    def _span(self, call: HookCall, what: str | None = None) -> ExitStack:
        """The block, as one span of the session in each record: of a call, or what it put off."""
        stack, kind = ExitStack(), Kind.HOOK if what is None else Kind.FINISH
        name = f"{call.owner}.{call.moment}" if what is None else f"{call.owner}: {what}"
        for record in self._records:
            stack.enter_context(ended(record.span(kind, name)))
        return stack

    def put_off(
        self, fn: Callable[[], Awaitable[None]], what: str
    ) -> Callable[[], Awaitable[None]]:
        call = self.current
        if call is None:
            return fn

        async def run() -> None:
            self.current = call
            with self._span(call, what):
                await fn()

        return run

    # --- moments, in the order of a session's life ------------------------------------------------

    @holds_loop(culprit)
    async def begin(
        self, has_global_step: Callable[[], bool] = lambda: True, graph: Any = None
    ) -> None:
        """Call begin of all; one that was called counts as begun."""
        self._num_begun = 0
        for each in (self._begun, self._joined, self.begun, self.leave, self.checks):
            each.clear()
        checks: list[tuple[HookCall, Callable[[], None]]] = []
        if (recorder := current_recorder()) is not None:
            self._is_planned = recorder.stand_in is not None
            self.record(recorder)
        begins = {call.place: call for call in self._calls("begin")}
        for place, hook in enumerate(self.hooks):
            self._num_begun = place + 1
            if getattr(hook, "needs_global_step", False) and not has_global_step():
                raise RuntimeError(
                    f"Global step should be created to use {type(hook).__name__}. Create one "
                    "(tf.compat.v1.train.get_or_create_global_step()) before the session. If "
                    "there is one, it is in another graph: make the session inside "
                    "`with graph.as_default():`"
                )
            if place in begins:
                await self._begin_one(begins[place], graph)
                checks += [(begins[place], check) for check in self.checks]
                self.checks.clear()
            self._begun.add(place)
        for call, check in checks:
            with call.blaming():
                check()
        self.current = None

    async def _begin_one(self, call: HookCall, graph: Any) -> None:
        """Call it; meanwhile it may join this session, and tasks that it starts may not later."""
        joinable: list[SessionHooks] = [self]
        shown_to_it = joinable if needs(call.hook, "needs_session_in_begin") else ()
        try:
            with _having(begin_graph, graph), _having(begin_session, shown_to_it):
                await self._call(call)
        finally:
            joinable.clear()

    def join(self, hook: SessionRunHook) -> SessionHooks:
        """A hook in its begin asks what it shares with the others of its session."""
        place = self._num_begun - 1
        self._begun.add(place)
        self._joined.setdefault(place, []).append(hook)
        self.begun.append(hook)
        return self

    def names_of_restoring(self) -> str:
        """The hooks that may restore a model, for people; "" if none may."""
        return ", ".join(dict.fromkeys(call.owner for call in self._calls("restore_model")))

    async def restore(self, raw: RawSession) -> RestoredStep:
        """Bring back what was saved of a raw session's model, by the first hook that does."""
        # `current` stays as it is: another worker may have this one's hooks restore their model
        for call in self._calls("restore_model"):
            try:
                with self._span(call):
                    step: RestoredStep = await call.fn(raw.exposed)
            except BaseException as error:
                raised = no_input_end(error, f"{call},")
                raised = call.blamed(raised, is_stopping=self.stop.is_set)
                if raised is not error:
                    raise raised from error
                raise
            if step is not NotImplemented:
                what, expected = f"what {call} returned", "an integer >= 0, None or NotImplemented"
                return None if step is None else integer(what, step, least=0, expected=expected)
        return NotImplemented  # type: ignore[no-any-return]  # to mypy it is Any

    @holds_loop(culprit)
    async def after_create_session(self, raw: RawSession, coord: Coordinator) -> None:
        self.unasked = SessionRunValues(None, *raw.no_options)
        for call in self._calls("after_create_session"):
            await self._call(call, raw.exposed, coord)
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
        if call is not None:
            asked = merged is not None and call.place in merged.fetches
            if call.moment == "after_run" and not asked and "NoneType" in str(error):
                why = "is None, as its before_run asked for nothing; return"
                note_once(error, f'run_values.results {why} SessionRunArgs({{"loss": "loss"}})')
            return call.blamed(error, is_stopping=self.stop.is_set)
        if is_input_end(error):
            return input_ended(error, "the step")
        if merged is not None and isinstance(error, (TypeError, ValueError, LookupError)):
            merged.blame(error)
        return error

    @holds_loop(culprit)
    async def end(self, session: Any) -> BaseException | None:
        """Call before_end and end of all, also after one failed; returns the first error."""
        engine = current_engine()
        first: BaseException | None = None
        for call in [*self._calls("before_end"), *self._calls("end")]:
            try:
                await self._call(call, session)
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
    async def on_error(self, session: Any, error: BaseException, grace_secs: float) -> None:
        """Call on_error of all that have begun, in reverse; shielded, for the grace period."""
        until, leaving = current_engine().now() + grace_secs, None
        for call in reversed(self._calls("on_error")):
            if call.place >= self._num_begun:
                continue
            try:
                with self._shielded(call, until):
                    await self._call(call, session, error)
            except BaseException as second:
                add_note(error, f"then, in {call}: {second!r}")
                extra = fields(call.hook, reason=repr(second))
                logger.error("%s failed: %r", call, second, extra=extra)
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    leaving = leaving or second  # the other hooks let go of what they hold
        if leaving is not None:
            raise leaving

    @holds_loop(culprit)
    async def after_close(
        self, error: BaseException | None, grace_secs: float
    ) -> BaseException | None:
        """Call after_close of those that have begun; returns what leaves the session.

        Shielded, for the grace period, where that is a cancellation.
        """
        engine = current_engine()
        is_cancelled = error is not None and engine.failure_in(error) is None
        until = engine.now() + grace_secs
        for call in self._to_leave("after_close"):
            try:
                with self._shielded(call, until) if is_cancelled else nullcontext():
                    if await self._call(call, error, is_stopping=True):
                        error = None
            except BaseException as raised:
                if raised is not error:
                    raised.__context__ = raised.__context__ or error
                error = raised
        self.current = None
        for record in reversed(self._records):
            await record.aclose(error)
        while self.leave:
            error = await self.leave.pop()(error)
        return error

    @contextmanager
    def _shielded(self, call: HookCall, until: float) -> Iterator[None]:
        """The block, which a cancellation does not enter until its time is over."""
        engine = current_engine()
        with engine.shielded(max(0.0, until - engine.now())) as scope:
            yield
        if scope.cancelled_caught:
            logger.warning("%s took longer than the grace period", call, extra=fields(call.hook))

    def on_drop(self) -> None:
        """Call on_drop of those that have begun, here and now; errors are logged."""
        for call in self._to_leave("on_drop"):
            try:
                call.fn()
            except Exception as error:
                extra = fields(call.hook, reason=repr(error))
                logger.error("A dropped session: %s failed: %r", call, error, extra=extra)
        for record in self._records:
            record.drop()

    def _to_leave(self, moment: str) -> list[HookCall]:
        """The calls to hooks that have begun: one that was refused in its begin holds nothing."""
        return [call for call in self._calls(moment) if call.place in self._begun]

    async def _call(self, call: HookCall, *args: Any, is_stopping: bool = False) -> Any:
        """Call one method; an error of it names it."""
        self.current = call
        with call.blaming(is_stopping=is_stopping), self._span(call):
            return await call.fn(*args)


@contextmanager
def _having(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The block with this value; setting it in vain would cost each task 120 bytes for good."""
    if variable.get() is value:
        yield
        return
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


NOTHING: Mapping[int, SessionRunValues] = {}
RunArguments = tuple[Any, Any, Any, Any]
"""(fetches, feed_dict, options, run_metadata)."""


class MergedRun:
    """What a raw run is asked for, and the way back from its outputs to hooks and caller.

    What the caller passed is never changed, and goes through untouched if no hook adds to it.
    """

    # where no hook asks for them
    _fed: tuple[tuple[str, Mapping[Any, Any]], ...] = ()  # by which hook, and what
    _options: tuple[Any, ...] = ()

    def __init__(self, raw: RawSession, args: RunArguments, hooks: HookList) -> None:
        self._raw = raw
        self._args = args
        self._hooks = hooks
        self.fetches: dict[int, Any] = {}
        """What hooks ask for, by their places."""

    def add(self, call: HookCall, request: Any) -> None:
        """Add what a hook asks for."""
        if type(request) is not SessionRunArgs:
            request = _converted(request, call.owner)
        fetches, feeds, options = request
        if fetches is not None:
            self.fetches[call.place] = fetches
        if options is not None:
            self._options += (options,)
        if feeds:
            if not isinstance(feeds, Mapping):
                raise wrong_feeds(f"{call.owner}.before_run returned the feed_dict", feeds)
            self._add_feeds(feeds, call.owner)

    def _add_feeds(self, feeds: Mapping[Any, Any], feeder: str) -> None:
        before = (("", self._args[1] or {}), *self._fed)
        feeders = {name: whose for whose, fed in before for name in self._names(fed)}
        clashes = {str(name): feeders[name] for name in self._names(feeds) if name in feeders}
        if clashes:
            pair = "a SessionRunHook and user" if "" in clashes.values() else "two hooks"
            raise RuntimeError(
                f"Same tensor is fed by {pair}. Conflict(s): {', '.join(sorted(clashes))}; "
                f"{feeder} feeds them, too: leave them to one of the two"
            )
        self._fed += ((feeder, feeds),)

    def _names(self, feeds: Mapping[Any, Any]) -> Iterator[Hashable]:
        return (name for key in feeds for name in self._raw.feed_names(key))

    def finish(self) -> RunArguments:
        """What to run: the caller's fetches, or a tuple of these and of each hook's.

        The last run's fetches if they are the same: a raw session may have compiled that object.
        """
        fetches, feed_dict, options, metadata = self._args
        if self._fed:
            feed_dict = dict(feed_dict or {})
            for _, feeds in self._fed:
                feed_dict.update(feeds)
        if self._options:
            asked = self._options if options is None else (options, *self._options)
            options = self._raw.merge_options(list(asked))
        if options is not None and metadata is None and self._hooks.hooks:
            metadata = self._raw.new_run_metadata()
        self._args = (fetches, feed_dict, options, metadata)
        if self.fetches:
            fetches, last = (fetches, *self.fetches.values()), self._hooks.last_fetches
            if len(last) == len(fetches) and all(map(operator.is_, last, fetches)):
                fetches = last
            self._hooks.last_fetches = fetches
        return fetches, feed_dict, options, metadata

    def split(self, outputs: Any) -> tuple[Any, SessionRunValues, Mapping[int, SessionRunValues]]:
        """(what the caller gets, what a hook gets that asked for nothing, the others' by place)."""
        (_, options, metadata), unasked = self._args[1:], self._hooks.unasked
        if options is not None or metadata is not None:
            _, no_options, no_metadata = unasked
            options = no_options if options is None else options
            unasked = SessionRunValues(None, options, no_metadata if metadata is None else metadata)
        if not self.fetches:
            return outputs, unasked, NOTHING
        its, (_, options, metadata) = {}, unasked
        for number, place in enumerate(self.fetches, 1):
            its[place] = SessionRunValues(outputs[number], options, metadata)
        return outputs[0], unasked, its

    def blame(self, error: Exception) -> None:
        """Name the hooks whose fetches or feeds made the run fail, if that is the cause."""
        for place, fetches in self.fetches.items():
            if self._raw.rejects(fetches, error):
                hook = self._hooks.hooks[place]
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
