"""StopAtStepHook: exact among workers, whatever fails or is cancelled."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator
from .training import run_session, suspending_step

pytestmark = pytest.mark.anyio


class Counter:
    """A step function that is safe in threads, and may fail now and then."""

    def __init__(self, stride: int = 1, fail_every: int = 0) -> None:
        self.value = 0
        self.calls = 0
        self.stride = stride
        self.fail_every = fail_every
        self.lock = threading.Lock()

    def __call__(self) -> dict[str, int]:
        with self.lock:
            self.calls += 1
            if self.fail_every and self.calls % self.fail_every == 0:
                raise ValueError("now and then")
            self.value += self.stride
            return {"global_step": self.value}


async def train(counter: Any, workers: int, step_runner: Any, cancel: bool = False) -> None:
    creator = SharedSessionCreator(FunctionSessionCreator(counter))

    async def worker(index: int) -> None:
        hooks = [StopAtStepHook(last_step=200)]
        with anyio.CancelScope() as scope:
            async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
                while not session.should_stop():
                    with contextlib.suppress(ValueError):
                        await session.run([])
                    await anyio.lowlevel.checkpoint()
                    if cancel and index % 3 == 1 and session.global_step.value > 50:
                        scope.cancel()

    async with anyio.create_task_group() as group:
        for index in range(workers):
            group.start_soon(worker, index)


@pytest.mark.parametrize(
    ("options", "workers", "step_runner"),
    [
        *(({}, num, each) for num in (1, 2, 4, 8, 64) for each in ("inline", "thread", "auto")),
        *(({"fail_every": 7}, num, each) for num in (2, 8, 64) for each in ("inline", "thread")),
        *(({"stride": num}, 8, each) for num in (3, 7) for each in ("inline", "thread")),
    ],
)
async def test_all_workers_stop_exactly_also_where_some_fail_and_are_cancelled_or_within_a_stride(
    options: dict[str, int], workers: int, step_runner: Any
) -> None:
    counter = Counter(**options)
    await train(counter, workers, step_runner, cancel="fail_every" in options)
    assert 200 <= counter.value < 200 + counter.stride


@pytest.mark.parametrize("workers", [1, 4])
async def test_async_steps_stop_exactly(workers: int) -> None:
    counter = Counter()

    async def step() -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return counter()

    await train(step, workers, "auto")
    assert counter.calls == 200


async def test_num_steps_counts_from_the_step_found_and_not_again_on_recovery() -> None:
    calls = 0

    def step() -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise PreemptionError("lost")
        return {"calls": calls}

    hook = StopAtStepHook(num_steps=5)
    creator = FunctionSessionCreator(step, initial_step=100)
    recovery = Recovery(first_pause_secs=0)
    session = await run_session([hook], creator, recovery=recovery)
    assert session.global_step.value == 105
    session = await run_session([hook])
    assert session.global_step.value == 105


async def test_each_hook_stops_its_own_session_and_the_largest_limit_holds() -> None:
    creator = SharedSessionCreator(FunctionSessionCreator(suspending_step))
    ran = {10: 0, 40: 0}

    async def worker(last_step: int) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=last_step)], creator) as session:
            while not session.should_stop():
                await session.run([])
                ran[last_step] += 1
        assert session.global_step.value >= last_step

    async with anyio.create_task_group() as group:
        group.start_soon(worker, 10)
        group.start_soon(worker, 40)
    assert ran[10] < 10
    assert ran[10] + ran[40] == 40


async def test_a_worker_that_comes_too_late_runs_nothing_and_ends_cleanly() -> None:
    creator = SharedSessionCreator(counting_creator())
    hook = RecordingHook("late")
    async with MonitoredSession([StopAtStepHook(last_step=3)], creator) as first:
        while not first.should_stop():
            await first.run([])
        async with MonitoredSession([StopAtStepHook(last_step=3), hook], creator) as late:
            with pytest.raises(StopTraining):
                await late.run([])
            await late.run([])
            raise AssertionError("not reached")
        assert first.global_step.value == 3
    assert [moment for _, moment in hook.log] == ["begin", "after_create_session", "end"]
