"""Positions: a pipeline of the same stages goes on where another one was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynchooks import InputError, InputStateError, PreemptionError, data
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

from ..hooks.inputs import trained_with
from ..support.helpers import settle
from .recipes import SAME_AGAIN, Recipe, build_stage, recipes
from .sources import (
    AsyncEpochs,
    BadRecordError,
    Epochs,
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
    max_examples=60,
    deadline=None,
)


@prop
@given(
    recipe=recipes,
    first=st.integers(0, 20),
    second=st.integers(0, 10),
    variation=st.integers(0, 3),
    reads_ahead=st.booleans(),
)
async def test_first_items_and_those_after_each_restore_are_the_whole(
    recipe: Recipe, first: int, second: int, variation: int, reads_ahead: bool
) -> None:
    try:
        whole = await read_all(build_stage(recipe))
    except InputError:  # the source of an endless repeat is empty
        assume(False)
        raise
    counts = (first, second, len(whole) + 1)
    lives = [(build_stage(recipe, variation), count) for count in counts]
    assert await read_in_lives(*lives, reads_ahead=reads_ahead) == whole


def fails_at(*items: int) -> Callable[[int], int]:
    def fn(item: int) -> int:
        if item in items:
            raise BadRecordError(item)
        return item

    return fn


# what the recipes have none of
PIPELINES: dict[str, Callable[[], Stage[Any]]] = {
    "with failures": lambda: data.map(range(9), fails_at(2, 3, 8), max_failures=3),
    "strict": lambda: data.zip(range(5), iter(range(5)), strict=True),
    "of passes, shuffled": lambda: shuffle(data.unbatch(batch(repeat(range(5), 2), 3)), 4, 1),
    "chain, shuffled": lambda: shuffle(data.chain(range(5), data.zip(range(3), range(3))), 4, 1),
    "a last batch that is not full": lambda: take(batch(shuffle(range(5), 3, 0), 2), 9),
}


@pytest.mark.parametrize("name", PIPELINES)
async def test_a_pipeline_goes_on_behind_any_item(name: str) -> None:
    make = PIPELINES[name]
    whole = await read_all(make())
    for first in range(len(whole) + 1):
        assert await read_in_lives((make(), first), (make(), 1), (make(), 99)) == whole


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


async def test_a_prefetch_may_come_and_go_between_a_save_and_a_restore() -> None:
    whole = await read_in_two_lives(
        lambda: prefetch(batch(range(7), 2), 2), 2, lambda: batch(prefetch(range(7), 1), 2)
    )
    assert whole == [[0, 1], [2, 3], [4, 5], [6]]


# Sources that keep a position of their own

CUT: dict[str, Callable[[Callable[[int], Any]], Stage[Any]]] = {
    "shuffled": lambda make: take(shuffle(make(4), 8, 1), 2),
    "by the shorter source": lambda make: data.zip([0, 1], make(20)),
}


@pytest.mark.parametrize("cut", CUT)
async def test_passes_that_take_may_cut_of_a_source_with_its_own_position_have_none(
    cut: str,
) -> None:
    for kind in ("goes on, async", "once", "epochs at both ends"):
        stage = prefetch(repeat(CUT[cut](SAME_AGAIN[kind])), 2)
        with pytest.raises(InputStateError, match="makes passes that (take|zip) may cut, over a"):
            stage.state_dict()
        assert len(await read_all(take(stage, 8))) == 8


begins = pytest.mark.parametrize("begins", ["at iter", "at next", "at both ends"])


NUM_ITEMS, NUM_EPOCHS = 4, 3
WHOLE = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
kinds = pytest.mark.parametrize("kind", [Epochs, AsyncEpochs])


@kinds
@begins
async def test_a_source_goes_back_with_the_model(
    kind: type[Epochs], begins: str, tmp_path: Path
) -> None:
    for call in (2, 5, 6):
        source = prefetch(repeat(kind(NUM_ITEMS, begins), NUM_EPOCHS), 2)
        lost = {call: PreemptionError("lost")}
        assert (await trained_with(source, tmp_path / str(call), errors=lost)).items == WHOLE


class InParts(StatefulSync):
    """Its state has bytes in lists and tuples, within each other."""

    def state_dict(self) -> Any:
        return {"parts": [(b"at %d" % self._at, 7), [b"\xff"]], "name": "x"}

    def load_state_dict(self, state: Any) -> None:
        (at, seven), [last] = state["parts"]
        assert (seven, last, state["name"]) == (7, b"\xff", "x")
        self._at = int(at.split()[1])


async def test_a_state_of_its_own_is_saved_as_it_was_behind_the_item_also_with_bytes() -> None:
    async with prefetch(Stateful(9), 5) as stage:
        await read_some(stage, 2)
        await settle()
        assert position(stage)["state"] == {"at": 2}
    assert await read_in_two_lives(lambda: prefetch(InParts(5), 3), 2) == list(range(5))


# What is refused


def of_take(source: Any, taken: Any = 1) -> dict[str, Any]:
    return {"stage": "take", "taken": taken, "source": source}


BEGIN = {"stage": "sequence", "items": 0}
DAMAGED = "^take.* cannot go on from .*"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, DAMAGED),
        (of_take(4), DAMAGED),
        (of_take({"stage": "iterable", "items": 1}), "^the state is that of iterable, and this"),
        ({"stage": "take", "source": BEGIN}, DAMAGED + r"KeyError\('taken'\)"),
        (of_take(BEGIN, "many"), DAMAGED + "is 'many'; give an integer >= 0"),
        (of_take({**BEGIN, "items": -1}), DAMAGED + "is -1; give an integer >= 0"),
    ],
)
def test_a_state_that_is_damaged_or_of_other_stages_is_an_error(state: Any, message: str) -> None:
    with pytest.raises(InputStateError, match=message):
        take(range(5), 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("stage", "other", "message"),
    [
        (lambda: shard(range(5), 2, 0), shard(range(5), 2, 1), "shard 0 of 2, and this is 1 of 2"),
        (lambda: interleave([[1], [2]]), interleave([[1]]), "that of 2 sources, and there are 1"),
    ],
)
def test_the_state_of_another_shard_or_of_other_sources_is_an_error(
    stage: Callable[[], Stage[Any]], other: Stage[Any], message: str
) -> None:
    with pytest.raises(InputStateError, match=message):
        other.load_state_dict(stage().state_dict())


async def test_a_saved_state_of_its_own_needs_a_source_that_has_one() -> None:
    stage = prefetch(iter(range(5)), 1)
    stage.load_state_dict({"stage": "iterable", "state": {"at": 3}})
    with pytest.raises(InputStateError, match="has no state of its own"):
        await read_all(stage)


@pytest.mark.parametrize(
    "make",
    [lambda num: list(range(num)), lambda num: iter(range(num)), lambda num: Source(num).items()],
)
async def test_a_source_that_is_shorter_than_its_saved_position_is_an_error(make: Any) -> None:
    message = "ended after 4 items, and the saved position is behind item 5"
    for num in (5, 4):
        stage = take(make(num), 9)
        kind = stage.state_dict()["source"]["stage"]
        with pytest.raises(InputStateError, match=message) if num == 4 else nullcontext():
            stage.load_state_dict(of_take({"stage": kind, "items": 5}, 5))
            assert await read_all(stage) == []
        await stage.aclose()


@pytest.mark.parametrize("make", [batch, prefetch])
async def test_loading_after_the_beginning_is_an_error(make: Any) -> None:
    stage = make(range(5), 1)
    state = stage.state_dict()
    async with stage:
        with pytest.raises(RuntimeError, match="has begun; load its state before it is"):
            stage.load_state_dict(state)


async def test_results_without_order_have_no_position() -> None:
    stage = prefetch(batch(map_concurrent(str, range(5), 2, ordered=False), 2), 1)
    with pytest.raises(InputStateError, match="leave ordered=True"):
        stage.state_dict()
