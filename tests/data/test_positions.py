"""Positions: a pipeline of the same stages goes on where another one was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynchooks import (
    FeedHook,
    InputError,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    data,
)
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

from ..hooks.inputs import Diary, saving, until_stopped
from ..support.helpers import settle
from .recipes import SAME_AGAIN, Recipe, build_stage, recipes
from .sources import (
    AsyncEpochs,
    BadRecordError,
    Epochs,
    GetSetIterator,
    Source,
    Stateful,
    StatefulSync,
    position,
    read_all,
    read_in_lives,
    read_in_two_lives,
    read_some,
)

pytestmark = pytest.mark.anyio


prop = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=100,
    deadline=None,
)


async def _whole(recipe: Recipe) -> list[Any]:
    try:
        return await read_all(build_stage(recipe))
    except InputError:  # the source of an endless repeat is empty
        assume(False)
        raise


CUT: dict[str, Callable[[Callable[[int], Any]], Stage[Any]]] = {
    "of one item": lambda make: take(make(9), 1),
    "of two items": lambda make: take(make(5), 2),
    "shuffled": lambda make: take(shuffle(make(9), 3, 1), 2),
    "shuffled, with the end read": lambda make: take(shuffle(make(4), 8, 1), 2),
    "in shards": lambda make: take(shard(make(6), 2, 1), 2),
    "of two sources": lambda make: take(interleave([make(5), make(2)]), 6),
    "of two sources, one cut": lambda make: interleave([take(make(5), 2), make(4)]),
    "by the shorter source": lambda make: data.zip([0, 1], make(20)),
    "of passes": lambda make: take(repeat(make(2), 2), 3),
}


async def _check_every_restore(make: Callable[[], Stage[Any]]) -> list[Any]:
    """The first items, which are the same with restores behind any two of them in a row."""
    whole = await read_all(take(make(), 8))
    for first in range(8):
        lives = [(take(make(), 8), count) for count in (first, 1, 8)]
        assert await read_in_lives(*lives, reads_ahead=False) == whole, first
    return whole


@pytest.mark.parametrize("kind", SAME_AGAIN)
@pytest.mark.parametrize("cut", CUT)
async def test_passes_that_take_may_cut_of_a_source_with_its_own_position_have_none(
    kind: str, cut: str
) -> None:
    stage = prefetch(repeat(CUT[cut](SAME_AGAIN[kind])), 2)
    with pytest.raises(
        InputStateError, match="makes passes that (take|zip) may cut, over a source that"
    ):
        stage.state_dict()
    assert len(await read_all(take(stage, 8))) == 8


@pytest.mark.parametrize("cut", CUT)
async def test_passes_that_take_cuts_of_a_source_that_is_made_anew_have_a_position(
    cut: str,
) -> None:
    await _check_every_restore(lambda: repeat(CUT[cut](lambda num: list(range(num)))))
    await _check_every_restore(lambda: repeat(CUT[cut](lambda num: lambda: StatefulSync(num))))


@pytest.mark.parametrize("kind", SAME_AGAIN)
async def test_a_source_that_has_given_nothing_in_a_pass_keeps_its_number(kind: str) -> None:
    make = SAME_AGAIN[kind]
    await _check_every_restore(lambda: repeat(interleave([make(2), make(3)])))
    await _check_every_restore(lambda: repeat(data.chain(make(2), make(3))))
    await _check_every_restore(lambda: repeat(data.mix([make(2), make(3)], seed=1)))


class Connection(AsyncEpochs):
    """Its iterators are no generators, and hold something open from the beginning."""

    num_open = 0

    def __aiter__(self) -> AsyncIterator[int]:
        Connection.num_open += 1
        return _Lines(iter(self))


class _Lines:
    def __init__(self, items: Iterator[int]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        await anyio.lowlevel.checkpoint()
        for item in self._items:
            return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        Connection.num_open -= 1


@pytest.mark.parametrize("begins", ["at iter", "at next", "at both ends"])
async def test_the_iterators_that_find_the_position_are_closed(begins: str) -> None:
    def make(num_items: int) -> Connection:
        return Connection(num_items, begins)

    await _check_every_restore(lambda: repeat(interleave([prefetch(make(n), 3) for n in (2, 3)])))
    assert Connection.num_open == 0


@prop
@given(
    recipe=recipes,
    first=st.integers(0, 20),
    second=st.integers(0, 10),
    variation=st.integers(0, 3),
)
async def test_first_items_and_those_after_each_restore_are_the_whole(
    recipe: Recipe, first: int, second: int, variation: int
) -> None:
    whole = await _whole(recipe)
    counts = (first, second, len(whole) + 1)
    lives = [(build_stage(recipe, variation), count) for count in counts]
    assert await read_in_lives(*lives, reads_ahead=False) == whole


def _numbers(item: Any) -> list[int]:
    if isinstance(item, tuple):
        return [each for part in item for each in _numbers(part)]
    return [item] if isinstance(item, int) else []


@prop
@given(
    num_items=st.integers(0, 30),
    first=st.integers(0, 40),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(),
    num_epochs=st.integers(1, 3),
)
async def test_with_another_shuffle_size_nothing_is_lost_and_nothing_comes_twice(
    num_items: int, first: int, sizes: tuple[int, int, int], seed: int, num_epochs: int
) -> None:
    lives = [
        (prefetch(repeat(shuffle(list(range(num_items)), size, seed), num_epochs), size), count)
        for size, count in zip(sizes, (first, 5, 1000), strict=True)
    ]
    got = await read_in_lives(*lives, reads_ahead=False)
    assert Counter(got) == dict.fromkeys(range(num_items), num_epochs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stateful(6),
        lambda: StatefulSync(6),
        lambda: GetSetIterator(6),
        lambda: iter(range(6)),
        lambda: Source(6).items(),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 4, 6])
async def test_a_source_goes_on_also_behind_a_buffer(make: Any, count: int) -> None:
    whole = await read_in_two_lives(lambda: prefetch(make(), 3), count, lambda: prefetch(make(), 1))
    assert whole == list(range(6))


async def test_a_prefetch_may_come_and_go_between_a_save_and_a_restore() -> None:
    whole = await read_in_two_lives(
        lambda: prefetch(batch(range(7), 2), 2), 2, lambda: batch(prefetch(range(7), 1), 2)
    )
    assert whole == [[0, 1], [2, 3], [4, 5], [6]]


async def test_a_stage_with_state_is_saved_as_it_was_behind_the_item_not_as_it_is() -> None:
    async with prefetch(Stateful(9), 5) as stage:
        await read_some(stage, 2)
        assert position(stage)["state"] == {"at": 2}


def of_take(source: Any, taken: Any = 1) -> dict[str, Any]:
    return {"stage": "take", "taken": taken, "source": source}


BEGIN = {"stage": "sequence", "items": 0}
OTHER_STAGE, DAMAGED = (
    "^the state is that of {}, and this stage is ",
    "^take.* cannot go on from .*",
)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, DAMAGED),
        ([], DAMAGED),
        ({}, DAMAGED),
        (7, DAMAGED),
        (of_take(4), DAMAGED),
        ({"stage": "batch"}, OTHER_STAGE.format("batch")),
        (BEGIN, OTHER_STAGE.format("sequence")),
        (of_take({"stage": "iterable", "items": 1}), OTHER_STAGE.format("iterable")),
        ({"stage": "take", "source": BEGIN}, DAMAGED + r"KeyError\('taken'\)"),
        (of_take(BEGIN, "many"), DAMAGED + "is 'many'; give an integer >= 0"),
        (of_take(BEGIN, math.inf), DAMAGED + "is inf; give an integer >= 0"),
        (of_take(BEGIN, -1), DAMAGED + "is -1; give an integer >= 0"),
        (of_take({"stage": "sequence"}), DAMAGED + r"KeyError\('items'\)"),
        (of_take({**BEGIN, "items": None}), DAMAGED + "is None; give an integer >= 0"),
        (of_take({**BEGIN, "items": -1}), DAMAGED + "is -1; give an integer >= 0"),
    ],
)
def test_a_state_that_is_damaged_or_of_other_stages_is_an_error(state: Any, message: str) -> None:
    with pytest.raises(InputStateError, match=message):
        take(range(5), 4).load_state_dict(state)


def test_the_state_of_another_shard_or_of_fewer_sources_is_an_error() -> None:
    one = shard(range(5), 2, 1)
    with pytest.raises(InputStateError, match="shard 0 of 2, and this is 1 of 2"):
        one.load_state_dict(shard(range(5), 2, 0).state_dict())
    with pytest.raises(InputStateError, match="cannot go on from"):
        one.load_state_dict({**one.state_dict(), "shard": []})
    with pytest.raises(InputStateError, match="cannot go on from"):
        interleave([[1]]).load_state_dict(interleave([[1], [2]]).state_dict())


async def test_a_saved_state_of_its_own_needs_a_source_that_has_one() -> None:
    state = {"stage": "iterable", "state": {"at": 3}}
    stage = prefetch(iter(range(5)), 1)
    stage.load_state_dict(state)
    with pytest.raises(InputStateError, match="has no state of its own"):
        await read_all(stage)


@pytest.mark.parametrize(
    "make",
    [
        lambda num: list(range(num)),
        lambda num: range(num),
        lambda num: iter(range(num)),
        lambda num: Source(num).items(),
    ],
)
async def test_a_source_that_is_shorter_than_its_saved_position_is_an_error(make: Any) -> None:
    state = {"stage": "take", "taken": 5}
    for num, message in ((5, None), (4, "ended after 4 items, and the saved position is behind")):
        stage = take(make(num), 9)
        kind = stage.state_dict()["source"]["stage"]
        with (
            pytest.raises(InputStateError, match=f"{message} item 5") if message else nullcontext()
        ):
            stage.load_state_dict({**state, "source": {"stage": kind, "items": 5}})
            assert await read_all(stage) == []
        await stage.aclose()


async def test_loading_after_the_beginning_is_an_error() -> None:
    for stage in (batch(range(5), 1), prefetch(range(5), 1)):
        state = stage.state_dict()
        async with stage:
            with pytest.raises(RuntimeError, match="has begun; load its state before it is"):
                stage.load_state_dict(state)
        with pytest.raises(RuntimeError, match="has begun; load its state before it is"):
            stage.load_state_dict(state)


async def test_results_without_order_have_no_position() -> None:
    stage = prefetch(batch(map_concurrent(str, range(5), 2, ordered=False), 2), 1)
    with pytest.raises(InputStateError, match="leave ordered=True"):
        stage.state_dict()


async def test_numbers_of_numpy_are_saved_as_numbers() -> None:
    three: Any = np.int64(3)
    one: Any = np.int64(1)
    whole = await read_in_two_lives(
        lambda: shard(range(9), three, one), 1, lambda: shard(range(9), 3, 1)
    )
    assert whole == [1, 4, 7]


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
    assert await trained_with(repeat(kind(NUM_ITEMS, begins), NUM_EPOCHS), call, tmp_path) == WHOLE


async def test_a_source_goes_back_to_where_it_was_before_its_first_item(tmp_path: Path) -> None:
    assert await trained_with(StatefulSync(6), 3, tmp_path) == list(range(6))


async def trained_with(source: Any, lost_at: int, path: Path) -> list[int]:
    """What a model was trained with that was lost at a call, and restored."""
    diary = Diary({lost_at: PreemptionError("lost")})
    hooks = [FeedHook(prefetch(source, 2), "x"), saving(path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        await until_stopped(session)
    return diary.items


STATEFUL: dict[str, Callable[[Any], Any]] = {
    "interleave": lambda source: interleave([prefetch(source, 5), prefetch(range(99, 130), 2)]),
    "shuffle": lambda source: shuffle(prefetch(source, 3), 8, 1),
    "batch": lambda source: batch(prefetch(source, 5), 3),
    "shard": lambda source: shard(prefetch(source, 5), 3, 1),
    "repeat": lambda source: repeat(prefetch(source, 5), 1),
}


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("source", [Stateful, StatefulSync])
async def test_a_source_goes_on_exactly_where_all_else_was_forgotten(
    kind: str, source: Any
) -> None:
    def make() -> Stage[Any]:
        return prefetch(STATEFUL[kind](source(30)), 3)

    whole = await read_all(make())
    for count in range(1, len(whole), 5):
        assert await read_in_two_lives(make, count) == whole
        async with make() as stage:
            await read_some(stage, count)
            await settle()
            assert "'at'" in repr(position(stage)), "of its own, not a count"


class InBytes(Stateful):
    """Its state is bytes."""

    def state_dict(self) -> Any:
        return b"at %d" % self._at

    def load_state_dict(self, state: Any) -> None:
        self._at = int(state.split()[1])


class InParts(StatefulSync):
    """Its state has bytes in lists and tuples, within each other."""

    def state_dict(self) -> Any:
        return {"parts": [(b"at %d" % self._at, 7), [b"\xff"]], "name": "x"}

    def load_state_dict(self, state: Any) -> None:
        (at, seven), [last] = state["parts"]
        assert (seven, last, state["name"]) == (7, b"\xff", "x")
        self._at = int(at.split()[1])


@pytest.mark.parametrize("source", [InBytes, InParts])
@pytest.mark.parametrize(
    "around", [lambda source: take(source, 9), lambda source: prefetch(source, 3)]
)
async def test_a_state_with_bytes_is_saved_and_comes_back(source: Any, around: Any) -> None:
    assert await read_in_two_lives(lambda: around(source(5)), 2) == list(range(5))


class Wordy:
    """A source whose repr is a book."""

    def __iter__(self) -> Any:
        yield 0
        raise BadRecordError

    def __repr__(self) -> str:
        return "word " * 1000


async def test_a_source_with_a_long_repr_is_named_by_its_type() -> None:
    with pytest.raises(BadRecordError) as caught:
        await read_all(batch(Wordy(), 1))
    assert caught.value.__notes__ == ["in a Wordy, after 1 items"]
