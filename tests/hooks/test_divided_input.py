"""What a shard has left is divided again, also where its workers use its items in another order."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, MonitoredSession, SessionRunContext, SharedSessionCreator
from asynchooks.data import Stage, batch, prefetch, repeat, shard, shuffle

# private: through checkpoints it takes processes; tests/checkpoints/test_ranks.py has some
from asynchooks.data._division import divided_again

from ..data.sources import read_all
from ..support.moments import at
from .inputs import Diary
from .training import run_session

NUM = 30
PIPELINES: dict[str, Callable[[int, int], Stage[Any]]] = {
    "batches": lambda *part: batch(shard(range(NUM), *part), 2),
    "shuffled": lambda *part: prefetch(
        repeat(batch(shuffle(shard(range(NUM), *part), 4, 1), 2), 1), 2
    ),
}


async def train(stage: Stage[Any], diary: Diary, num_runs: int) -> dict[str, Any]:
    """One worker has an item in hand, and another one trains; returns the position then."""
    creator, has_item = SharedSessionCreator(diary.creator), anyio.Event()

    async def hold(run_context: SessionRunContext) -> None:
        has_item.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(run_session, [FeedHook(stage, "x"), at(before_run=hold)], creator)
        await has_item.wait()
        hook = FeedHook(stage, "x")
        async with MonitoredSession([hook], creator) as session:
            for _ in range(num_runs):
                await session.run([])
            position = hook.state_dict()
        group.cancel_scope.cancel()
    return position


def divided(states: list[dict[str, Any]], stage: Stage[Any], num: int) -> Stage[Any]:
    stage.load_state_dict(divided_again(states, stage.state_dict(), num))
    return stage


@pytest.mark.parametrize("name", PIPELINES)
async def test_an_item_that_a_worker_has_in_hand_is_left_and_no_other_one_that_was_used(
    name: str,
) -> None:
    make, diary = PIPELINES[name], Diary()
    states = [await train(make(2, index), diary, 2 + index) for index in range(2)]
    assert [state["beyond"] for state in states] == [[1, 2], [1, 2, 3]]
    assert len(diary.items) == 10
    for index in range(2):  # a training that is resumed, and saves before its first step
        stage = make(2, index)
        stage.load_state_dict(states[index])
        states[index] = stage.state_dict()
    first, second, third = (divided(states, make(3, index), 3) for index in range(3))
    states = [first.state_dict(), second.state_dict(), await train(third, diary, 1)]
    rest = [item for each in await read_all(divided(states, make(1, 0), 1)) for item in each]
    assert sorted(diary.items + rest) == list(range(NUM))


async def test_an_open_pipeline_goes_on_where_a_shard_had_used_nothing_and_others_had() -> None:
    unused, used = shard(range(6), 2, 0), shard(range(6), 2, 1)
    assert [await anext(used), await anext(used)] == [1, 3]
    stage, diary = prefetch(shard(range(6), 1, 0), 1), Diary()
    hook = FeedHook(stage, "x")
    async with stage, MonitoredSession([hook], diary.creator) as session:
        states = [unused.state_dict(), used.state_dict()]
        hook.load_state_dict(divided_again(states, stage.state_dict(), 1))
        while not session.should_stop():
            await session.run([])
        assert hook.state_dict()["place"] == 2 + 4, "no place was given twice"
    assert diary.items == [0, 2, 4, 5]
