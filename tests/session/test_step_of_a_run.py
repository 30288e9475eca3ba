"""`run_context.step`: the global step that a run made, whatever other workers have done since."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    GlobalStep,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.moments import together

pytestmark = pytest.mark.anyio


class Compares(SessionRunHook):
    """Notes what `run_context` says beside what the step function says."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.current: list[int] = []

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        assert run_context.step == run_context.global_step.value
        return SessionRunArgs("made")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        for _ in range(3):  # meanwhile the others make steps
            await anyio.lowlevel.checkpoint()
        if run_context.step == 1 and run_context.global_step.statistics().workers_open > 1:
            await run_context.global_step.wait_for(2, timeout=5)
        self.seen.append((run_context.step, run_values.results))
        self.current.append(run_context.global_step.value)


@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
@pytest.mark.parametrize("kind", ["plain", "async", "of threes"])
async def test_a_run_knows_its_own_step_while_others_go_on(kind: str, runner: Any) -> None:
    made, stride = 0, 3 if kind == "of threes" else 1

    def step() -> dict[str, int]:
        nonlocal made
        made += stride
        return {"made": made, **({"global_step": made} if stride > 1 else {})}

    async def async_step() -> dict[str, int]:
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        return step()

    creator = SharedSessionCreator(async_step if kind == "async" else step, num_workers=4)
    hooks = [Compares() for _ in range(4)]

    async def work(hook: Compares) -> None:
        stop = StopAtStepHook(last_step=30)
        async with MonitoredSession([hook, stop], creator, step_runner=runner) as session:
            while not session.should_stop():
                await session.run([])

    await together(*(partial(work, hook) for hook in hooks))
    seen = [each for hook in hooks for each in hook.seen]
    assert sorted(seen) == [(each, each) for each in range(stride, 31, stride)]
    current = [each for hook in hooks for each in hook.current]
    if stride == 1:  # the first run has waited for another
        assert current != [step for step, _ in seen]


def test_by_hand_it_is_the_step_of_the_session() -> None:
    class Raw:
        global_step = GlobalStep(7)

    context = SessionRunContext(SessionRunArgs(None), Raw())
    assert context.step == 7
    Raw.global_step.publish(8)
    assert context.step == 8
