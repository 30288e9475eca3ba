"""Consumers: each item is used once, wherever the pipeline is rewound to."""

from __future__ import annotations

import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asynchooks import DataWaitHook, FeedHook, GlobalStep, InputPositionHook, StopTraining
from asynchooks._engine.stop import Stop
from asynchooks._running.hook_state import load_hooks, save_hooks
from asynchooks.data import Stage, batch, prefetch, shuffle, take
from asynchooks.data._consumers import Consumer, Consumers, CurrentRun, TrainingEnd, consumers_of

from ..hooks.inputs import FromFunction, gated
from ..support.helpers import settle
from .sources import Stateful, at, position, read_in_two_lives

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def joined(source: Any) -> AsyncIterator[tuple[Consumers, Consumer, Consumer]]:
    """With two consumers: a hook, and a loop over `session.batches`."""
    consumers = consumers_of(source)
    hook = consumers.join(CurrentRun(None))
    batches = consumers.join(CurrentRun(None), weakref.ref(consumers))
    yield consumers, hook, batches
    await hook.leave()
    await batches.leave()


async def use_next(consumer: Consumer, count: int) -> list[int]:
    got = []
    for _ in range(count):
        got.append(await consumer.take(None))
        consumer.use()
    return got


async def test_an_item_given_back_goes_at_once_to_a_waiting_consumer() -> None:
    never = anyio.Event()

    async def one_item() -> AsyncGenerator[int, None]:
        yield 7
        await never.wait()

    seen: list[int] = []

    async def wait() -> None:
        seen.append(await second.take(None))

    async with joined(prefetch(one_item(), 2)) as (consumers, first, second):
        assert await first.take(None) == 7
        async with anyio.create_task_group() as group:
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
    assert step.statistics().tasks_waiting_for_step == 0
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


class EndedRun(CurrentRun):
    """In a thread, and its task has not come back."""

    def has_ended(self) -> bool:
        return True


async def test_an_item_that_comes_during_a_rewind_is_not_given_out() -> None:
    gate = anyio.Event()
    source = prefetch(FromFunction(lambda: gated(range(5), {2: gate})), 1)
    got: list[int] = []

    async def wait() -> None:
        got.append(await waits.take(None))

    async with joined(source) as (consumers, trains, waits):
        assert await use_next(trains, 1) == [0]
        saved = consumers.state_dict()
        assert await use_next(trains, 1) == [1]
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await settle()
            consumers.load_state_dict(saved)  # another worker has lost the session
            gate.set()
        waits.use()
        got += await use_next(trains, 3)
        with pytest.raises(StopAsyncIteration):
            await trains.take(None)
        assert got == [1, 2, 3, 4]
        assert consumers.state_dict()["items"] == 5


@pytest.mark.parametrize("has_taken", [False, True])
async def test_a_run_that_ends_after_a_rewind_has_used_nothing(has_taken: bool) -> None:
    async with joined(prefetch(range(6), 2)) as (consumers, late, other):
        await use_next(other, 1)
        saved = consumers.state_dict()
        await use_next(other, 1)
        assert await late.take(None) == 2
        consumers.load_state_dict(saved)
        got = await use_next(other, 1) if has_taken else []
        late.use()
        assert consumers.state_dict()["items"] == 1 + len(got)
        assert consumers.state_dict()["beyond"] == []
        assert got + await use_next(late, 5 - len(got)) == [1, 2, 3, 4, 5]


async def test_an_item_given_back_after_a_rewind_is_not_given_out_once_more() -> None:
    async with joined(prefetch(range(4), 2)) as (consumers, late, other):
        await use_next(other, 1)
        saved = consumers.state_dict()
        assert await late.take(None) == 1
        await use_next(other, 1)
        consumers.load_state_dict(saved)
        assert await use_next(other, 1) == [1]
        late.give_back()
        assert await use_next(other, 2) == [2, 3]
        with pytest.raises(StopAsyncIteration):
            await other.take(None)


async def test_before_the_next_take_the_position_is_that_of_the_rewind() -> None:
    async with joined(prefetch(range(8), 2)) as (consumers, hook, batches):
        assert await batches.take(None) == 0
        await use_next(hook, 1)
        saved = consumers.state_dict()
        assert saved == at(0, 1)
        assert await use_next(hook, 2) == [2, 3]
        consumers.load_state_dict(saved)
        assert consumers.state_dict() == saved
        batches.use()  # its run was made again
        assert consumers.state_dict() == {**saved, "beyond": [0, 1]}
        assert await use_next(hook, 6) == [2, 3, 4, 5, 6, 7]
        assert consumers.state_dict() == at(8)


