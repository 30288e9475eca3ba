"""Sources that count what is read of them, and small things to read pipelines with."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import anyio
import pytest

from asynchooks.data import Stage

from ..support.helpers import settle, turns


class BadRecordError(Exception):
    pass


class Source:
    """Makes generators of numbers; counts what they gave and how many are open.

    Args:
        num_items: of each generator; None never ends.
        error: raised behind the last item.
        hangs: whether it waits for ever behind the last item.
    """

    def __init__(
        self, num_items: int | None, error: BaseException | None = None, *, hangs: bool = False
    ) -> None:
        self._num_items = num_items
        self._error = error
        self._hangs = hangs
        self.num_read = 0
        self.num_begun = 0
        self.num_closed = 0
        self.threads: set[int] = set()
        self.released = threading.Event()  # a generator in a thread hangs until then

    def _places(self) -> Iterator[int]:
        return itertools.count() if self._num_items is None else iter(range(self._num_items))

    async def items(self) -> AsyncGenerator[int, None]:
        self.num_begun += 1
        try:
            for place in self._places():
                await turns()
                self.num_read += 1
                yield place
            if self._error is not None:
                raise self._error
            if self._hangs:
                await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await turns(5)
            self.num_closed += 1

    def items_in_thread(self) -> Generator[int, None, None]:
        self.num_begun += 1
        self.threads.add(threading.get_ident())
        try:
            for place in self._places():
                self.num_read += 1
                yield place
            if self._error is not None:
                raise self._error
            if self._hangs:
                self.released.wait(20)
        finally:
            self.threads.add(threading.get_ident())
            self.num_closed += 1

    async def items_in_group(self) -> AsyncGenerator[int, None]:
        """A generator that holds a task group open where it yields."""
        self.num_begun += 1
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                for place in self._places():
                    await turns()
                    self.num_read += 1
                    yield place
                group.cancel_scope.cancel()
        finally:
            self.num_closed += 1

    @property
    def is_closed(self) -> bool:
        return self.num_begun == self.num_closed > 0


class Calls:
    """An async function whose calls wait until they are let go."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self._events: dict[int, anyio.Event] = {}
        self.errors: dict[int, BaseException] = {}

    async def __call__(self, item: int) -> int:
        self.begun.append(item)
        event = self._events[item] = anyio.Event()
        try:
            await event.wait()
            if item in self.errors:
                raise self.errors[item]
        finally:
            self.ended.append(item)
        return 10 * item

    def let(self, *items: int) -> None:
        for item in items:
            self._events[item].set()


class StatefulSync:
    """An iterable that knows its position."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self._at < self._num_items:
            self._at += 1
            yield self._at - 1
        self._at = 0


class Async:
    """What another source iterates, and its position, as an async iterable."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict

    def __aiter__(self) -> AsyncIterator[int]:
        return self._in_turn(iter(self._source))

    async def _in_turn(self, items: Any) -> AsyncIterator[int]:
        with closing(items):
            for item in items:
                await turns()
                yield item


class Epochs:
    """An iterable that knows its position, and has other items in each pass.

    Args:
        begins: when a further pass begins: "at iter", "at next", or "at both ends": the pass is
            counted as it ends, and the position goes back at the first `next`.
    """

    def __init__(self, num_items: int, begins: str) -> None:
        self._num_items = num_items
        self._begins = begins
        self._at = self._epoch = 0
        self._is_loaded = True

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at, self._epoch = state["at"], state["epoch"]
        self._is_loaded = True

    def __iter__(self) -> Iterator[int]:
        if self._begins == "at iter":
            self._begin()
        return self._items()

    def _begin(self) -> None:
        if not self._is_loaded:
            self._at = 0
            self._epoch += self._begins != "at both ends"
        self._is_loaded = False

    def _items(self) -> Iterator[int]:
        if self._begins != "at iter":
            self._begin()
        while self._at < self._num_items:
            self._at += 1
            yield 10 * self._epoch + self._at - 1
        self._epoch += self._begins == "at both ends"


class Once(StatefulSync):
    """An iterable that goes on where it was loaded, once; further passes begin at the beginning."""

    _begin = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = self._at = state["at"]

    def __iter__(self) -> Iterator[int]:
        begin, self._begin = self._begin, 0
        for item in range(begin, self._num_items):
            self._at = item + 1
            yield item


class GetSetIterator:
    """An iterator whose state are bytes, as those of Grain are."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._at = 0

    def __iter__(self) -> GetSetIterator:
        return self

    def __next__(self) -> int:
        if self._at >= self._num_items:
            raise StopIteration
        self._at += 1
        return self._at - 1

    def get_state(self) -> bytes:
        return b"at %d" % self._at

    def set_state(self, state: bytes) -> None:
        self._at = int(state.split()[1])


def fails_at(*items: int) -> Callable[[int], int]:
    def fn(item: int) -> int:
        if item in items:
            raise BadRecordError(item)
        return 10 * item or 1

    return fn


async def same(item: Any) -> Any:
    """The item, after others had a turn."""
    await turns()
    return item


def same_in_thread(item: Any) -> Any:
    return item


on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For a test of what asyncio alone has: queues, futures, its own way to cancel a task."""


async def read_all(stage: Stage[Any]) -> list[Any]:
    async with stage as items:
        return [item async for item in items]


async def read_some(stage: Stage[Any], count: int) -> list[Any]:
    """The first items of an open stage."""
    items: list[Any] = []
    while len(items) < count:
        try:
            items.append(await anext(stage))
        except StopAsyncIteration:
            break
    return items


def position(stage: Stage[Any]) -> Any:
    """What was saved and read again."""
    return json.loads(json.dumps(stage.state_dict()))


def at(items: int, *beyond: int) -> dict[str, Any]:
    """The position in a sequence: so many items were used, and these behind them."""
    return {"stage": "sequence", "items": items, "place": items, "beyond": list(beyond)}


async def read_in_lives(*lives: tuple[Stage[Any], int], reads_ahead: bool = True) -> list[Any]:
    """What pipelines give that go on one after the other: so many items of each, or all it has."""
    got: list[Any] = []
    state = None
    for stage, count in lives:
        if state is not None:
            stage.load_state_dict(state)
            assert position(stage) == state
        async with stage:
            got += await read_some(stage, count)
            if reads_ahead:
                await settle()
            state = position(stage)
    return got


async def read_in_two_lives(
    make: Callable[[], Stage[Any]], count: int, again: Callable[[], Stage[Any]] | None = None
) -> list[Any]:
    """All items: `count` of a pipeline, then those of another one that goes on at its position."""
    return await read_in_lives((make(), count), ((again or make)(), sys.maxsize))
