"""The position in the input: in checkpoints, after a loss, in long inputs, and of workers."""

from __future__ import annotations

import itertools
import json
import logging
import random
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    shard,
    shuffle,
)

from ..data.sources import StatefulSync, at
from ..support.helpers import settle
from ..support.threads import threads_left
from .inputs import (
    PIPELINES,
    Counted,
    Diary,
    FromFunction,
    double,
    gated,
    items_of,
    saving,
)
from .training import Holds, run_session, tasks

pytestmark = pytest.mark.anyio


class CrashError(Exception):
    """Ends a life without a last checkpoint."""


async def live(
    path: Path,
    source: Any,
    num_steps: int,
    *,
    is_crash: bool = False,
    background: bool = False,
    by_loop: bool = False,
) -> Diary:
    """Resume, train for some steps, or to the end of the input, and end well or badly."""
    diary = Diary()
    hooks: list[Any] = [saving(path, diary, background=background)]
    hooks.insert(0, InputPositionHook(source) if by_loop else FeedHook(source, "x"))
    with suppress(CrashError):
        async with MonitoredSession(hooks, diary.creator, step_runner="inline") as session:
            if by_loop:
                async for item in session.batches(source):
                    if not num_steps:
                        break
                    await session.run([], {"x": item})
                    num_steps -= 1
            while not by_loop and num_steps:
                await session.run([])
                num_steps -= 1
            if is_crash:
                raise CrashError
    return diary


async def several_lives(
    path: Path, make: Callable[[int], Stage[Any]], seed: int, **how: bool
) -> list[int]:
    """What the model of the last life was trained with, all in all."""
    draw = random.Random(seed)
    for _ in range(4):
        steps, is_crash = draw.randrange(9), draw.random() < 0.5
        await live(path, make(draw.randrange(1, 9)), steps, is_crash=is_crash, **how)
    return (await live(path, make(3), 10_000, **how)).items


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(PIPELINES))
@pytest.mark.parametrize("how", ["foreground", "background", "by_loop"])
async def test_several_lives_are_fed_what_one_would_be(kind: str, how: str, tmp_path: Path) -> None:
    make = PIPELINES[kind]
    expected = await items_of(make(2))
    options = {} if how == "foreground" else {how: True}
    for seed in range(2):
        assert await several_lives(tmp_path / str(seed), make, seed, **options) == expected


async def test_a_shuffle_itself_can_be_fed() -> None:
    diary = await resumed(shuffle(range(9), 4, seed=1))
    assert sorted(diary.items) == list(range(9))


async def test_items_used_out_of_order_are_in_the_state_and_are_not_fed_again() -> None:
    source = prefetch(range(6), 3)
    slow, fast = FeedHook(source, "x"), FeedHook(source, "x")
    diary = Diary({1: CrashError()})
    creator = SharedSessionCreator(diary.creator)
    async with MonitoredSession([slow], creator) as a, MonitoredSession([fast], creator) as b:
        with pytest.raises(CrashError):
            await a.run([])  # it has item 0 in hand
        await b.run([])
        await b.run([])
        state = json.loads(json.dumps(source.state_dict()))
        assert state == slow.state_dict() == fast.state_dict()
        assert state["beyond"] == [1, 2]
    assert diary.items == [1, 2]
    again = prefetch(range(6), 1)
    FeedHook(again).load_state_dict(state)
    assert (await resumed(again)).items == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("state", "items"), [({"items": 0, "beyond": [1, 2]}, [0, 3, 4, 5]), ({"items": 6}, [])]
)
async def test_a_stage_that_the_program_loads_feeds_nothing_twice_also_at_its_end(
    state: dict[str, Any], items: list[int]
) -> None:
    again = prefetch(range(6), 1)
    again.load_state_dict({"stage": "sequence", **state})
    assert (await resumed(again)).items == items


async def test_a_checkpoint_at_the_end_of_the_input_ends_training_cleanly(tmp_path: Path) -> None:
    for _ in range(2):
        assert (await live(tmp_path, prefetch(range(6), 1), 99)).items == [0, 1, 2, 3, 4, 5]


