"""Stages are opened, shared and closed: producers, generators and files end however one is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FeedHook, InputStateError, MonitoredSession
from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)
from asynchooks.data._stage import Phase

from ..hooks.inputs import Diary
from ..support.afterwards import nothing_left
from ..support.helpers import settle
from ..support.threads import threads_left
from .sources import (
    BadRecordError,
    Calls,
    Source,
    on_asyncio,
    on_both_and_asyncio,
    read_all,
    same,
    same_in_thread,
)

pytestmark = pytest.mark.anyio

AROUND: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 3),
    "batch": lambda source: batch(source, 1),
    "shuffle": lambda source: shuffle(source, 3, 1),
    "shard": lambda source: shard(source, 2, 1),
    "take": lambda source: take(source, 99),
    "repeat": lambda source: repeat(source, 1),
    "interleave": lambda source: interleave([source, [0] * 99]),
    "map": lambda source: map_concurrent(same, source, 3),
    "map in threads": lambda source: map_concurrent(same_in_thread, source, 3),
    "map unordered": lambda source: map_concurrent(same, source, 3, ordered=False),
    "prefetch of unordered batches": lambda source: prefetch(
        batch(map_concurrent(same, source, 4, ordered=False), 2), 2
    ),
    "many": lambda source: prefetch(
        batch(map_concurrent(same, repeat(shuffle(prefetch(source, 2), 2, 0), 1), 2), 1), 2
    ),
    "interleaved prefetches": lambda source: interleave(
        [prefetch(source, 2), prefetch([1] * 99, 2)]
    ),
}
around = pytest.mark.parametrize("around", AROUND)
kinds = pytest.mark.parametrize("kind", ["items", "items_in_thread"])


@around
@kinds
@on_both_and_asyncio(
    "way", ["break", "end", "error", "error of the source", "scope", "group"], ["native"]
)
async def test_leaving_a_loop_ends_all_at_once(around: str, kind: str, way: str) -> None:
    error = BadRecordError("bad record")
    endings = {"end": Source(9), "error of the source": Source(4, error)}
    source = endings.get(way) or Source(None)
    closed: list[bool] = []

    async def read(scope: anyio.CancelScope | None = None) -> None:
        try:
            async with AROUND[around](getattr(source, kind)()) as items:
                num = 0
                async for _ in items:
                    num += 1
                    assert num < 2000, "never cancelled"
                    if num < 3:
                        continue
                    if way == "break":
                        break
                    if way == "error":
                        raise error
                    if way == "native":
                        task = asyncio.current_task()
                        assert task is not None
                        task.cancel()
                    elif scope is not None:
                        scope.cancel()
        finally:
            closed.append(source.is_closed)

    async with nothing_left():
        if way.startswith("error"):
            with pytest.raises(BadRecordError) as caught:
                await read()
            assert caught.value is error
        elif way == "native":
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(read())
        elif way == "group":
            async with anyio.create_task_group() as group:
                group.start_soon(read, group.cancel_scope)
        elif way == "scope":
            with anyio.CancelScope() as scope:
                await read(scope)
            assert scope.cancelled_caught
        else:
            await read()
    assert closed == [True]
    assert source.num_begun == 1


@around
@on_both_and_asyncio("is_native", [False], [True])
async def test_cancelling_the_reader_of_a_source_that_hangs_ends_all(
    around: str, is_native: bool
) -> None:
    source = Source(2, hangs=True)

    async def read() -> None:
        try:
            async with AROUND[around](source.items()) as items:
                async for _ in items:
                    pass
        finally:
            assert source.is_closed

    async with nothing_left():
        if is_native:
            task = asyncio.create_task(read())
            await settle()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await settle()
                group.cancel_scope.cancel()
    assert source.is_closed


@around
async def test_closing_twice_is_fine_and_a_closed_stage_cannot_be_read(around: str) -> None:
    stage = AROUND[around](list(range(9)))
    async with stage:
        await anext(stage)
    await stage.aclose()
    with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
        await anext(stage)
    with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
        async with stage:
            pass


async def test_a_pipeline_is_closed_as_well_if_it_was_never_opened() -> None:
    source = Source(None)
    generator = source.items()
    await anext(generator)
    await prefetch(generator, 1).aclose()
    assert source.is_closed


async def test_a_reader_that_waits_for_a_thread_gets_the_error_of_a_closed_stage() -> None:
    may_go_on = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        may_go_on.wait(10)
        yield 2

    seen: list[Any] = []

    async def read(stage: Any) -> None:
        with suppress(RuntimeError):  # it got one item more, and asks for another
            async for item in stage:
                seen.append(item)
                waits.set()

    waits = anyio.Event()
    async with nothing_left():
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                async with batch(numbers(), 1) as stage:
                    group.start_soon(read, stage)
                    await waits.wait()
                    await anyio.lowlevel.checkpoint()
                    may_go_on.set()
    assert seen[0] == [1]


@pytest.mark.parametrize("make", [lambda source: take(source, 9), lambda source: batch(source, 9)])
async def test_a_coroutine_that_waits_for_a_source_can_be_closed(make: Any) -> None:
    calls = Calls()

    class Waiting:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            return await calls(0)

    reading = anext(make(Waiting()))
    reading.send(None)  # it waits
    reading.close()
    assert calls.ended == [0]
    await make(Source(1).items()).aclose()


def test_a_plain_with_is_refused_with_async_with_as_the_remedy() -> None:
    with pytest.raises(TypeError, match="opened by `async with stage:`, not by `with stage:`"):
        with prefetch(range(3), 1):
            raise AssertionError("never entered")


every_way = pytest.mark.parametrize(
    "around", [lambda source: batch(source, 1), lambda source: prefetch(batch(source, 1), 1)]
)


async def fails_to_close(error: BaseException) -> AsyncGenerator[int, None]:
    try:
        while True:
            await anyio.lowlevel.checkpoint()
            yield 0
    finally:
        raise error


@every_way
@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("of the user"), OSError("a disk")])
async def test_an_error_in_closing_leaves_as_itself(
    around: Callable[[Any], Any], error: BaseException
) -> None:
    async with nothing_left():
        with pytest.raises(type(error)) as caught:
            async with around(fails_to_close(error)) as items:
                await anext(items)
    assert caught.value is error


@every_way
@pytest.mark.parametrize(("error", "leaves"), [(SystemExit(3), SystemExit), (OSError(), KeyError)])
async def test_an_exit_in_closing_replaces_the_error_of_the_block_and_no_other_error_does(
    around: Callable[[Any], Any], error: BaseException, leaves: type[BaseException]
) -> None:
    async with nothing_left():
        with pytest.raises(leaves):
            async with around(fails_to_close(error)) as items:
                await anext(items)
                raise KeyError


async def test_a_cancellation_in_closing_passes_through_though_the_block_has_failed() -> None:
    async def unshielded_end() -> AsyncGenerator[int, None]:
        try:
            yield 0
        finally:
            await anyio.lowlevel.checkpoint()

    with anyio.CancelScope() as scope:
        async with batch(unshielded_end(), 1) as items:
            await anext(items)
            scope.cancel()
            raise BadRecordError
    assert scope.cancelled_caught


async def test_of_several_errors_in_closing_the_first_leaves_and_all_are_closed() -> None:
    first, second, last = OSError("first"), OSError("second"), Source(None)
    stage = interleave([fails_to_close(first), fails_to_close(second), last.items()])
    with pytest.raises(OSError, match="first") as caught:
        async with stage as items:
            for _ in range(3):
                await anext(items)
    assert caught.value is first
    assert last.is_closed


async def test_of_several_inputs_that_fail_to_close_the_first_error_notes_the_others() -> None:
    first, second = OSError("first"), OSError("second")
    with pytest.raises(OSError, match="first") as caught:
        async with MonitoredSession([], Diary().creator) as session:
            loops = [session.batches(fails_to_close(error)) for error in (first, second)]
            for loop in loops:
                await anext(loop)
            await settle()  # both have read ahead
    assert caught.value is first
    assert "then, closing another input: OSError('second')" in first.__notes__


def fails(error: type[BaseException]) -> Any:
    def fn(item: Any) -> Any:
        raise error("by mistake")

    return fn


def fails_async(error: type[BaseException]) -> Any:
    async def fn(item: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        raise error("by mistake")

    return fn


FUNCTIONS: dict[str, tuple[Callable[[Any], Stage[Any]], str]] = {
    "fn": (lambda error: map_concurrent(fails_async(error), range(9), 2), "map_concurrent"),
    "fn in threads": (lambda error: map_concurrent(fails(error), range(9), 2), "map_concurrent"),
    "awaitable": (
        lambda error: map_concurrent(lambda x: fails_async(error)(x), range(9), 1),
        "map_concurrent",
    ),
    "collate": (lambda error: batch(range(9), 2, collate=fails(error)), "batch"),
    "collate, ahead": (lambda error: prefetch(batch([1], 1, collate=fails(error)), 2), "batch"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("error", [GeneratorExit, StopAsyncIteration])
async def test_an_end_that_a_function_raises_leaves_as_an_error_that_names_the_stage(
    name: str, error: type[BaseException]
) -> None:
    make, kind = FUNCTIONS[name]
    async with nothing_left():
        with pytest.raises(RuntimeError, match=f"^{kind} called what raised {error.__name__}") as e:
            await read_all(make(error))
    assert isinstance(e.value.__cause__, error)


async def items_that_fail() -> AsyncIterator[int]:
    yield 1
    raise GeneratorExit("by mistake")


def items_that_fail_in_thread() -> Iterator[int]:
    yield 1
    raise GeneratorExit("by mistake")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: take(items_that_fail(), 9), "items_that_fail at .* raised GeneratorExit"),
        (lambda: batch(items_that_fail(), 9), "items_that_fail at .* raised GeneratorExit"),
        (lambda: prefetch(items_that_fail(), 2), "items_that_fail at .* raised Generator"),
        (lambda: map_concurrent(str, items_that_fail(), 2), "items_that_fail at .* raised"),
        (lambda: take(items_that_fail_in_thread(), 9), "^iterable called what raised"),
        (lambda: prefetch(items_that_fail_in_thread(), 2), "^iterable called"),
    ],
)
async def test_a_generator_exit_of_a_source_leaves_as_an_error_that_names_it(
    make: Callable[[], Stage[Any]], message: str
) -> None:
    async with nothing_left():
        with pytest.raises(RuntimeError, match=message) as caught:
            await read_all(make())
    assert isinstance(caught.value.__cause__, GeneratorExit)


class Hanging:
    """A call in a thread that hangs until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.is_let_go: bool | None = None  # False: it hung until it gave up

    def __call__(self, item: int = 0) -> int:
        self.has_begun.set()
        self.is_let_go = self.may_end.wait(20)
        return item

    def __iter__(self) -> Iterator[int]:
        yield self()


