"""BackgroundWriter: one write at a time, and errors that are raised once."""

from __future__ import annotations

import anyio
import pytest

from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.hooks.checkpoint._background import BackgroundWriter, Write

from ...checkpoints.stores import run_python
from ...support.helpers import settle

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


async def test_an_error_is_reported_and_raised_once() -> None:
    writes, errors = Writes(), [OSError("a"), OSError("b")]
    for error in errors:
        writes.writer.submit(writes.held(str(error), error))
        await settle()
        writes.slots[str(error)].wake()
        await writes.wait_idle()
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
