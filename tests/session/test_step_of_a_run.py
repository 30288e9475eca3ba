"""`run_context.step`: the global step that a run made, whatever other workers have done since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
)

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


def counting(num: int = 0) -> Callable[[], dict[str, int]]:
    """A step function that returns the global step that its call makes."""

    def step() -> dict[str, int]:
        nonlocal num
        num += 1
        return {"made": num}

    return step


def counting_async() -> Callable[[], Awaitable[dict[str, int]]]:
    step = counting()

    async def step_async() -> dict[str, int]:
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        return step()

    return step_async


async def train(
    step: Callable[[], Any], *, num_workers: int = 4, last_step: int = 40, **options: Any
) -> list[Compares]:
    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=num_workers)
    hooks = [Compares() for _ in range(num_workers)]

    async def work(hook: Compares) -> None:
        stop = StopAtStepHook(last_step=last_step)
        async with MonitoredSession([hook, stop], creator, **options) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for hook in hooks:
            group.start_soon(work, hook)
    return hooks


@pytest.mark.parametrize("make_step", [counting, counting_async])
@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
async def test_a_run_knows_its_own_step_while_others_go_on(
    make_step: Callable[[], Any], runner: str
) -> None:
    hooks = await train(make_step(), step_runner=runner)

    seen = [each for hook in hooks for each in hook.seen]
    assert [step for step, made in seen if step != made] == []
    assert sorted(step for step, _ in seen) == list(range(1, 41))
    current = [each for hook in hooks for each in hook.current]
    assert current != [step for step, _ in seen]  # the others did go on


async def test_a_step_that_the_function_names_is_that_of_the_run() -> None:
    made = 0

    def step() -> Mapping[str, int]:
        nonlocal made
        made += 3
        return {"made": made, "global_step": made}

    hooks = await train(step, last_step=30)

    assert sorted(hooks[0].seen + hooks[1].seen + hooks[2].seen + hooks[3].seen) == [
        (each, each) for each in range(3, 31, 3)
    ]


async def test_the_step_of_a_run_is_that_of_the_attempt_that_was_made() -> None:
    """A run that fails, and is caught, leaves nothing behind for the next one."""
    failed = False

    def step() -> dict[str, int]:
        nonlocal failed
        if len(hook.seen) == 2 and not failed:
            failed = True
            raise ValueError("bad batch")
        return {"made": len(hook.seen) + 1}

    hook = Compares()
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        for _ in range(2):
            await session.run([])
        with pytest.raises(ValueError, match="bad batch"):
            await session.run([])
        await session.run([])

    assert hook.seen == [(1, 1), (2, 2), (3, 3)]


def test_by_hand_it_is_the_step_of_the_session() -> None:
    class Raw:
        def __init__(self) -> None:
            from asynchooks import GlobalStep

            self.global_step = GlobalStep(7)

    raw = Raw()
    context = SessionRunContext(SessionRunArgs(None), raw)

    assert context.step == 7
    raw.global_step.publish(8)
    assert context.step == 8
