"""The engine seam carries whole sessions: one program, one trace, on every kernel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine

from ..support.virtual_kernel import AnyioKernel, Kernel, Trampoline

Trace = list[tuple[float, str]]


async def pause(seconds: float) -> None:
    engine = current_engine()
    await engine.park(Slot(engine, "a pause"), engine.now() + seconds)


class Tracing(SessionRunHook):
    """Writes its moments, with their virtual times, and keeps a side task ticking."""

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        self.name = name
        self.note = note

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.note(f"{self.name} created")
        coord.start_soon(self.tick, coord)

    async def tick(self, coord: Coordinator) -> None:
        while not await coord.wait_stopped(timeout=2.5):
            self.note(f"{self.name} ticks")
        self.note(f"{self.name} stops ticking")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.note(f"{self.name} ran {run_context.global_step.value}")

    async def end(self, session: Any) -> None:
        self.note(f"{self.name} ends")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.note(f"{self.name} on error")


def program(kernel: Kernel, trace: Trace) -> Callable[[], Awaitable[None]]:
    """Three workers on one step function: one waits for step 4, one is cancelled at 5.25 s."""

    def note(what: str) -> None:
        trace.append((kernel.now(), what))

    async def step() -> dict[str, float]:
        await pause(1.0)
        return {"loss": 0.5}

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def worker(name: str, wait_until: int) -> None:
        hooks = [
            GlobalStepWaiterHook(wait_until), StopAtStepHook(last_step=12), Tracing(name, note),
        ]  # fmt: skip
        async with MonitoredSession(hooks, creator, stop_grace_period_secs=10) as session:
            while not session.should_stop():
                await session.run("loss")
                await pause(0.25)
        note(f"{name} left at {session.global_step.value}")

    async def main() -> None:
        tasks = [kernel.start(worker, "a", 0), kernel.start(worker, "b", 4)]
        doomed = kernel.start(worker, "c", 0)
        await pause(5.25)
        note("cancelling c")
        doomed.cancel()
        for task in (*tasks, doomed):
            await task.wait()
        note("all done")

    return main


def trace_on_trampoline() -> Trace:
    trace: Trace = []
    kernel = Trampoline()
    kernel.run(program(kernel, trace))
    return trace


def trace_on(backend: str) -> Trace:
    trace: Trace = []

    async def run() -> None:
        kernel = AnyioKernel()
        await kernel.run(program(kernel, trace))

    anyio.run(run, backend=backend)
    return trace


def test_the_program_does_what_it_says() -> None:
    trace = trace_on_trampoline()
    events = [what for _, what in trace]
    assert events[-1] == "all done"
    assert "a left at 12" in events
    assert "b left at 12" in events
    assert "c left at 12" not in events
    assert (5.25, "cancelling c") in trace
    assert (5.25, "c on error") in trace
    assert "c ends" not in events
    first_of_b = next(time for time, what in trace if what.startswith("b ran"))
    fourth = next(time for time, what in trace if what.endswith("ran 4"))
    assert first_of_b == fourth + 1.0
    steps = [int(what.split()[-1]) for what in events if " ran " in what]
    assert steps == list(range(1, 13))
    assert {"a stops ticking", "b stops ticking"} <= set(events)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_event_loop_and_trampoline_give_one_trace(backend: str) -> None:
    expected = trace_on_trampoline()
    for _ in range(5):
        assert trace_on(backend) == expected
