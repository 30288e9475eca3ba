"""HookList: calls a session's hooks in order and says whose error it was.

It decides neither when a moment comes nor what becomes of an error.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any

from ._coordinator import Coordinator
from ._engine import Engine
from ._errors import StopTraining, is_input_end
from ._hook import SessionRunContext, begin_graph
from ._hook_calls import (
    HookCall,
    calls_of,
    checked,
    in_groups,
    needs_global_step,
    needs_graph_entered,
)
from ._merge import MergedRun

logger = logging.getLogger("asynchooks")


CallPlain = Callable[[Callable[[], Any], Hashable], Awaitable[Any]]
"""Calls a plain function where blocking steps run; those of one key take about the same time."""


class HookList:
    """The hooks of one session. A method that a hook leaves alone costs it nothing.

    Args:
        hooks: any iterable of hooks, ours or TensorFlow's; one listed twice is called twice.
        is_stopping: whether the session was asked to stop: a hook's wait may then end with
            StopTraining at any moment.

    Raises:
        TypeError: something in `hooks` is no hook.
    """

    def __init__(self, hooks: Iterable[Any] | None, is_stopping: Callable[[], bool]) -> None:
        self.hooks = checked(hooks)
        self.needs_graph_entered = any(needs_graph_entered(hook) for hook in self.hooks)
        self.call_plain: CallPlain  # the session sets it when it opens
        self._is_stopping = is_stopping
        self._num_begun = 0
        self._current: tuple[Any, str] = (None, "")
        self._begin = calls_of(self.hooks, "begin")
        self._created = calls_of(self.hooks, "after_create_session")
        self._before_run = in_groups(calls_of(self.hooks, "before_run"))
        self._after_run = in_groups(calls_of(self.hooks, "after_run"))
        self._end = calls_of(self.hooks, "end")
        self._on_error = calls_of(self.hooks, "on_error")

    def culprit(self) -> str:
        """Which hook is being called, and when."""
        hook, moment = self._current
        return f"{moment} of {type(hook).__name__}" if hook is not None else "the session"

    async def begin(self, has_global_step: Callable[[], bool], graph: Any = None) -> None:
        """Call begin of all; a hook counts as begun as soon as its begin is called."""
        token = begin_graph.set(graph)
        try:
            await self._begin_all(has_global_step)
        finally:
            begin_graph.reset(token)
        self._current = (None, "")

    async def _begin_all(self, has_global_step: Callable[[], bool]) -> None:
        self._num_begun = 0
        begins = {call.place: call.method for call in self._begin}
        for place, hook in enumerate(self.hooks):
            self._num_begun += 1
            self._current = (hook, "begin")
            try:
                if needs_global_step(hook) and not has_global_step():
                    raise RuntimeError(
                        f"Global step should be created to use {type(hook).__name__}. Create one "
                        "(tf.compat.v1.train.get_or_create_global_step()) before the session. If "
                        "there is one, it is in another graph: make the session inside "
                        "`with graph.as_default():`"
                    )
                if place in begins:  # a plain one, too, on the event loop: it builds a graph
                    result = begins[place]()
                    if isinstance(result, Awaitable):
                        await result
            except BaseException as error:
                self._blame(error)
                raise

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        try:
            for call in self._created:
                await self._call(call, "after_create_session", session, coord)
        except BaseException as error:
            self._blame(error)
            raise
        self._current = (None, "")

    async def before_run(self, context: SessionRunContext, merged: MergedRun) -> None:
        """Ask all hooks and merge what they want; an iterator that ended here ends training."""
        try:
            for group in self._before_run:
                call = group[0]
                if not call.is_async:
                    await self._ask_group(group, context, merged)
                    continue
                self._current = (call.hook, "before_run")
                request = await call.method(context)
                if request is not None:
                    merged.add(call.place, call.hook, request)
        except BaseException as error:
            if is_input_end(error):
                raise StopTraining(f"the input ended in {self.culprit()}") from error
            error.add_note(f"in {self.culprit()}")
            raise
        self._current = (None, "")

    async def after_run(
        self, context: SessionRunContext, merged: MergedRun, results: dict[int, Any], options: Any
    ) -> None:
        try:

            def tell(call: HookCall) -> Any:
                return call.method(context, merged.values(results.get(call.place), options))

            for group in self._after_run:
                if group[0].is_async:
                    self._current = (group[0].hook, "after_run")
                    await tell(group[0])
                else:
                    await self._call_group(group, "after_run", tell)
        except BaseException as error:
            self._blame(error)
            raise
        self._current = (None, "")

    async def end(self, session: Any) -> BaseException | None:
        """Call end of all, also after one failed; returns the first error.

        A cancellation, which is no hook's failure, ends the round and is returned.
        """
        first: BaseException | None = None
        for call in self._end:
            try:
                try:
                    await self._call(call, "end", session)
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
        for call in reversed(self._on_error):
            if call.place >= self._num_begun:
                continue
            try:
                with engine.shielded(max(0.0, until - engine.now())) as scope:
                    await self._call(call, "on_error", session, error)
                if scope.cancelled_caught:
                    logger.warning("%s took longer than %g s", self.culprit(), grace_secs)
            except BaseException as second:
                error.add_note(f"then, in {self.culprit()}: {second!r}")
                logger.error("%s failed: %r", self.culprit(), second)
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    raise

    async def _call(self, call: HookCall, moment: str, *args: Any) -> None:
        self._current = (call.hook, moment)
        if call.is_async:
            await call.method(*args)
        else:
            await self._call_group([call], moment, lambda call: call.method(*args))

    async def _ask_group(
        self, group: list[HookCall], context: SessionRunContext, merged: MergedRun
    ) -> None:
        requests = await self._call_group(group, "before_run", lambda call: call.method(context))
        for call, request in zip(group, requests, strict=True):
            if request is not None:
                self._current = (call.hook, "before_run")
                merged.add(call.place, call.hook, request)

    async def _call_group(
        self, group: list[HookCall], moment: str, fn: Callable[[HookCall], Any]
    ) -> list[Any]:
        """Call plain methods, all in one place; what one returns to be awaited is awaited here."""
        results: list[Any] = []

        def call_rest() -> None:
            for call in group[len(results) :]:
                self._current = (call.hook, moment)
                results.append(fn(call))
                if isinstance(results[-1], Awaitable):
                    return

        while len(results) < len(group):
            await self.call_plain(call_rest, (moment, group[len(results)].place))
            if results and isinstance(results[-1], Awaitable):
                results[-1] = await results[-1]
        return results

    def _blame(self, error: BaseException) -> None:
        """Name hook and moment; the end of an input, where none is read, is the hook's bug."""
        is_told_to_stop = self._current[1] == "after_run" and self._is_stopping()
        if is_input_end(error) or (type(error) is StopTraining and not is_told_to_stop):
            cause = error.__cause__ if type(error) is RuntimeError else error
            raise RuntimeError(
                f"{self.culprit()} raised {cause!r}, but no input is read there; "
                "catch it in the hook, or read the input in before_run"
            ) from error
        error.add_note(f"in {self.culprit()}")
