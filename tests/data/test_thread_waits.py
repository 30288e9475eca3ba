"""Waits for a thread that reads: cancelled ones, and what comes behind a slow item."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks._engine.base import Engine
from asynchooks.data import prefetch, take
from asynchooks.data._thread_source import ReadingThread

from ..support.helpers import settle

pytestmark = pytest.mark.anyio


class Gates:
    """An iterator each of whose items has a gate."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._at = 0
        self.are_asked = [threading.Event() for _ in range(num_items)]
        self.gates = [threading.Event() for _ in range(num_items)]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._at == self._num_items:
            raise StopIteration
        at = self._at
        self.are_asked[at].set()
        assert self.gates[at].wait(10)
        self._at += 1
        return at

    async def until_asked(self, place: int, secs: float = 10.0) -> bool:
        return await anyio.to_thread.run_sync(self.are_asked[place].wait, secs)


async def test_however_often_a_wait_is_cancelled_one_item_is_asked_for() -> None:
    source = Gates(4)
    async with take(source, 4) as items:
        for _ in range(3):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(anext, items)
                    assert await source.until_asked(0)
                    await settle()
                    scope.cancel()
        source.gates[0].set()
        assert await anext(items) == 0
        assert not await source.until_asked(1, 0.1), "nobody wants it yet"
        for gate in source.gates:
            gate.set()
        assert [item async for item in items] == [1, 2, 3]


async def test_an_item_that_was_waited_for_long_comes_at_once_and_not_with_the_next() -> None:
    source = Gates(3)
    stage: Any = prefetch(source, 3)
    got: list[int] = []

    async def one() -> None:
        got.append(await anext(stage))

    async with stage:
        try:
            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    group.start_soon(one)
                    assert await source.until_asked(0)
                    while stage._source._thread._is_patient:
                        await anyio.lowlevel.checkpoint()
                    source.gates[0].set()
        finally:
            for gate in source.gates:
                gate.set()
    assert got == [0]


async def test_leaving_waits_for_the_call_under_way_and_for_no_other() -> None:
    source = Gates(5)

    async def let_all_go() -> None:
        await settle()  # the block is being left
        for gate in source.gates:
            gate.set()

    async with anyio.create_task_group() as group:
        async with prefetch(source, 5):
            assert await source.until_asked(0)
            group.start_soon(let_all_go)
    assert not source.are_asked[1].is_set()


class ClockOfAWait:
    """An engine on which a thread goes on, and has woken whoever waits, when the time is asked."""

    def __init__(self, engine: Engine, thread: ReadingThread, gate: threading.Event) -> None:
        self._engine, self._of, self._gate = engine, thread, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def now(self) -> float:
        self._gate.set()
        until = self._engine.now() + 10
        while self._of._slot is not None:
            assert self._engine.now() < until
        return self._engine.now()


async def test_an_item_that_comes_just_before_the_wait_for_it_begins_is_given_out() -> None:
    source = Gates(1)
    stage: Any = take(source, 1)
    async with stage:
        thread = stage._sources[0]._thread
        thread._engine = ClockOfAWait(thread._engine, thread, source.gates[0])
        with anyio.fail_after(10):
            assert await anext(stage) == 0