async def resumed(source: Stage[Any]) -> Diary:
    diary = Diary()
    await run_session([FeedHook(source, "x")], diary.creator)
    return diary


async def test_an_item_that_was_drawn_and_not_used_is_behind_the_position() -> None:
    source = prefetch(range(9), 4)
    hook, diary = FeedHook(source, "x"), Diary({3: CrashError()})
    async with MonitoredSession([hook], diary.creator) as session:
        assert hook.state_dict() == at(0)
        await session.run([])
        await session.run([])
        assert hook.state_dict() == at(2)
        with pytest.raises(CrashError):
            await session.run([])
        assert hook.state_dict() == at(2)


async def test_a_batch_counts_as_used_when_the_run_behind_it_has_ended() -> None:
    source = prefetch(range(9), 4)
    hook, diary = InputPositionHook(source), Diary({2: CrashError()})
    async with MonitoredSession([hook], diary.creator) as session:
        batches = session.batches(source)
        await session.run([], {"x": await anext(batches)})
        assert hook.state_dict()["items"] == 1
        item = await anext(batches)
        assert hook.state_dict()["items"] == 1
        with pytest.raises(CrashError):
            await session.run([], {"x": item})
        assert hook.state_dict()["items"] == 1
        await session.run([], {"x": item})
        assert hook.state_dict()["items"] == 2


async def test_a_run_uses_the_items_of_its_own_session_s_loops_in_any_worker_s_hook() -> None:
    source = prefetch(range(9), 4)
    creator = SharedSessionCreator(Diary().creator)
    hook = InputPositionHook(source)
    async with MonitoredSession([hook], creator) as a, MonitoredSession([], creator) as b:
        await anext(a.batches(source))
        await anext(b.batches(source))
        await b.run([], {"x": 5})
        assert hook.state_dict() == at(0, 1)
        await a.run([], {"x": 5})
        assert hook.state_dict() == at(2)


async def test_a_pipeline_without_order_says_so_once_and_is_not_in_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = map_concurrent(double, range(20), 3, ordered=False)
    diary, hook = Diary(), FeedHook(source, "x")
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await run_session([hook, saving(tmp_path, diary)], diary.creator)
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == 1
    assert "The position in the input is not saved: map_concurrent(..., ordered=False)" in str(
        warnings
    )
    assert hook.state_dict() == {}
    assert sorted(diary.items) == list(range(0, 40, 2))
    caplog.clear()
    again = map_concurrent(double, range(20), 3, ordered=False)
    assert sorted((await live(tmp_path, again, 10_000)).items) == sorted(2 * diary.items)


async def test_a_state_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    await live(tmp_path, prefetch(range(9), 1), 3)
    with pytest.raises(InputStateError, match="the state is that of sequence") as refused:
        await live(tmp_path, PIPELINES["epochs"](1), 3)
    assert "in the saved state of the hook FeedHook" in str(refused.value.__notes__)
    with pytest.raises(InputStateError, match="the state is that of take"):
        FeedHook(prefetch(range(9), 1)).load_state_dict({"stage": "take", "taken": 1})


MANY = 256

LONG: dict[str, Callable[[], Stage[Any]]] = {
    "shuffled": lambda: prefetch(batch(shuffle(range(2000), 9, seed=1), 2), 3),
    "stateful": lambda: prefetch(StatefulSync(2000), 3),
    "stateful, not prefetched": lambda: batch(StatefulSync(2000), 1),
}


