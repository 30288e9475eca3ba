"""Properties: nothing is lost and nothing comes twice, under any cancellation or failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynchooks import (
    FeedHook,
    InputError,
    InputPositionHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import Stage, batch, map_concurrent, prefetch, rollouts, shuffle

from ..support.afterwards import nothing_left
from ..support.faults import Halt
from .recipes import Faults, Recipe, build_stage, recipes
from .sources import BadRecordError, Source, position, read_all, same, same_in_thread

pytestmark = pytest.mark.anyio


PIPELINES: dict[str, Callable[[Any, int], Stage[Any]]] = {
    "prefetch": lambda source, size: prefetch(prefetch(source, size), size),
    "map": lambda source, size: map_concurrent(same, source, size),
    "map in threads": lambda source, size: map_concurrent(same_in_thread, source, size),
    "map unordered": lambda source, size: map_concurrent(same, source, size, False),
    "prefetch of batches": lambda source, size: prefetch(batch(source, size), 2),
    "rollouts": lambda source, size: rollouts(
        same, source, size, concurrency=size + 4, max_staleness=9
    ),
    "prefetch of shuffle": lambda source, size: prefetch(shuffle(source, size, 1), size),
}
prop = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
    deadline=None,
)


@prop
@given(
    name=st.sampled_from(sorted(PIPELINES)),
    size=st.integers(1, 4),
    kind=st.sampled_from(["items", "items_in_thread"]),
    num_items=st.integers(0, 24),
    # a reader each: how many items there are when it is cancelled, and its waits behind each
    plans=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), max_size=4),
)
async def test_each_item_goes_to_one_reader_and_a_cancelled_one_loses_none(
    name: str, size: int, kind: str, num_items: int, plans: list[tuple[int, int]]
) -> None:
    source = Source(num_items)
    got: list[Any] = []
    scopes = [anyio.CancelScope() for _ in plans]

    def take(item: Any) -> None:
        items = item if isinstance(item, list) else [item]
        got.extend(getattr(each, "item", each) for each in items)
        for (when, _), scope in zip(plans, scopes, strict=True):
            if len(got) >= when:
                scope.cancel()

    async def read(place: int) -> None:
        with scopes[place]:
            async for item in stage:
                take(item)
                for _ in range(plans[place][1]):
                    await anyio.lowlevel.checkpoint()

    async with PIPELINES[name](getattr(source, kind)(), size) as stage:
        async with anyio.create_task_group() as group:
            for place in range(len(plans)):
                group.start_soon(read, place)
        async for item in stage:
            take(item)
    assert source.is_closed
    in_order = name not in ("map unordered", "prefetch of shuffle", "rollouts")
    assert (got if in_order else sorted(got)) == list(range(num_items))


@dataclass(frozen=True)
class Life:
    """How one life goes."""

    how: str  # plain, feed, or batches
    num_readers: int
    variation: int
    leave_after: int | None
    cancel_after: int | None
    """Turns of the event loop."""
    read: int
    call: int
    step: int
    error: type[BaseException]
    """What a read, call or step that fails raises."""
    num_waits: int
    """Of a reader, or of a step, with each item."""
    is_step_sync: bool
    saves_inside: bool
    goes_on_from: int | None
    """How many items were used when the position was saved with which the next life begins."""
    is_threaded: bool


WHEN = st.one_of(st.none(), st.integers(0, 12))
FAULT = st.one_of(st.just(-1), st.just(-1), st.integers(0, 12))
LIVES = st.builds(
    Life,
    how=st.sampled_from(["plain", "feed", "batches"]),
    num_readers=st.integers(1, 3),
    variation=st.integers(0, 3),
    leave_after=WHEN,
    cancel_after=st.one_of(st.none(), st.integers(0, 60)),
    read=FAULT,
    call=FAULT,
    step=FAULT,
    error=st.sampled_from([BadRecordError, Halt, pytest.skip.Exception]),
    num_waits=st.integers(0, 2),
    is_step_sync=st.booleans(),
    saves_inside=st.booleans(),
    goes_on_from=WHEN,
    is_threaded=st.booleans(),
)
UNDISTURBED = Life("plain", 1, 0, None, None, -1, -1, -1, Halt, 0, False, False, None, False)


def leaves_of(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves_of(each)]
    return [error]


async def live(recipe: Recipe, life: Life, state: Any, is_empty: bool) -> tuple[list[Any], Any]:
    """What was used in it, and the position at its end."""
    faults = Faults(life.read, life.call, life.step, life.error)
    stage = build_stage(recipe, life.variation, faults)
    if state is not None:
        stage.load_state_dict(state)
    used: list[Any] = []
    inside: list[Any] = []

    checkpoint: list[tuple[list[Any], Any]] = []

    def save() -> None:
        if life.goes_on_from is not None and len(used) >= life.goes_on_from and not checkpoint:
            checkpoint.append((list(used), position(stage)))

    class Saving(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            save()

    async def cancel(scope: anyio.CancelScope) -> None:
        if life.cancel_after is None:
            return
        for _ in range(life.cancel_after):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    async def step(x: Any) -> dict[str, Any]:
        for _ in range(life.num_waits):
            await anyio.lowlevel.checkpoint()
        faults.meet("step")
        used.append(x)
        return {}

    def sync_step(x: Any) -> dict[str, Any]:
        faults.meet("step")
        used.append(x)
        return {}

    async def read() -> None:
        while life.leave_after is None or len(used) < life.leave_after:
            try:
                item = await anext(stage)
            except StopAsyncIteration:
                return
            used.append(item)
            save()
            faults.meet("step")
            for _ in range(life.num_waits):
                await anyio.lowlevel.checkpoint()

    creator = SharedSessionCreator(sync_step if life.is_step_sync else step)
    runner: Any = "inline"
    if (
        life.is_threaded
        and life.is_step_sync
        and life.cancel_after is None
        and life.num_readers == 1
    ):
        runner = "thread"  # a cancelled run there ends, and has used nothing

    async def feed() -> None:
        hooks: list[Any] = [FeedHook(stage, "x"), Saving()]
        if life.leave_after is not None:
            hooks.append(StopAtStepHook(last_step=life.leave_after + 1))
        async with MonitoredSession(hooks, creator, step_runner=runner) as session:
            while not session.should_stop():
                await session.run([])

    async def loop() -> None:
        hooks: list[Any] = [InputPositionHook(stage), Saving()]
        async with MonitoredSession(hooks, creator, step_runner=runner) as session:
            async for item in session.batches(stage):
                if life.leave_after is not None and len(used) >= life.leave_after:
                    break
                await session.run([], {"x": item})

    async with nothing_left():
        try:
            with anyio.CancelScope() as outer:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel, outer)
                    if life.how == "plain":
                        async with stage:
                            try:
                                async with anyio.create_task_group() as readers:
                                    for _ in range(life.num_readers):
                                        readers.start_soon(read)
                            finally:
                                if life.saves_inside:
                                    inside.append(position(stage))
                    else:
                        for _ in range(life.num_readers):
                            group.start_soon(feed if life.how == "feed" else loop)
        except StopTraining:
            raise
        except BaseExceptionGroup as error:
            found = leaves_of(error)
            has_failed = any(isinstance(each, life.error) for each in found)
            for each in found:
                may_be = (
                    isinstance(each, life.error)
                    or (is_empty and "has no items" in str(each))
                    or (life.cancel_after is not None and "was cancelled while it was" in str(each))
                    # another reader met the error, which ended the generator
                    or (has_failed and life.num_readers > 1 and "ended after" in str(each))
                    or (has_failed and life.num_readers > 1 and "none in pass" in str(each))
                )
                if not may_be:
                    raise
    assert faults.num_open == 0, "a generator is left open"
    after = inside[0] if inside else position(stage)
    return checkpoint[0] if checkpoint else (used, after)


@prop
@given(recipe=recipes, lives=st.lists(LIVES, min_size=1, max_size=4))
async def test_each_item_comes_once_however_lives_end(recipe: Recipe, lives: list[Life]) -> None:
    try:
        expected = await read_all(build_stage(recipe, 0, Faults()))
    except InputError:
        assume(False)
    got: list[Any] = []
    state = None
    in_order = True
    for life in [*lives, UNDISTURBED]:
        used, state = await live(recipe, life, state, is_empty=not expected)
        got += used
        in_order = in_order and life.num_readers == 1
        if in_order:
            assert got == expected[: len(got)]
        else:
            assert not Counter(got) - Counter(expected)
    assert Counter(got) == Counter(expected)
