"""One session that runs its steps to their end."""

from collections.abc import Callable
from typing import Any

from asynchooks import MonitoredSession, SessionCreator, SessionRunHook, StopAtStepHook


async def run_steps(
    step: Callable[..., Any] | SessionCreator,
    num_steps: int,
    *hooks: SessionRunHook,
    **options: Any,
) -> MonitoredSession:
    """Train with these hooks until that step, or until the session should stop.

    Args:
        step: what a run calls, or a creator of sessions.
        num_steps: the last global step, >= 1.
        hooks: come before the one that ends training.
        options: of the session.
    """
    stop = StopAtStepHook(last_step=num_steps)
    async with MonitoredSession([*hooks, stop], step, **options) as session:
        while not session.should_stop():
            await session.run([])
    return session
