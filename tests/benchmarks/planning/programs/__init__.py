"""Ordinary programs, which run really and in a plan."""

from typing import Any

from asynchooks import MonitoredSession, TimeLimitHook


async def train_for(secs: float, step: Any, *hooks: Any) -> None:
    async with MonitoredSession([*hooks, TimeLimitHook(secs)], step) as session:
        while not session.should_stop():
            await session.run([])
