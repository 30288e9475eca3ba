"""What tests of hooks in wrappers, and of hooks that are called by hand, share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asynchooks import (
    Coordinator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

Wrap = Callable[[SessionRunHook], SessionRunHook]


class Forwards(SessionRunHook):
    """What a user would write around a hook: it forwards the moments of TensorFlow's hooks."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.hook.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hook.load_state_dict(state)

    async def begin(self) -> None:
        await self.hook.begin()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self.hook.after_create_session(session, coord)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        request: SessionRunArgs | None = await self.hook.before_run(run_context)
        return request

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self.hook.after_run(run_context, run_values)

    async def end(self, session: Any) -> None:
        await self.hook.end(session)

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self.hook.on_error(session, exception)


class ForwardsAll(Forwards):
    """It forwards every public moment, those that only our hooks have, too."""

    async def restore_model(self, session: Any) -> Any:
        return await self.hook.restore_model(session)

    async def before_end(self, session: Any) -> None:
        await self.hook.before_end(session)

    async def after_close(self, exception: BaseException | None) -> bool | None:
        is_swallowed: bool | None = await self.hook.after_close(exception)
        return is_swallowed

    def on_drop(self) -> None:
        self.hook.on_drop()


def twice(hook: SessionRunHook) -> SessionRunHook:
    """A wrapper in a wrapper."""
    return Forwards(Forwards(hook))


def bare(hook: SessionRunHook) -> SessionRunHook:
    return hook
