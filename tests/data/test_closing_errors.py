"""Errors in closing, and ends that are none: which one leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks.data import batch, interleave, prefetch

from ..support.afterwards import nothing_left
from .sources import BadRecordError, Source, read_all

pytestmark = pytest.mark.anyio

every_way = pytest.mark.parametrize(
    "around", [lambda source: batch(source, 1), lambda source: prefetch(batch(source, 1), 1)]
)


async def fails_to_close(error: BaseException) -> AsyncGenerator[int, None]:
    try:
        while True:
            await anyio.lowlevel.checkpoint()
            yield 0
    finally:
        raise error


@every_way
async def test_an_exit_in_closing_leaves_though_the_block_has_failed(
    around: Callable[[Any], Any],
) -> None:
    error = SystemExit(3)
    async with nothing_left():
        with pytest.raises(SystemExit) as caught:
            async with around(fails_to_close(error)) as items:
                await anext(items)
                raise BadRecordError
    assert caught.value is error


@every_way
async def test_a_runtime_error_in_closing_leaves_as_itself(around: Callable[[Any], Any]) -> None:
    error = RuntimeError("of the user")
    with pytest.raises(RuntimeError) as caught:
        async with around(fails_to_close(error)) as items:
            await anext(items)
    assert caught.value is error


async def test_a_cancellation_in_closing_passes_through_though_the_block_has_failed() -> None:
    with anyio.CancelScope() as scope:
        async with batch(unshielded_end(), 1) as items:
            await anext(items)
            scope.cancel()
            raise BadRecordError
    assert scope.cancelled_caught


async def unshielded_end() -> AsyncGenerator[int, None]:
    try:
        yield 0
    finally:
        await anyio.lowlevel.checkpoint()


async def test_of_several_errors_in_closing_the_first_leaves_and_all_are_closed() -> None:
    first, second, last = OSError("first"), OSError("second"), Source(None)
    stage = interleave([fails_to_close(first), fails_to_close(second), last.items()])
    with pytest.raises(OSError, match="first") as caught:
        async with stage as items:
            for _ in range(3):
                await anext(items)
    assert caught.value is first
    assert last.is_closed


@every_way
async def test_an_end_of_some_input_within_collate_is_not_the_end(
    around: Callable[[Any], Any],
) -> None:
    def collate(items: list[Any]) -> Any:
        raise StopAsyncIteration

    with pytest.raises(RuntimeError, match="batch called what raised StopAsyncIteration"):
        await read_all(around(batch(range(4), 2, collate=collate)))
