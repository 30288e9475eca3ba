"""StopAtStepHook: exact among workers, whatever fails or is cancelled."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.moments import at
from .training import run_session, suspending_step

pytestmark = pytest.mark.anyio


class Counter:
    """A step function that may fail now and then."""

    def __init__(self, stride: int = 1, fail_every: int = 0) -> None:
        self.value = self.calls = 0
        self.stride, self.fail_every = stride, fail_every

    def __call__(self) -> dict[str, int]:
        self.calls += 1
        if self.fail_every and self.calls % self.fail_every == 0:
            raise ValueError("now and then")
        self.value += self.stride
        return {"global_step": self.value}

    async def later(self) -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return self()


@pytest.mark.parametrize(
    ("options", "num_workers", "step_runner"),
    [
        ({}, 1, "inline"), ({}, 8, "thread"), ({}, 8, "auto"),
        ({"fail_every": 7}, 16, "inline"), ({"fail_every": 7}, 2, "thread"),
        ({"stride": 7}, 8, "inline"),
    ],
)  # fmt: skip
async def test_all_workers_stop_exactly_also_where_some_fail_and_are_cancelled_or_within_a_stride(
    options: dict[str, int], num_workers: int, step_runner: Any
) -> None:
    counter = Counter(**options)
    creator = SharedSessionCreator(counter.later if step_runner == "auto" else counter)

    async def work(place: int) -> None:
        hooks = [StopAtStepHook(last_step=200)]
        with anyio.CancelScope() as scope:
            async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
                while not session.should_stop():
                    with suppress(ValueError):
                        await session.run([])
                    await anyio.lowlevel.checkpoint()
                    if counter.fail_every and place % 3 == 1 and session.global_step.value > 50:
                        scope.cancel()

    async with anyio.create_task_group() as group:
        for place in range(num_workers):
            group.start_soon(work, place)
    assert 200 <= counter.value < 200 + counter.stride


async def test_num_steps_counts_from_the_step_found_and_not_again_on_recovery() -> None:
    outcomes = [None, None, PreemptionError("lost")]

    def step() -> dict[str, int]:
        if error := outcomes.pop(0) if outcomes else None:
            raise error
        return {}

    creator = FunctionSessionCreator(step, initial_step=100)
    recovery = Recovery(first_pause_secs=0)
    session = await run_session([StopAtStepHook(num_steps=5)], creator, recovery=recovery)
    assert session.global_step.value == 105


async def test_each_hook_stops_its_own_session_and_the_largest_limit_holds() -> None:
    creator, ran = SharedSessionCreator(suspending_step), {10: 0, 40: 0}

    async def work(last_step: int) -> None:
        def count(run_context: object, run_values: object) -> None:
            ran[last_step] += 1

        hooks = [StopAtStepHook(last_step=last_step), at(after_run=count)]
        session = await run_session(hooks, creator)
        assert session.global_step.value >= last_step

    async with anyio.create_task_group() as group:
        group.start_soon(work, 10)
        group.start_soon(work, 40)
    assert ran[10] < 10
    assert ran[10] + ran[40] == 40
