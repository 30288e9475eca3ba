"""Pipelines composed at random of deterministic stages, with faults in them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hypothesis import strategies as st

from asynchooks import data
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

from ..support.helpers import turns
from .sources import Async, BadRecordError, Epochs, GetSetIterator, Once, StatefulSync

Recipe = tuple[Any, ...]


class Faults:
    """What goes wrong in one life: the read, the call and the step that fail, counted down."""

    def __init__(
        self,
        read: int = -1,
        call: int = -1,
        step: int = -1,
        error: type[BaseException] = BadRecordError,
    ) -> None:
        self.left = {"read": read, "call": call, "step": step}
        self.error = error
        self.num_open = 0  # generators

    def meet(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] == -1:
            raise self.error(what)


class _Leaf(StatefulSync):
    """Its reads may fail."""

    def __init__(self, num_items: int, faults: Faults) -> None:
        super().__init__(num_items)
        self.faults = faults

    def __iter__(self) -> Iterator[int]:
        self.faults.num_open += 1
        try:
            while self._at < self._num_items:
                self.faults.meet("read")
                self._at += 1
                yield self._at - 1
            self._at = 0
        finally:
            self.faults.num_open -= 1


LEAVES: dict[str, Callable[[int, Faults], Any]] = {
    "list": lambda num, faults: list(range(num)),
    "async": lambda num, faults: lambda: aiter(Async(_Leaf(num, faults))),
    "thread": lambda num, faults: lambda: iter(_Leaf(num, faults)),
    "stateful": lambda num, faults: lambda: Async(_Leaf(num, faults)),
    "stateful in thread": lambda num, faults: lambda: _Leaf(num, faults),
    "iterator": lambda num, faults: lambda: GetSetIterator(num),
}

SAME_AGAIN: dict[str, Callable[[int], Any]] = {
    "goes on": StatefulSync,
    "once": Once,
    **{
        f"epochs {begins}": partial(Epochs, begins=begins)
        for begins in ("at iter", "at next", "at both ends")
    },
}
"""Sources that know their position, and of which all passes read the same object."""
SAME_AGAIN |= {
    f"{name}, async": lambda num, make=make: Async(make(num))  # type: ignore[misc]
    for name, make in SAME_AGAIN.items()
}

LEAVES |= {
    name: lambda num, faults, make=make: make(num)  # type: ignore[misc]
    for name, make in SAME_AGAIN.items()
}


SEVERAL: dict[str, Callable[..., Stage[Any]]] = {
    "interleave": interleave,
    "zip": lambda sources: data.zip(*sources),
    "chain": lambda sources: data.chain(*sources),
    "mix": lambda sources, seed: data.mix(
        sources, seed=seed, weights=[1.0 + place for place, _ in enumerate(sources)]
    ),
}


def build(recipe: Recipe, variation: int, faults: Faults) -> Any:
    """The pipeline.

    Args:
        variation: changes what is no part of the position: the sizes of `prefetch`, and how many
            items `map_concurrent` has.
        faults: what its sources and its functions meet.
    """
    kind, child, *args = recipe
    if kind == "leaf":
        return LEAVES[child](args[0], faults)
    if kind in SEVERAL:
        return SEVERAL[kind]([build(each, variation, faults) for each in child], *args)
    source = build(child, variation, faults)

    async def mapped(item: Any) -> Any:
        if variation % 2 or (isinstance(item, int) and item % 2):
            await turns()
        faults.meet("call")
        return ("mapped", item)

    def mapped_in_thread(item: Any) -> Any:
        faults.meet("call")
        return ("mapped", item)

    async def kept(item: Any) -> bool:
        await mapped(item)
        return "1" not in repr(item)

    if kind == "prefetch":
        return prefetch(source, args[0] + variation)
    if kind == "map":
        fn: Callable[[Any], Any] = mapped if args[1] else mapped_in_thread
        return map_concurrent(fn, source, args[0] + variation)
    if kind == "map one by one":
        return data.map(source, mapped if args[0] else mapped_in_thread)
    if kind == "filter":
        return data.filter(source, kept if args[0] else lambda item: "1" not in repr(item))
    if kind == "unbatch":
        return data.unbatch(batch(source, args[0], collate=list))
    if kind == "batch":
        return batch(source, args[0], args[1], tuple)
    make: Any = {"repeat": repeat, "take": take, "shard": shard, "shuffle": shuffle}[kind]
    return make(source, *args)


def build_stage(recipe: Recipe, variation: int = 0, faults: Faults | None = None) -> Stage[Any]:
    made = build(recipe, variation, faults or Faults())
    return made if isinstance(made, Stage) else take(made, 1000)


leaves = st.tuples(st.just("leaf"), st.sampled_from(sorted(LEAVES)), st.integers(0, 6))


def _around(child: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    small, seed, either = st.integers(1, 4), st.integers(0, 9), st.booleans()
    several = st.lists(child, min_size=1, max_size=3)

    def of(kind: str, *args: Any, below: Any = child) -> st.SearchStrategy[Recipe]:
        return st.tuples(st.just(kind), below, *args)

    return st.one_of(
        of("prefetch", small),
        of("map", small, either),
        of("batch", small, either),
        of("shuffle", small, seed),
        of("repeat", st.integers(0, 3)),
        of("take", st.integers(0, 12)),
        st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 1)]).flatmap(
            lambda part: of("shard", *map(st.just, part))
        ),
        of("map one by one", either),
        of("filter", either),
        of("unbatch", small),
        st.sampled_from(["interleave", "zip", "chain"]).flatmap(
            lambda kind: of(kind, below=several)
        ),
        of("mix", seed, below=several),
        of("take", st.integers(0, 12), below=of("repeat", st.none())),
    )


def _may_be_cut(recipe: Recipe, above: tuple[str, ...] = ()) -> bool:
    """Whether `take` may cut passes of a source with its own position: then there is none."""
    kind, child = recipe[:2]
    if kind == "leaf":
        is_cut = any(
            each in ("take", "zip") and "repeat" in above[:n] for n, each in enumerate(above)
        )
        return child in SAME_AGAIN and is_cut
    below = child if kind in SEVERAL else [child]
    return any(_may_be_cut(each, (*above, kind)) for each in below)


recipes: st.SearchStrategy[Recipe] = st.recursive(leaves, _around, max_leaves=5).filter(
    # shuffle: see test_shuffle.py
    lambda recipe: recipe[0] not in ("leaf", "shuffle") and not _may_be_cut(recipe)
)
