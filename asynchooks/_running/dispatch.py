"""HookList: calls a session's hooks in order, and names the hook in their errors.

It decides neither when a moment comes nor what becomes of an error.
"""

from __future__ import annotations

import logging
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from .._check import integer
from .._engine.base import Engine
from .._engine.current import current_engine
from .._engine.recording import Kind, Recorder, SessionRecord, current_recorder
from .._engine.stacks import holds_loop
from .._engine.stop import Stop
from .._engine.threads import is_async
from .._errors import add_note, as_stop, input_ended, is_input_end, is_stop, no_input_end, note_once
from .._hook import (
    AnyHook,
    Begin,
    SessionHooks,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
    begin_session,
)
from .._log import fields
from .._stopping.coordinator import Coordinator
from .._stopping.session_stop import SessionStop
from ..backends._creator import Restore
from ..backends._raw_session import RawSession, RestoredStep
from ..metrics._live import LiveMetrics
from .hook_check import FURTHER_MOMENTS, checked, overrides, warn_of_misspelt
from .merge import MergedRun
from .records import Records

logger = logging.getLogger("asynchooks")

CallPlain = Callable[[Callable[[], Any], Hashable, bool], Awaitable[Any] | None]
"""Calls a plain function where blocking steps run; those of one key take about the same time.

The last argument is whether a stop ends the wait for its turn. It returns None if the call was
made at once, and else what to await.
"""
CallBegin = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a plain `begin`."""


@dataclass(slots=True, eq=False)
class HookCall:
    """One method of one hook; `place` is the hook's in the list, as hooks may compare equal."""

    place: int
    hook: Any
    moment: str
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_async = is_async(self.method)

    @property
    def method(self) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.hook, self.moment)
        return method

    @property
    def owner(self) -> str:
        return type(self.hook).__name__

    def __str__(self) -> str:
        return f"{self.moment} of {self.owner}"

    def log_fields(self, error: BaseException) -> dict[str, Any]:
        return fields(self.hook, reason=repr(error))


Group = tuple[HookCall, Callable[..., Any], tuple[HookCall, ...]]
"""(A call, its method, the plain methods that share one hop to a thread: none for a coroutine)."""


def _in_groups(calls: Iterable[HookCall]) -> tuple[Group, ...]:
    """The calls in order, neighbouring plain methods together."""
    groups: list[Group] = []
    for are_async, neighbours in groupby(calls, attrgetter("is_async")):
        group = tuple(neighbours)
        if are_async:
            groups += [(call, call.method, ()) for call in group]
        else:
            groups.append((group[0], group[0].method, group))
    return tuple(groups)


def _needs(hook: Any, what: str) -> bool:
    """Whether it needs this: unless its own class, and not a base of it, says that it does not."""
    return bool(vars(type(hook)).get(what, True) or getattr(hook, what, True))


class _Blaming:
    """Names the called hook in an error out of the block; a generator's frames would show in it."""

    __slots__ = ("_hooks",)

    def __init__(self, hooks: HookList) -> None:
        self._hooks = hooks

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and (blamed := self._hooks.blamed(error)) is not error:
            raise blamed from error


