"""Stages are opened, shared and closed: producers, generators and files end however one is left."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, InputStateError, MonitoredSession
from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shuffle,
    take,
)

from ..hooks.inputs import Diary
from ..hooks.training import run_session
from ..support.afterwards import nothing_left
from ..support.helpers import cancelled_when_settled, settle, turns
from .sources import (
    BadRecordError,
    Calls,
    Source,
    on_asyncio,
    read_all,
    read_some,
    same,
    same_in_thread,
)

AROUND: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 3),
    "batch": lambda source: batch(source, 1),
    "repeat": lambda source: repeat(shuffle(source, 3, 1), 1),
    "interleave": lambda source: interleave([prefetch(source, 2), take([0] * 99, 99)]),
    "map in threads": lambda source: map_concurrent(same_in_thread, source, 3),
    "many": lambda source: prefetch(
        batch(map_concurrent(same, repeat(shuffle(prefetch(source, 2), 2, 0), 1), 2), 1), 2
    ),
}
WAYS = ["end", "error", "error of the source", "scope", "in a wait", "native", "never read"]
KINDS = ["items", "items_in_thread", "items_in_group"]


@pytest.mark.parametrize(
    ("way", "kind", "anyio_backend"),
    [
        each
        for each in product(WAYS, KINDS, ["asyncio", "trio"])
        if each[::2] != ("native", "trio")
        # threads cannot be cancelled, and a task group wraps errors in a group
        and (each[1] == "items" or each[0] != "in a wait")
        and each[:2] != ("error of the source", "items_in_group")
    ],
)
async def test_all_ends_at_once_however_a_stage_is_left(way: str, kind: str) -> None:
    error = BadRecordError("bad record")
    endings: dict[str, Any] = {"end": (9,), "error of the source": (4, error), "in a wait": (2,)}

    async def read(around: str, source: Source) -> None:
        try:
            async with AROUND[around](getattr(source, kind)()) as items:
                if way in endings:
                    await read_some(items, 99)
                elif way != "never read":
                    await read_some(items, 3)
                await settle()  # tasks wait for room
                if way == "error":
                    raise error
                if way in ("native", "scope"):
                    task.cancel() if way == "native" else scope.cancel()
                    await anyio.sleep_forever()
        finally:
            assert source.num_begun == source.num_closed
            assert source.is_closed or way == "never read"

    for around in AROUND:
        source = Source(*endings.get(way, (None,)), hangs=way == "in a wait")
        async with nothing_left():
            with anyio.CancelScope() as scope:
                if way == "native":
                    task = asyncio.create_task(read(around, source))
                    with pytest.raises(asyncio.CancelledError):
                        await task
                elif way == "in a wait":
                    assert await cancelled_when_settled(read, around, source)
                else:
                    with pytest.raises(BadRecordError) if "error" in way else nullcontext():
                        await read(around, source)
            assert scope.cancelled_caught == (way == "scope")
        assert source.num_begun == 1 or way == "never read"


@pytest.mark.parametrize("around", ["prefetch", "batch"])
async def test_closing_twice_is_fine_and_a_closed_stage_cannot_be_read(around: str) -> None:
    stage = AROUND[around](list(range(9)))
    async with stage:
        await anext(stage)
    await stage.aclose()
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        await anext(stage)
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        await stage.__aenter__()


async def test_a_pipeline_is_closed_as_well_if_it_was_never_opened() -> None:
    source = Source(None)
    generator = source.items()
    await anext(generator)
    await prefetch(generator, 1).aclose()
    assert source.is_closed


async def test_a_coroutine_that_waits_for_a_source_can_be_closed() -> None:
    calls = Calls()

    class Waiting:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            return await calls(0)

    reading: Any = anext(batch(Waiting(), 9))
    reading.send(None)  # it waits
    reading.close()
    assert calls.ended == [0]


def test_a_plain_with_is_refused_with_async_with_as_the_remedy() -> None:
    with pytest.raises(TypeError, match="opened by `async with stage:`, not by `with stage:`"):
        with prefetch(range(3), 1):
            raise AssertionError("never entered")


async def fails_to_close(error: BaseException) -> AsyncGenerator[int, None]:
    try:
        while True:
            await turns()
            yield 0
    finally:
        raise error


@pytest.mark.parametrize(
    "around", [lambda source: batch(source, 1), lambda source: prefetch(batch(source, 1), 1)]
)
@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("closing", [SystemExit(3), OSError("a disk")])
async def test_an_error_in_closing_leaves_as_itself_and_behind_that_of_the_block_but_for_an_exit(
    closing: BaseException, has_failed: bool, around: Callable[[Any], Any]
) -> None:
    async with nothing_left():
        with pytest.raises((SystemExit, OSError, KeyError)) as caught:
            async with around(fails_to_close(closing)) as items:
                await anext(items)
                if has_failed:
                    raise KeyError
    if has_failed and isinstance(closing, OSError):
        assert isinstance(caught.value, KeyError)
        [note] = caught.value.__notes__
        assert "OSError('a disk')" in note
    else:
        assert caught.value is closing


async def test_of_several_errors_in_closing_the_first_leaves_and_all_are_closed() -> None:
    first, second, last = OSError("first"), OSError("second"), Source(None)
    with pytest.raises(OSError, match="first"):
        async with interleave(
            [fails_to_close(first), fails_to_close(second), last.items()]
        ) as items:
            for _ in range(3):
                await anext(items)
    assert last.is_closed
    with pytest.raises(OSError, match="first") as caught:
        async with MonitoredSession([], Diary().creator) as session:
            for error in (first, second):
                await anext(session.batches(fails_to_close(error)))
            await settle()  # both have read ahead
    assert "then, closing another input: OSError('second')" in caught.value.__notes__


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda fails, _: map_concurrent(fails, range(9), 2), "map_concurrent called"),
        (lambda fails, _: batch(range(9), 2, collate=fails), "batch called"),
        (lambda _, source: batch(source.items(), 9), ""),
        (lambda _, source: prefetch(source.items_in_thread(), 2), ""),
    ],
)
@pytest.mark.parametrize("error", [GeneratorExit(), StopAsyncIteration()])
async def test_an_end_that_a_function_or_source_raises_does_not_pass_for_the_end(
    make: Callable[[Any, Source], Stage[Any]], says: str, error: BaseException
) -> None:
    def fails(item: Any) -> Any:
        raise error

    async with nothing_left():
        with pytest.raises(RuntimeError, match=f"^{says}.*raised") as caught:
            await read_all(make(fails, Source(1, error)))
    assert isinstance(caught.value.__cause__, type(error))


class Hanging:
    """Calls in a thread that hang until they are let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, item: int = 0) -> int:
        self.has_begun.set()
        assert self.may_end.wait(20)
        return item

    def __iter__(self) -> Iterator[int]:
        yield self()


