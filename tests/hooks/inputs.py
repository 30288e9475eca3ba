"""Models that remember what they were trained with, sources with gates, and lives to train in."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    StateDictSaver,
)
from asynchooks.data import Stage, batch, map_concurrent, prefetch, repeat, shuffle

SHORT_SECS = 20
"""What takes longer hangs."""


class Diary:
    """A model that is nothing but what it was trained with, in this order.

    Args:
        errors: by the number of a call, counted from 1: what it raises, before it learns.
    """

    def __init__(self, errors: Mapping[int, BaseException] | None = None) -> None:
        self.items: list[int] = []
        self.num_calls = 0
        self.errors = dict(errors or {})

    def step(self, x: Any) -> dict[str, Any]:
        self.num_calls += 1
        if self.num_calls in self.errors:
            raise self.errors[self.num_calls]
        self.items += [int(each) for each in np.ravel(x)]
        return {"x": x}

    @property
    def creator(self) -> FunctionSessionCreator:
        return FunctionSessionCreator(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"items": np.array(self.items, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.items = [int(each) for each in state["items"]]


async def gated(items: Iterable[int], gates: Mapping[int, anyio.Event]) -> AsyncIterator[int]:
    """The items; one that has a gate comes when that is open."""
    for item in items:
        if item in gates:
            await gates[item].wait()
        yield item


class Counted:
    """A source that says whether it is open."""

    def __init__(self, num_items: int = 9, error: BaseException | None = None) -> None:
        self.log: list[str] = []
        self._num_items = num_items
        self._error = error

    async def __aiter__(self) -> AsyncIterator[int]:
        self.log.append("open")
        try:
            for number in range(self._num_items):
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.log.append("closed")


async def until_stopped(session: MonitoredSession, fetches: Any = ()) -> None:
    while not session.should_stop():
        await session.run(list(fetches))


async def double(x: Any) -> Any:
    return x * 2


PIPELINES: dict[str, Callable[[int], Stage[Any]]] = {
    # by the size of their buffers, which may differ between two lives
    "prefetch": lambda size: prefetch(range(60), size),
    "plain": lambda size: batch(shuffle(iter(range(60)), 7, seed=3), 2),
    "shuffled batches": lambda size: prefetch(batch(shuffle(range(61), 9, seed=1), 3), size),
    "epochs": lambda size: prefetch(repeat(shuffle(range(13), 5, seed=2), 4), size),
    "mapped": lambda size: prefetch(map_concurrent(double, range(60), size + 1), size),
    "in a thread": lambda size: prefetch(map(int, range(60)), size),
}


def saving(
    path: Path, model: Any, *, every: int = 4, background: bool = False
) -> CheckpointSaverHook:
    saver = StateDictSaver(diary=model)
    return CheckpointSaverHook(path, save_steps=every, saver=saver, background=background)


async def trained_with(
    source: Any,
    path: Path | None = None,
    last: int = 999,
    *,
    errors: Mapping[int, BaseException] | None = None,
    by_loop: bool = False,
) -> Diary:
    """What a model was trained with, up to a step; it is restored from a path, and saved there."""
    diary = Diary(errors)
    feed = InputPositionHook(source) if by_loop else FeedHook(source, "x")
    saver = [] if path is None else [saving(path, diary)]
    async with MonitoredSession([feed, *saver], diary.creator) as session:
        if by_loop:
            async for item in session.batches(source):
                await session.run([], {"x": item})
        while not by_loop and not session.should_stop() and session.global_step.value < last:
            await session.run([])
    return diary


async def trained_in_lives(make: Callable[[int], Stage[Any]], path: Path, *lasts: int) -> Diary:
    """The same in several lives; each makes its pipeline, with a buffer of another size."""
    for last in lasts:
        diary = await trained_with(make(last % 4 + 1), path, last)
    return diary


async def items_of(source: Any) -> list[int]:
    """What an uninterrupted training is given."""
    async with prefetch(source, 1) as items:
        return [int(part) async for item in items for part in np.ravel(item)]
