"""BackgroundWriter: one write at a time, at most one in line, and errors that are raised once."""

from __future__ import annotations

import threading
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks._engine.base import Engine, Slot
from asynchooks._engine.current import current_engine
from asynchooks._engine.threads import run_blocking
from asynchooks.hooks.checkpoint._background import BackgroundWriter, Write

from ...checkpoints.stores import run_python
from ...support.helpers import settle
from ..savers import until
from ..virtual_time import on_trampoline

pytestmark = pytest.mark.anyio


class Writes:
    """Writes that wait until they are let go, one event of an engine for each."""

    def __init__(self) -> None:
        self.engine = current_engine()
        self.log: list[str] = []
        self.failures: list[BaseException] = []
        self.slots: dict[str, Slot] = {}
        self.writer = BackgroundWriter(self.engine, self.failures.append)

    def held(self, name: str, error: BaseException | None = None) -> Write:
        slot = self.slots[name] = Slot(self.engine, name)

        async def write() -> None:
            self.log.append(f"begin {name}")
            await self.engine.park(slot)
            self.log.append(f"end {name}")
            if error is not None:
                raise error

        return write

    async def wait_idle(self) -> None:
        await self.writer.wait_idle()
        self.log.append("idle")


async def test_a_write_continues_while_its_submitter_does() -> None:
    writes = Writes()
    await writes.writer.wait_idle()
    writes.writer.submit(writes.held("a"))
    assert writes.writer.is_busy
    async with anyio.create_task_group() as group:
        group.start_soon(writes.wait_idle)
        group.start_soon(writes.wait_idle)
        await settle()
        assert writes.log == ["begin a"]
        writes.slots["a"].wake()
    assert writes.log == ["begin a", "end a", "idle", "idle"]
    assert not writes.writer.is_busy
    writes.writer.raise_error()


async def test_of_those_in_line_only_the_newest_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "asynchooks")
    writes = Writes()
    for name in "abcd":
        writes.writer.submit(writes.held(name))
        await settle()
    writes.slots["a"].wake()
    await settle()
    assert writes.log == ["begin a", "end a", "begin d"]
    writes.slots["d"].wake()
    await writes.wait_idle()
    assert writes.log == ["begin a", "end a", "begin d", "end d", "idle"]
    assert caplog.text.count("is superseded by a newer one") == 2


async def test_what_is_submitted_in_the_moment_of_an_end_is_written() -> None:
    writes = Writes()

    async def write() -> None:
        writes.writer.submit(writes.held("next"))

    writes.writer.submit(write)
    await settle()
    writes.slots["next"].wake()
    await writes.wait_idle()
    assert writes.log == ["begin next", "end next", "idle"]


async def test_what_is_in_line_is_written_after_an_error_which_is_raised_once() -> None:
    writes, errors = Writes(), [OSError("a"), OSError("b")]
    for error in errors:
        writes.writer.submit(writes.held(str(error), error))
        await settle()
    writes.slots["a"].wake()
    writes.slots["b"].wake()
    await writes.wait_idle()
    assert writes.log == ["begin a", "end a", "begin b", "end b", "idle"]
    assert writes.failures == errors
    with pytest.raises(OSError, match="^a") as caught:
        writes.writer.raise_error()
    assert caught.value is errors[0]
    assert caught.value.__notes__ == ["then, writing the next one: OSError('b')"]
    writes.writer.raise_error()


async def test_a_wait_that_is_cancelled_leaves_the_write_under_way() -> None:
    writes = Writes()
    writes.writer.submit(writes.held("a"))
    async with anyio.create_task_group() as group:
        group.start_soon(writes.wait_idle)
        await settle()
        group.cancel_scope.cancel()
    assert writes.writer.is_busy
    writes.slots["a"].wake()
    await writes.wait_idle()
    assert writes.log == ["begin a", "end a", "idle"]


async def test_of_writes_in_threads_none_overlaps_another() -> None:
    writes, lock = Writes(), threading.Lock()
    begun: list[bool] = []  # of each write, whether another one was under way
    submitted = [threading.Event() for _ in range(21)]

    def block(number: int) -> None:
        assert lock.acquire(blocking=False)
        submitted[number + 1].wait(20)
        lock.release()

    async def write() -> None:
        begun.append(lock.locked())
        await run_blocking(writes.engine, lambda: block(len(begun) - 1), 10.0, "asynchooks-save")

    async def submit(number: int) -> None:
        writes.writer.submit(write)
        for _ in range(3):  # it could begin now, while the one before it is written
            await anyio.lowlevel.checkpoint()
        submitted[number].set()
        await until(lambda: len(begun) == number + 1 and lock.locked())

    for number in range(20):
        await submit(number)
    submitted[-1].set()
    await writes.wait_idle()
    assert begun == [False] * 20
    writes.writer.raise_error()


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.6, 3.0]), min_size=1, max_size=8),
    fails=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_the_last_is_always_written_none_twice_and_no_two_at_once(
    gaps: list[float], fails: list[bool]
) -> None:
    spans: list[tuple[int, float, float]] = []
    reported: list[str] = []

    async def main(engine: Engine) -> None:
        writer = BackgroundWriter(engine, lambda error: reported.append(str(error)))

        def write_of(number: int) -> Write:
            async def write() -> None:
                begun = engine.now()
                await engine.park(Slot(engine, "a write"), begun + 1.0)
                spans.append((number, begun, engine.now()))
                if fails[number]:
                    raise OSError(number)

            return write

        for number, gap in enumerate(gaps):
            await engine.park(Slot(engine, "a gap"), engine.now() + gap)
            writer.submit(write_of(number))
        await writer.wait_idle()

    on_trampoline(main)
    numbers = [number for number, _, _ in spans]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == len(gaps) - 1
    for (_, _, ended), (_, begun, _) in pairwise(spans):
        assert ended <= begun
    assert reported == [str(number) for number in numbers if fails[number]]


EXIT = """
import sys, anyio
from asynchooks._engine.current import current_engine
from asynchooks._engine.threads import run_blocking
from asynchooks.hooks.checkpoint._background import BackgroundWriter

async def write():
    raise SystemExit(3)

async def main():
    writer = BackgroundWriter(current_engine(), lambda error: print("reported", repr(error)))
    writer.submit(write)
    await writer.wait_idle()
    try:
        writer.raise_error()
    except SystemExit as error:
        print("raised", repr(error))

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_exit_in_a_write_is_kept_until_it_is_raised(backend: str) -> None:
    assert run_python(EXIT, backend) == "reported SystemExit(3)\nraised SystemExit(3)\n"
