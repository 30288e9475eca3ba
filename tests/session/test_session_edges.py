"""Sessions under pressure: several tasks at once, stops and errors at awkward moments."""

import inspect
from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StepContext,
    StopAtStepHook,
)
from asynchooks.data import map_concurrent
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import cancelled_when_settled, in_task, settle, turns
from ..support.moments import HeldStep, at, counting, losing, lost, moments_of, scripted, train


async def test_leaving_waits_for_a_close_in_another_task() -> None:
    """For a run, see tests/explore."""
    may_go_on, log = anyio.Event(), list[str]()

    async def end(session: Any) -> None:
        await may_go_on.wait()
        log.append("end")

    async def go_on() -> None:
        await settle()
        may_go_on.set()

    async with anyio.create_task_group() as group:
        async with counting(at(end=end)) as session:
            group.start_soon(session.close)
            await settle()
            group.start_soon(go_on)
        assert log == ["end"]


async def test_a_side_task_that_fails_behind_a_cancellation_stops_the_other_workers() -> None:
    async def fail() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("in the clean-up")

    creator = SharedSessionCreator(dict)
    async with MonitoredSession([], creator) as other:
        with pytest.raises(ValueError, match="in the clean-up"), anyio.CancelScope() as scope:
            async with MonitoredSession([], creator) as session:
                session.start_soon(fail)
                await settle()
                scope.cancel()
                await anyio.sleep_forever()
        assert other.should_stop()


async def test_a_run_while_the_session_opens_is_refused() -> None:
    may_begin = anyio.Event()
    session = counting(at(begin=may_begin.wait))
    async with in_task(session.__aenter__):
        with pytest.raises(RuntimeError, match="before the session was opened"):
            await session.run([])
        may_begin.set()
    await session.close()
    with pytest.raises(RuntimeError, match="before the session was opened"):
        await counting().__aexit__(None, None, None)


class RecreatesLate(ScriptedSessionCreator):
    """Makes its second raw session only when it may."""

    def __init__(self, raws: list[ScriptedSession]) -> None:
        super().__init__(raws)
        self.raws = raws
        self.may_create = anyio.Event()

    async def create_session(self) -> Any:  # type: ignore[override]
        raw = super().create_session()
        if raw is self.raws[1]:
            with anyio.CancelScope(shield=True):
                await self.may_create.wait()
        return raw


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_run_that_outlives_its_session_brings_no_raw_session_back(is_shared: bool) -> None:
    """A shared one is given back once, and goes to the worker that stays."""
    late = RecreatesLate(losing())
    creator: Any = SharedSessionCreator(late) if is_shared else late
    leaving = MonitoredSession([], creator, 0.05, step_runner="inline")
    staying = MonitoredSession([], creator, step_runner="inline")
    if is_shared:
        await staying.__aenter__()
    await leaving.__aenter__()
    async with in_task(leaving.run, []) as run:
        await leaving.__aexit__(None, None, None)
        late.may_create.set()
    assert "closed while a run recreated it" in str(run.error)
    if is_shared:
        assert not late.raws[1].is_closed
        assert await staying.run([]) == []
        assert staying.raw_session() is late.raws[1]
        await staying.close()
    assert [raw.is_closed for raw in late.raws] == [True, True]


async def test_a_run_cancelled_while_it_recovers_leaves_the_session_usable() -> None:
    may_go_on, raws = anyio.Event(), losing()
    hook = at(after_create_session=lambda _, coord: coord.start_soon(may_go_on.wait))
    creator = ScriptedSessionCreator(raws)
    async with MonitoredSession([hook], creator, step_runner="inline") as session:
        assert await cancelled_when_settled(session.run, [])
        may_go_on.set()
        assert not session.should_stop()
        assert await session.run([]) == []
    assert raws[1].num_runs == 1


