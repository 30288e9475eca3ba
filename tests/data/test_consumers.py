"""Consumers: each item is used once, wherever the pipeline is rewound to."""

from __future__ import annotations

import json
import re
import weakref
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asynchooks import DataWaitHook, FeedHook, GlobalStep, InputPositionHook, StopTraining
from asynchooks._engine.stop import Stop
from asynchooks.data import batch, prefetch, take
from asynchooks.data._consumers import Consumer, CurrentRun, TrainingEnd, consumers_of

from ..hooks.inputs import gated
from ..support.helpers import in_task, settle
from .sources import read_all

pytestmark = pytest.mark.anyio


async def test_an_item_given_back_goes_at_once_to_a_waiting_consumer() -> None:
    consumers = consumers_of(prefetch(gated([7, 8], {8: anyio.Event()}), 2))
    first, second = (consumers.join(CurrentRun(None)) for _ in range(2))
    assert await first.take(None) == 7
    async with in_task(second.take, None) as waiting:
        assert waiting.value is None
        first.give_back()
    assert waiting.value == 7
    assert consumers.state_dict()["items"] == 0
    second.use()
    assert consumers.state_dict()["items"] == 1
    await first.leave()
    await second.leave()


async def test_a_wait_for_data_ends_at_the_limit_and_leaves_nothing_at_the_step() -> None:
    step = GlobalStep(0)
    consumer = consumers_of(prefetch(gated([1], {1: anyio.Event()}), 1)).join(CurrentRun(None))
    end = TrainingEnd(Stop(), step)
    async with in_task(consumer.take, end) as waiting:
        step.raise_limit(3)  # while it waits
        await settle()
        step.publish(2)
        await settle()
        assert step.statistics().tasks_waiting_for_step == 1
        step.publish(3)
    assert isinstance(waiting.error, StopTraining)
    assert step.statistics().tasks_waiting_for_step == 0
    with pytest.raises(StopTraining):
        await consumer.take(end)  # it was reached before
    await consumer.leave()


NUM_ITEMS = 12


class Training:
    """Two loops and a hook, which is the last, and what the model was trained with."""

    def __init__(self, begin: dict[str, Any] | None) -> None:
        source = prefetch(range(NUM_ITEMS), 2)
        self.consumers = consumers_of(source)
        self.used: set[int] = set()
        if begin is not None:
            source.load_state_dict({"stage": "sequence", **begin})
            self.used = used_in(begin)
        loop = weakref.ref(self)
        self.members = [self.consumers.join(CurrentRun(None), each) for each in (loop, loop, None)]
        self.has: dict[Consumer, int] = {}
        self.saved: list[tuple[str, set[int]]] = []
        self.save(0)

    def save(self, _: int) -> None:
        self.saved.append((json.dumps(self.consumers.state_dict()), set(self.used)))

    def go_back(self, num: int) -> None:
        """To the last saved position, or to one before; what was saved later is no more."""
        del self.saved[max(1, len(self.saved) - num) :]
        text, used = self.saved[-1]
        if json.loads(text) != self.consumers.state_dict():  # else it is there already
            self.has.pop(self.members[2], None)
        self.used = set(used)
        self.consumers.load_state_dict(json.loads(text))

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

    async def do(self, acts: list[tuple[str, int]]) -> None:
        """All of that, and what is left of the items; each position says what was used."""
        for act, number in acts:
            if act == "take":
                await self.take(number)
            else:
                getattr(self, act)(number)
            assert used_in(self.consumers.state_dict()) == self.used
        for num in range(3):
            self.use(num)
        while len(self.used) < NUM_ITEMS:
            await self.take(2)
            assert self.members[2] in self.has, f"it has ended after {sorted(self.used)}"
            self.use(2)
        assert used_in(self.consumers.state_dict()) == self.used
        with pytest.raises(StopAsyncIteration):
            await self.members[2].take(None)
        for consumer in self.members:
            await consumer.leave()