async def first_of(hook: FeedHook) -> list[int]:
    diary = Diary()
    await run_session([hook], diary.creator, runs=1)
    return diary.items


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_it_reaches_back_to_the_first_item_that_is_not_used(
    kind: str, num_workers: int
) -> None:
    """A second worker has an item in hand that it got after the first 100."""
    source, diary = LONG[kind](), Diary()
    creator = SharedSessionCreator(diary.creator)
    hook, other = FeedHook(source, "x"), FeedHook(source, "x")
    states: dict[int, Any] = {}
    async with (
        MonitoredSession([hook], creator) as session,
        MonitoredSession([other], creator) as b,
    ):
        for number in range(1, 2 * MANY + 6):
            await session.run([])
            if abs(number - MANY) < 3 or abs(number - 2 * MANY) < 3:
                states[number] = hook.state_dict()
            if number == 100 and num_workers == 2:
                with pytest.raises(ValueError, match="unknown"):
                    await b.run([], {"unknown": 1})
    for number, state in states.items():
        assert kind == "shuffled" or "'state'" in repr(state), "its own, and not a count"
        again = FeedHook(LONG[kind](), "x")
        again.load_state_dict(state)
        found = await first_of(again)
        if num_workers == 1:
            size = len(found)
            assert found == diary.items[number * size : (number + 1) * size]
        else:
            assert not set(found) & set(diary.items), "the item in hand comes first"


@pytest.mark.parametrize("kind", list(LONG))
async def test_the_position_after_items_of_a_former_life_is_that_of_the_next(kind: str) -> None:
    async with LONG[kind]() as items:
        await anext(items)
        begin = items.state_dict()
        expected = [await anext(items) for _ in range(21)]
    hook, diary = FeedHook(LONG[kind](), "x"), Diary()
    hook.load_state_dict({**begin, "beyond": list(range(1, 20))})
    async with MonitoredSession([hook], diary.creator) as session:
        await session.run([])
        state = hook.state_dict()
    again = FeedHook(LONG[kind](), "x")
    again.load_state_dict(state)
    found = await first_of(again)
    assert found == [int(each) for each in np.ravel(expected[20])]


