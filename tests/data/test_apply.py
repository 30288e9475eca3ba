"""map and filter, and how many calls of a stage may fail."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asynchooks import StopTraining, data
from asynchooks.data import Stage, batch, map_concurrent, prefetch, repeat, take

from ..support.afterwards import nothing_left
from ..support.faults import Halt
from ..support.helpers import cancelled_when_settled, in_task, turns
from .sources import (
    BadRecordError,
    Calls,
    Source,
    fails_at,
    position,
    read_all,
    read_in_two_lives,
    same,
)


@pytest.mark.parametrize("fn", [int, same, lambda item: same(item)])
async def test_a_map_calls_a_function_with_one_item_after_the_other(fn: Any) -> None:
    source = Source(None)
    assert await read_all(take(data.map(source.items(), fn), 3)) == [0, 1, 2]
    assert source.num_read == 3, "no more than it was asked for"
    assert await read_all(prefetch(data.map(Source(3).items_in_thread(), fn), 2)) == [0, 1, 2]


@pytest.mark.parametrize("fn", [bool, same, lambda item: np.bool_(item)])
async def test_a_filter_keeps_items_of_which_something_true_is_said(fn: Any) -> None:
    assert await read_all(batch(data.filter([0, 1, 2, 0, 3], fn), 2)) == [[1, 2], [3]]
    assert await read_all(prefetch(data.filter(Source(3).items(), fn), 4)) == [1, 2]


async def test_a_cancellation_enters_the_function_and_loses_no_item() -> None:
    calls = Calls()
    async with data.map(range(3), calls) as stage:
        assert await cancelled_when_settled(anext, stage)
        assert (calls.begun, calls.ended) == ([0], [0])
        state = position(stage)
        async with in_task(anext, stage) as again:
            calls.let(0)
        assert (again.value, calls.begun) == (0, [0, 0])
    later = data.map(range(3), abs)
    later.load_state_dict(state)
    assert await read_all(later) == [0, 1, 2]


async def in_turn(fn: Callable[[int], int], item: int) -> int:
    await turns()
    return fn(item)


FAILING: dict[str, Callable[..., Stage[Any]]] = {
    "map": data.map,
    "async map": lambda source, fn, **more: data.map(source, lambda x: in_turn(fn, x), **more),
    "filter": data.filter,
    "map_concurrent": lambda source, fn, **more: map_concurrent(
        lambda item: in_turn(fn, item), source, 3, **more
    ),
    "in threads": lambda source, fn, **more: map_concurrent(fn, source, 3, **more),
    "unordered": lambda source, fn, **more: map_concurrent(fn, source, 3, ordered=False, **more),
}
kinds = pytest.mark.parametrize("kind", FAILING)


@kinds
async def test_an_error_comes_behind_all_results_with_a_note_and_the_source_is_closed(
    kind: str,
) -> None:
    source, got = Source(None), list[int]()
    stage = FAILING[kind](source.items(), fails_at(5))
    async with nothing_left():
        with pytest.raises(BadRecordError) as caught:
            async with prefetch(batch(stage, 1), 1) as batches:
                async for each in batches:
                    got += each
    assert source.is_closed
    assert caught.value.__notes__ == [f"in {stage.statistics().stage}, at item 5"]
    assert kind == "unordered" or len(got) == 5


@kinds
@pytest.mark.parametrize("num_allowed", [0, 2, 9])
async def test_so_many_calls_in_all_may_fail_and_the_next_error_is_raised(
    kind: str, num_allowed: int, caplog: pytest.LogCaptureFixture
) -> None:
    bad = (2, 3, 8, 30)
    stage = FAILING[kind](range(1, 60), fails_at(*bad), max_failures=num_allowed)
    try:
        got = await read_all(stage)
    except BadRecordError as error:
        assert num_allowed < len(bad)
        assert kind == "unordered" or error.args == (bad[num_allowed],)
    else:
        assert num_allowed >= len(bad)
        factor = 1 if kind == "filter" else 10
        assert sorted(got) == [factor * each for each in range(1, 60) if each not in bad]
    num_left_out = min(num_allowed, len(bad))
    assert stage.statistics().num_failures == num_left_out
    left_out = [each.message for each in caplog.records if "is left out, failure" in each.message]
    assert len(left_out) == num_left_out


@kinds
@pytest.mark.parametrize("error", [StopTraining("enough"), Halt()])
async def test_a_stop_and_an_exit_are_no_failures(kind: str, error: BaseException) -> None:
    def fn(item: int) -> int:
        raise error

    stage = FAILING[kind](range(5), fn, max_failures=9)
    with pytest.raises(type(error)):
        await read_all(stage)
    assert stage.statistics().num_failures == 0


async def test_failures_count_over_passes_and_their_places_from_where_a_pass_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got: list[int] = []
    with pytest.raises(BadRecordError):
        async for each in repeat(data.map(range(3), fails_at(1), max_failures=2)):
            got.append(each)
    assert got == [1, 20, 1, 20, 1]
    caplog.clear()
    make = lambda: data.map(range(9), fails_at(6), max_failures=1)  # noqa: E731
    assert await read_in_two_lives(make, 4) == [1, 10, 20, 30, 40, 50, 70, 80]
    assert [each.message[:10] for each in caplog.records] == ["Item 6 of "]
