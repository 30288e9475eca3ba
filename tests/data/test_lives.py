"""A pipeline that is interrupted in any way, again and again, and goes on: each item comes once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputError,
    InputPositionHook,
    MonitoredSession,
    SessionRunHook,
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
    shuffle,
    take,
)
from asynchooks.data import shard as shard_of

from ..support.afterwards import nothing_left
from ..support.faults import LOOPS, Halt
from .recipes import MOST, Recipe, recipes
from .sources import BadRecordError, read_all

pytestmark = pytest.mark.anyio


class Faults:
    """What goes wrong in one life: the read, the call and the step that fail, counted down."""

    def __init__(
        self,
        read: int = -1,
        call: int = -1,
        step: int = -1,
        error: type[BaseException] = BadRecordError,
    ) -> None:
        self.left = {"read": read, "call": call, "step": step}
        self.error = error
        self.num_open = 0

    def meet(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] == -1:
            raise self.error(what)


class Leaf:
    """Numbers, given in one of several ways; it has a state of its own where it says so."""

    def __init__(self, num_items: int, faults: Faults) -> None:
        self.num_items, self.faults, self.at = num_items, faults, 0

    def numbers(self) -> Iterator[int]:
        self.faults.num_open += 1
        try:
            while self.at < self.num_items:
                self.faults.meet("read")
                self.at += 1
                yield self.at - 1
            self.at = 0
        finally:
            self.faults.num_open -= 1

    async def numbers_async(self) -> AsyncIterator[int]:
        self.faults.num_open += 1
        try:
            while self.at < self.num_items:
                await anyio.lowlevel.checkpoint()
                self.faults.meet("read")
                self.at += 1
                yield self.at - 1
            self.at = 0
        finally:
            self.faults.num_open -= 1


class Knowing(Leaf):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class KnowingAsync(Knowing):
    def __aiter__(self) -> AsyncIterator[int]:
        return self.numbers_async()


class KnowingInThread(Knowing):
    def __iter__(self) -> Iterator[int]:
        return self.numbers()


def build(recipe: Recipe, variation: int, faults: Faults) -> Any:
    kind, child, *args = recipe
    if kind == "leaf":
        return {
            "list": list(range(args[0])),
            "async": lambda: Leaf(args[0], faults).numbers_async(),
            "thread": lambda: Leaf(args[0], faults).numbers(),
            "stateful": lambda: KnowingAsync(args[0], faults),
            "stateful in thread": lambda: KnowingInThread(args[0], faults),
            "iterator": KnowingInThread(args[0], faults),
        }[child]
    if kind == "interleave":
        return interleave([build(each, variation, faults) for each in child])
    source = build(child, variation, faults)

    async def mapped(item: Any) -> Any:
        if variation % 2:
            await anyio.lowlevel.checkpoint()
        faults.meet("call")
        return ("mapped", item)

    def mapped_in_thread(item: Any) -> Any:
        faults.meet("call")
        return ("mapped", item)

    if kind == "prefetch":
        return prefetch(source, args[0] + variation)
    if kind == "map":
        fn: Callable[[Any], Any] = mapped if args[1] else mapped_in_thread
        return map_concurrent(fn, source, min(args[0] + variation, MOST))
    if kind == "batch":
        return batch(source, args[0], args[1], tuple)
    make: Any = {"repeat": repeat, "take": take, "shard": shard_of, "shuffle": shuffle}[kind]
    return make(source, *args)


def build_stage(recipe: Recipe, variation: int, faults: Faults) -> Stage[Any]:
    made = build(recipe, variation, faults)
    return made if isinstance(made, Stage) else take(made, 1000)


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


def saved(stage: Stage[Any]) -> Any:
    return json.loads(json.dumps(stage.state_dict()))


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
            checkpoint.append((list(used), saved(stage)))

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

    creator = SharedSessionCreator(FunctionSessionCreator(sync_step if life.is_step_sync else step))
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
                                    inside.append(saved(stage))
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
    after = inside[0] if inside else saved(stage)
    return checkpoint[0] if checkpoint else (used, after)


@pytest.mark.parametrize("anyio_backend", LOOPS)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
    deadline=None,
)
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