HANGING: dict[str, Callable[[Hanging], Stage[Any]]] = {
    "map": lambda hanging: map_concurrent(hanging.__call__, range(3), 1),
    "prefetch": lambda hanging: prefetch(hanging, 1),
    "prefetch of batches": lambda hanging: prefetch(batch(hanging, 1), 1),
    "a stage without tasks": lambda hanging: batch(hanging, 1),
}


hanging_kinds = pytest.mark.parametrize("kind", HANGING)


@asynccontextmanager
async def closing(stage: Stage[Any], hanging: Hanging) -> AsyncIterator[asyncio.Task[None]]:
    """A task that closes the stage, and waits for a call in a thread."""

    async def leave() -> None:
        async with stage:
            async with anyio.create_task_group() as group:
                group.start_soon(anext, stage)
                while not hanging.has_begun.is_set():
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()

    async with nothing_left():
        task = asyncio.create_task(leave())
        try:
            while stage._phase is not Phase.CLOSED:
                await anyio.lowlevel.checkpoint()
            for _ in range(5):  # until it waits
                await anyio.lowlevel.checkpoint()
            yield task
        finally:
            hanging.may_end.set()
            while threads_left():
                await anyio.lowlevel.checkpoint()
            await settle()


@on_asyncio
@hanging_kinds
async def test_a_cancellation_leaves_when_the_call_has_ended(kind: str) -> None:
    hanging = Hanging()
    async with closing(HANGING[kind](hanging), hanging) as task:
        task.cancel()
        await settle()
        assert not task.done()
        hanging.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not threads_left()