def used_in(state: dict[str, Any]) -> set[int]:
    beyond = {state["items"] + place for place in state.get("beyond", ())}
    return {*range(state["items"]), *beyond}


ACTS = {"t": "take", "u": "use", "g": "give_back", "s": "save", "b": "go_back"}


@pytest.mark.parametrize(
    "script",
    [
        "t0 u0 s0 t0 u0 t2 b0 u2",  # a hook's run ends behind a rewind,
        "t0 u0 s0 t0 u0 t2 b0 t0 u0 u2",  # and behind the next take
        "t0 u0 s0 t2 t0 u0 b0 t0 u0 g2",  # its item is given back behind one
        "t0 t2 u2 s0 t2 u2 t2 u2 b0 u0",
        "t2 u2 s0 t2 u2 t0 b0 u0 t2",  # a loop keeps what it has in hand, and uses it at once,
        "t2 u2 s0 t2 u2 t0 b0 t2 u2 t2 u2 t0 u0",  # or asks for it again,
        "t2 u2 s0 t2 u2 t0 b0 g0",  # or gives it back,
        "t2 u2 s0 t2 u2 t0 b0 t2 u2 g0",
        "t2 u2 s0 t2 u2 t0 b0 u0 b0",  # or goes back once more
        "t2 u2 s0 t2 u2 t1 g1 b0 t2 u2 t2 u2",
        "t2 u2 s0 t2 u2 t2 u2 t0 b0 t2 u2 s0 t2 u2 b0 u0",
    ],
)
async def test_what_is_in_hand_at_a_rewind_is_used_once(script: str) -> None:
    acts = [(ACTS[act], int(number)) for act, number in re.findall(r"(\w)(\d)", script)]
    await Training(None).do(acts)


@pytest.mark.exhaustive
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None
)
@example(
    begin={"items": 1, "beyond": [1, 3]},
    acts=[("take", 0), ("use", 0), ("save", 0), ("take", 2), ("go_back", 0)],
)
@given(
    begin=st.sampled_from([None, {"items": 0}, {"items": 2}, {"items": 1, "beyond": [1, 3]}]),
    acts=st.lists(
        st.tuples(st.sampled_from(["take", *ACTS.values()]), st.integers(0, 2)), max_size=30
    ),
)
async def test_each_item_is_used_once_whatever_is_saved_and_gone_back_to(
    begin: dict[str, Any] | None, acts: list[tuple[str, int]]
) -> None:
    await Training(begin).do(acts)


@pytest.mark.parametrize("make", [lambda: take(range(6), 9), lambda: prefetch(range(6), 2)])
@pytest.mark.parametrize("beyond", [[0, 2, 3], [1, 4, 5]])
async def test_a_plain_loop_leaves_out_what_was_used_before(make: Any, beyond: list[int]) -> None:
    stage = make()
    stage.load_state_dict({**make().state_dict(), "beyond": beyond})
    assert await read_all(stage) == [each for each in range(6) if each not in beyond]


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], TypeError, "names is .*; give a name or tensor"),
        ({"x"}, TypeError, "names is .*; give a name or tensor"),
        (3, TypeError, "names is .*; give a name or tensor"),
        (("x", "x"), ValueError, "feeds one of them twice"),
        ({1: "x", 2: "x"}, ValueError, "feeds one of them twice"),
    ],
)
def test_names_that_are_none_or_feed_one_twice_are_refused(
    names: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FeedHook([1], names)


@pytest.mark.parametrize("hook", [DataWaitHook, InputPositionHook])
def test_a_stage_within_the_pipeline_is_not_what_a_session_draws_from(hook: Any) -> None:
    inner = batch(range(9), 2)
    hook(prefetch(inner, 2))
    with pytest.raises(ValueError, match="which another stage reads, .* give the last stage"):
        hook(inner)
    with pytest.raises(TypeError, match="give the stage that the session reads"):
        hook([1])
