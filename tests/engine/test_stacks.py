"""What a dump of stacks shows: chains of awaits, threads, within bounds, whatever it meets.

The report is private: StallHook makes it of the tasks that its process has, and these are chosen.
"""

from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any

import anyio
import pytest

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


async def nested(depth: int) -> None:
    await (nested(depth - 1) if depth else trap())


def test_a_section_is_bounded_and_says_how_much_is_missing() -> None:
    tasks = [nested(depth) for depth in range(120)]
    for each in tasks:
        each.send(None)
    text = _dump.report(lambda: [(f"w{i}", each) for i, each in enumerate(tasks)])
    for each in tasks:
        each.close()
    section = text.partition("\n\nthread")[0]
    num_shown = section.count("task w")
    assert len(section) < _dump.MAX_CHARS + 100
    assert 0 < num_shown < 120
    assert f"({120 - num_shown} more tasks are left out)" in section


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


async def parks_for_good(engine: RealTimeEngine, slot: Slot) -> None:
    await engine.park(slot)


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