@on_asyncio
@pytest.mark.parametrize(
    "make",
    [
        lambda hanging: map_concurrent(hanging.__call__, range(3), 1),
        lambda hanging: prefetch(hanging, 1),
        lambda hanging: batch(hanging, 1),
    ],
)
async def test_a_cancellation_of_the_closing_waits_for_calls_in_threads(
    make: Callable[[Hanging], Stage[Any]],
) -> None:
    hanging = Hanging()
    stage, closes = make(hanging), asyncio.Event()

    async def leave() -> None:
        async with stage:
            async with anyio.create_task_group() as group:
                group.start_soon(anext, stage)
                while not hanging.has_begun.is_set():
                    await turns()
                group.cancel_scope.cancel()
            closes.set()

    async with nothing_left():
        task = asyncio.create_task(leave())
        await closes.wait()
        await turns(5)  # until it waits
        task.cancel()
        await settle()
        assert not task.done()
        hanging.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("around", [lambda source: source, lambda source: repeat(source, 3)])
async def test_several_may_share_a_stage_and_the_last_one_closes_it(around: Any) -> None:
    source = Source(9)
    shared: Stage[int] = around(prefetch(source.items, 2))
    one, two = batch(shared, 1), batch(shared, 1)
    with pytest.raises(InputStateError, match="feeds 2 stages"):
        one.state_dict()
    async with nothing_left():
        async with one:
            async with two:
                got = [await anext(one), await anext(two)]
            assert not source.is_closed
            got += [item async for item in one]
    assert len(got) == 9 * source.num_begun
    assert source.is_closed


INNER: dict[str, Any] = {
    "plain": lambda: batch(range(20), 1),
    "with a task": lambda: prefetch(batch(range(20), 1), 2),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("by_hook", [False, True])
async def test_a_stage_around_one_that_others_read_has_no_position(
    by_hook: bool, inner: str
) -> None:
    async with INNER[inner]() as below:
        if by_hook:
            await run_session([FeedHook(below, "x")], Diary().creator, runs=1)
            assert below.state_dict()["source"] == {"stage": "sequence", "items": 1}
        async with prefetch(shuffle(take(below, 9), 1, seed=0), 2) as rest:
            if not by_hook:
                rest.state_dict()
                await anext(below)
            with pytest.raises(InputStateError, match="of which items were also taken by others"):
                rest.state_dict()


@pytest.mark.parametrize("inner", INNER)
async def test_no_state_is_loaded_around_a_stage_that_has_begun(inner: str) -> None:
    state = prefetch(INNER[inner](), 2).state_dict()
    async with INNER[inner]() as below:
        if inner == "plain":
            prefetch(below, 2).load_state_dict(state)  # it has given nothing yet
            await anext(below)
        with pytest.raises(RuntimeError, match=r"which prefetch\(.* reads, has begun"):
            prefetch(below, 2).load_state_dict(state)
