"""Whatever fails, wherever: the right error leaves, every hook is told, nothing stays open."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    Coordinator,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

pytestmark = pytest.mark.anyio

MOMENTS = ["begin", "after_create_session", "before_run", "step", "after_run", "end", "side task"]


class FaultError(Exception):
    """What is made to happen."""


class Faulty(SessionRunHook):
    """Fails, or is cancelled, at one moment, and counts what it is told."""

    def __init__(self, moment: str, fault: str, scope: anyio.CancelScope) -> None:
        self.moment = moment
        self.fault = fault
        self.scope = scope
        self.begun = self.ended = self.told = 0
        self.error = FaultError(f"{fault} in {moment}")

    async def at(self, moment: str) -> None:
        await anyio.lowlevel.checkpoint()
        if moment != self.moment:
            return
        if self.fault == "error":
            raise self.error
        if self.fault == "input ends":
            raise StopAsyncIteration
        self.scope.cancel()
        await anyio.lowlevel.checkpoint()

    async def begin(self) -> None:
        self.begun += 1
        await self.at("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        if self.moment == "side task":
            coord.start_soon(self.at, "side task")
        await self.at("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        await self.at("before_run")
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self.at("after_run")

    async def end(self, session: Any) -> None:
        self.ended += 1
        await self.at("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await anyio.lowlevel.checkpoint()
        self.told += 1


async def train(hooks: list[Faulty], creator: Any, scope: anyio.CancelScope) -> Any:
    """Train for three steps; returns (what left, whether the block was left cleanly)."""
    try:
        with scope:
            async with MonitoredSession(hooks, creator, 5) as session:
                for _ in range(3):
                    await session.run([])
                await anyio.lowlevel.checkpoint()
            return None, True
    except Exception as error:
        return error, False
    return None, False


def script_of(moment: str, fault: str, error: Exception) -> list[Any]:
    if moment != "step" or fault == "cancel":
        return []
    return [{}, error if fault == "error" else StopAsyncIteration()]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", ["error", "input ends", "cancel"])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_fault_at_one_moment(moment: str, fault: str, place: int) -> None:
    scope = anyio.CancelScope()
    hooks = [Faulty(moment if i == place else "", fault, scope) for i in range(3)]
    boom = hooks[place].error
    raw = ScriptedSession(script_of(moment, fault, boom))
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    error, is_clean = await train(hooks, creator, scope)
    if moment == "step" and fault == "cancel":
        assert is_clean  # nothing in this program cancels there
    elif fault == "error":
        assert error is boom
    elif fault == "cancel":
        assert scope.cancelled_caught or moment == "side task"
    elif moment in ("before_run", "step"):
        assert is_clean
    elif moment == "side task":
        assert type(error) is StopAsyncIteration or isinstance(error, RuntimeError)
    else:
        assert isinstance(error, RuntimeError)
        assert f"{moment} of Faulty raised" in str(error)
    begun = [hook.begun for hook in hooks]
    assert begun == [1] * sum(begun) + [0] * (3 - sum(begun))
    if is_clean:
        assert [hook.ended for hook in hooks] == [1, 1, 1]
        assert [hook.told for hook in hooks] == [0, 0, 0]
    else:
        assert [hook.told for hook in hooks] == begun
    assert raw.is_closed or moment == "begin"
    statistics = creator.lease().global_step.statistics()
    assert (statistics.tickets, statistics.workers_open) == (0, 0)


@given(
    faults=st.lists(
        st.tuples(st.sampled_from(MOMENTS), st.sampled_from(["error", "cancel", "none"])),
        min_size=1,
        max_size=6,
    )
)
async def test_many_workers_with_many_faults(faults: list[tuple[str, str]]) -> None:
    raw = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    all_hooks: list[list[Faulty]] = []
    outcomes: list[Any] = []

    async def worker(moment: str, fault: str) -> None:
        scope = anyio.CancelScope()
        hooks = [
            Faulty("", "", scope),
            Faulty(moment if fault != "none" else "", fault, scope),
        ]
        all_hooks.append(hooks)
        outcomes.append((hooks[1], await train(hooks, creator, scope)))

    async with anyio.create_task_group() as group:
        for moment, fault in faults:
            group.start_soon(worker, moment, fault)
    for hook, (error, is_clean) in outcomes:
        must_fail = hook.fault == "error" and hook.moment not in ("", "step")
        assert error is (hook.error if must_fail else None)
        assert is_clean or hook.moment not in ("", "step")
    for hooks in all_hooks:
        for hook in hooks:
            assert hook.ended <= 1
            assert hook.told <= hook.begun == 1 or hook.begun == 0
            assert hook.told + hook.ended >= hook.begun
    assert raw.is_closed or raw.num_runs == 0
    statistics = creator.lease().global_step.statistics()
    assert (statistics.tickets, statistics.workers_open) == (0, 0)


async def test_a_stop_by_step_fn_is_no_fault() -> None:
    hook = Faulty("", "", anyio.CancelScope())
    creator = ScriptedSessionCreator([ScriptedSession()])
    async with MonitoredSession([hook], creator):
        raise StopTraining
    assert (hook.ended, hook.told) == (1, 0)
