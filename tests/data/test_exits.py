"""However a loop is left: producers end, generators and files are closed, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .recipes import MOST
from .sources import BadRecordError, Source, only_on_asyncio, read_all, same, same_in_thread

pytestmark = pytest.mark.anyio


AROUND: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 3),
    "batch": lambda source: batch(source, 1),
    "shuffle": lambda source: shuffle(source, 3, 1),
    "shard": lambda source: shard(source, 2, 1),
    "take": lambda source: take(source, 99),
    "repeat": lambda source: repeat(source, 1),
    "interleave": lambda source: interleave([source, [0] * 99]),
    "map": lambda source: map_concurrent(same, source, min(3, MOST)),
    "map in threads": lambda source: map_concurrent(same_in_thread, source, min(3, MOST)),
    "map unordered": lambda source: map_concurrent(same, source, min(3, MOST), ordered=False),
    "many": lambda source: prefetch(
        batch(map_concurrent(same, repeat(shuffle(prefetch(source, 2), 2, 0), 1), min(2, MOST)), 1),
        2,
    ),
    "interleaved prefetches": lambda source: interleave(
        [prefetch(source, 2), prefetch([1] * 99, 2)]
    ),
}
KINDS = ["items", "items_in_thread"]
around = pytest.mark.parametrize("around", AROUND)
kinds = pytest.mark.parametrize("kind", KINDS)


@around
@kinds
@pytest.mark.parametrize("way", ["break", "error", "scope", "group", "native"])
async def test_leaving_a_loop_ends_all_at_once(
    around: str, kind: str, way: str, anyio_backend_name: str, request: pytest.FixtureRequest
) -> None:
    if way == "native":
        only_on_asyncio(anyio_backend_name)
    source = Source(None)
    closed: list[bool] = []

    async def read(scope: anyio.CancelScope | None = None) -> None:
        try:
            async with AROUND[around](getattr(source, kind)()) as items:
                num = 0
                async for _ in items:
                    num += 1
                    assert num < 2000, "never cancelled"
                    if num < 3:
                        continue
                    if way == "break":
                        break
                    if way == "error":
                        raise BadRecordError
                    if way == "native":
                        task = asyncio.current_task()
                        assert task is not None
                        task.cancel()
                    elif scope is not None:
                        scope.cancel()
        finally:
            closed.append(source.is_closed)

    async with nothing_left():
        if way == "error":
            with pytest.raises(BadRecordError):
                await read()
        elif way == "native":
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(read())
        elif way == "group":
            async with anyio.create_task_group() as group:
                group.start_soon(read, group.cancel_scope)
        elif way == "scope":
            with anyio.CancelScope() as scope:
                await read(scope)
            assert scope.cancelled_caught
        else:
            await read()
    assert closed == [True]
    assert source.num_begun == 1


@around
@pytest.mark.parametrize("is_native", [False, True])
async def test_cancelling_whoever_waits_for_a_source_that_hangs_ends_all(
    around: str, is_native: bool, anyio_backend_name: str
) -> None:
    if is_native:
        only_on_asyncio(anyio_backend_name)
    source = Source(2, hangs=True)

    async def read() -> None:
        try:
            async with AROUND[around](source.items()) as items:
                async for _ in items:
                    pass
        finally:
            assert source.is_closed

    async with nothing_left():
        if is_native:
            task = asyncio.create_task(read())
            await settle()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await settle()
                group.cancel_scope.cancel()
    assert source.is_closed


@around
@kinds
async def test_an_error_of_the_source_leaves_as_itself_and_closes_all(
    around: str, kind: str
) -> None:
    error = BadRecordError("bad record")
    source = Source(4, error)
    async with nothing_left():
        with pytest.raises(BadRecordError) as caught:
            async with AROUND[around](getattr(source, kind)()) as items:
                async for _ in items:
                    pass
        assert caught.value is error
    assert source.is_closed


async def test_a_pipeline_is_closed_as_well_if_it_was_never_opened() -> None:
    ended: list[bool] = []

    async def read() -> Any:
        try:
            yield 1
        finally:
            ended.append(True)

    generator = read()
    await anext(generator)
    await prefetch(generator, 1).aclose()
    assert ended == [True]


async def test_closing_twice_is_fine_and_a_closed_stage_cannot_be_read() -> None:
    for make in AROUND.values():
        stage = make(list(range(9)))
        async with stage:
            await anext(stage)
        await stage.aclose()
        with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
            await anext(stage)
        with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
            async with stage:
                pass


@around
async def test_files_of_generators_are_closed(
    around: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "records"
    path.write_text("1\n2\n3\n4\n5\n6\n")

    def read() -> Any:
        with path.open() as file:
            yield from file

    async with nothing_left():
        async with AROUND[around](read()) as items:
            async for _ in items:
                break
        await read_all(AROUND[around](read()))
