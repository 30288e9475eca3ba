"""What a dump of stacks shows: chains of awaits, threads, within bounds, whatever it meets."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks._engine.real_time import RealTimeEngine
from asynchooks._engine.stacks import frames_of
from asynchooks.hooks.guards import _dump

from ..support.helpers import settle

Coroutine = Any  # coroutines of any kind, and what only looks like one


@coroutine
def trap() -> Generator[str, None, None]:
    yield "a trap of the event loop"


async def innermost() -> None:
    await trap()


async def outermost() -> None:
    await innermost()


class ByHand(Awaitable[None]):
    """Steps a coroutine by hand, as sessions on a graph drive those of their hooks."""

    def __await__(self) -> Generator[Any, Any, None]:
        driven = innermost()
        while True:
            try:
                yielded = driven.send(None)
            except StopIteration:
                return
            yield yielded


async def drives() -> None:
    await ByHand()


async def items() -> AsyncIterator[int]:
    await innermost()
    yield 1


async def iterates() -> None:
    async for _ in items():
        pass


async def wraps() -> None:
    await Wrapped()


class Wrapped(Awaitable[None]):
    def __await__(self) -> Generator[Any, Any, None]:
        return innermost().__await__()


@contextmanager
def suspended(coroutine: Coroutine) -> Iterator[Coroutine]:
    assert coroutine.send(None) == "a trap of the event loop"
    yield coroutine
    with pytest.raises(StopIteration):
        coroutine.send(None)


def functions_of(coroutine: Coroutine) -> list[str]:
    return [frame.f_code.co_name for frame, _ in frames_of(coroutine)]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (outermost, ["outermost", "innermost", "trap"]),
        (drives, ["drives", "__await__", "innermost", "trap"]),
        (iterates, ["iterates", "items", "innermost", "trap"]),
        (wraps, ["wraps", "innermost", "trap"]),
    ],
)
def test_a_chain_of_awaits_is_followed_to_its_end(fn: Any, expected: list[str]) -> None:
    with suspended(fn()) as coroutine:
        assert functions_of(coroutine) == expected


def test_a_dump_names_tasks_file_line_function_and_source() -> None:
    with suspended(outermost()) as one, suspended(outermost()) as another:
        tasks = [(f"w{i}", one if i % 2 else another) for i in range(7)]
        text = _dump.report(lambda: [*tasks, ("alone", None)])
    line = outermost.__code__.co_firstlineno + 1
    assert "tasks w0, w1, w2, w3, w4 and 2 more:\n" in text
    assert text.count("in outermost") == 1
    assert f'{__file__}", line {line}, in outermost\n    await innermost()\n' in text
    assert "task alone:\n  (no frames" in text


@pytest.mark.parametrize("num", [1, 20, 1000])
def test_a_section_is_bounded_and_says_how_much_is_missing(num: int) -> None:
    def fresh(name: str) -> Coroutine:
        scope: dict[str, Any] = {"trap": trap}
        exec(f"async def {name}():\n    await trap()\n", scope)
        return scope[name]()

    coroutines = [fresh(f"f{i}" + "x" * 300) for i in range(num)]
    for each in coroutines:
        each.send(None)
    text = _dump.report(lambda: [(each.__name__, each) for each in coroutines])
    for each in coroutines:
        each.close()
    tasks = text.partition("\n\nthread")[0]
    assert len(tasks) < _dump.MAX_CHARS + 100
    shown = tasks.count("task f")
    assert (f"({num - shown} more tasks are left out)" in tasks) == (num == 1000)
    assert shown == num or num == 1000


class Hostile:
    """Fails at whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


def test_what_cannot_be_shown_never_raises() -> None:
    def fails() -> list[tuple[str, object]]:
        raise RuntimeError("the set has changed")

    assert "tasks cannot be listed: RuntimeError('the set has changed')" in _dump.report(fails)
    with suspended(outermost()) as coroutine:
        text = _dump.report(lambda: [("bad", Hostile()), ("good", coroutine)])
    assert "task bad:\n" in text
    assert "in innermost" in text
    hostile: Any = Hostile()
    assert "the tasks cannot be listed" in _dump.report(lambda: [(hostile, None)])


anything = st.recursive(
    st.none() | st.integers() | st.text() | st.builds(Hostile) | st.builds(iter, st.just([1])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.lists(st.tuples(st.text(), anything), max_size=5))
@settings(max_examples=30)
def test_a_dump_of_anything_is_text_of_bounded_length(tasks: list[tuple[str, object]]) -> None:
    assert len(_dump.report(lambda: tasks)) < 2 * _dump.MAX_CHARS + 200


async def parks_for_good(engine: RealTimeEngine, slot: Slot) -> None:
    await engine.park(slot)


def test_threads_that_wait_alike_share_an_entry_so_that_none_is_left_out() -> None:
    are_in, may_end = threading.Semaphore(0), threading.Event()

    def waits() -> None:
        are_in.release()
        may_end.wait()

    def waits_elsewhere() -> None:
        waits()

    threads = [threading.Thread(target=waits, name=f"alike {index}") for index in range(200)]
    threads.append(threading.Thread(target=waits_elsewhere, name="the other one"))
    for thread in threads:
        thread.start()
        are_in.acquire()
    text = _dump.report(list)
    may_end.set()
    for thread in threads:
        thread.join()
    alike = ", ".join(f"alike {index}" for index in range(5))
    assert text.startswith("no tasks are known\n")
    assert f"threads {alike} and " in text
    assert "in waits_elsewhere" in text.partition("thread the other one:\n")[2]


@pytest.mark.anyio
async def test_the_engine_names_the_tasks_of_its_loop_in_any_thread() -> None:
    engine: Any = current_engine()
    slot = Slot(engine, "the end of this test")
    async with anyio.create_task_group() as group:
        group.start_soon(parks_for_good, engine, slot, name="the one that parks")
        await settle()
        tasks = [*engine.running_tasks(), *await anyio.to_thread.run_sync(engine.running_tasks)]
        chains = [functions_of(each) for name, each in tasks if name == "the one that parks"]
        slot.wake()
    assert len(chains) == 2
    for chain in chains:
        assert chain[chain.index("parks_for_good") + 1] == "park"
    assert "the one that parks" not in [name for name, _ in engine.running_tasks()]
