"""Which items of a source that `shard` divides were used, and dividing the others again.

An item's place in the source is a list: the number of the pass of each `repeat` around the shard,
and of the items before it in this pass. A set of items is a list of places, its bounds: an item is
in it if an odd number of them are at or before it. So the lists of two sets, one behind the other,
are the bounds of what is in one of them alone: of both, if none is in both, and of the rest, if one
holds the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from .._errors import InputStateError

EPOCHS_ENDED = "epochs_ended"
"""In the state of a `FeedHook`, beside a position: for how many passes it called `after_epoch`."""

Bounds = list[list[int]]
State = Mapping[str, Any]


def bounds_between(before: Any, mark: Any) -> Bounds:
    """Which items of the source went in between two marks; None: from its beginning on."""
    if not isinstance(mark, tuple):  # a shuffle says it, or the shard, or one below
        known: Bounds | None = mark.get("used")
        return known or ([[], mark["at"]] if "at" in mark else bounds_between(None, mark["source"]))
    stage, data, below = mark
    bounds: Bounds = stage._bounds_between(before, data, below)
    return bounds


def data_of(mark: Any) -> Any:
    """What the stage of a mark knows there."""
    return mark[1] if isinstance(mark, tuple) else mark


def mark_below(mark: Any) -> Any:
    """The mark of the stage below."""
    return mark[2] if isinstance(mark, tuple) else mark["source"]


def divided_again(states: Sequence[State], own: State, num_shards: int) -> dict[str, Any]:
    """The position of one of several shards in what is left of a source.

    It is where the first of the former shards was. All that are to read the source go on there,
    pass over what was used, and divide the rest.

    Args:
        states: the positions of all former shards.
        own: that of a pipeline with the new shard, wherever it is.
        num_shards: how many there are now.

    Raises:
        InputStateError: which items were used is not known, or not all shards are there.
    """
    saved, here = [_shard_in(each) for each in states], _shard_in(own)
    found = sorted(each["shard"] for each in saved)
    if found != [[index, len(saved)] for index in range(len(saved))]:
        raise InputStateError(
            f"the shards that were saved are {found}, each [index, num_shards]; expected each of "
            f"{len(saved)} once"
        )
    index = here["shard"][0]
    if here["shard"][1] != num_shards:
        raise InputStateError(
            f"{num_shards} are to read it, and it is divided by shard(source, num_shards="
            f"{here['shard'][1]}, index={index}); give num_shards={num_shards}"
        )
    first = min(range(len(saved)), key=lambda each: saved[each]["at"])
    begin = saved[first]
    if len(begin["at"]) != len(here["at"]):
        raise InputStateError(
            f"{len(begin['at']) - 1} repeat stages were around the shard, and there are "
            f"{len(here['at']) - 1}; make the pipeline of the same stages"
        )
    used: list[Bounds] = [[] for _ in saved]
    for state, shard in zip(states, saved, strict=True):
        used[shard["shard"][0]] = sorted(chain(bounds_between(None, state), *state["used_beyond"]))
    num_reached = (begin["shard"][0] - begin["to_pass"]) % len(saved)
    shard = {
        **here,
        "to_pass": index,
        "at": begin["at"],
        "divided": [*begin["divided"], [num_reached, used]],
        "source": begin["source"],
    }
    ends = [each["place"] + max(each["beyond"], default=-1) + 1 for each in states]
    divided = {
        **_with_shard(own, shard, begin["at"]),
        "place": max(ends),  # no item has a place that another one had
        "beyond": [],
        "used_beyond": [],
    }
    if EPOCHS_ENDED in states[first]:
        divided[EPOCHS_ENDED] = states[first][EPOCHS_ENDED]
    if "counts" in own and index == 0:  # those of all, once
        divided["counts"] = dict(
            sum((Counter(each.get("counts", ())) for each in states), Counter())
        )
    return divided


def _shard_in(state: State) -> State:
    """What a position says of the shard."""
    inner: State | None = state
    while inner and inner.get("stage") != "shard":
        inner = inner.get("source")
    if "used_beyond" not in state or not inner:
        raise InputStateError(
            "it is not divided by asynchooks.data.shard, or by one below take, unbatch or a stage "
            "of several sources; divide it by asynchooks.data.shard(source, num_shards, index), "
            "with none of these around it"
        )
    return inner


def _with_shard(state: State, shard: State, at: Sequence[int]) -> State:
    """The state of a pipeline, with another one of its shard, in the passes of that."""
    if state["stage"] == "shard":
        return shard
    below = state["source"]
    if state["stage"] == "repeat":
        state, at = {**state, "epoch": at[0]}, at[1:]
    elif state["stage"] == "shuffle":
        state = {"stage": "shuffle"}  # nothing is drawn
    return {**state, "source": _with_shard(below, shard, at)}
