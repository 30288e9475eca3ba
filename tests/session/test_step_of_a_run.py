"""`run_context.step`: the global step that a run made, whatever other workers have done since."""

from typing import Any

import pytest

from asynchooks import (
    GlobalStep,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.helpers import turns
from ..support.moments import at, together, train


@pytest.mark.parametrize("runner", ["inline", "thread", "async"])
@pytest.mark.parametrize("stride", [1, 3])
async def test_a_run_knows_its_own_step_while_others_go_on(stride: int, runner: Any) -> None:
    made, seen, others = 0, list[tuple[int, int]](), list[int]()

    def step() -> dict[str, int]:
        nonlocal made
        made += stride
        return {"made": made, **({"global_step": made} if stride > 1 else {})}

    async def async_step() -> dict[str, int]:
        await turns()
        return step()

    def before_run(run_context: SessionRunContext) -> SessionRunArgs:
        assert run_context.step == run_context.global_step.value
        return SessionRunArgs("made")

    async def after_run(run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.step == 1:
            await run_context.global_step.wait_for(2)  # by another worker
        await turns()
        seen.append((run_context.step, run_values.results))
        others.append(run_context.global_step.value - run_context.step)

    is_async = runner == "async"
    creator = SharedSessionCreator(async_step if is_async else step, num_workers=4)

    async def work() -> None:
        hooks = [at(before_run=before_run, after_run=after_run), StopAtStepHook(last_step=30)]
        name: Any = "auto" if is_async else runner
        async with MonitoredSession(hooks, creator, step_runner=name) as session:
            await train(session)

    await together(*[work] * 4)
    assert sorted(seen) == [(each, each) for each in range(stride, 31, stride)]
    assert stride > 1 or any(others)


def test_by_hand_it_is_the_step_of_the_session() -> None:
    class Raw:
        global_step = GlobalStep(7)

    context = SessionRunContext(SessionRunArgs(None), Raw())
    assert context.step == 7
    Raw.global_step.publish(8)
    assert context.step == 8
