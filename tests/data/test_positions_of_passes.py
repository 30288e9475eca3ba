"""Positions in sources that know their own, over several passes: also where a pass begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks import FeedHook, MonitoredSession, PreemptionError
from asynchooks.data import Stage, prefetch, repeat, shuffle, take

from ..hooks.inputs import Diary, saving, until_stopped
from .sources import AsyncEpochs, Epochs, StatefulSync, position, read_all, read_some

pytestmark = pytest.mark.anyio

NUM_ITEMS, NUM_EPOCHS = 4, 3
WHOLE = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]

kinds = pytest.mark.parametrize("kind", [Epochs, AsyncEpochs])
begins = pytest.mark.parametrize("begins", ["at iter", "at next", "at both ends"])


async def read_ahead(stage: Stage[Any], num_left: int) -> None:
    """Return when it has read as far as it will."""
    while (found := stage.statistics()).num_buffered < min(found.buffer_size, num_left):
        await anyio.lowlevel.checkpoint()


@kinds
@begins
@pytest.mark.parametrize("around", [lambda source: source, lambda source: shuffle(source, 3, 7)])
async def test_a_pass_goes_on_in_its_own_order(
    kind: type[Epochs], begins: str, around: Callable[[Any], Any]
) -> None:
    def pipeline(size: int) -> Stage[int]:
        return prefetch(repeat(around(kind(NUM_ITEMS, begins)), NUM_EPOCHS), size)

    whole = await read_all(pipeline(1))
    assert sorted(whole) == WHOLE
    for count in range(len(whole) + 1):
        async with pipeline(5) as stage:
            first = await read_some(stage, count)
            await read_ahead(stage, len(whole) - count)
            state = position(stage)
        again = pipeline(5)
        again.load_state_dict(state)
        assert position(again) == state
        async with again:
            await read_ahead(again, len(whole) - count)
            assert position(again) == state
            assert first + [each async for each in again] == whole, count


@kinds
@begins
async def test_a_second_restore_at_the_beginning_of_a_pass_is_that_of_the_first(
    kind: type[Epochs], begins: str
) -> None:
    got: list[int] = []
    state = None
    # from the last item of a pass to the beginning of the next one, which is saved twice
    for count in (NUM_ITEMS, 0, 0, 1, NUM_ITEMS - 1, 0, 0, 99):
        source = repeat(kind(NUM_ITEMS, begins), NUM_EPOCHS)
        stage = prefetch(source, 2) if count != NUM_ITEMS else source
        if state is not None:
            stage.load_state_dict(state)
        async with stage:
            got += await read_some(stage, count)
            await read_ahead(stage, len(WHOLE) - len(got))
            state = position(stage)
    assert got == WHOLE


@kinds
@begins
@pytest.mark.parametrize("call", [2, 5, 6])
async def test_it_goes_back_with_the_model(
    kind: type[Epochs], begins: str, call: int, tmp_path: Path
) -> None:
    diary = Diary({call: PreemptionError("lost")})
    source = prefetch(repeat(kind(NUM_ITEMS, begins), NUM_EPOCHS), 2)
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        await until_stopped(session)
    assert diary.items == WHOLE


async def test_a_source_goes_back_to_where_it_was_before_its_first_item(tmp_path: Path) -> None:
    diary = Diary({3: PreemptionError("lost")})
    hooks = [FeedHook(prefetch(StatefulSync(6), 2), "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        await until_stopped(session)
    assert diary.items == list(range(6))


@pytest.mark.parametrize(("epoch", "items"), [((), [0, 1, 2]), ((1,), [10, 11, 12])])
async def test_what_was_not_open_goes_back_to_its_first_item_in_the_first_pass_only(
    epoch: tuple[int, ...], items: list[int]
) -> None:
    stage = take(Epochs(3, "at iter"), 9)
    state = position(stage)
    assert await read_all(stage) == [0, 1, 2]
    again = stage._restarted(epoch)
    again.load_state_dict(state)
    assert await read_all(again) == items
