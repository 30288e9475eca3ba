"""Items that a former life used out of order: no loop over the stage gives them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynchooks.data import Stage, prefetch, take

from .sources import position, read_all, read_some

pytestmark = pytest.mark.anyio

every_kind = pytest.mark.parametrize(
    "make", [lambda: take(range(6), 9), lambda: prefetch(range(6), 2)]
)


def state_of(make: Callable[[], Stage[int]], beyond: list[int]) -> dict[str, object]:
    return {**make().state_dict(), "used_beyond": beyond}


@every_kind
async def test_a_plain_loop_leaves_out_what_was_used(make: Callable[[], Stage[int]]) -> None:
    stage = make()
    stage.load_state_dict(state_of(make, [0, 2, 3]))
    assert await read_all(stage) == [1, 4, 5]


@every_kind
async def test_used_items_at_the_end_are_left_out_too(make: Callable[[], Stage[int]]) -> None:
    stage = make()
    stage.load_state_dict(state_of(make, [1, 4, 5]))
    async with stage:
        assert await read_some(stage, 9) == [0, 2, 3]
        state = position(stage)
    again = make()
    again.load_state_dict(state)
    assert await read_all(again) == []


@every_kind
async def test_what_was_used_is_left_out_in_the_life_after_the_next_too(
    make: Callable[[], Stage[int]],
) -> None:
    stage = make()
    stage.load_state_dict(state_of(make, [1, 3, 4]))
    assert position(stage)["used_beyond"] == [1, 3, 4]
    async with stage:
        assert await read_some(stage, 1) == [0]
        assert position(stage)["used_beyond"] == [0, 2, 3]
        assert await read_some(stage, 1) == [2]
        state = position(stage)
    again = make()
    again.load_state_dict(state)
    assert await read_all(again) == [5]
