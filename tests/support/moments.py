"""Sessions in few words: hooks made of functions, losses, held steps, several tasks at once."""

import threading
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread

from asynchooks import MonitoredSession, PreemptionError, Recovery, SessionRunHook
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from .helpers import counting_creator, hook_of, turns

NOW = Recovery(first_pause_secs=0, longest_pause_secs=0)
LIMIT_SECS = 20.0
"""What takes longer hangs."""


def at(**moments: Callable[..., Any]) -> SessionRunHook:
    """A hook, of the class `At`, that calls or awaits functions with what its moments are given."""
    return hook_of("At", moments)


def plain_at(**moments: Callable[..., Any]) -> SessionRunHook:
    """As `at`, of the class `Plain`, with plain methods."""
    return hook_of("Plain", moments, is_plain=True)


def counting(*hooks: Any, **options: Any) -> MonitoredSession:
    """A session of a step that counts its calls."""
    return MonitoredSession(hooks, counting_creator(), **options)


def scripted(raws: list[Any], *hooks: Any, **options: Any) -> MonitoredSession:
    """A session on these raw sessions, one after the other."""
    return MonitoredSession(hooks, ScriptedSessionCreator(raws), **options)


def moments_of(hook: RecordingHook) -> list[str]:
    return [moment for _, moment in hook.log]


def lost(why: str = "the machine went away") -> PreemptionError:
    return PreemptionError(why)


def losing(num: int = 1, *, after: int = 0) -> list[ScriptedSession]:
    """Raw sessions that are lost in their first run, or behind so many, and one that is not."""
    lose: list[Any] = [{}] * after + [lost()]
    return [*(ScriptedSession(lose) for _ in range(num)), ScriptedSession()]


def losing_step(*losses: int) -> Callable[[], dict[str, int]]:
    """A step that counts its calls; those with these numbers lose the raw session."""
    num = 0

    def step() -> dict[str, int]:
        nonlocal num
        num += 1
        if num in losses:
            raise lost()
        return {"calls": num}

    return step


async def train(session: MonitoredSession, fetches: Any = ()) -> None:
    """Run steps until the session is to stop, letting other tasks run between them."""
    while not session.should_stop():
        await session.run(fetches)
        await turns()


async def together(*fns: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Call all of them, each in a task of its own; the first one begins first."""
    with anyio.fail_after(LIMIT_SECS):
        async with anyio.create_task_group() as group:
            for fn in fns:
                group.start_soon(fn)


class HeldStep:
    """A step function whose calls wait in their threads until they may end."""

    def __init__(self, makes: Callable[[], Any] = lambda: {"x": 1}) -> None:
        self.makes = makes
        self.begun, self.may_end, self.ended = (threading.Event() for _ in range(3))
        self.thread: threading.Thread

    def __call__(self, *_: object) -> Any:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.may_end.wait(30)
        self.ended.set()
        return self.makes()

    async def has_begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.begun.wait, 30)

    async def cancel_in(self, fn: Callable[..., Any], *args: Any, ends: bool = True) -> None:
        """Cancel a call as soon as this step has begun in it; its end may come then."""
        async with anyio.create_task_group() as group:
            group.start_soon(fn, *args)
            await self.has_begun()
            group.cancel_scope.cancel()
            if ends:
                self.may_end.set()
