"""FeedFnHook: feeds the values that a function returns."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .. import _check
from .._engine.threads import is_async
from .._hook import (
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from .._running.hook_state import PositionState, as_saved
from ..backends._raw_session import raw_session_of
from ..data._source_stage import has_methods

Feeds = Mapping[Any, Any] | None


class FeedFnHook(SessionRunHook):
    """Calls a function before each run and feeds the values that it returns.

    Args:
        feed_fn: takes nothing and returns a mapping as for `session.run`'s feed_dict; sync or
            async. A sync one runs where blocking steps run. Its StopIteration or
            StopAsyncIteration ends training cleanly. The state of a callable object with
            `state_dict()` and `load_state_dict(state)` is saved and restored with checkpoints, so
            that training goes on at its position in the data.

    Raises:
        TypeError: `feed_fn` is not callable.

    Source: TensorFlow's `tf.compat.v1.train.FeedFnHook`.

    Example:
        async def next_batch():
            return {images: await queue.receive()}

        hooks = [FeedFnHook(next_batch)]
    """

    _shown = (("feed_fn", "feed_fn"),)

    def __init__(self, feed_fn: Callable[[], Feeds | Awaitable[Feeds]]) -> None:
        expected = "a function that returns a feed_dict, without arguments"
        self.feed_fn = _check.function("feed_fn", feed_fn, expected, num_args=0)
        has_state = has_methods(feed_fn, "state_dict", "load_state_dict")
        self._stateful: Any = feed_fn if has_state else None
        self._is_coroutine = is_async(feed_fn) and self._stateful is None
        self._state_before: dict[str, Any] | None = None  # the present run, or one that failed
        self._run: SessionRunContext | None = None  # that one
        self._state_of_last: dict[str, Any] | None = None  # before the last run that was made
        self._left_out: set[str] = set()  # states, as saved: what comes next is not fed

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, where `feed_fn` has a `state_dict`.

        Values that were fed to a run that failed, or did not take place, come after it.
        """
        self._settle()
        if self._state_before is not None:
            return self._state_before
        return {} if self._stateful is None else self._position(self._stateful)

    def _position(self, stateful: Any) -> dict[str, Any]:
        state = stateful.state_dict()
        is_one = isinstance(state, Mapping)  # else a save refuses it, and says so
        return PositionState(state, place=type(self.feed_fn).__qualname__) if is_one else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._stateful is not None:
            self._state_before = None
            self._stateful.load_state_dict(state)

    def _settle(self) -> None:
        """What was fed to a step that is made is used, whatever becomes of its run."""
        if self._run is not None and self._run.step_is_made:
            self._use()

    def _use(self) -> None:
        self._state_of_last, self._state_before, self._run = self._state_before, None, None

    async def begin(self) -> None:
        SessionHooks.of(self)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._use()

    def vouch(self) -> None:
        """As `FeedHook.vouch`; no other worker is fed by it."""

    def leave_out(self) -> bool:
        """As `FeedHook.leave_out`."""
        self._settle()
        if self._state_of_last is None:
            return False
        self._left_out.add(as_saved(self._state_of_last))
        return True

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        self._settle()
        self._run = run_context
        while True:
            feeds = await self._next(run_context)
            if not self._left_out or as_saved(self._state_before or {}) not in self._left_out:
                return SessionRunArgs(None, feeds)
            self._state_before = None

    async def _next(self, run_context: SessionRunContext) -> Feeds:
        hooks = run_context.called_by
        if self._is_coroutine:
            feeds = self.feed_fn()
        elif hooks is None:  # called by hand
            feeds = await raw_session_of(run_context.session).call_blocking(self._draw)
        else:
            key, stop = ("feed_fn", id(self)), hooks.stop.run_stop
            feeds = await hooks.call_plain(self._draw, key, stop)
        return await feeds if isinstance(feeds, Awaitable) else feeds

    def _draw(self) -> Feeds | Awaitable[Feeds]:
        if self._state_before is None and self._stateful is not None:
            self._state_before = copy.deepcopy(self._position(self._stateful))
        return self.feed_fn()
