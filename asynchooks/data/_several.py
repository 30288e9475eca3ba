"""Stages around several sources: interleave, zip, chain and mix.

They read when they are asked, from one source at a time: give them `prefetch` stages to have all
sources work at once. The position holds that of each source.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, overload

from .. import _check as check
from .._errors import InputStateError, InputStructureError
from ._shuffle import BLOCK, uniforms
from ._sources import Source, stage_of
from ._stage import Epoch, Mark, Pair, Stage, State, T, no_epoch, saved_count, state_of


@overload
def interleave(sources: Iterable[Source[T]]) -> Stage[T]: ...
@overload
def interleave(sources: Iterable[Any]) -> Stage[Any]: ...  # of sources that are not alike
def interleave(sources: Iterable[Any]) -> Stage[Any]:
    """One item of each source in turn, in their order; one that has ended is left out.

    It reads when it is asked, from one source at a time: give it `prefetch` stages to have all of
    them work at once.

    Args:
        sources: as in `asynchooks.data`; at least one.

    Example:
        assert [item async for item in interleave([[1, 3, 5], [2, 4]])] == [1, 2, 3, 4, 5]
    """
    return Interleave(*_stages_of("interleave", "interleave([a, b])", sources))


def zip(*sources: Source[Any], strict: bool = False) -> Stage[tuple[Any, ...]]:  # noqa: A001
    """Tuples of one item of each source, up to the end of the shortest.

    It reads as `interleave` does. A cancellation loses no item of a tuple that is not complete.

    Args:
        sources: as in `asynchooks.data`; at least one.
        strict: whether sources of different lengths are an error.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        InputStructureError: out of the iteration: with `strict`, one source ended before another.

    Example:
        from asynchooks import data

        pairs = data.zip(["a", "b"], range(9))
        assert [pair async for pair in pairs] == [("a", 0), ("b", 1)]
    """
    check.instance("strict", strict, bool, "True or False")
    return Zip(_stages_of("zip", "zip(a, b)", sources), strict)


def chain(*sources: Source[T]) -> Stage[T]:
    """All items of the first source, then those of the second, and so on.

    It opens all sources at its beginning, so that a `prefetch` of a later one already reads ahead.

    Args:
        sources: as in `asynchooks.data`; at least one.

    Example:
        assert [item async for item in chain([1, 2], [3])] == [1, 2, 3]
    """
    return Chain(*_stages_of("chain", "chain(a, b)", sources))


@overload
def mix(
    sources: Iterable[Source[T]], *, seed: int, weights: Sequence[float] | None = None
) -> Stage[T]: ...
@overload
def mix(
    sources: Iterable[Any], *, seed: int, weights: Sequence[float] | None = None
) -> Stage[Any]: ...
def mix(sources: Iterable[Any], *, seed: int, weights: Sequence[float] | None = None) -> Stage[Any]:
    """The next item of a source that is chosen at random, again and again, until all have ended.

    One that has ended is left out; the others keep the ratio of their weights. Put `repeat` around
    a source that is to come again. The choices depend on the seed alone, also behind a restore; in
    each pass of a `repeat` around it they are others. It reads as `interleave` does.

    Args:
        sources: as in `asynchooks.data`; at least one.
        seed: any integer; the same seed makes the same choices.
        weights: how often each source is chosen, in any unit, > 0; None: all alike.

    Raises:
        TypeError, ValueError: an argument is not what it should be.

    Example:
        mixed = mix([["web"] * 80, ["code"] * 20], weights=[4, 1], seed=7)
        assert sorted([item async for item in mixed]) == ["code"] * 20 + ["web"] * 80
    """
    stages = _stages_of("mix", "mix([a, b], seed=1)", sources)
    seed = check.integer("seed", seed)
    given: Any = [1.0] * len(stages) if weights is None else weights
    weights = list(check.instance("weights", given, Iterable, "a list of numbers > 0"))
    if len(weights) != len(stages):
        raise ValueError(
            f"weights is {weights}, and there are {len(stages)} sources; give one for each"
        )
    for place, weight in enumerate(weights):
        check.number(f"weights[{place}]", weight, above=0.0, expected="a finite number > 0")
    return Mix(stages, weights, seed)


def _stages_of(kind: str, call: str, sources: Iterable[Any]) -> list[Stage[Any]]:
    if not isinstance(sources, Iterable):
        raise TypeError(f"{kind} got {sources!r}; give several sources: {call}")
    stages = [stage_of(each) for each in sources]
    if not stages:
        raise ValueError(f"{kind} got no sources; give at least one")
    return stages


class Several(Stage[Any]):
    """Chooses the source of the next item, until all have ended.

    A mark has those of all sources below, each behind the last item that it gave.
    """

    _reads_on = False
    """Whether all that is read at once may be of one source."""

    def _begin_sources(self, state: State | None, epoch: Epoch) -> None:
        num = len(self._sources)
        states = [None] * num if state is None else list(state["sources"])
        if len(states) != num:
            raise ValueError(f"the state is that of {len(states)} sources, and there are {num}")
        for place, each in enumerate(self._sources):
            each._begin(states[place], epoch)

    def _set(self, state: State | None) -> None:
        state = self._at_first() if state is None else state
        self._marks: list[Mark] = [each._origin() for each in self._sources]
        self._turn = saved_count(state["next"])
        self._ended = [saved_count(each) for each in state["ended"]]  # sources
        # read once more: a source with a position of its own has to meet the end of its pass
        self._to_end = [each for each in self._ended if self._sources[each]._keeps_position()]

    def _at_first(self) -> dict[str, Any]:
        return {"next": 0, "ended": []}

    def _origin(self) -> Mark:
        if self._loaded is not None:
            return self._loaded
        return self, self._at_first(), [each._origin() for each in self._sources]

    def _state_of(self, data: Any, below: list[Mark]) -> dict[str, Any]:
        return {**data, "sources": [state_of(each) for each in below]}

    def _epoch_of(self, data: Any, below: list[Mark]) -> int:
        raise no_epoch(self)

    async def _pull(self, limit: int) -> Sequence[Pair]:
        while self._to_end:
            source = self._sources[self._to_end[-1]]
            if await source._read(1):
                raise InputStateError(
                    f"{source!r} had ended at the saved position, and gives another item; give the "
                    "source that it was saved of"
                )
            self._to_end.pop()
        while len(self._ended) < len(self._sources):
            place = self._chosen()
            found = await self._sources[place]._read(limit if self._reads_on else 1)
            self._turn += 1  # behind the read: one that is cancelled has chosen nothing
            if not found:
                self._ended.append(place)
                continue
            data = {"next": self._turn, "ended": list(self._ended)}
            pairs: list[Pair] = []
            for item, mark in found:
                self._marks[place] = mark
                pairs.append((item, (self, data, list(self._marks))))
            return pairs
        return ()

    def _is_divided(self) -> bool:
        return False  # one shard among several sources

    @abstractmethod
    def _chosen(self) -> int:
        """Which source gives the next item; not one of those that have ended."""


class Interleave(Several):
    kind = "interleave"

    def _chosen(self) -> int:
        while (place := self._turn % len(self._sources)) in self._ended:
            self._turn += 1
        return place


class Chain(Several):
    kind = "chain"
    _reads_on = True

    def _chosen(self) -> int:
        return len(self._ended)


class Mix(Several):
    kind = "mix"

    def __init__(self, sources: Sequence[Stage[Any]], weights: Sequence[float], seed: int) -> None:
        super().__init__(*sources)
        self._weights = weights
        self._seed = seed

    def _set(self, state: State | None) -> None:
        super()._set(state)
        self._uniforms: list[float] = []

    def _chosen(self) -> int:
        """By the number of the draw, and what has ended by then."""
        if not self._uniforms or self._turn % BLOCK == 0:
            self._uniforms = uniforms(self._seed, self._epoch, self._turn)
        left = [each for each in range(len(self._sources)) if each not in self._ended]
        sums = list(accumulate(self._weights[each] for each in left))
        drawn = self._uniforms[self._turn % BLOCK] * sums[-1]
        return left[bisect(sums, drawn, hi=len(left) - 1)]


class Zip(Several):
    kind = "zip"

    def __init__(self, sources: Sequence[Stage[Any]], strict: bool) -> None:
        super().__init__(*sources)
        self._strict = strict

    def _set(self, state: State | None) -> None:
        super()._set(state)
        self._row: list[Pair] = []  # of the next tuple; here, so that a cancellation loses none

    def _chosen(self) -> int:
        return len(self._row)

    async def _pull(self, limit: int) -> Sequence[Pair]:
        row = self._row
        while len(row) < len(self._sources):
            pairs = await self._sources[self._chosen()]._read(1)
            if not pairs:
                if self._strict:
                    await self._check_all_ended(len(row))
                return ()
            row += pairs
        self._row = []
        mark = self, self._at_first(), [mark for _, mark in row]
        return ((tuple([item for item, _ in row]), mark),)

    async def _check_all_ended(self, ended: int) -> None:
        for place, each in enumerate(self._sources):
            if place < ended or (place > ended and await each._read(1)):
                raise InputStructureError(
                    f"zip: source {ended}, {self._sources[ended]!r}, has ended, and source "
                    f"{place}, {each!r}, has another item; give sources of one length, or leave "
                    "strict out to end with the shortest"
                )
