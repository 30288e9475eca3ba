"""Positions: a pipeline of the same stages goes on where another one was."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynchooks import InputError, InputStateError
from asynchooks.data import (
    _stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)

from .recipes import Recipe, build_stage, recipes
from .sources import (
    GetSetIterator,
    Source,
    Stateful,
    StatefulSync,
    position,
    read_all,
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


@prop
@given(
    recipe=recipes,
    first=st.integers(0, 20),
    second=st.integers(0, 10),
    variation=st.integers(0, 3),
    trim_every=st.sampled_from([1, 3, 256]),
)
async def test_first_items_and_those_after_each_restore_are_the_whole(
    recipe: Recipe, first: int, second: int, variation: int, trim_every: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stage, "TRIM_EVERY", trim_every)
        whole = await _whole(recipe)
        got: list[Any] = []
        state = None
        for count in (first, second, len(whole) + 1):
            stage = build_stage(recipe, variation)
            if state is not None:
                stage.load_state_dict(state)
                assert position(stage) == state
            async with stage:
                got += await read_some(stage, count)
                state = position(stage)
            assert got == whole[: len(got)]
        assert got == whole


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
    got: list[int] = []
    state = None
    for size, count in zip(sizes, (first, 5, 1000), strict=True):
        source = shuffle(list(range(num_items)), size, seed)
        stage = prefetch(repeat(source, num_epochs), size)
        if state is not None:
            stage.load_state_dict(state)
        async with stage:
            got += await read_some(stage, count)
            state = position(stage)
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
    async with prefetch(make(), 3) as stage:
        first = await read_some(stage, count)
        state = position(stage)
    again = prefetch(make(), 1)
    again.load_state_dict(state)
    assert first + await read_all(again) == list(range(6))


async def test_a_prefetch_may_come_and_go_between_a_save_and_a_restore() -> None:
    async with prefetch(batch(range(7), 2), 2) as stage:
        assert await read_some(stage, 2) == [[0, 1], [2, 3]]
        state = position(stage)
    without = batch(prefetch(range(7), 1), 2)
    without.load_state_dict(state)
    assert await read_all(without) == [[4, 5], [6]]


async def test_a_stage_with_state_is_saved_as_it_was_behind_the_item_not_as_it_is() -> None:
    source = Stateful(9)
    async with prefetch(source, 5) as stage:
        await read_some(stage, 2)
        assert position(stage)["state"] == {"at": 2}


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        7,
        {"stage": "batch"},
        {"stage": "take", "taken": "many", "source": {"stage": "sequence", "items": 0}},
        {"stage": "take", "taken": 1, "source": {"stage": "sequence"}},
        {"stage": "take", "taken": 1, "source": {"stage": "sequence", "items": None}},
        {"stage": "take", "taken": 1, "source": {"stage": "iterable", "items": 1}},
        {"stage": "take", "taken": 1, "source": 4},
    ],
)
def test_a_state_of_another_pipeline_is_an_error(state: Any) -> None:
    with pytest.raises(InputStateError, match=r"take|the state is that of iterable"):
        take(range(5), 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: shard([1], 2, 1), {"stage": "shard", "shard": [], "to_pass": 0, "source": {}}),
        (lambda: take([1], 2), {"stage": "take", "taken": float("inf"), "source": None}),
        (lambda: take([1], 2), {"stage": "take", "taken": -1, "source": None}),
        (lambda: take([1], 2), {"stage": "take", "taken": 0, "source": {"items": -1}}),
    ],
)
def test_a_damaged_state_is_an_error(make: Any, state: dict[str, Any]) -> None:
    source = {"stage": "sequence", "items": 0, **(state["source"] or {})}
    with pytest.raises(InputStateError):
        make().load_state_dict({**state, "source": source})


def test_the_state_of_another_shard_or_of_fewer_sources_is_an_error() -> None:
    with pytest.raises(InputStateError, match="shard 0 of 2, and this is 1 of 2"):
        shard(range(5), 2, 1).load_state_dict(shard(range(5), 2, 0).state_dict())
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
    import numpy as np

    stage = shard(range(9), np.int64(3), np.int64(1))  # type: ignore[arg-type]
    async with stage:
        await read_some(stage, 1)
        state = position(stage)
    again = shard(range(9), 3, 1)
    again.load_state_dict(state)
    assert await read_all(again) == [4, 7]


async def test_bytes_of_an_async_source_are_saved_as_those_of_any_other() -> None:
    class InBytes(Stateful):
        def state_dict(self) -> Any:
            return b"at %d" % self._at

        def load_state_dict(self, state: Any) -> None:
            self._at = int(state.split()[1])

    async with prefetch(InBytes(4), 1) as stage:
        await read_some(stage, 1)
        state = position(stage)
    again = prefetch(InBytes(4), 1)
    again.load_state_dict(state)
    assert await read_all(again) == [1, 2, 3]
