"""One rule for stopping: after any stop that was asked for, the next run ends the block cleanly.

And `session.stop_reason`: what ended training, and why.
"""

import threading
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedFnHook,
    MonitoredSession,
    Recovery,
    SessionRunContext,
    SharedSessionCreator,
    StepContext,
    StopReason,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.faults import LOOPS
from ..support.helpers import KeepsCoord, counting_creator, in_task, settle, turns
from ..support.moments import (
    NOW,
    at,
    counting,
    losing,
    losing_step,
    lost,
    moments_of,
    scripted,
)
from ..support.stop_requests import AT, REASON, WAYS, Training

KINDS = pytest.mark.parametrize("kind", ["plain", "async"])


def step_of(kind: str, calls: list[int]) -> Any:
    def step(x: int = 0) -> dict[str, int]:
        calls.append(x)
        return {"calls": len(calls)}

    async def suspends(x: int = 0) -> dict[str, int]:
        await turns()
        return step(x)

    return step if kind == "plain" else suspends


async def run_refused(session: MonitoredSession) -> None:
    await session.run([])
    raise AssertionError("it ran")


@KINDS
@pytest.mark.parametrize("way", WAYS)
async def test_the_run_after_a_stop_ends_the_block_and_no_other_worker_s(
    way: str, kind: str
) -> None:
    calls, training = list[int](), Training(way)
    creator = SharedSessionCreator(step_of(kind, calls))
    async with MonitoredSession([], creator) as other:
        await training.run(creator)
        training.check()
        assert len(calls) == AT
        assert moments_of(training.hooks[0]).count("before_run") == AT, "none of one refused"
        if training.asks.error is None:
            assert await other.run("calls") == AT + 1
            assert other.stop_reason is None
        else:
            assert other.should_stop(), "an error of one worker stops all"