@pytest.mark.parametrize("uses_at_once", [True, False])
async def test_what_a_loop_has_in_hand_comes_once_wherever_the_pipeline_goes_back_to(
    uses_at_once: bool,
) -> None:
    async with joined(prefetch(range(8), 2)) as (consumers, hook, batches):
        await use_next(hook, 2)
        saved = consumers.state_dict()
        await use_next(hook, 2)
        assert await batches.take(None) == 4
        consumers.load_state_dict(saved)
        if uses_at_once:
            batches.use()
            assert consumers.state_dict() == at(2, 2)
        assert await use_next(hook, 3) == [2, 3, 5]
        if not uses_at_once:
            assert consumers.state_dict() == at(4, 1)
            assert await batches.take(None) == 4
            batches.use()
        assert consumers.state_dict() == at(6)
        assert await use_next(hook, 2) == [6, 7]


@pytest.mark.parametrize("has_taken", [False, True])
async def test_what_a_loop_gives_back_after_a_rewind_comes_once_more(
    has_taken: bool,
) -> None:
    async with joined(prefetch(range(6), 2)) as (consumers, hook, batches):
        await use_next(hook, 1)
        saved = consumers.state_dict()
        await use_next(hook, 2)
        assert await batches.take(None) == 3
        consumers.load_state_dict(saved)
        if has_taken:
            assert await use_next(hook, 1) == [1]
        batches.give_back()  # the loop was left
        assert await use_next(hook, 4 if has_taken else 5) == [1, 2, 3, 4, 5][has_taken:]
        assert consumers.state_dict() == at(6)


async def test_a_second_rewind_forgets_what_was_made_again_after_the_first() -> None:
    async with joined(prefetch(range(8), 2)) as (consumers, hook, batches):
        await use_next(hook, 2)
        saved = consumers.state_dict()
        await use_next(hook, 2)
        assert await batches.take(None) == 4
        consumers.load_state_dict(saved)
        batches.use()
        consumers.load_state_dict(saved)
        assert consumers.state_dict() == saved
        assert await use_next(hook, 6) == [2, 3, 4, 5, 6, 7]


async def test_places_of_returned_items_are_forgotten_by_a_rewind() -> None:
    async with joined(prefetch(range(8), 2)) as (consumers, hook, other):
        await use_next(hook, 1)
        saved = consumers.state_dict()
        await use_next(hook, 2)
        await other.take(None)
        other.give_back()
        consumers.load_state_dict(saved)
        for number in range(1, 5):
            assert await use_next(hook, 1) == [number]
            assert consumers.state_dict() == at(number + 1)


async def test_a_run_that_has_ended_before_a_rewind_is_not_in_the_position_behind_it() -> None:
    async with joined(prefetch(range(8), 2)) as (consumers, _, other):
        late = consumers.join(EndedRun(None))
        await use_next(other, 1)
        saved = consumers.state_dict()
        await use_next(other, 2)
        assert await late.take(None) == 3
        assert consumers.state_dict() == at(4)
        consumers.load_state_dict(saved)
        await use_next(other, 1)
        assert consumers.state_dict() == at(2)
        await late.leave()


async def test_what_a_loop_has_from_before_an_earlier_rewind_stands_for_its_item() -> None:
    async with joined(prefetch(range(9), 2)) as (consumers, hook, batches):
        await use_next(hook, 3)
        assert await batches.take(None) == 3
        consumers.load_state_dict(at(1))  # of a checkpoint long ago
        await use_next(hook, 1)
        saved = consumers.state_dict()
        await use_next(hook, 1)
        consumers.load_state_dict(saved)
        batches.use()
        assert saved == at(2)
        assert consumers.state_dict() == at(2, 1)
        assert await use_next(hook, 6) == [2, 4, 5, 6, 7, 8]


NUM_ITEMS = 12


class Training:
    """Two loops and a hook that draw from one pipeline, and what the model was trained with."""

    def __init__(self, begin: dict[str, Any] | None) -> None:
        source = prefetch(range(NUM_ITEMS), 2)
        self.consumers: Consumers = consumers_of(source)
        self.used: set[int] = set()
        if begin is not None:
            source.load_state_dict(begin)
            self.used = used_in(begin)
        loop = weakref.ref(self)
        self.members = [self.consumers.join(CurrentRun(None), each) for each in (loop, loop, None)]
        self.has: dict[Consumer, int] = {}
        self.saved: list[tuple[str, set[int]]] = []
        self.save(0)

    def save(self, _: int) -> None:
        state = self.consumers.state_dict()
        assert used_in(state) == self.used
        self.saved.append((json.dumps(state), set(self.used)))

    def go_back(self, num: int) -> None:
        """To the last saved position, or to one before; what was saved later is no more."""
        del self.saved[max(1, len(self.saved) - num) :]
        text, used = self.saved[-1]
        if json.loads(text) != self.consumers.state_dict():  # else it is there already
            self.has.pop(self.members[2], None)
        self.used = set(used)
        self.consumers.load_state_dict(json.loads(text))
        assert used_in(self.consumers.state_dict()) == self.used

    async def take(self, num: int) -> None:
        consumer = self.members[num]
        try:
            self.has[consumer] = await consumer.take(None)
        except StopAsyncIteration:
            self.has.pop(consumer, None)

    def use(self, num: int) -> None:
        consumer = self.members[num]
        if consumer in self.has:
            item = self.has.pop(consumer)
            assert item not in self.used
            self.used.add(item)
        consumer.use()

    def give_back(self, num: int) -> None:
        self.has.pop(self.members[num], None)
        self.members[num].give_back()

    async def end(self) -> None:
        for num in range(3):
            self.use(num)
        hook = self.members[2]
        while len(self.used) < NUM_ITEMS:
            await self.take(2)
            assert hook in self.has, f"it has ended after {sorted(self.used)}"
            self.use(2)
        self.save(0)
        with pytest.raises(StopAsyncIteration):
            await hook.take(None)
        for consumer in self.members:
            await consumer.leave()


