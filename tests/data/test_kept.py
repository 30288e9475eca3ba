"""What is forgotten is never what a position needs, and no item less than may be forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks.data import (
    Stage,
    _stage,
    batch,
    interleave,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)

from .sources import Stateful, StatefulSync, position, read_all, read_some

pytestmark = pytest.mark.anyio

STATEFUL: dict[str, Callable[[Any], Any]] = {
    "interleave": lambda source: interleave([prefetch(source, 5), prefetch(range(99, 130), 2)]),
    "shuffle": lambda source: shuffle(prefetch(source, 3), 8, 1),
    "batch": lambda source: batch(prefetch(source, 5), 3),
    "shard": lambda source: shard(prefetch(source, 5), 3, 1),
    "repeat": lambda source: repeat(take(prefetch(source, 5), 9), 1),
}


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("source", [Stateful, StatefulSync])
async def test_a_source_goes_on_exactly_where_all_else_was_forgotten(
    kind: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stage, "TRIM_EVERY", 1)

    def make() -> Stage[Any]:
        return prefetch(STATEFUL[kind](source(30)), 3)

    whole = await read_all(make())
    for count in range(1, len(whole), 5):
        async with make() as stage:
            first = await read_some(stage, count)
            for _ in range(9):  # all read ahead
                await anyio.lowlevel.checkpoint()
            state = position(stage)
        assert "'at'" in repr(state), "of its own, not a count"
        again = make()
        again.load_state_dict(state)
        assert first + await read_all(again) == whole
