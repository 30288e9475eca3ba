"""Shared sessions: one raw session from the first worker's opening to the last one's end."""

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import MonitoredSession, SharedSessionCreator
from asynchooks.simulation import Simulation, current_simulation
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..simulation.engines import on_every_engine
from ..support.helpers import cancelled_when_settled, counting_creator, in_task
from ..support.moments import at, together
from ..support.step_loops import run_steps


@on_every_engine
def test_a_begin_that_waits_for_a_later_worker_is_told_of_in_the_log(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        simulation, creator = current_simulation(), SharedSessionCreator(counting_creator())
        waits = at(begin=lambda: simulation.sleep(60.0))  # as long as the other waits to open

        async def worker(*hooks: Any) -> None:
            async with MonitoredSession(hooks, creator):
                pass

        tasks = [simulation.start(worker, waits), simulation.start(worker)]
        await simulation.sleep(29.0)
        assert not caplog.records
        await simulation.sleep(2.0)
        (said,) = caplog.messages
        assert "waited for the shared session for 30 s" in said
        for task in tasks:
            await task.wait()

    Simulation(backend=backend).run(main)


async def test_all_workers_share_one_raw_session_which_the_last_one_closes() -> None:
    """One that still opens is one of them."""
    may_begin, raw = anyio.Event(), ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    first = MonitoredSession([], creator)
    last = MonitoredSession([at(begin=may_begin.wait)], creator)
    await first.__aenter__()
    assert first.raw_session() is raw
    async with in_task(last.__aenter__):
        await first.run([])
        await first.__aexit__(None, None, None)
        assert not raw.is_closed
        may_begin.set()
    assert last.raw_session() is raw
    await last.run([])
    assert last.global_step.value == 2
    await last.__aexit__(None, None, None)
    assert raw.is_closed


async def test_workers_begin_one_after_another_also_where_one_is_cancelled_in_the_queue() -> None:
    log, may_begin = list[str](), anyio.Event()
    creator = SharedSessionCreator(counting_creator())

    async def worker(name: str) -> None:
        async def begin() -> None:
            log.append(name)
            await may_begin.wait()
            await anyio.lowlevel.checkpoint()
            log.append(name)

        async with MonitoredSession([at(begin=begin)], creator):
            pass

    async with in_task(worker, "a"), in_task(worker, "b"):
        assert await cancelled_when_settled(worker, "cancelled")
        async with in_task(worker, "c"):
            may_begin.set()
    assert log == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_raw_session_may_run_and_close_in_coroutines(is_shared: bool) -> None:
    log: list[str] = []

    class AsyncSession(ScriptedSession):
        async def run(self, fetches: Any, *_: Any) -> Any:
            await anyio.lowlevel.checkpoint()
            log.append("run")
            return fetches

        async def close(self) -> None:  # type: ignore[override]
            await anyio.lowlevel.checkpoint()
            log.append("closed")

    creator: Any = ScriptedSessionCreator([AsyncSession()])
    creator = SharedSessionCreator(creator) if is_shared else creator
    async with MonitoredSession([], creator) as session:
        assert await session.run("x") == "x"
    assert log == ["run", "closed"]


async def test_a_hundred_workers_share_a_function_and_later_ones_go_on_counting() -> None:
    creator = SharedSessionCreator(counting_creator())

    for limit in (200, 400):
        await together(*[partial(run_steps, creator, limit)] * 100)
        assert creator.handle().global_step.value == limit