@on_asyncio
@hanging_kinds
async def test_a_second_cancellation_leaves_at_once(kind: str) -> None:
    hanging = Hanging()
    async with closing(HANGING[kind](hanging), hanging) as task:
        for _ in range(2):
            assert not task.done()
            task.cancel()
            await settle()
        assert task.cancelled()
        assert hanging.is_let_go is None  # it hangs still


@on_asyncio
@hanging_kinds
async def test_a_cancellation_leaves_when_the_grace_period_is_over(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("_map", "_thread_source"):
        monkeypatch.setattr(f"asynchooks.data.{module}._GRACE_SECS", 0.2)
    hanging = Hanging()
    async with closing(HANGING[kind](hanging), hanging) as task:
        task.cancel()
        with anyio.fail_after(10), pytest.raises(asyncio.CancelledError):
            await task


WITH_GROUP: dict[str, Any] = {
    "prefetch": lambda items: prefetch(items, 2),
    "prefetch of others": lambda items: prefetch(batch(shuffle(items, 2, 0), 1), 2),
    "prefetch within": lambda items: batch(prefetch(items, 2), 1),
    "prefetch of a part": lambda items: prefetch(take(items, 5), 2),
}


@pytest.mark.parametrize("make", WITH_GROUP)
@pytest.mark.parametrize("way", ["end", "break", "error", "scope", "never read"])
async def test_a_generator_with_an_open_group_is_closed_however_it_is_left(
    way: str, make: str
) -> None:
    source = Source(5 if way == "end" and make != "prefetch of a part" else None)
    async with nothing_left():
        with anyio.CancelScope() as scope:
            try:
                async with WITH_GROUP[make](source.items_in_group()) as items:
                    if way == "end":
                        assert len([item async for item in items]) == 5
                    elif way != "never read":
                        await anext(items)
                    await settle()  # its task waits for room
                    if way == "error":
                        raise BadRecordError
                    if way == "scope":
                        scope.cancel()
                        await anyio.sleep_forever()
            except BadRecordError:
                assert way == "error"
    assert source.is_closed


@pytest.mark.parametrize("count", [20, 1000])
async def test_a_generator_that_holds_a_scope_is_read_by_one_task(count: int) -> None:
    async def within_scope() -> AsyncGenerator[int, None]:
        with anyio.fail_after(60):
            for number in range(count):
                await anyio.lowlevel.checkpoint()
                yield number

    async with nothing_left():
        async with map_concurrent(same, within_scope(), 3) as items:
            seen = []
            async for item in items:
                seen.append(item)
                if item == 50:
                    break
    assert seen == list(range(min(count, 51)))


async def test_if_one_source_cannot_be_opened_the_others_are_closed() -> None:
    closed = batch([1], 1)
    await closed.aclose()
    source = Source(None)
    async with nothing_left():
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            async with interleave([prefetch(source.items(), 1), closed]):
                pass


async def test_a_stage_around_an_open_one_ends_with_it() -> None:
    source = Source(None)
    async with nothing_left():
        async with prefetch(source.items(), 1) as items:
            async for _ in batch(items, 2):
                break
        assert source.is_closed


@pytest.mark.parametrize("make", [lambda source: source, lambda source: batch(source, 1)])
async def test_several_may_share_a_stage_and_the_last_one_closes_it(make: Any) -> None:
    source = Source(9)
    shared: Stage[int] = prefetch(source.items(), 2)
    one, two = make(shared), make(shared)
    async with nothing_left():
        async with one:
            async with two:
                got = [await anext(one), await anext(two)]
            assert not source.is_closed
            got += [item async for item in one]
    assert len(got) == 9
    assert source.is_closed


async def test_two_may_share_a_repeated_source() -> None:
    source = Source(3)
    shared = repeat(source.items, 3)
    one, two = prefetch(shared, 1), prefetch(shared, 1)
    async with nothing_left():
        async with one:
            async with two:
                got = [await anext(two) for _ in range(4)]
            got += [item async for item in one]
        assert source.is_closed
    assert set(got) == {0, 1, 2}


@pytest.mark.parametrize(
    "make", [lambda: repeat([1, 2, 3]), lambda: interleave([range(10_000), range(10_000)])]
)
async def test_two_that_share_a_stage_may_be_far_apart(make: Callable[[], Any]) -> None:
    shared = make()
    first, second = take(shared, 10**6), take(shared, 10**6)
    async with first, second:
        for _ in range(1100):
            await anext(first)
        for _ in range(600):
            await anext(second)
    assert shared.statistics().num_items == 1700


async def test_a_stage_that_feeds_two_has_no_position_in_either() -> None:
    shared = prefetch(range(6), 2)
    with pytest.raises(InputStateError, match="feeds 2 stages"):
        interleave([batch(shared, 1), batch(shared, 2)]).state_dict()


OTHERS = "does not know its position: it reads .*, of which items were also taken by others"
INNER: dict[str, Any] = {
    "plain": lambda: batch(range(20), 1),
    "with a task": lambda: prefetch(batch(range(20), 1), 2),
}
OUTER: dict[str, Any] = {
    "plain": lambda inner: batch(inner, 1),
    "with a task": lambda inner: prefetch(inner, 2),
    "far": lambda inner: prefetch(shuffle(take(inner, 9), 1, seed=0), 2),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("when", ["before", "meanwhile", "before, by a hook"])
async def test_a_stage_around_one_that_others_read_has_no_position(
    when: str, inner: str, outer: str
) -> None:
    async with INNER[inner]() as below:
        if when == "before":
            assert await anext(below) == [0]
        if when == "before, by a hook":
            async with MonitoredSession([FeedHook(below, "x")], Diary().creator) as session:
                await session.run([])
            assert below.state_dict()["source"] == {"stage": "sequence", "items": 1}
        async with OUTER[outer](below) as rest:
            await anext(rest)
            if when == "meanwhile":
                rest.state_dict()
                await anext(below)
            with pytest.raises(InputStateError, match=OTHERS):
                rest.state_dict()


async def test_a_stage_around_one_that_is_open_and_was_not_read_has_its_position() -> None:
    source = {"stage": "sequence", "items": 3}
    state = {"stage": "batch", "items": 3, "source": source, "place": 3, "beyond": []}
    async with batch(range(5), 1) as below, prefetch(below, 2) as rest:
        assert [await anext(rest) for _ in range(3)] == [[0], [1], [2]]
        assert rest.state_dict() == state
    async with batch(range(5), 1) as below:
        again = prefetch(below, 2)
        again.load_state_dict(state)
        assert await read_all(again) == [[3], [4]]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("is_read", [True, False])
async def test_no_state_is_loaded_around_a_stage_that_has_begun(inner: str, is_read: bool) -> None:
    async with INNER[inner]() as below:
        if is_read:
            await anext(below)
        rest = prefetch(below, 2)
        state = prefetch(INNER[inner](), 2).state_dict()
        if is_read or inner == "with a task":
            with pytest.raises(RuntimeError, match=r"which prefetch\(.* reads, has begun"):
                rest.load_state_dict(state)
        else:
            rest.load_state_dict(state)
