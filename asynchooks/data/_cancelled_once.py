"""CancelledOnce: a call whose clean-up is not cancelled again.

anyio and trio cancel every wait of a cancelled task, those of its `finally` blocks, too; asyncio's
own cancellation comes once. So code that is right in plain asyncio (`finally: await box.delete()`)
is right in a stage, on every event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from .._engine.base import Engine


class CancelledOnce:
    """Awaits an awaitable, and calls back as its first cancellation is delivered.

    The caller then shields the scope around it: what it awaits from then on is not cancelled.
    """

    __slots__ = ("_awaitable", "_engine", "_on_cancelled")

    def __init__(
        self, awaitable: Awaitable[Any], engine: Engine, on_cancelled: Callable[[], None]
    ) -> None:
        self._awaitable = awaitable
        self._engine = engine
        self._on_cancelled = on_cancelled

    def __await__(self) -> Generator[Any, Any, Any]:
        awaitable = self._awaitable
        coroutine = awaitable if isinstance(awaitable, Coroutine) else _wait_for(awaitable)
        resume: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            try:
                waited = resume(value)
            except StopIteration as end:
                return end.value
            try:
                value = yield waited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                resume, value = coroutine.throw, error
                raised: BaseException | None = error
            else:
                resume = coroutine.send
                raised = getattr(value, "error", None)  # trio sends its outcomes
            if raised is not None and self._is_cancellation(raised):
                self._on_cancelled()

    def _is_cancellation(self, error: Any) -> bool:
        return isinstance(error, BaseException) and self._engine.failure_in(error) is None


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
