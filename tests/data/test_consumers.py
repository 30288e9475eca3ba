"""Consumers: one item for each consumer, and what is given back goes to whoever waits."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import anyio
import pytest

from asynchooks import GlobalStep, StopTraining
from asynchooks._engine.stop import Stop
from asynchooks.data import batch, prefetch, shuffle
from asynchooks.data._consumers import CurrentRun, TrainingEnd, consumers_of

from ..support.helpers import settle

pytestmark = pytest.mark.anyio


async def test_what_is_given_back_goes_at_once_to_whoever_waits() -> None:
    never = anyio.Event()

    async def one_item() -> AsyncGenerator[int, None]:
        yield 7
        await never.wait()

    consumers = consumers_of(prefetch(one_item(), 2))
    first, second = consumers.join(CurrentRun(None)), consumers.join(CurrentRun(None))
    assert await first.take(None) == 7
    async with anyio.create_task_group() as group:
        seen: list[int] = []

        async def wait() -> None:
            seen.append(await second.take(None))

        group.start_soon(wait)
        await settle()
        assert seen == []
        first.give_back()
        with anyio.fail_after(10):
            while not seen:
                await settle()
    assert seen == [7]
    assert consumers.state_dict()["items"] == 0
    second.use()
    assert consumers.state_dict()["items"] == 1
    await first.leave()
    await second.leave()


async def test_what_is_read_ahead_of_a_loaded_shuffle_does_not_move_its_position() -> None:
    pipeline = shuffle(range(40), 8, 1)
    for _ in range(9):
        await anext(pipeline)
    saved = json.loads(json.dumps(pipeline.state_dict()))
    again = prefetch(shuffle(range(40), 8, 1), 4)
    again.load_state_dict(saved)
    async with again:
        await settle()
        assert again.state_dict() == saved
        assert await anext(again) == await anext(pipeline)
        assert again.state_dict() == pipeline.state_dict()


async def test_a_wait_for_data_ends_at_the_limit_and_leaves_nothing_at_the_step() -> None:
    never, step = anyio.Event(), GlobalStep(0)

    async def nothing() -> AsyncGenerator[int, None]:
        await never.wait()
        yield 1

    consumer = consumers_of(prefetch(nothing(), 1)).join(CurrentRun(None))
    end = TrainingEnd(Stop(), step)
    for _ in range(50):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await consumer.take(end)
    assert step.admission.waiters.limit_slots == []
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StopTraining):
                await consumer.take(end)

        group.start_soon(wait)
        await settle()
        step.raise_limit(3)  # while it waits
        await settle()
        step.publish(2)
        await settle()
        assert step.statistics().tasks_waiting_for_step == 1
        step.publish(3)
    assert step.statistics().tasks_waiting_for_step == 0
    with pytest.raises(StopTraining), anyio.fail_after(10):
        await consumer.take(end)  # it was reached before
    await consumer.leave()


@pytest.mark.parametrize("goes_back", [False, True])
async def test_workers_that_open_an_input_together_agree_on_its_position(goes_back: bool) -> None:
    consumers = consumers_of(batch(range(30), 3))
    members = [consumers.join(CurrentRun(None)) for _ in range(5)]
    if goes_back:
        saved = consumers.state_dict()
        await members[0].take(None)
        members[0].use()
        consumers.load_state_dict(saved)
    async with anyio.create_task_group() as group:
        for each in members:
            group.start_soon(each.take, None)
    for each in members:
        each.use()
    assert consumers.state_dict()["items"] == 15
    assert [await members[0].take(None), members[0].num_before] == [[15, 16, 17], 5]
    for each in members:
        await each.leave()
