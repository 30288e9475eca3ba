"""One program, one trace: the three kernels run the same sessions and hooks alike."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks.simulation import Simulation

from ..engine.test_engine_seam import Trace, program, trace_on_trampoline
from .engines import BACKENDS


def trace_of(backend: Any) -> tuple[Trace, bytes]:
    trace: Trace = []
    simulation = Simulation(backend=backend, keep_trace=True)

    async def main() -> None:
        await program(simulation.kernel, trace)()  # type: ignore[arg-type]

    simulation.run(main)
    return trace, simulation.trace.to_bytes()


def test_sessions_and_hooks_give_one_trace_on_all_kernels() -> None:
    traces = [trace_of(each) for each in BACKENDS]
    assert traces[0] == traces[1] == traces[2]
    assert traces[0][0] == trace_on_trampoline()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_is_built_on_anyio_ends_at_exactly_its_time(simulation: Simulation) -> None:
    async def main() -> list[float]:
        await anyio.sleep(3.2e9)  # noqa: ASYNC116
        times = [simulation.now]
        with anyio.move_on_after(0.1):
            await anyio.sleep(100)
        times.append(simulation.now)
        send, receive = anyio.create_memory_object_stream[int](1)
        async with anyio.create_task_group() as group, send, receive:

            async def produce() -> None:
                await anyio.sleep(2.5)
                await send.send(1)

            group.start_soon(produce)
            await receive.receive()
            times.append(simulation.now)
        return times

    assert simulation.run(main) == [3.2e9, 3.2e9 + 0.1, 3.2e9 + 0.1 + 2.5]