def used_in(state: dict[str, Any]) -> set[int]:
    beyond = {state["items"] + place for place in state.get("beyond", ())}
    return {*range(state["items"]), *beyond}


ACTS = st.tuples(
    st.sampled_from(["take", "take", "use", "give_back", "save", "go_back"]), st.integers(0, 2)
)
BEGINS = st.sampled_from([None, {"items": 0}, {"items": 2}, {"items": 1, "beyond": [1, 3]}])


@pytest.mark.exhaustive
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None
)
@example(
    begin={"items": 1, "beyond": [1, 3]},
    acts=[("take", 0), ("use", 0), ("save", 0), ("take", 2), ("go_back", 0)],
)
@given(begin=BEGINS, acts=st.lists(ACTS, max_size=30))
async def test_each_item_is_used_once_whatever_is_saved_and_gone_back_to(
    begin: dict[str, Any] | None, acts: list[tuple[str, int]]
) -> None:
    training = Training(None if begin is None else {"stage": "sequence", **begin})
    for act, number in acts:
        if act == "take":
            await training.take(number)
        else:
            getattr(training, act)(number)
    await training.end()


async def test_a_loop_uses_nothing_twice_after_a_rewind_to_a_position_of_long_ago() -> None:
    async with joined(prefetch(range(60), 2)) as (consumers, hook, batches):
        await use_next(hook, 2)
        saved = consumers.state_dict()
        for _ in range(40):
            await use_next(hook, 1)
            consumers.state_dict()
        assert await batches.take(None) == 42
        consumers.load_state_dict(saved)
        batches.use()
        assert await use_next(hook, 57) == [each for each in range(2, 60) if each != 42]


class WithArrays(Stateful):
    """A source with a state of its own, which is an array."""

    def state_dict(self) -> dict[str, Any]:
        return {"places": np.array([self._at, 0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = int(state["places"][0])


async def test_a_loop_uses_nothing_twice_where_positions_hold_arrays() -> None:
    source = prefetch(WithArrays(8), 1)
    position = InputPositionHook(source)
    async with joined(source) as (consumers, _, batches):
        assert await use_next(batches, 2) == [0, 1]
        saved = save_hooks([position])
        load_hooks([position], saved)
        assert consumers.stage is source, "it is there already"
        assert await use_next(batches, 2) == [2, 3]
        assert await batches.take(None) == 4
        load_hooks([position], saved)
        batches.use()
        assert await use_next(batches, 5) == [2, 3, 5, 6, 7]


@pytest.mark.parametrize("make", [lambda: take(range(6), 9), lambda: prefetch(range(6), 2)])
@pytest.mark.parametrize("beyond", [[0, 2, 3], [1, 3, 4], [1, 4, 5]])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
async def test_a_plain_loop_leaves_out_what_was_used_in_this_life_and_in_the_next(
    make: Callable[[], Stage[int]], beyond: list[int], count: int
) -> None:
    def loaded() -> Stage[int]:
        stage = make()
        stage.load_state_dict({**make().state_dict(), "beyond": beyond})
        return stage

    assert position(loaded())["beyond"] == beyond
    rest = [each for each in range(6) if each not in beyond]
    assert await read_in_two_lives(loaded, count, make) == rest


@pytest.mark.parametrize("names", [[], (), {}, {"x"}, 3, 1.5])
def test_names_that_are_none_are_refused(names: Any) -> None:
    with pytest.raises(TypeError, match="names is .*; give a name or tensor"):
        FeedHook([1], names)


@pytest.mark.parametrize("names", [["x", "x"], ("x", "y", "x"), {"a": "x", "b": "x"}])
def test_a_name_that_would_be_fed_twice_is_refused(names: Any) -> None:
    with pytest.raises(ValueError, match="feeds one of them twice"):
        FeedHook([1], names)


@pytest.mark.parametrize("hook", [DataWaitHook, InputPositionHook])
def test_a_stage_within_the_pipeline_is_not_what_a_session_draws_from(hook: Any) -> None:
    inner = batch(range(9), 2)
    source = prefetch(inner, 2)
    with pytest.raises(ValueError, match="which another stage reads, .* give the last stage"):
        hook(inner)
    hook(source)