@pytest.mark.parametrize("anyio_backend", LOOPS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_stop_for_all_ends_every_block(way: str) -> None:
    calls, training = list[int](), Training(way, 3, all_workers=True)
    await training.run(SharedSessionCreator(step_of("plain", calls)))
    training.check()
    assert len(calls) == sum(training.num_runs)


async def test_runs_go_on_when_the_coordinator_s_stop_is_cleared_unless_a_hook_has_asked() -> None:
    def stop(run_context: SessionRunContext, run_values: Any) -> None:
        if run_context.step == 2:
            run_context.request_stop("enough")

    keeps = KeepsCoord()
    async with counting(keeps, at(after_run=stop)) as session:
        for _ in range(2):
            keeps.coord.request_stop()
            with pytest.raises(StopTraining, match="after a stop, by the coordinator"):
                await session.run([])
            keeps.coord.clear_stop()
            assert not session.should_stop()
            await session.run([])
        keeps.coord.request_stop()
        keeps.coord.clear_stop()
        with pytest.raises(StopTraining, match="by after_run of At: enough"):
            await session.run([])


@pytest.mark.parametrize("by_hook", [False, True])
async def test_a_stop_before_or_in_opening_lets_no_run_begin(by_hook: bool) -> None:
    def stop(raw: Any, coord: Any) -> None:
        if by_hook:
            coord.request_stop(reason=REASON)

    hook = RecordingHook("a")
    session = counting(hook, at(after_create_session=stop))
    if not by_hook:
        session.request_stop(REASON)
    async with session:
        assert session.should_stop()
        await run_refused(session)
    assert moments_of(hook) == ["begin", "after_create_session", "end"]
    assert session.stop_reason is REASON


async def test_a_stop_of_another_thread_reaches_a_loop_that_never_waits() -> None:
    has_run = threading.Event()

    def ask() -> None:
        has_run.wait(10)
        session.request_stop(REASON)

    thread = threading.Thread(target=ask)
    thread.start()
    async with MonitoredSession([], counting_creator(), step_runner="inline") as session:
        with anyio.fail_after(10):
            while True:
                await session.run([])
                has_run.set()
    thread.join()
    assert session.stop_reason is REASON


async def test_hooks_and_the_body_may_run_the_raw_session_after_a_stop() -> None:
    calls: list[int] = []
    async with counting(at(end=lambda raw: calls.append(raw.run("calls")))) as session:
        session.request_stop(REASON, all_workers=True)
        calls.append(session.raw_session().run("calls"))
        await run_refused(session)
    assert calls == [1, 2]


async def test_run_step_fn_does_not_refuse_but_its_runs_with_hooks_do() -> None:
    log: list[str] = []

    async def step_fn(step_context: StepContext) -> None:
        log.append(f"raw {step_context.session.run('calls')}")
        await step_context.run_with_hooks([])
        log.append("with hooks")
        session.request_stop(REASON)
        with pytest.raises(StopTraining, match="no run begins after a stop"):
            await step_context.run_with_hooks([])

    async with counting() as session:
        await session.run_step_fn(step_fn)
        await session.run_step_fn(step_fn)
        raise AssertionError("it ran with hooks")
    assert log == ["raw 1", "with hooks", "raw 3"]


async def test_a_stop_that_was_asked_for_for_good_needs_no_recovery_first() -> None:
    hook, raws = KeepsCoord(), [ScriptedSession(), ScriptedSession()]
    async with scripted(raws, hook) as session:
        hook.coord.request_stop(lost())
        session.request_stop(REASON)
        await run_refused(session)
    assert session.stop_reason is REASON
    assert not raws[1].is_closed, "it was never made"


async def test_a_run_that_is_lost_after_a_stop_is_not_made_again_once_recreated() -> None:
    def step() -> dict[str, int]:
        session.request_stop(REASON)
        raise lost()

    hook = RecordingHook("a")
    async with MonitoredSession([hook], step, recovery=NOW) as session:
        await run_refused(session)
    assert moments_of(hook) == [
        "begin", "after_create_session", "before_run", "after_create_session", "end",
    ]  # fmt: skip
    assert session.stop_reason is REASON


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_hook_s_stop_for_all_holds_over_a_recovery_and_reaches_its_coordinator_last(
    is_lost: bool,
) -> None:
    def stop(run_context: SessionRunContext, run_values: Any) -> None:
        run_context.request_stop(REASON, all_workers=True)

    keeps, seen = KeepsCoord(), list[bool]()
    acts = at(after_run=stop, end=lambda _: seen.append(keeps.coord.should_stop()))
    raws = [ScriptedSession(), ScriptedSession()]
    async with scripted(raws, keeps, acts) as session:
        await session.run([])
        assert session.should_stop()
        if is_lost:
            keeps.coord.request_stop(lost())
        await run_refused(session)
    assert session.stop_reason is REASON
    assert seen == [is_lost]


async def test_a_side_task_s_stop_for_all_holds_while_its_raw_session_is_replaced() -> None:
    """It stops all workers as soon as its raw session is given up."""
    keeps, shared = KeepsCoord(), SharedSessionCreator(losing_step(1))

    async def stop(coord: Any) -> None:
        await coord.wait_stopped()
        coord.request_stop(reason=REASON, all_workers=True)

    async with MonitoredSession([keeps], shared) as a, MonitoredSession([], shared) as b:
        keeps.coord.start_soon(stop, keeps.coord)
        await settle()
        await run_refused(a)
    assert a.stop_reason is b.stop_reason is REASON


@pytest.mark.parametrize("asks", ["when open", "before opening", "after closing"])
async def test_a_stop_for_all_holds_for_later_workers_until_the_last_has_closed(asks: str) -> None:
    creator, hook = SharedSessionCreator(counting_creator()), RecordingHook("a")
    for _ in range(2):
        async with MonitoredSession([], creator) as first:
            assert not first.should_stop()
            asking = MonitoredSession([], creator)
            if asks == "before opening":
                asking.request_stop(REASON, all_workers=True)
            async with asking:
                if asks == "when open":
                    asking.request_stop(REASON, all_workers=True)
            if asks == "after closing":
                asking.request_stop(REASON, all_workers=True)
            assert first.stop_reason is REASON
            async with MonitoredSession([hook], creator) as late:
                with pytest.raises(StopTraining):
                    await late.global_step.wait_for(5)
                await run_refused(late)
            assert late.stop_reason is REASON
        assert moments_of(hook)[-3:] == ["begin", "after_create_session", "end"]
    asking.request_stop(REASON, all_workers=True)  # none is open: there is nothing to stop
    async with MonitoredSession([], creator) as fresh, MonitoredSession([], dict) as unshared:
        unshared.request_stop(all_workers=True)
        assert (fresh.should_stop(), unshared.should_stop()) == (False, True)


async def test_the_first_reason_stays_where_an_input_ends_or_all_workers_are_stopped() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as one, MonitoredSession([], creator) as other:
        one.request_stop("enough of one")
        other.request_stop(StopReason("a", "b"), all_workers=True)
        other.request_stop("again")
        raise StopTraining("of my own")
    assert str(one.stop_reason) == "session.request_stop: enough of one"
    assert str(other.stop_reason) == "a: b"


async def test_a_stop_in_the_pause_before_a_recovery_leaves_as_the_loss() -> None:
    """There is no session left that could end cleanly: what was not saved is lost."""
    away = lost("still away")
    creator = ScriptedSessionCreator([losing()[0], away, away, ScriptedSession()])
    recovery = Recovery(first_pause_secs=60.0, longest_pause_secs=60.0)
    session = MonitoredSession([], creator, recovery=recovery)

    async def host() -> None:
        async with session:
            await session.run([])

    with anyio.fail_after(10):
        async with in_task(host) as left:
            session.request_stop(REASON)
    assert left.error is away
    assert session.stop_reason is REASON


@KINDS
async def test_a_refused_run_reads_no_item_of_the_input(kind: str) -> None:
    items, seen = iter(range(100)), list[int]()
    hooks = [FeedFnHook(lambda: {"x": next(items)})]
    async with MonitoredSession(hooks, step_of(kind, seen)) as session:
        for number in range(10):
            if number == AT:
                session.request_stop(REASON)
            await session.run([])
    assert seen == [0, 1, 2]
    assert next(items) == 3
    seen.clear()
    async with MonitoredSession([], step_of(kind, seen)) as session:
        async for x in session.batches(range(100)):
            await session.run([], {"x": x})
            if len(seen) == AT:
                session.request_stop(REASON)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("given", ["enough", None])
async def test_the_hook_that_asked_first_is_named_with_its_reason_and_later_ones_see_it(
    given: str | None,
) -> None:
    seen: list[bool] = []

    def stop(run_context: SessionRunContext, run_values: Any) -> None:
        seen.append(run_context.stop_requested)
        run_context.request_stop(given if len(seen) == 1 else "too late")

    async with counting(at(after_run=stop), at(after_run=stop)) as session:
        assert session.stop_reason is None
        await session.run([])
    assert session.stop_reason == StopReason("after_run of At", given or "no reason given")
    assert seen == [False, True]
