"""What tests of hooks in wrappers, and of hooks that are called by hand, share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asynchooks import SessionRunHook

Wrap = Callable[[SessionRunHook], SessionRunHook]


def _forwarded(moment: str) -> Any:
    async def method(self: Forwards, *given: Any) -> Any:
        return await getattr(self.hook, moment)(*given)

    return method


class Forwards(SessionRunHook):
    """What a user would write around a hook: it forwards the moments of TensorFlow's hooks."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.hook.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hook.load_state_dict(state)

    begin = _forwarded("begin")
    after_create_session = _forwarded("after_create_session")
    before_run = _forwarded("before_run")
    after_run = _forwarded("after_run")
    end = _forwarded("end")
    on_error = _forwarded("on_error")


class ForwardsAll(Forwards):
    """It forwards every public moment, those that only our hooks have, too."""

    restore_model = _forwarded("restore_model")
    before_end = _forwarded("before_end")
    after_close = _forwarded("after_close")

    def on_drop(self) -> None:
        self.hook.on_drop()


def twice(hook: SessionRunHook) -> SessionRunHook:
    """A wrapper in a wrapper."""
    return Forwards(Forwards(hook))


def bare(hook: SessionRunHook) -> SessionRunHook:
    return hook
