"""Consumers of a pipeline that goes back to any of its saved positions: each item is used once."""

from __future__ import annotations

import json
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asynchooks._running.hook_state import load_hooks, save_hooks
from asynchooks.data import prefetch
from asynchooks.data._consumers import Consumer, Consumers, CurrentRun, consumers_of
from asynchooks.hooks._input import InputPositionHook

from .test_consumers_rewind import drawn_from, use_next

pytestmark = pytest.mark.anyio

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
        self.save()

    def save(self) -> None:
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

    async def take(self, consumer: Consumer) -> None:
        try:
            self.has[consumer] = await consumer.take(None)
        except StopAsyncIteration:
            self.has.pop(consumer, None)

    def use(self, consumer: Consumer) -> None:
        if consumer in self.has:
            item = self.has.pop(consumer)
            assert item not in self.used
            self.used.add(item)
        consumer.use()

    def give_back(self, consumer: Consumer) -> None:
        self.has.pop(consumer, None)
        consumer.give_back()

    async def end(self) -> None:
        for consumer in self.members:
            self.use(consumer)
        hook = self.members[2]
        while len(self.used) < NUM_ITEMS:
            await self.take(hook)
            assert hook in self.has, f"it has ended after {sorted(self.used)}"
            self.use(hook)
        self.save()
        with pytest.raises(StopAsyncIteration):
            await hook.take(None)
        for consumer in self.members:
            await consumer.leave()


def used_in(state: dict[str, Any]) -> set[int]:
    beyond = {state["items"] + place for place in state.get("used_beyond", ())}
    return {*range(state["items"]), *beyond}


WHO = st.integers(0, 2)
ACTS = st.one_of(
    st.tuples(st.just("take"), WHO),
    st.tuples(st.just("take"), WHO),
    st.tuples(st.just("use"), WHO),
    st.tuples(st.just("give back"), WHO),
    st.tuples(st.just("save"), WHO),
    st.tuples(st.just("go back"), WHO),
)
BEGINS = st.sampled_from([None, {"items": 0}, {"items": 2}, {"items": 1, "used_beyond": [1, 3]}])


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None
)
@example(
    begin={"items": 1, "used_beyond": [1, 3]},
    acts=[("take", 0), ("use", 0), ("save", 0), ("take", 2), ("go back", 0)],
)
@given(begin=BEGINS, acts=st.lists(ACTS, max_size=30))
async def test_each_item_is_used_once_whatever_is_saved_and_gone_back_to(
    begin: dict[str, Any] | None, acts: list[tuple[str, int]]
) -> None:
    training = Training(None if begin is None else {"stage": "sequence", **begin})
    for act, who in acts:
        if act == "save":
            training.save()
        elif act == "go back":
            training.go_back(who)
        elif act == "take":
            await training.take(training.members[who])
        elif act == "use":
            training.use(training.members[who])
        else:
            training.give_back(training.members[who])
    await training.end()


async def test_a_loop_uses_nothing_twice_after_a_way_back_to_a_position_of_long_ago() -> None:
    consumers, hook, batches = drawn_from(60)
    await use_next(hook, 2)
    saved = consumers.state_dict()
    for _ in range(40):
        await use_next(hook, 1)
        consumers.state_dict()
    assert await batches.take(None) == 42
    consumers.load_state_dict(saved)
    batches.use()
    assert await use_next(hook, 57) == [each for each in range(2, 60) if each != 42]
    await hook.leave()
    await batches.leave()


class WithArrays:
    """A source with a state of its own, which is an array."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._at = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        while self._at < self._num_items:
            self._at += 1
            yield self._at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"places": np.array([self._at, 0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = int(state["places"][0])


async def test_a_loop_uses_nothing_twice_where_positions_hold_arrays() -> None:
    source = prefetch(WithArrays(8), 1)
    consumers, position = consumers_of(source), InputPositionHook(source)
    batches = consumers.join(CurrentRun(None), weakref.ref(consumers))
    assert await use_next(batches, 2) == [0, 1]
    saved = save_hooks([position])
    assert await use_next(batches, 2) == [2, 3]
    assert await batches.take(None) == 4
    load_hooks([position], saved)
    batches.use()
    assert await use_next(batches, 5) == [2, 3, 5, 6, 7]
    await batches.leave()


async def test_a_position_with_arrays_where_the_pipeline_is_already_is_none_to_go_back_to() -> None:
    source = prefetch(WithArrays(8), 1)
    consumers, position = consumers_of(source), InputPositionHook(source)
    batches = consumers.join(CurrentRun(None), weakref.ref(consumers))
    await use_next(batches, 2)
    load_hooks([position], save_hooks([position]))
    assert await batches.take(None) == 2
    assert consumers.stage is source
    await batches.leave()
