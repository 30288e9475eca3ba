"""StopAtStepHook: exact among workers, whatever fails or is cancelled."""

import itertools
from contextlib import suppress
from functools import partial
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

from ..support.moments import at, together, train
from .training import run_session, suspending_step


@pytest.mark.parametrize(("num_workers", "step_runner"), [(16, "inline"), (8, "thread")])
async def test_all_workers_stop_exactly_also_where_some_fail_and_are_cancelled(
    num_workers: int, step_runner: Any
) -> None:
    calls, made = itertools.count(1), list[int]()

    def step() -> dict[str, int]:
        call = next(calls)
        if call % 7 == 0:
            raise ValueError("now and then")
        made.append(call)
        return {}

    async def work(place: int) -> None:
        hooks = [StopAtStepHook(last_step=200)]
        with anyio.CancelScope() as scope:
            async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
                while not session.should_stop():
                    with suppress(ValueError):
                        await train(session)
                    if place % 3 == 1 and session.global_step.value > 50:
                        scope.cancel()

    creator = SharedSessionCreator(step)
    await together(*(partial(work, place) for place in range(num_workers)))
    assert len(made) == 200


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

    await together(partial(work, 10), partial(work, 40))
    assert ran[10] < 10
    assert ran[10] + ran[40] == 40
