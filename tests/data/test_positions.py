"""Positions: a pipeline of the same stages goes on where another one was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import InputStateError, PreemptionError, data
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
from .recipes import SAME_AGAIN
from .sources import (
    Async,
    Source,
    StatefulSync,
    fails_at,
    position,
    read_all,
    read_in_lives,
    read_in_two_lives,
    read_some,
)

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


@pytest.mark.parametrize("kind", [each for each in SAME_AGAIN if "epochs" in each])
async def test_a_source_goes_back_with_the_model(kind: str, tmp_path: Path) -> None:
    for call in (2, 5, 6):
        source = prefetch(repeat(SAME_AGAIN[kind](4), 3), 2)
        lost = {call: PreemptionError("lost")}
        model = await trained_with(source, tmp_path / str(call), errors=lost)
        assert model.items == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


class InParts(StatefulSync):
    """Its state has bytes in lists and tuples, within each other."""

    def state_dict(self) -> Any:
        return {"parts": [(b"at %d" % self._at, 7), [b"\xff"]], "name": "x"}

    def load_state_dict(self, state: Any) -> None:
        (at, seven), [last] = state["parts"]
        assert (seven, last, state["name"]) == (7, b"\xff", "x")
        self._at = int(at.split()[1])


async def test_a_state_of_its_own_is_saved_as_it_was_behind_the_item_also_with_bytes() -> None:
    async with prefetch(Async(StatefulSync(9)), 5) as stage:
        await read_some(stage, 2)
        await settle()
        assert position(stage)["state"] == {"at": 2}
    assert await read_in_two_lives(lambda: prefetch(InParts(5), 3), 2) == list(range(5))


# What is refused


def of_take(source: Any, taken: Any = 1) -> dict[str, Any]:
    return {"stage": "take", "taken": taken, "source": source}


BEGIN = {"stage": "sequence", "items": 0}
DAMAGED = "^take.* cannot go on from .*"


def take_four() -> Stage[int]:
    return take(range(5), 4)


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (take_four, None, DAMAGED),
        (take_four, of_take(4), DAMAGED),
        (take_four, of_take({"stage": "iterable", "items": 1}), "^the state is that of iterable, "),
        (take_four, {"stage": "take", "source": BEGIN}, DAMAGED + r"KeyError\('taken'\)"),
        (take_four, of_take(BEGIN, "many"), DAMAGED + "is 'many'; give an integer >= 0"),
        (take_four, of_take({**BEGIN, "items": -1}), DAMAGED + "is -1; give an integer >= 0"),
        (
            lambda: shard(range(5), 2, 1),
            shard(range(5), 2, 0).state_dict(),
            "shard 0 of 2, and this is 1 of 2",
        ),
        (
            lambda: interleave([[1]]),
            interleave([[1], [2]]).state_dict(),
            "that of 2 sources, and there are 1",
        ),
    ],
)
def test_a_state_that_is_damaged_or_of_other_stages_is_an_error(
    make: Callable[[], Stage[Any]], state: Any, message: str
) -> None:
    with pytest.raises(InputStateError, match=message):
        make().load_state_dict(state)


async def test_a_saved_state_of_its_own_needs_a_source_that_has_one() -> None:
    stage = prefetch(iter(range(5)), 1)
    stage.load_state_dict({"stage": "iterable", "state": {"at": 3}})
    with pytest.raises(InputStateError, match="has no state of its own"):
        await read_all(stage)


ENDED = "ended after 4 items, and the saved position is behind item 5"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda num: take(list(range(num)), 9), ENDED),
        (lambda num: take(iter(range(num)), 9), ENDED),
        (lambda num: take(Source(num).items(), 9), ENDED),
        (lambda num: shuffle(range(num), 8, 1), "ended at item 4"),
        (
            lambda num: data.unbatch(batch(range(8), num)),
            "behind item 5 of a batch, which has 4; give the",
        ),
    ],
)
async def test_a_position_behind_the_end_of_a_source_or_batch_is_an_error(
    make: Callable[[int], Stage[Any]], message: str
) -> None:
    longer, shorter = make(8), make(4)
    await read_some(longer, 5)
    await longer.aclose()
    with pytest.raises(InputStateError, match=message):
        shorter.load_state_dict(longer.state_dict())
        await read_all(shorter)
    await shorter.aclose()


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
