"""A worker that opens after the input of its training has ended: it ends, as after a limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    rollouts,
    take,
)

from ..support.faults import FaultError
from .inputs import Counted, Diary, saving
from .training import run_session


async def same(x: Any) -> Any:
    return x


INPUTS: dict[str, Callable[[Any], Stage[Any]]] = {
    "batch": lambda source: batch(source, 1),
    "prefetch": lambda source: prefetch(source, 2),
    "map": lambda source: map_concurrent(same, source, 2),
    "interleave": lambda source: interleave([source]),
    "epochs": lambda source: prefetch(repeat(source, 1), 2),
    "take": lambda source: take(source, 9),
    "rollouts": lambda source: rollouts(same, source, 1, concurrency=2, max_staleness=9),
}


def counting() -> tuple[SharedSessionCreator, list[Any]]:
    seen: list[Any] = []

    async def step(x: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        seen.append(x)
        return {}

    return SharedSessionCreator(step), seen


async def train(source: Any, creator: Any, *, loops: bool = False) -> None:
    if not loops:
        await run_session([FeedHook(source, "x")], creator)
        return
    async with MonitoredSession([], creator) as session:
        async for item in session.batches(source):
            await session.run([], {"x": item})


@pytest.mark.parametrize("around", INPUTS)
@pytest.mark.parametrize("loops", [True, False])
async def test_a_worker_that_opens_behind_the_end_of_its_input_ends_cleanly(
    around: str, loops: bool
) -> None:
    source, (creator, seen) = INPUTS[around](range(6)), counting()
    for _ in range(3):
        await train(source, creator, loops=loops)
        assert len(seen) == 6
    if not loops:
        async with MonitoredSession([FeedHook(source, "x")], creator) as session:
            assert not session.should_stop()
            with pytest.raises(StopTraining, match="the input .* has ended"):
                await session.run([])


@pytest.mark.parametrize("is_failed", [True, False])
async def test_an_input_that_was_closed_before_its_end_is_not_taken_for_one_that_has_ended(
    is_failed: bool,
) -> None:
    source, (creator, seen) = prefetch(Counted(4, FaultError()), 2), counting()
    if is_failed:
        with pytest.raises(FaultError):
            await train(source, creator)
    else:
        await run_session([FeedHook(source, "x"), StopAtStepHook(num_steps=2)], creator)
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        await train(source, creator)
    assert len(seen) == (4 if is_failed else 2)


async def test_another_training_with_an_input_that_has_ended_is_refused() -> None:
    source, diary = prefetch(range(3), 1), Diary()
    await train(source, diary.step)
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        await train(source, diary.step)
    assert diary.items == [0, 1, 2]


async def test_it_ends_cleanly_also_where_it_restores_the_checkpoint_of_the_end(
    tmp_path: Path,
) -> None:
    source, diary = prefetch(batch(range(6), 2), 2), Diary()
    creator = SharedSessionCreator(diary.step)
    for _ in range(2):
        await run_session([FeedHook(source, "x"), saving(tmp_path, diary)], creator)
        assert diary.items == list(range(6))
