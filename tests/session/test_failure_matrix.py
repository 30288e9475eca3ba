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
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.faults import EXCEPTIONS, LOOPS, Kind, covering

pytestmark = [pytest.mark.anyio, pytest.mark.exhaustive]

MOMENTS = ["begin", "after_create_session", "before_run", "step", "after_run", "end", "side task"]


class Faulty(SessionRunHook):
    """Fails, or is cancelled, at one moment, and counts what it is told."""

    def __init__(self, moment: str, fault: Kind, scope: anyio.CancelScope) -> None:
        self.moment = moment
        self.fault = fault
        self.scope = scope
        self.begun = self.ended = self.told = 0
        self.has_struck = False
        self.error = fault.new_error(moment)

    async def at(self, moment: str) -> None:
        await anyio.lowlevel.checkpoint()
        if moment != self.moment:
            return
        self.has_struck = True
        if self.fault.is_error:
            raise self.error
        if self.fault is Kind.INPUT_ENDS:
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
    except BaseException as error:
        if not isinstance(error, Exception) and all(error is not each.error for each in hooks):
            raise
        return error, False
    return None, False


def script_of(moment: str, fault: Kind, error: BaseException) -> list[Any]:
    if moment != "step" or fault is Kind.CANCEL:
        return []
    return [{}, error if fault.is_error else StopAsyncIteration()]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", EXCEPTIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_fault_at_one_moment(moment: str, fault: Kind, place: int) -> None:
    await check(moment, fault, place)


@pytest.mark.parametrize(
    ("moment", "fault", "place", "anyio_backend"), covering(MOMENTS, Kind, [0, 1, 2], LOOPS)
)
async def test_one_fault_of_any_kind_at_one_moment(moment: str, fault: Kind, place: int) -> None:
    await check(moment, fault, place)


async def check(moment: str, fault: Kind, place: int) -> None:
    scope = anyio.CancelScope()
    hooks = [Faulty(moment if i == place else "", fault, scope) for i in range(3)]
    boom = hooks[place].error
    raw = ScriptedSession(script_of(moment, fault, boom))
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    error, is_clean = await train(hooks, creator, scope)
    if moment == "step" and fault is Kind.CANCEL:
        assert is_clean  # nothing in this program cancels there
    elif fault.is_error:
        assert error is boom
    elif fault is Kind.CANCEL:
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
    statistics = creator.handle().global_step.statistics()
    assert (statistics.tickets, statistics.workers_open) == (0, 0)


@pytest.mark.parametrize("anyio_backend", LOOPS)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from(MOMENTS),
            st.sampled_from([None, *(kind for kind in Kind if kind is not Kind.INPUT_ENDS)]),
            st.one_of(st.just(0), st.integers(0, 40)),
        ),
        min_size=1,
        max_size=8,
    )
)
async def test_many_workers_with_many_faults(faults: list[tuple[str, Kind | None, int]]) -> None:
    """Each with the moment and the kind of its fault, and turns of the loop until it opens."""
    raws: list[ScriptedSession] = []

    class Creator(SessionCreator):
        def create_session(self) -> ScriptedSession:
            raws.append(ScriptedSession())
            return raws[-1]

    creator = SharedSessionCreator(Creator())
    all_hooks: list[list[Faulty]] = []
    outcomes: list[Any] = []

    async def worker(moment: str, fault: Kind | None, num_turns: int) -> None:
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        scope = anyio.CancelScope()
        hooks = [
            Faulty("", Kind.ERROR, scope),
            Faulty(moment if fault else "", fault or Kind.ERROR, scope),
        ]
        all_hooks.append(hooks)
        outcomes.append((hooks[1], await train(hooks, creator, scope)))

    async with anyio.create_task_group() as group:
        for each in faults:
            group.start_soon(worker, *each)
    for hook, (error, is_clean) in outcomes:
        assert error is (hook.error if hook.has_struck and hook.fault.is_error else None)
        # others that fail may stop a worker before its first run
        must_strike = hook.moment in ("begin", "after_create_session")
        assert hook.has_struck or not must_strike
        assert is_clean or hook.moment not in ("", "step")
    for hooks in all_hooks:
        for hook in hooks:
            assert hook.ended <= 1
            assert hook.told <= hook.begun == 1 or hook.begun == 0
            assert hook.told + hook.ended >= hook.begun
    assert all(raw.is_closed for raw in raws)
    statistics = creator.handle().global_step.statistics()
    assert (statistics.tickets, statistics.workers_open) == (0, 0)


async def test_a_stop_by_step_fn_is_no_fault() -> None:
    hook = Faulty("", Kind.ERROR, anyio.CancelScope())
    creator = ScriptedSessionCreator([ScriptedSession()])
    async with MonitoredSession([hook], creator):
        raise StopTraining
    assert (hook.ended, hook.told) == (1, 0)
