"""Closing: what generators do at their end is waited for, and readers are told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FunctionSessionCreator, InputError, InputStateError, MonitoredSession
from asynchooks.data import batch, interleave, map_concurrent, prefetch, repeat, shuffle, take

from ..support.afterwards import nothing_left
from .sources import read_all, same_in_thread

pytestmark = pytest.mark.anyio


class Slowly:
    """Generators whose end takes some turns of the event loop."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(5000):
                yield number
        finally:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            self.num_closed += 1


async def _mapped(item: int) -> int:
    if item > 3:
        await anyio.sleep(0.01)
    return item


AROUND: dict[str, Callable[[Any], Any]] = {
    "prefetch": lambda source: prefetch(source, 3),
    "map": lambda source: map_concurrent(_mapped, source, 4),
    "map in threads": lambda source: map_concurrent(same_in_thread, source, 4),
    "prefetch of map": lambda source: prefetch(map_concurrent(_mapped, source, 4), 2),
    "prefetch of batches": lambda source: prefetch(
        batch(map_concurrent(_mapped, source, 4, ordered=False), 2), 2
    ),
}


@pytest.mark.parametrize("around", AROUND)
async def test_a_loop_that_is_left_waits_for_the_end_of_the_generator(around: str) -> None:
    source = Slowly()
    async with nothing_left():
        async with AROUND[around](source.numbers()) as items:
            async for _ in items:
                break
    assert source.num_closed == 1


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("error", [ValueError("five"), SystemExit(3)])
async def test_the_first_error_leaves_and_the_generator_ends(
    ordered: bool, error: BaseException
) -> None:
    async def fn(item: int) -> int:
        if item == 5:
            raise error
        return await _mapped(item)

    source = Slowly()
    async with nothing_left():
        with pytest.raises(type(error)) as caught:
            await read_all(map_concurrent(fn, source.numbers(), 4, ordered))
    assert caught.value is error
    assert source.num_closed == 1


async def test_whoever_waits_for_a_thread_is_told_that_the_stage_is_closed() -> None:
    may_go_on = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        may_go_on.wait(10)
        yield 2

    seen: list[Any] = []

    async def read(stage: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it got one item more, and asks for another
            async for item in stage:
                seen.append(item)
                waits.set()

    waits = anyio.Event()
    async with nothing_left():
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                async with batch(numbers(), 1) as stage:
                    group.start_soon(read, stage)
                    await waits.wait()
                    await anyio.lowlevel.checkpoint()
                    may_go_on.set()
    assert seen[0] == [1]


@pytest.mark.parametrize(
    "make", [lambda: repeat([1, 2, 3]), lambda: interleave([range(10_000), range(10_000)])]
)
async def test_two_that_share_a_stage_may_be_far_apart(make: Callable[[], Any]) -> None:
    shared = make()
    first, second = take(shared, 10**6), take(shared, 10**6)
    async with first, second:
        for _ in range(1100):
            await anext(first)
        for _ in range(600):
            await anext(second)
    assert shared.statistics().num_items == 1700


async def test_a_shuffle_whose_source_has_become_shorter_says_so() -> None:
    longer = shuffle(range(20), 8, 1)
    for _ in range(6):
        await anext(longer)
    shorter = shuffle(range(9), 8, 1)
    shorter.load_state_dict(longer.state_dict())
    with pytest.raises(InputStateError, match="ended at item 9"):
        await anext(shorter)


async def test_a_repeat_that_is_beyond_its_last_epoch_has_ended() -> None:
    longer = repeat([1, 2, 3], 5)
    for _ in range(13):
        await anext(longer)
    shorter = repeat([1, 2, 3], 2)
    shorter.load_state_dict(longer.state_dict())
    assert await read_all(shorter) == []


async def test_an_empty_source_is_not_repeated_again_and_again() -> None:
    assert await read_all(repeat([], 10**9)) == []
    with pytest.raises(InputError, match="is empty"):
        await read_all(repeat([]))


async def test_two_loops_over_one_source_share_its_items() -> None:
    creator = FunctionSessionCreator(lambda x: {"x": x})
    source, used = prefetch(range(8), 3), []
    async with MonitoredSession([], creator) as session:
        one, other = session.batches(source), session.batches(source)
        used += [await session.run("x", {"x": await anext(one)})]
        held = await anext(one)
        used += [await session.run("x", {"x": await anext(other)})]
        used += [await session.run("x", {"x": held})]
        async for item in other:
            used += [await session.run("x", {"x": item})]
    assert sorted(used) == list(range(8))