class Thing:
    """An item, or a state, that says how many of its kind are remembered."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


class Things:
    """An iterable that knows its position, without an end."""

    def state_dict(self) -> Any:
        return {"thing": Thing()}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class AsyncThings(Things):
    async def __aiter__(self) -> AsyncGenerator[int, None]:
        for number in self:
            yield number


def things() -> Iterator[Thing]:
    while True:
        yield Thing()


LOGGED: dict[str, Callable[[], Stage[Any]]] = {
    "shuffle": lambda: shuffle(things, 9, 1),
    "batches of it": lambda: prefetch(batch(shuffle(things, 5, 1), 4), 2),
    "shard of it": lambda: shard(shuffle(things, 5, 1), 3, 1),
    "interleave": lambda: prefetch(interleave([things, things]), 3),
    "map": lambda: map_concurrent(double_of, things, 3),
    "stateful": lambda: prefetch(AsyncThings(), 3),
    "stateful in a thread": lambda: batch(Things(), 1),
}


async def double_of(thing: Thing) -> tuple[Thing, Thing]:
    return thing, thing


async def used(source: Stage[Any], how: str) -> AsyncGenerator[None, None]:
    """Something behind every item that was used."""
    hook = FeedHook(source, "x") if how == "FeedHook" else InputPositionHook(source)
    creator = FunctionSessionCreator(lambda x: {})
    if how == "a plain loop":
        async with source:
            async for _ in source:
                yield
        return
    async with MonitoredSession([hook], creator, step_runner="inline") as session:
        if how == "FeedHook":
            while True:
                await session.run([])
                yield
        async for item in session.batches(source):
            await session.run([], {"x": item})
            yield


@pytest.mark.parametrize("kind", LOGGED)
@pytest.mark.parametrize("how", ["FeedHook", "session.batches", "a plain loop"])
async def test_long_inputs_leave_no_more_behind_than_a_few_items(kind: str, how: str) -> None:
    num, most = 0, 0
    Thing.alive.clear()
    async with aclosing(used(LOGGED[kind](), how)) as steps:
        async for _ in steps:
            most = max(most, len(Thing.alive))
            num += 1
            if num == 300:
                break
    assert num == 300
    assert 0 < most <= 40


async def train_workers(
    path: Path, source: Stage[Any], diary: Diary, last_step: int | None = None
) -> Diary:
    """Four workers of one model, of which the first saves."""
    creator = SharedSessionCreator(diary.creator)

    async def worker(place: int) -> None:
        hooks: list[Any] = [FeedHook(source, "x")]
        hooks += [saving(path, diary)] if place == 0 else []
        hooks += [StopAtStepHook(last_step=last_step)] if last_step else []
        with suppress(CrashError):
            async with MonitoredSession(hooks, creator, step_runner="inline") as session:
                opened[place].set()
                for each in opened:
                    await each.wait()
                while not session.should_stop():
                    await session.run([])
                    await anyio.lowlevel.checkpoint()

    opened = [anyio.Event() for _ in range(4)]
    async with tasks() as group:
        for place in range(4):
            group.start_soon(worker, place)
    return diary


@pytest.mark.parametrize("seed", range(4))
async def test_workers_of_several_lives_use_each_item_once(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    last_step = 0
    for _ in range(4):
        last_step += draw.randrange(3, 9)
        source = prefetch(range(80), draw.randrange(1, 9))
        crash_at = draw.choice([0, draw.randrange(2, 8)])  # 0: none
        await train_workers(tmp_path, source, Diary({crash_at: CrashError()}), last_step)
    last = await train_workers(tmp_path, prefetch(range(80), 2), Diary())
    assert sorted(last.items) == list(range(80))


def lost_at(*calls: int) -> Diary:
    return Diary({call: PreemptionError("lost") for call in calls})


@pytest.mark.parametrize("kind", sorted(set(PIPELINES) - {"plain", "in a thread"}))
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("calls", [(3, 11, 12), (1, 2, 7, 8, 9, 10, 14)])
async def test_the_input_goes_back_with_the_model(
    kind: str, background: bool, calls: tuple[int, ...], tmp_path: Path
) -> None:
    """Also where losses follow each other, and right after the way back."""
    make, diary = PIPELINES[kind], lost_at(*calls)
    hooks = [FeedHook(make(3), "x"), saving(tmp_path, diary, background=background)]
    recovery = Recovery(first_pause_secs=0.0)
    await run_session(hooks, diary.creator, step_runner="inline", recovery=recovery)
    assert diary.items == await items_of(make(2))
    assert not threads_left()


@pytest.mark.parametrize("kind", ["plain", "in a thread"])
async def test_an_input_that_cannot_go_back_goes_on_and_says_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = PIPELINES[kind]
    expected, diary, source = await items_of(make(2)), lost_at(7), make(3)
    width = 2 if kind == "plain" else 1
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await run_session(hooks, diary.creator, step_runner="inline")
    # saved at 4; item 6 was in hand
    assert diary.items == expected[: 4 * width] + expected[6 * width :]
    text = "The model goes back to a checkpoint, and its input cannot: "
    lines = [each.getMessage() for each in caplog.records if text in each.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("It goes on with the next items")


async def test_a_model_that_goes_back_to_where_it_is_leaves_the_input_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = lost_at(5)
    hooks = [FeedHook(iter(range(9)), "x"), saving(tmp_path, diary)]
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await run_session(hooks, diary.creator)
    assert diary.items == list(range(9))
    assert "cannot" not in caplog.text


@pytest.mark.parametrize("call", [3, 6, 9, 13])
async def test_workers_go_back_together(call: int, tmp_path: Path) -> None:
    diary = await train_workers(tmp_path, prefetch(range(40), 3), lost_at(call))
    assert sorted(diary.items) == list(range(40))


@pytest.mark.parametrize("is_programs", [False, True])
async def test_an_item_that_another_worker_waits_for_is_not_used_twice(
    is_programs: bool, tmp_path: Path
) -> None:
    """Whether a session or the program has opened the pipeline."""
    gate, diary = anyio.Event(), lost_at(3)
    source = prefetch(FromFunction(lambda: gated(range(6), {2: gate})), 1)
    creator = SharedSessionCreator(diary.creator)
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary, every=100)]
    async with (
        source if is_programs else nullcontext(),
        MonitoredSession(hooks, creator, step_runner="inline") as saves,
        MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline") as waits,
        MonitoredSession([], creator, step_runner="inline") as loses,
    ):
        await saves.run([])
        await saves.run([])
        async with tasks() as group:
            group.start_soon(waits.run, [])
            await settle()
            await loses.run([], {"x": 99})
            assert diary.items == [99], "it went back to the beginning, and ran again"
            await saves.run([])
            await settle()
            assert sorted(diary.items) == [0, 1, 99], "the other one waits no longer"
            gate.set()
        while not saves.should_stop():
            await saves.run([])
    assert sorted(diary.items) == [0, 1, 2, 3, 4, 5, 99]


async def test_a_checkpoint_of_another_worker_holds_as_many_items_as_steps(tmp_path: Path) -> None:
    source, diary, may_go_on = prefetch(range(9), 3), Diary(), anyio.Event()
    hold = Holds("after_run", may_go_on)
    creator = SharedSessionCreator(diary.creator)
    hooks: list[Any] = [FeedHook(source, "x"), saving(tmp_path, diary, every=2)]
    async with (
        MonitoredSession([hold, FeedHook(source, "x")], creator, step_runner="inline") as slow,
        MonitoredSession(hooks, creator, step_runner="inline") as saves,
    ):
        async with anyio.create_task_group() as group:
            group.start_soon(slow.run, [])
            await settle()
            await saves.run([])  # step 2, of which it writes a checkpoint
            may_go_on.set()
        assert source.state_dict() == at(2)
    again, later = prefetch(range(9), 3), Diary()
    assert max(each.step for each in CheckpointDirectory(tmp_path).checkpoints()) == 2
    await run_session([FeedHook(again, "x"), saving(tmp_path, later)], later.creator)
    assert sorted(later.items) == list(range(9))


@pytest.mark.parametrize("calls", [(7,), (3,), (3, 6), (1, 2), (7, 9)])
async def test_a_loop_over_batches_that_goes_back_uses_nothing_twice(
    calls: tuple[int, ...], tmp_path: Path
) -> None:
    source, diary = prefetch(range(12), 2), lost_at(*calls)
    hooks = [InputPositionHook(source), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        async for item in session.batches(source):
            await session.run([], {"x": item})
    assert sorted(diary.items) == list(range(12))


async def test_what_was_read_before_the_way_back_is_closed(tmp_path: Path) -> None:
    source, diary = Counted(9), lost_at(3)
    hooks = [FeedHook(prefetch(source, 2), "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        for _ in range(3):
            await session.run([])
        assert source.log == ["open", "closed", "open"]
    assert source.log == ["open", "closed", "open", "closed"]
    assert diary.items == [0], "the last run was made again"


async def test_a_save_that_waits_for_steps_does_not_hold_up_the_way_back_of_another_worker(
    tmp_path: Path,
) -> None:
    diary, events = Diary(), {"saves": anyio.Event(), "slow": anyio.Event()}
    errors = [PreemptionError("lost")]

    async def step(x: int) -> dict[str, Any]:
        if x == 1:
            await events["slow"].wait()
        if x == 2 and errors:
            raise errors.pop()
        return diary.step(x)

    shared = SharedSessionCreator(FunctionSessionCreator(step))
    hooks = [Holds("after_run", events["saves"]), saving(tmp_path, diary, every=1)]
    async with MonitoredSession(hooks, shared) as saves:
        async with MonitoredSession([], shared) as slow, MonitoredSession([], shared) as lost:
            async with tasks() as group:
                group.start_soon(saves.run, [], {"x": 0})
                await anyio.wait_all_tasks_blocked()
                group.start_soon(slow.run, [], {"x": 1})
                await anyio.wait_all_tasks_blocked()
                group.start_soon(lost.run, [], {"x": 2})
                await anyio.wait_all_tasks_blocked()  # until the slow step has ended
                for name in ("saves", "slow"):
                    events[name].set()
                    await anyio.wait_all_tasks_blocked()
    assert diary.items == [2]  # the others were made before the way back
