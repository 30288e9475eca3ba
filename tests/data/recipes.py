"""Pipelines composed at random of deterministic stages, built as often as one likes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio.lowlevel
from hypothesis import strategies as st

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

from .sources import GetSetIterator, Stateful, StatefulSync

Recipe = tuple[Any, ...]
MOST = 9
"""Items in `map_concurrent`, at most."""


def _leaf(kind: str, num_items: int) -> Any:
    async def read() -> AsyncIterator[int]:
        for each in range(num_items):
            await anyio.lowlevel.checkpoint()
            yield each

    def read_in_thread() -> Iterator[int]:
        yield from range(num_items)

    return {
        "list": list(range(num_items)),
        "async": read,
        "thread": read_in_thread,
        "stateful": lambda: Stateful(num_items),
        "stateful in thread": lambda: StatefulSync(num_items),
        "iterator": lambda: GetSetIterator(num_items),
    }[kind]


async def _mapped(item: Any) -> Any:
    if isinstance(item, int) and item % 2:
        await anyio.lowlevel.checkpoint()
    return ("mapped", item)


def _mapped_in_thread(item: Any) -> Any:
    return ("mapped", item)


def build(recipe: Recipe, variation: int = 0) -> Any:
    """The pipeline.

    Args:
        variation: changes what is no part of the position: the sizes of `prefetch` and how many
            items `map_concurrent` has; from 10 on also the sizes of `shuffle`.
    """
    kind, child, *args = recipe
    if kind == "leaf":
        return _leaf(child, *args)
    if kind == "interleave":
        return interleave([build(each, variation) for each in child])
    source = build(child, variation)
    size = args[0] + variation % 10 if args and args[0] is not None else None
    if kind == "prefetch":
        return prefetch(source, size or 1)
    if kind == "map":
        return map_concurrent(
            _mapped if args[1] else _mapped_in_thread, source, min(size or 1, MOST)
        )
    if kind == "batch":
        return batch(source, args[0], args[1], tuple)
    if kind == "shuffle":
        return shuffle(source, args[0] if variation < 10 else size or 1, args[1])
    make: Any = {"repeat": repeat, "take": take, "shard": shard}[kind]
    return make(source, *args)


def build_stage(recipe: Recipe, variation: int = 0) -> Stage[Any]:
    made = build(recipe, variation)
    return made if isinstance(made, Stage) else take(made, 1000)


_KINDS = ["list", "async", "thread", "stateful", "stateful in thread", "iterator"]
leaves = st.tuples(st.just("leaf"), st.sampled_from(_KINDS), st.integers(0, 6))


def _around(child: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    small = st.integers(1, 4)
    return st.one_of(
        st.tuples(st.just("prefetch"), child, small),
        st.tuples(st.just("map"), child, small, st.booleans()),
        st.tuples(st.just("batch"), child, small, st.booleans()),
        st.tuples(st.just("shuffle"), child, small, st.integers(0, 9)),
        st.tuples(st.just("repeat"), child, st.integers(0, 3)),
        st.tuples(st.just("take"), child, st.integers(0, 12)),
        st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 1)]).flatmap(
            lambda part: st.tuples(st.just("shard"), child, st.just(part[0]), st.just(part[1]))
        ),
        st.tuples(st.just("interleave"), st.lists(child, min_size=1, max_size=3)),
        st.tuples(
            st.just("take"), st.tuples(st.just("repeat"), child, st.none()), st.integers(0, 12)
        ),
    )


recipes: st.SearchStrategy[Recipe] = st.recursive(leaves, _around, max_leaves=5).filter(
    lambda recipe: recipe[0] not in ("leaf", "shuffle")  # shuffle: see test_shuffle.py
)