class HookList:
    """The hooks of one session. A method that a hook leaves alone costs it nothing.

    Args:
        hooks: any iterable of hooks, ours or TensorFlow's; one listed twice is called twice.
        stop: set when the session was asked to stop: a hook's wait may then end with StopTraining.
    """

    __slots__ = (
        "_is_planned", "_joined", "_live", "_num_begun", "_num_returned", "_records", "_shared",
        "_twin", "_watchers", "after_runs", "are_in_runs", "before_runs", "call_plain", "current",
        "hooks", "needs_graph_entered", "session", "stops", "unasked",
    )  # fmt: skip

    def __init__(self, hooks: Iterable[AnyHook] | None, stop: Stop) -> None:
        self.hooks = checked(hooks)
        warn_of_misspelt(self.hooks)
        self.needs_graph_entered = any(_needs(hook, "uses_default_graph") for hook in self.hooks)
        self.call_plain: CallPlain  # the session sets it when it opens
        self.stops = SessionStop(stop)
        self.session: Any = None  # the raw session, once it is ready, as hooks see it
        self.unasked = SessionRunValues(None, None, None)  # what a hook gets that asked for nothing
        self._num_begun = self._num_returned = 0  # of begins
        self._shared: SessionHooks | None = None  # from begin on, where a hook has joined
        self._live: list[LiveMetrics] = []
        # those that have, and their places in the list, or those of the wrappers that they are in
        self._joined: tuple[tuple[int, Any], ...] = ()
        self.current: HookCall | None = None
        self._watchers: tuple[SessionRunHook, ...] = ()  # called after the hooks, in runs only
        self._records = Records()
        self._is_planned = False  # hooks that act outside are left out
        self._twin: HookList | None = None
        self._find_runs()

    def _find_runs(self) -> None:
        self.before_runs = _in_groups(self._calls("before_run"))
        self.after_runs = _in_groups(self._calls("after_run"))
        if self._twin is not None:
            self._twin.before_runs = self._records.around_each(self.before_runs)
            self.after_runs = self._records.around_each(self.after_runs)
        elif self._records:
            self.before_runs, self.after_runs = self._records.around_runs(
                self.before_runs, self.after_runs
            )
        self.are_in_runs = bool(self.before_runs or self.after_runs)

    def record(self, recorder: Recorder, name: str = "session") -> SessionRecord:
        """Record the session from now on, as it opens."""
        handle = self.stops.handle
        step = None if handle is None else handle.global_step
        record = recorder.open_session(current_engine(), name, step)
        self._records.add(record)
        self._find_runs()
        return record

    @property
    def is_recorded(self) -> bool:
        return bool(self._records)

    def flight(self) -> AbstractContextManager[None]:
        """Record the block as one run in flight."""
        return self._records.flight()

    def recorded(
        self, fn: Callable[[], Awaitable[None]], what: str
    ) -> Callable[[], Awaitable[None]]:
        """What the hook that is called puts off to the end of the run, recorded if need be."""
        call = self.current
        return fn if call is None else self._records.put_off(fn, f"{call.owner}: {what}")

    def _calls(self, moment: str) -> list[HookCall]:
        """The calls of this moment, in order; a method that a hook leaves alone costs nothing.

        A hook that joined from within a wrapper is called itself where the wrapper does not have
        one of the moments that TensorFlow's hooks lack.
        """
        hooks = self.hooks
        calls = [
            HookCall(place, hook, moment)
            for place, hook in enumerate((*hooks, *self._watchers))
            if overrides(hook, moment) and not self._leaves_out(hook)
        ]
        if not self._joined or moment not in FURTHER_MOMENTS:
            return calls
        for place, hook in self._joined:
            is_wrapped = hook is not hooks[place] and not overrides(hooks[place], moment)
            if is_wrapped and overrides(hook, moment):
                calls.append(HookCall(place, hook, moment))
        return sorted(calls, key=lambda call: call.place)

    def _leaves_out(self, hook: Any) -> bool:
        return self._is_planned and bool(getattr(hook, "acts_outside", False))

    @property
    def live(self) -> LiveMetrics:
        """The session's metrics; made at the first use, as few of a thousand workers have any."""
        if not self._live:
            self._live.append(LiveMetrics())
        return self._live[0]  # where threads came at once, the same for each

    def twin(self) -> HookList:
        """The same hooks, to be called while this list calls others: `current` is its own."""
        self._twin = copy(self)
        return self._twin

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

    async def begin(
        self,
        has_global_step: Callable[[], bool],
        graph: Any = None,
        call_begin: CallBegin | None = None,
    ) -> None:
        """Call begin of all, a plain one by `call_begin`; one that was called counts as begun."""
        if graph is begin_graph.get():  # setting it would cost each task 120 bytes for good
            await self._begin_all(has_global_step, call_begin)
        else:
            token = begin_graph.set(graph)
            try:
                await self._begin_all(has_global_step, call_begin)
            finally:
                begin_graph.reset(token)
        self.current = None

    @holds_loop(culprit)
    async def _begin_all(
        self, has_global_step: Callable[[], bool], call_begin: CallBegin | None
    ) -> None:
        self._num_begun = self._num_returned = 0
        self._shared, self._joined = None, ()
        if (recorder := current_recorder()) is not None:
            self._is_planned = recorder.stand_in is not None
            self.record(recorder)
        checks: list[tuple[HookCall, Callable[[], None]]] = []
        begins = {call.place: call for call in self._calls("begin")}
        for place, hook in enumerate(self.hooks):
            self._num_begun += 1
            self.current = call = begins.get(place) or HookCall(place, hook, "begin")
            with _Blaming(self):
                needs_step = isinstance(hook, SessionRunHook) and hook.needs_global_step
                if needs_step and not has_global_step():
                    raise RuntimeError(
                        f"Global step should be created to use {type(hook).__name__}. Create one "
                        "(tf.compat.v1.train.get_or_create_global_step()) before the session. If "
                        "there is one, it is in another graph: make the session inside "
                        "`with graph.as_default():`"
                    )
                if place in begins:  # a plain one, too, on the event loop: it builds a graph
                    with self._joining(hook):
                        is_here = call.is_async or call_begin is None
                        with self._records.span(Kind.HOOK, f"{call.owner}.{call.moment}"):
                            result = call.method() if is_here else await call_begin(call.method)  # type: ignore[misc]
                            if isinstance(result, Awaitable):
                                await result
            self._num_returned += 1
            if self._shared is not None:
                checks += [(call, check) for check in self._shared.take_checks()]
        for self.current, check in checks:
            with _Blaming(self):
                check()

    @contextmanager
    def _joining(self, hook: Any) -> Iterator[None]:
        """Within the block the hook may join this session; tasks that it starts no longer."""
        if not _needs(hook, "needs_session_in_begin"):
            yield
            return
        begin = Begin(self)
        token = begin_session.set(begin)
        try:
            yield
        finally:
            begin.session = None
            begin_session.reset(token)

    def join(self, hook: SessionRunHook) -> SessionHooks:
        if self._shared is None:
            self._shared = SessionHooks(self.hooks, self.stops, self.live, self.record)
        self._shared.begun.append(hook)
        self._joined += ((self._num_begun - 1, hook),)
        return self._shared

    def restores(
        self, in_context: Callable[[Coroutine[Any, Any, RestoredStep]], Awaitable[RestoredStep]]
    ) -> list[Restore]:
        """The hooks that may bring back a saved model, each called in the session's context."""

        def restore_of(call: HookCall) -> Restore:
            return Restore(call.owner, lambda raw: in_context(self._restore(call, raw)))

        return [restore_of(call) for call in self._calls("restore_model")]

    async def _restore(self, call: HookCall, raw: RawSession) -> RestoredStep:
        # `current` stays as it is: another worker may have this one's hooks restore their model
        try:
            step: RestoredStep = await self._call_alone(call, raw.exposed)
        except BaseException as error:
            raised = no_input_end(error, f"{call},")
            raised = self.blamed(raised, str(call), is_stopping=self.stops.stop.is_set)
            if raised is error:
                raise
            raise raised from error
        if step is None or step is NotImplemented:
            return step
        expected = "an integer >= 0, None or NotImplemented"
        return integer(f"what {call} returned", step, least=0, expected=expected)

    async def after_create_session(self, raw: RawSession, coord: Coordinator) -> None:
        with _Blaming(self):
            for call in self._calls("after_create_session"):
                await self._call(call, raw.exposed, coord)
                # the hooks after it count from the step
                if _needs(call.hook, "uses_default_graph"):
                    await raw.take_up_step()
        self.current = None

    def merge(
        self,
        call: HookCall,
        request: Any,
        context: SessionRunContext,
        raw: RawSession,
        merged: MergedRun | None,
    ) -> MergedRun:
        """Add what a hook asks for to what is merged by then, if anything."""
        if merged is None:
            merged = MergedRun(raw, context.original_args, None, self.hooks)
        merged.add(call.place, call.hook, request)
        return merged

    async def before_run_of_group(
        self,
        group: Sequence[HookCall],
        context: SessionRunContext,
        raw: RawSession,
        merged: MergedRun | None,
    ) -> MergedRun | None:
        """Call before_run of neighbouring plain hooks; returns what is merged by then."""
        requests = await self._call_group(group, lambda call: call.method(context))
        for call, request in zip(group, requests, strict=True):
            if request is not None:
                self.current = call
                merged = self.merge(call, request, context, raw, merged)
        return merged

    async def after_run_of_group(
        self,
        group: Sequence[HookCall],
        context: SessionRunContext,
        unasked: SessionRunValues,
        results: Mapping[int, Any],
    ) -> None:
        """Call after_run of neighbouring plain hooks."""
        await self._call_group(
            group, lambda call: call.method(context, values_of(call, unasked, results))
        )

    def explained(
        self, error: BaseException, merged: MergedRun | None, call: HookCall | None
    ) -> BaseException:
        """What an error in a run becomes; `call` is the first of its group, None in the step.

        An iterator that ended in before_run, or in the step, ends training.
        """
        self._records.cut_run(error)
        error, known = as_stop(error), self.current
        if call is not None and (call.is_async or known is None or known.moment != call.moment):
            self.current = call  # plain hooks that were given up may have gone on in their thread
        if call is not None and call.moment == "after_run":
            return self.blamed(error, is_stopping=self.stops.stop.is_set)
        if is_input_end(error):
            return input_ended(error, "the step" if call is None else self.culprit())
        if call is not None:
            note_once(error, f"in {self.culprit()}")
        elif merged is not None and isinstance(error, (TypeError, ValueError, LookupError)):
            merged.blame(error)
        return error

    async def end(self, session: Any) -> BaseException | None:
        """Call before_end and end of all, also after one failed; returns the first error."""
        engine = current_engine()
        first: BaseException | None = None
        for call in [*self._calls("before_end"), *self._calls("end")]:
            try:
                with _Blaming(self):
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

    async def on_error(
        self, session: Any, error: BaseException, engine: Engine, grace_secs: float
    ) -> None:
        """Call on_error of all that have begun, in reverse; shielded, for the grace period."""
        until = engine.now() + grace_secs
        for call in reversed(self._calls("on_error")):
            if call.place >= self._num_begun:
                continue
            try:
                with engine.shielded(max(0.0, until - engine.now())) as scope:
                    await self._call(call, session, error)
                if scope.cancelled_caught:
                    extra = call.log_fields(error)
                    logger.warning("%s took longer than %g s", call, grace_secs, extra=extra)
            except BaseException as second:
                add_note(error, f"then, in {call}: {second!r}")
                logger.error("%s failed: %r", call, second, extra=call.log_fields(second))
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    raise

    @holds_loop(culprit)
    async def after_close(self, error: BaseException | None) -> BaseException | None:
        """Call after_close of those that have begun; returns what leaves the session."""
        for call in self._to_leave("after_close"):
            self.current = call
            try:
                is_swallowed = await self._call_alone(call, error)
            except BaseException as raised:
                if raised is not error and not isinstance(raised, (KeyboardInterrupt, SystemExit)):
                    raised = self.blamed(raised, is_stopping=True)
                if error is not None and raised is not error:
                    raised.__context__ = raised.__context__ or error
                error = raised
            else:
                error = None if is_swallowed else error
        self.current = None
        await self._records.aclose(error)
        while self._shared is not None and self._shared.leave:
            error = await self._shared.leave.pop()(error)
        return error

    def on_drop(self) -> None:
        """Call on_drop of those that have begun, here and now; errors are logged."""
        for call in self._to_leave("on_drop"):
            try:
                call.method()
            except Exception as error:
                extra = call.log_fields(error)
                logger.error("A dropped session: %s failed: %r", call, error, extra=extra)
        self._records.drop()

    def _to_leave(self, moment: str) -> list[HookCall]:
        """The calls to hooks that have begun: one that was refused in its begin holds nothing."""
        joined = {place for place, _ in self._joined}
        num_hooks = len(self.hooks)
        return [
            call
            for call in self._calls(moment)
            if call.place < self._num_returned or call.place in joined or call.place >= num_hooks
        ]

    @holds_loop(culprit)
    async def _call(self, call: HookCall, *args: Any) -> None:
        self.current = call
        await self._call_alone(call, *args)

    async def _call_alone(self, call: HookCall, *args: Any) -> Any:
        """Call one method, perhaps in a task of another session."""
        if self._records:
            with self._records.span(Kind.HOOK, f"{call.owner}.{call.moment}"):
                return await self._call_unrecorded(call, *args)
        return await self._call_unrecorded(call, *args)

    async def _call_unrecorded(self, call: HookCall, *args: Any) -> Any:
        if call.is_async:
            return await call.method(*args)
        results: list[Any] = []

        def call_it() -> Any:
            results.append(call.method(*args))
            return results[0] if isinstance(results[0], Awaitable) else None  # closed if too late

        pending = self.call_plain(call_it, (call.moment, call.place), False)
        if pending is not None:
            await pending
        return await results[0] if isinstance(results[0], Awaitable) else results[0]

    async def _call_group(
        self, group: Sequence[HookCall], fn: Callable[[HookCall], Any]
    ) -> list[Any]:
        """Call plain methods, all in one place; what one returns to be awaited is awaited here."""
        results: list[Any] = []

        def call_rest() -> Any:
            for call in group[len(results) :]:
                self.current = call
                result = fn(call)
                results.append(result)
                if result is not None and isinstance(result, Awaitable):
                    return result  # closed where it comes too late
            return None

        while len(results) < len(group):
            first = group[len(results)]
            is_before = first.moment == "before_run"  # a run that has made its step is completed
            pending = self.call_plain(call_rest, (first.moment, first.place), is_before)
            if pending is not None:
                await pending
            if results and results[-1] is not None and isinstance(results[-1], Awaitable):
                results[-1] = await results[-1]
        return results

    def blamed(
        self, error: BaseException, culprit: str = "", *, is_stopping: bool = False
    ) -> BaseException:
        """Name hook and moment; the end of an input, where none is read, is the hook's bug."""
        culprit = culprit or self.culprit()
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


def values_of(
    call: HookCall, unasked: SessionRunValues, results: Mapping[int, Any]
) -> SessionRunValues:
    """What a hook is given after the run: `unasked`, but with what it asked for, if anything."""
    if call.place not in results:
        return unasked
    return SessionRunValues(results[call.place], unasked.options, unasked.run_metadata)