async def test_a_session_whose_hooks_were_not_all_called_is_never_handed_out() -> None:
    last, raws = RecordingHook("last"), [*losing(), ScriptedSession()]

    def fail_once(session: Any, coord: Any) -> None:
        if session is raws[1]:
            raise ValueError("in after_create_session")

    hooks = [at(after_create_session=fail_once), last]
    async with scripted(raws, *hooks) as session:
        with pytest.raises(ValueError, match="in after_create_session"):
            await session.run([])
        assert session.should_stop()
        assert await session.run([]) == []
        assert not session.should_stop()
        assert session.raw_session() is raws[2]
    assert moments_of(last).count("after_create_session") == 2
    assert all(raw.is_closed for raw in raws)


@pytest.mark.parametrize("grace_secs", [0.01, 30])
@pytest.mark.parametrize("place", ["step", "step_fn", "map"])
async def test_a_coroutine_that_a_thread_made_too_late_is_closed_and_gives_its_ticket_back(
    place: str, grace_secs: float
) -> None:
    made: list[Any] = []

    async def late() -> dict[str, int]:
        return {"x": 1}

    def make() -> Any:
        made.append(late())
        return made[0]

    held = HeldStep(make)
    creator = FunctionSessionCreator(held if place == "step" else dict)
    session = MonitoredSession([], creator, grace_secs, step_runner="thread")
    acts = {
        "step": lambda: session.run([]),
        "step_fn": lambda: session.run_step_fn(lambda step_context: held()),
        "map": lambda: anext(session.batches(map_concurrent(held, range(3), 1))),
    }

    async def act() -> None:
        async with session:
            await acts[place]()

    await held.cancel_in(act, ends=grace_secs > 1 or place == "map")
    held.may_end.set()
    with anyio.fail_after(20):
        while not made or inspect.getcoroutinestate(made[0]) != inspect.CORO_CLOSED:
            await turns()
        while session.global_step.statistics().tickets:
            await turns()
    assert len(made) == 1


async def test_near_the_limit_a_step_that_never_ends_stops_the_others_short_and_counts_later() -> (
    None
):
    held = HeldStep()

    def step(hangs: bool = False) -> Any:
        return held() if hangs else {}

    creator = SharedSessionCreator(FunctionSessionCreator(step, thread_safe=True))
    hooks = [StopAtStepHook(last_step=10)]
    other = MonitoredSession([], creator, 0.01, step_runner="thread")
    async with MonitoredSession(hooks, creator, 0.01) as session, other:
        await held.cancel_in(other.run, [], {"hangs": True}, ends=False)
        await train(session)
        assert session.global_step.value == 9
        assert session.global_step.statistics().tickets == 1  # the thread still holds it
        held.may_end.set()
        await anyio.to_thread.run_sync(held.thread.join, 5)
        assert session.global_step.statistics().tickets == 0
        assert session.global_step.value == 10


async def test_a_function_that_went_back_with_a_recovery_takes_the_step_back() -> None:
    value = 0

    def step() -> dict[str, int]:
        nonlocal value
        value += 1
        if value == 8:
            value = 4  # its last checkpoint
            raise lost()
        return {"global_step": value}

    seen = []
    async with MonitoredSession([], step) as session:
        for _ in range(9):
            await session.run([])
            seen.append(session.global_step.value)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 5, 6]


async def test_a_run_within_a_step_fn_goes_on_while_another_task_closes_the_session() -> None:
    closing = anyio.Event()

    async def step_fn(step_context: StepContext) -> Any:
        closing.set()
        await settle()
        assert session.should_stop()
        return await step_context.run_with_hooks("calls")

    async def close() -> None:
        await closing.wait()
        await session.__aexit__(None, None, None)

    session = counting()
    await session.__aenter__()
    async with anyio.create_task_group() as group:
        group.start_soon(close)
        assert await session.run_step_fn(step_fn) == 1


async def test_a_step_fn_keeps_the_session_taken_also_between_its_runs() -> None:
    async def step_fn(step_context: StepContext) -> Any:
        await step_context.run_with_hooks([])
        with pytest.raises(RuntimeError, match="another run of this session"):
            await session.run([])
        return await step_context.run_with_hooks("calls")

    async with counting() as session:
        assert await session.run_step_fn(step_fn) == 2
