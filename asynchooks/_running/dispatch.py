"""HookList: calls a session's hooks in order and says whose error it was.

It decides neither when a moment comes nor what becomes of an error.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ._coordinator import Coordinator
from ._engine import Engine
from ._errors import StopTraining, is_input_end, note_once
from ._hook import SessionRunContext, SessionRunValues, begin_graph
from ._hook_calls import (
    HookCall,
    calls_of,
    checked,
    in_groups,
    needs_global_step,
    needs_graph_entered,
)
from ._merge import MergedRun
from ._raw_session import RawSession
from ._session_stop import SessionStop
from ._stop import Stop

logger = logging.getLogger("asynchooks")


CallPlain = Callable[[Callable[[], Any], Hashable], Awaitable[Any] | None]
"""Calls a plain function where blocking steps run; those of one key take about the same time.

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
        "_num_begun", "_stop", "are_in_runs",
        "asks", "call_plain", "current", "hooks", "needs_graph_entered", "stops", "tells",
    )  # fmt: skip

    def __init__(self, hooks: Iterable[Any] | None, stop: Stop) -> None:
        self.hooks = checked(hooks)
        self.needs_graph_entered = any(needs_graph_entered(hook) for hook in self.hooks)
        self.call_plain: CallPlain  # the session sets it when it opens
        self.stops = SessionStop(stop)
        self._stop = stop
        self._num_begun = 0
        self.current: HookCall | None = None
        self.asks = in_groups(calls_of(self.hooks, "before_run"))
        self.tells = in_groups(calls_of(self.hooks, "after_run"))
        self.are_in_runs = bool(self.asks or self.tells)

    def culprit(self) -> str:
        """Which hook is being called, and when."""
        call = self.current
        return "the session" if call is None else f"{call.moment} of {type(call.hook).__name__}"

    async def begin(self, has_global_step: Callable[[], bool], graph: Any = None) -> None:
        """Call begin of all; a hook counts as begun as soon as its begin is called."""
        if graph is begin_graph.get():  # setting it would cost each task 120 bytes for good
            await self._begin_all(has_global_step)
        else:
            token = begin_graph.set(graph)
            try:
                await self._begin_all(has_global_step)
            finally:
                begin_graph.reset(token)
        self.current = None

    @property
    def restore(self) -> Callable[[RawSession], Awaitable[int | None]] | None:
        """What brings back what was saved of a raw session's model; None if no hook does."""
        return next((call.method for call in calls_of(self.hooks, "_restore")), None)

    async def _begin_all(self, has_global_step: Callable[[], bool]) -> None:
        self._num_begun = 0
        for call in calls_of(self.hooks, "_meet"):
            call.method(self.hooks, self.stops)
        begins = {call.place: call for call in calls_of(self.hooks, "begin")}
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
                    result = call.method()
                    if isinstance(result, Awaitable):
                        await result
            except BaseException as error:
                self._blame(error)
                raise

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        try:
            for call in calls_of(self.hooks, "after_create_session"):
                await self._call(call, session, coord)
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

        A cancellation, which is no hook's failure, ends the round and is returned.
        """
        first: BaseException | None = None
        for call in calls_of(self.hooks, "_ending"):
            try:
                call.method()
            except Exception as error:
                first = first or error
        for call in calls_of(self.hooks, "end"):
            try:
                try:
                    await self._call(call, session)
                except BaseException as error:
                    self._blame(error)
                    raise
            except Exception as error:
                if first is not None:
                    first.add_note(f"then, in {self.culprit()}: {error!r}")
                first = first or error
            except BaseException as error:
                if first is not None:
                    error.add_note(f"after {first!r}")
                return error
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
                error.add_note(f"then, in {self.culprit()}: {second!r}")
                logger.error("%s failed: %r", self.culprit(), second)
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    raise

    def own(self, error: BaseException) -> bool:
        """Whether one of them had this error to tell, whatever the run came to."""
        return any(call.method(error) for call in calls_of(self.hooks, "_owns"))

    async def leave(self, error: BaseException | None) -> BaseException | None:
        """Tell those that have begun that the session is closed; returns what leaves it."""
        for call in calls_of(self.hooks, "_leave"):
            if call.place < self._num_begun:
                error = await call.method(error)
        return error

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

        def call_rest() -> None:
            for call in group[len(results) :]:
                self.current = call
                result = fn(call)
                results.append(result)
                if result is not None and isinstance(result, Awaitable):
                    return

        while len(results) < len(group):
            first = group[len(results)]
            pending = self.call_plain(call_rest, (first.moment, first.place))
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
        error.add_note(f"in {self.culprit()}")
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
