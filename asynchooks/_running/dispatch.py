"""HookList: calls a session's hooks in order and says whose error it was.

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
from contextlib import contextmanager
from typing import Any

from .._engine.base import Engine
from .._engine.current import current_engine
from .._engine.stop import Stop
from .._errors import StopTraining, add_note, is_input_end, no_input_end, note_once
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
from .._stopping.coordinator import Coordinator
from .._stopping.session_stop import SessionStop
from ..backends._creator import RestoredStep
from ..backends._raw_session import RawSession
from .hook_calls import (
    HookCall,
    calls_of,
    checked,
    in_groups,
    joins_session,
    needs_global_step,
    needs_graph_entered,
    overrides,
    warn_of_misspelt,
)
from .merge import MergedRun

logger = logging.getLogger("asynchooks")


CallPlain = Callable[[Callable[[], Any], Hashable, bool], Awaitable[Any] | None]
CallBegin = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a plain function where blocking steps run; those of one key take about the same time.

The last argument is whether a stop ends the wait for its turn.

It returns None if that was here, at once, and else what to await.
"""


class HookList:
    """The hooks of one session. A method that a hook leaves alone costs it nothing.

    Args:
        hooks: any iterable of hooks, ours or TensorFlow's; one listed twice is called twice.
        stop: set when the session was asked to stop: a hook's wait may then end with StopTraining
            at any moment.

    Raises:
        TypeError: something in `hooks` is no hook.
    """

    __slots__ = (
        "_joined", "_num_begun", "_num_returned", "_shared", "_stop", "are_in_runs", "asks",
        "call_plain", "current", "hooks", "needs_graph_entered", "stops", "tells",
    )  # fmt: skip

    def __init__(self, hooks: Iterable[AnyHook] | None, stop: Stop) -> None:
        self.hooks = checked(hooks)
        warn_of_misspelt(self.hooks)
        self.needs_graph_entered = any(needs_graph_entered(hook) for hook in self.hooks)
        self.call_plain: CallPlain  # the session sets it, and the next, when it opens
        self.stops = SessionStop(stop)
        self._stop = stop
        self._num_begun = self._num_returned = 0  # whose begin was called; and has returned
        self._shared: SessionHooks | None = None  # from begin on, where a hook has joined
        # those that have, and their places in the list, or those of the wrappers that they are in
        self._joined: tuple[tuple[int, Any], ...] = ()
        self.current: HookCall | None = None
        self.asks = in_groups(calls_of(self.hooks, "before_run"))
        self.tells = in_groups(calls_of(self.hooks, "after_run"))
        self.are_in_runs = bool(self.asks or self.tells)

    def watch_runs(self, watcher: Any) -> None:
        """Call before_run and after_run of this, too, from the next run on; after all hooks'."""
        place = len(self.asks) + len(self.tells) + len(self.hooks)  # of no other one
        self.asks += in_groups([HookCall(place, watcher, "before_run")])
        self.tells += in_groups([HookCall(place, watcher, "after_run")])
        self.are_in_runs = True
        self._session_hooks().after_step.append(watcher.after_step)

    def made_step(self) -> None:
        """A run was cancelled while a thread made its step: no hook is told of its end."""
        for use in () if self._shared is None else self._shared.after_step:
            use()

    def culprit(self) -> str:
        """Which hook is being called, and when."""
        call = self.current
        return "the session" if call is None else f"{call.moment} of {type(call.hook).__name__}"

    async def begin(
        self,
        has_global_step: Callable[[], bool],
        graph: Any = None,
        call_begin: CallBegin | None = None,
    ) -> None:
        """Call begin of all; a hook counts as begun as soon as its begin is called.

        Args:
            call_begin: calls a plain one; None: it is called as it is.
        """
        call_begin = call_begin or _call
        if graph is begin_graph.get():  # setting it would cost each task 120 bytes for good
            await self._begin_all(has_global_step, call_begin)
        else:
            token = begin_graph.set(graph)
            try:
                await self._begin_all(has_global_step, call_begin)
            finally:
                begin_graph.reset(token)
        self.current = None

    @property
    def restore(self) -> Callable[[RawSession], Coroutine[Any, Any, RestoredStep]] | None:
        """What brings back what was saved of a raw session's model; None if no hook may."""
        return self._restore if self._further("restore_model") else None

    async def _restore(self, raw: RawSession) -> RestoredStep:
        # `current` stays as it is: another worker may have this one's hooks restore their model
        for call in self._further("restore_model"):
            where = f"restore_model of {type(call.hook).__name__}"
            try:
                step: RestoredStep = await self._call_elsewhere(call, raw.exposed)
            except BaseException as error:
                raised = no_input_end(error, f"{where},")
                if raised is error:
                    note_once(error, f"in {where}")
                    raise
                raise raised from error
            if step is not NotImplemented:
                return step
        return NotImplemented  # type: ignore[no-any-return]  # to mypy it is Any

    async def _call_elsewhere(self, call: HookCall, session: Any) -> Any:
        if call.is_async:
            return await call.method(session)
        results: list[Any] = []
        pending = self.call_plain(
            lambda: results.append(call.method(session)), (call.moment, call.place), False
        )
        if pending is not None:
            await pending
        return await results[0] if isinstance(results[0], Awaitable) else results[0]

    def _further(self, moment: str) -> list[HookCall]:
        """The calls of a moment that TensorFlow's hooks do not have.

        A hook that joined from within a wrapper is called itself where the wrapper lacks it.
        """
        calls = list(calls_of(self.hooks, moment))
        for place, hook in self._joined:
            is_hidden = hook is not self.hooks[place] and not overrides(self.hooks[place], moment)
            if is_hidden and overrides(hook, moment):
                calls.append(HookCall(place, hook, moment))
        return sorted(calls, key=lambda call: call.place) if self._joined else calls

    async def _begin_all(self, has_global_step: Callable[[], bool], call_begin: CallBegin) -> None:
        self._num_begun = self._num_returned = 0
        begins = {call.place: call for call in calls_of(self.hooks, "begin")}
        self._shared, self._joined = None, ()
        checks: list[tuple[HookCall, Callable[[], None]]] = []
        await self._begin_each(begins, has_global_step, call_begin, checks)
        for self.current, check in checks:
            try:
                check()
            except BaseException as error:
                self._blame(error)
                raise

    def join(self, hook: SessionRunHook) -> SessionHooks:
        shared = self._session_hooks()
        shared.begun.append(hook)
        self._joined += ((self._num_begun - 1, hook),)
        return shared

    def _session_hooks(self) -> SessionHooks:
        """What hooks share; most sessions have no hook that asks for it."""
        self._shared = self._shared or SessionHooks(self.hooks, self.stops)
        return self._shared

    async def _begin_each(
        self,
        begins: Mapping[int, HookCall],
        has_global_step: Callable[[], bool],
        call_begin: CallBegin,
        checks: list[tuple[HookCall, Callable[[], None]]],
    ) -> None:
        """Call begin of all; `checks` gets what they want to be called when all have begun."""
        for place, hook in enumerate(self.hooks):
            self._num_begun += 1
            self.current = call = begins.get(place) or HookCall(place, hook, "begin")
            try:
                if needs_global_step(hook) and not has_global_step():
                    raise RuntimeError(
                        f"Global step should be created to use {type(hook).__name__}. Create one "
                        "(tf.compat.v1.train.get_or_create_global_step()) before the session. If "
                        "there is one, it is in another graph: make the session inside "
                        "`with graph.as_default():`"
                    )
                if place in begins:  # a plain one, too, on the event loop: it builds a graph
                    with self._begin_of(call.hook):
                        result = call.method() if call.is_async else await call_begin(call.method)
                        if isinstance(result, Awaitable):
                            await result
            except BaseException as error:
                self._blame(error)
                raise
            self._num_returned += 1
            if self._shared is not None:
                checks += [(call, check) for check in self._shared.take_checks()]

    @contextmanager
    def _begin_of(self, hook: Any) -> Iterator[None]:
        """Within the block the hook may join this session; tasks that it starts no longer."""
        if not joins_session(hook):
            yield
            return
        begin = Begin(self)
        token = begin_session.set(begin)
        try:
            yield
        finally:
            begin.session = None
            begin_session.reset(token)

    async def after_create_session(self, raw: RawSession, coord: Coordinator) -> None:
        try:
            for call in calls_of(self.hooks, "after_create_session"):
                await self._call(call, raw.exposed, coord)
                if needs_graph_entered(call.hook):  # the hooks after it count from the step
                    await raw.take_up_step()
        except BaseException as error:
            self._blame(error)
            raise
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

    async def ask_group(
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

    async def tell_group(
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
        """What an error becomes that a run came to; notes say whose it was.

        An iterator that ended in before_run, or in the step, ends training.

        Args:
            call: the hook that was called, or the first of a group; None in the step.
        """
        known = self.current
        if call is not None and (call.is_async or known is None or known.moment != call.moment):
            self.current = call  # plain hooks that were given up may have gone on in their thread
        if call is not None and call.moment == "after_run":
            return self._blamed(error, call.moment)
        if is_input_end(error):
            where = "the step" if call is None else self.culprit()
            ended = StopTraining(f"the input ended in {where}")
            ended.__cause__ = error
            return ended
        if call is not None:
            note_once(error, f"in {self.culprit()}")
        elif merged is not None and isinstance(error, (TypeError, ValueError, LookupError)):
            merged.blame(error)
        return error

    async def end(self, session: Any) -> BaseException | None:
        """Call end of all, also after one failed; returns the first error.

        A cancellation, which is no hook's failure, ends the round and is returned; so does an exit
        (KeyboardInterrupt, SystemExit), which may be a signal's and not the hook's.
        """
        engine = current_engine()
        first: BaseException | None = None
        for call in [*self._further("before_end"), *calls_of(self.hooks, "end")]:
            try:
                try:
                    await self._call(call, session)
                except BaseException as error:
                    self._blame(error)
                    raise
            except BaseException as error:
                is_exit = isinstance(error, (KeyboardInterrupt, SystemExit))
                if is_exit or engine.failure_in(error) is not error:
                    if first is not None:
                        add_note(error, f"after {first!r}")
                    return error
                if first is not None:
                    add_note(first, f"then, in {self.culprit()}: {error!r}")
                first = first or error
        return first

    async def on_error(
        self, session: Any, error: BaseException, engine: Engine, grace_secs: float
    ) -> None:
        """Tell all hooks that have begun, in reverse; shielded, for the grace period in all."""
        until = engine.now() + grace_secs
        for call in reversed(calls_of(self.hooks, "on_error")):
            if call.place >= self._num_begun:
                continue
            try:
                with engine.shielded(max(0.0, until - engine.now())) as scope:
                    await self._call(call, session, error)
                if scope.cancelled_caught:
                    logger.warning("%s took longer than %g s", self.culprit(), grace_secs)
            except BaseException as second:
                add_note(error, f"then, in {self.culprit()}: {second!r}")
                logger.error("%s failed: %r", self.culprit(), second)
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    raise

    async def after_close(self, error: BaseException | None) -> BaseException | None:
        """Call after_close of those that have begun; returns what leaves the session."""
        for call in self._to_leave("after_close"):
            self.current = call
            try:
                is_swallowed = await self._call_elsewhere(call, error)
            except BaseException as raised:
                if error is not None and raised is not error:
                    raised.__context__ = raised.__context__ or error
                error = raised
            else:
                error = None if is_swallowed else error
        self.current = None
        return error

    def _to_leave(self, moment: str) -> list[HookCall]:
        """The calls to hooks that have begun: one that was refused in its begin holds nothing."""
        joined = {place for place, _ in self._joined}
        calls = self._further(moment)
        return [call for call in calls if call.place < self._num_returned or call.place in joined]

    def on_drop(self) -> None:
        """Call on_drop of those that have begun."""
        for call in self._to_leave("on_drop"):
            try:
                call.method()
            except Exception as error:
                logger.error("A dropped session: %r failed: %r", call.method, error)

    async def _call(self, call: HookCall, *args: Any) -> None:
        self.current = call
        if call.is_async:
            await call.method(*args)
        else:
            await self._call_group((call,), lambda call: call.method(*args))

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

    def _blamed(self, error: BaseException, moment: str) -> BaseException:
        """Name hook and moment; the end of an input, where none is read, is the hook's bug."""
        is_told_to_stop = moment == "after_run" and self._stop.is_set
        if is_input_end(error) or (type(error) is StopTraining and not is_told_to_stop):
            cause = error.__cause__ if type(error) is RuntimeError else error
            bug = RuntimeError(
                f"{self.culprit()} raised {cause!r}, but no input is read there; "
                "catch it in the hook, or read the input in before_run"
            )
            bug.__cause__ = error
            return bug
        add_note(error, f"in {self.culprit()}")
        return error

    def _blame(self, error: BaseException) -> None:
        blamed = self._blamed(error, "")
        if blamed is not error:
            raise blamed


def values_of(
    call: HookCall, unasked: SessionRunValues, results: Mapping[int, Any]
) -> SessionRunValues:
    """What a hook is given after the run: `unasked`, but with what it asked for, if anything."""
    if call.place not in results:
        return unasked
    return SessionRunValues(results[call.place], unasked.options, unasked.run_metadata)


async def _call(fn: Callable[[], Any]) -> Any:
    return fn()
