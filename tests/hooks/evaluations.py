"""Evaluations that tests of EvaluationHook hold up, count and let go."""

from collections import defaultdict
from typing import Any

import anyio

from asynchooks import MonitoredSession

from ..support.helpers import settle


class Notes:
    """Ends at once, and notes the steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def __call__(self, session: Any, step: int) -> dict[str, float]:
        self.steps.append(step)
        return {"step": step}


class Failing(Notes):
    """Raises these errors at its first calls."""

    def __init__(self, *errors: BaseException) -> None:
        super().__init__()
        self.errors = list(errors)

    async def __call__(self, session: Any, step: int) -> dict[str, float]:
        results = await super().__call__(session, step)
        if self.errors:
            raise self.errors.pop(0)
        return results


class Gated:
    """Ends for each step when it is let, and counts how many there are at once."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.most_at_once = 0
        self._num_now = 0
        self._has_begun: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)
        self._may_end: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)

    def let(self, step: int) -> None:
        self._may_end[step].set()

    async def wait_for_begun(self, step: int) -> None:
        await self._has_begun[step].wait()

    async def let_when_begun(self, step: int) -> None:
        await self.wait_for_begun(step)
        self.let(step)

    async def __call__(self, session: Any, step: int) -> dict[str, float]:
        self.begun.append(step)
        self._has_begun[step].set()
        self._num_now += 1
        self.most_at_once = max(self.most_at_once, self._num_now)
        try:
            await self._may_end[step].wait()
        finally:
            self._num_now -= 1
        self.ended.append(step)
        return {"step": step}


async def stop_when_settled(session: MonitoredSession) -> None:
    await settle()
    session.request_stop("enough")
