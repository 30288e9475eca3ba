"""FeedFnHook: feeds what a function returns."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from .._engine.threads import is_async
from .._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from ..backends._raw_session import raw_session_of

Feeds = Mapping[Any, Any] | None


class FeedFnHook(SessionRunHook):
    """Calls a function before each run and feeds what it returns.

    Args:
        feed_fn: takes nothing and returns a mapping as for `session.run`'s feed_dict; sync or
            async. A sync one runs where blocking steps run. Its StopIteration or
            StopAsyncIteration ends training cleanly. A callable object with `state_dict()` and
            `load_state_dict(state)` is saved and restored with checkpoints: so training goes on
            where the data was left.

    Raises:
        TypeError: `feed_fn` cannot be called.

    Source: TensorFlow's `tf.compat.v1.train.FeedFnHook`.

    Example:
        async def next_batch():
            return {images: await queue.receive()}

        hooks = [FeedFnHook(next_batch)]
    """

    _shown = (("feed_fn", "feed_fn"),)

    def __init__(self, feed_fn: Callable[[], Feeds | Awaitable[Feeds]]) -> None:
        if not callable(feed_fn):
            raise TypeError(f"feed_fn is {feed_fn!r}; give a function that returns a feed_dict")
        self.feed_fn = feed_fn
        self._positioned = feed_fn if isinstance(feed_fn, _HasState) else None
        self._is_coroutine = is_async(feed_fn) and self._positioned is None
        self._state_before: dict[str, Any] | None = None  # a run that has not ended well

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, where `feed_fn` is an object that has a `state_dict`.

        What was fed to a run that failed, or never took place, lies behind it.
        """
        if self._state_before is not None:
            return self._state_before
        return {} if self._positioned is None else self._positioned.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._positioned is not None:
            self._state_before = None
            self._positioned.load_state_dict(state)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._state_before = None

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        hooks = run_context.called_by
        if self._is_coroutine:
            feeds = self.feed_fn()
        elif hooks is None:  # called by hand
            feeds = await raw_session_of(run_context.session).call_blocking(self._draw)
        else:
            drawn: list[Feeds | Awaitable[Feeds]] = []
            kind = ("feed_fn", id(self))
            pending = hooks.call_plain(lambda: drawn.append(self._draw()), kind, True)
            if pending is not None:
                await pending
            feeds = drawn[0]
        return SessionRunArgs(None, await feeds if isinstance(feeds, Awaitable) else feeds)

    def _draw(self) -> Feeds | Awaitable[Feeds]:
        if self._state_before is None and self._positioned is not None:
            self._state_before = copy.deepcopy(self._positioned.state_dict())
        return self.feed_fn()


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
