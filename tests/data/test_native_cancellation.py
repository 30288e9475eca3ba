"""asyncio's own `task.cancel()`, which enters shields, while a pipeline closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks.data import Stage, batch, map_concurrent, prefetch
from asynchooks.data._stage import Phase

from ..hooks.savers import threads_left
from ..support.afterwards import nothing_left
from ..support.helpers import settle


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


class Hanging:
    """A call in a thread that hangs until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, item: int = 0) -> int:
        self.has_begun.set()
        self.may_end.wait(20)
        return item

    def __iter__(self) -> Iterator[int]:
        yield self()


STAGES: dict[str, Callable[[Hanging], Stage[Any]]] = {
    "map": lambda hanging: map_concurrent(hanging.__call__, range(3), 1),
    "prefetch": lambda hanging: prefetch(hanging, 1),
    "prefetch of batches": lambda hanging: prefetch(batch(hanging, 1), 1),
    "a stage without tasks": lambda hanging: batch(hanging, 1),
}
kinds = pytest.mark.parametrize("kind", STAGES)


@asynccontextmanager
async def closing(stage: Stage[Any], hanging: Hanging) -> AsyncIterator[asyncio.Task[None]]:
    """A task that closes the stage, and waits for a call in a thread."""

    async def leave() -> None:
        async with stage:
            async with anyio.create_task_group() as group:
                group.start_soon(anext, stage)
                while not hanging.has_begun.is_set():
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()

    async with nothing_left():
        task = asyncio.create_task(leave())
        try:
            while stage._phase is not Phase.CLOSED:
                await anyio.lowlevel.checkpoint()
            for _ in range(5):  # until it waits
                await anyio.lowlevel.checkpoint()
            yield task
        finally:
            hanging.may_end.set()
            while threads_left():
                await anyio.lowlevel.checkpoint()
            await settle()


@kinds
async def test_a_cancellation_leaves_when_the_call_has_ended(kind: str) -> None:
    hanging = Hanging()
    async with closing(STAGES[kind](hanging), hanging) as task:
        task.cancel()
        await settle()
        assert not task.done()
        hanging.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not threads_left()


@kinds
async def test_a_second_cancellation_leaves_at_once(kind: str) -> None:
    hanging = Hanging()
    async with closing(STAGES[kind](hanging), hanging) as task:
        for _ in range(2):
            assert not task.done()
            task.cancel()
            await settle()
        assert task.cancelled()


@kinds
async def test_a_cancellation_leaves_when_the_grace_period_is_over(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("_map", "_thread_source"):
        monkeypatch.setattr(f"asynchooks.data.{module}._GRACE_SECS", 0.2)
    hanging = Hanging()
    async with closing(STAGES[kind](hanging), hanging) as task:
        task.cancel()
        with anyio.fail_after(10), pytest.raises(asyncio.CancelledError):
            await task
