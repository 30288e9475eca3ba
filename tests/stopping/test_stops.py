"""One rule for stopping: after any stop that was asked for, the next run ends the block cleanly."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    EarlyStoppingHook,
    EvaluationHook,
    FeedFnHook,
    FinalOpsHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StopAtStepHook,
    StopReason,
    StopTraining,
    TimeLimitHook,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, counting_creator, counting_step, settle
from ..support.stop_requests import AT, ERROR, REASON, WAYS, Asks, Training, call_in_thread

pytestmark = pytest.mark.anyio

KINDS = ["plain", "async"]


def creator_of(kind: str, calls: list[int]) -> FunctionSessionCreator:
    def step() -> dict[str, int]:
        calls.append(len(calls) + 1)
        return {"calls": len(calls)}

    async def suspends() -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return step()

    return FunctionSessionCreator(step if kind == "plain" else suspends)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
async def test_the_run_after_a_stop_ends_the_block(way: type[Asks], kind: str) -> None:
    calls: list[int] = []
    training = Training(way, 1, all_workers=False)
    await training.run(MonitoredSession, creator_of(kind, calls), "calls")
    training.check()
    assert len(calls) == AT
    moments = [moment for _, moment in training.hooks[0].log]
    assert moments.count("before_run") == AT, "none of a run that is refused"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
async def test_a_stop_for_all_ends_every_block(
    way: type[Asks], num_workers: int, kind: str
) -> None:
    calls: list[int] = []
    creator = SharedSessionCreator(creator_of(kind, calls))
    training = Training(way, num_workers, all_workers=True)
    await training.run(MonitoredSession, creator, "calls")
    training.check()
    assert len(calls) == sum(training.num_runs)


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_for_all_ends_every_block_on_uvloop(way: type[Asks]) -> None:
    pytest.importorskip("uvloop")

    async def main() -> None:
        training = Training(way, 3, all_workers=True)
        creator = SharedSessionCreator(creator_of("plain", []))
        await training.run(MonitoredSession, creator, "calls")
        training.check()

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})


@pytest.mark.parametrize("way", [each for each in WAYS if each.error is None])
async def test_a_plain_stop_is_one_worker_s(way: type[Asks]) -> None:
    creator = SharedSessionCreator(counting_creator())
    asks = way(all_workers=False)
    async with MonitoredSession([], creator) as other:
        async with MonitoredSession([asks], creator) as session:
            while True:
                await session.run([])
                await asks.between(session)
        assert asks.num_runs == AT
        assert not other.should_stop()
        assert await other.run("calls") == AT + 1
    assert other.stop_reason is None


@pytest.mark.parametrize(
    ("hook", "at_most"),
    [
        (StopAtStepHook(last_step=5), 5),
        (StopAtStepHook(num_steps=5), 5),
        (EarlyStoppingHook("loss", patience=4), 5),
        (TimeLimitHook(0.01), 10**6),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_a_loop_that_never_looks_at_should_stop_ends_by_each_hook(
    hook: SessionRunHook, at_most: int
) -> None:
    num_runs = 0
    async with MonitoredSession([hook], FunctionSessionCreator(lambda: {"loss": 1.0})) as session:
        for _ in range(10**7):
            await session.run("loss")
            num_runs += 1
    assert 1 <= num_runs <= at_most
    assert num_runs == at_most or isinstance(hook, TimeLimitHook)
    assert session.stop_reason is not None


async def test_the_refusal_says_why() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        session.request_stop("the user has pressed a key")
        for _ in range(2):
            with pytest.raises(
                StopTraining,
                match=r"no run begins after a stop, by session.request_stop: the user has",
            ):
                await session.run([])


async def test_runs_go_on_when_the_coordinator_s_stop_is_cleared() -> None:
    hook = KeepsCoord()
    async with MonitoredSession([hook], counting_creator()) as session:
        for _ in range(2):
            hook.coord.request_stop()
            assert session.should_stop()
            with pytest.raises(StopTraining, match="after a stop, by the coordinator"):
                await session.run([])
            hook.coord.clear_stop()
            assert not session.should_stop()
            await session.run([])


async def test_a_hook_s_stop_outlasts_one_of_the_coordinator_that_is_cleared() -> None:
    class Stops(KeepsCoord):
        async def before_run(self, run_context: SessionRunContext) -> None:
            run_context.request_stop("enough")

    hook = Stops()
    async with MonitoredSession([hook], counting_creator()) as session:
        await session.run([])
        hook.coord.request_stop()
        hook.coord.clear_stop()
        with pytest.raises(StopTraining, match="by before_run of Stops: enough"):
            await session.run([])


async def test_a_stop_before_opening_lets_no_run_begin() -> None:
    log: list[tuple[str, str]] = []
    session = MonitoredSession([RecordingHook("a", log)], counting_creator())
    session.request_stop(REASON)
    async with session:
        assert session.should_stop()
        await session.run([])
    assert [moment for _, moment in log] == ["begin", "after_create_session", "end"]
    assert session.stop_reason is REASON


async def test_a_stop_in_after_create_session_lets_no_run_begin() -> None:
    class Stops(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.request_stop(reason=REASON)

    async with MonitoredSession([Stops()], counting_creator()) as session:
        await session.run([])
        raise AssertionError("it ran")
    assert session.stop_reason is REASON


async def test_a_run_under_way_completes_when_the_caller_asks() -> None:
    begun, may_end = anyio.Event(), anyio.Event()

    async def step() -> dict[str, int]:
        begun.set()
        await may_end.wait()
        return {"loss": 1}

    hook = RecordingHook("a")

    async def ask() -> None:
        await begun.wait()
        session.request_stop(REASON)
        may_end.set()

    results = []
    async with anyio.create_task_group() as group:
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            group.start_soon(ask)
            for _ in range(5):
                results.append(await session.run("loss"))
    assert results == [1]
    assert [moment for _, moment in hook.log[-3:]] == ["before_run", "after_run", "end"]


async def test_a_stop_of_another_thread_reaches_a_loop_that_never_waits() -> None:
    num_runs = 0
    async with MonitoredSession([], counting_creator(), step_runner="inline") as session:
        timer = threading.Timer(0.05, session.request_stop, (REASON,))
        timer.start()
        with anyio.fail_after(10):
            while True:
                await session.run([])
                num_runs += 1
    timer.join()
    assert num_runs > 1
    assert session.stop_reason is REASON


async def test_hooks_may_run_the_raw_session_in_end_after_a_stop() -> None:
    class RunsAtEnd(SessionRunHook):
        async def end(self, session: Any) -> None:
            self.calls = session.run("calls")

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        async with session.global_step.exclusive():
            return {"step": step}

    final, at_end = FinalOpsHook("calls"), RunsAtEnd()
    evaluation = EvaluationHook(evaluate, every_n_steps=100)
    async with MonitoredSession([final, evaluation, at_end], counting_creator()) as session:
        await session.run([])
        session.request_stop(REASON, all_workers=True)
        await session.run([])
    assert final.final_ops_values == 1
    assert evaluation.latest == {"step": 1}
    assert at_end.calls == 2


async def test_the_raw_session_still_runs_in_the_body() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        session.request_stop()
        assert session.raw_session().run("calls") == 1


async def test_run_step_fn_does_not_refuse_but_its_runs_with_hooks_do() -> None:
    log: list[str] = []

    async def step_fn(step_context: StepContext) -> None:
        log.append(f"raw {step_context.session.run('calls')}")
        await step_context.run_with_hooks([])
        log.append("with hooks")

    async with MonitoredSession([], counting_creator()) as session:
        await session.run_step_fn(step_fn)
        session.request_stop(REASON)
        await session.run_step_fn(step_fn)
        raise AssertionError("it ran with hooks")
    assert log == ["raw 1", "with hooks", "raw 3"]


async def test_a_refused_run_with_hooks_may_be_caught_in_the_step_fn() -> None:
    async def step_fn(step_context: StepContext) -> Any:
        await step_context.run_with_hooks([])
        session.request_stop(REASON)
        with pytest.raises(StopTraining, match="no run begins after a stop"):
            await step_context.run_with_hooks([])
        return step_context.session.run("calls")

    async with MonitoredSession([], counting_creator()) as session:
        assert await session.run_step_fn(step_fn) == 2


NO_PAUSE = Recovery(max_attempts=3, first_pause_secs=0.0)


async def test_a_stop_that_was_asked_for_for_good_needs_no_recovery_first() -> None:
    hook = KeepsCoord()
    raws = [ScriptedSession(), ScriptedSession()]
    creator = ScriptedSessionCreator(raws)
    async with MonitoredSession([hook], creator) as session:
        hook.coord.request_stop(PreemptionError("lost"))
        session.request_stop(REASON)
        await session.run([])
        raise AssertionError("it ran")
    assert session.stop_reason is REASON
    assert not raws[1].is_closed, "it was never made"


async def test_a_run_that_is_lost_after_a_stop_is_not_made_again_once_recreated() -> None:
    class Loses(ScriptedSession):
        def run(self, *args: Any, **options: Any) -> Any:
            session.request_stop(REASON)
            raise PreemptionError("lost")

    log: list[tuple[str, str]] = []
    raws = [Loses(), ScriptedSession()]
    hooks = [RecordingHook("a", log)]
    async with MonitoredSession(hooks, ScriptedSessionCreator(raws), recovery=NO_PAUSE) as session:
        await session.run([])
        raise AssertionError("it ran")
    moments = [moment for _, moment in log]
    assert moments == [
        "begin", "after_create_session", "before_run", "after_create_session", "end",
    ]  # fmt: skip
    assert session.stop_reason is REASON


class StopsAll(KeepsCoord):
    """Stops all workers after a run; `seen` says whether its coordinator had stopped at the end."""

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        run_context.request_stop(REASON, all_workers=True)

    async def end(self, session: Any) -> None:
        self.seen = self.coord.should_stop()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_hook_s_stop_for_all_holds_over_a_recovery_and_reaches_its_coordinator_last(
    is_lost: bool,
) -> None:
    hook = StopsAll()
    raws = [ScriptedSession(), ScriptedSession()]
    async with MonitoredSession([hook], ScriptedSessionCreator(raws)) as session:
        await session.run([])
        assert session.should_stop()
        if is_lost:
            hook.coord.request_stop(PreemptionError("lost"))
        await session.run([])
        raise AssertionError("it ran")
    assert session.stop_reason is REASON
    assert hook.seen is is_lost


async def test_a_side_task_s_stop_for_all_holds_while_its_raw_session_is_replaced() -> None:
    class StopsWhenLost(SessionRunHook):
        """A side task that stops all workers as soon as its raw session is given up."""

        has_begun = False

        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            async def stop() -> None:
                await coord.wait_stopped()
                coord.request_stop(reason=REASON, all_workers=True)

            if not self.has_begun:
                coord.start_soon(stop)
            self.has_begun = True

    calls: list[int] = []

    def step() -> dict[str, int]:
        calls.append(len(calls))
        if len(calls) == 2:
            raise PreemptionError("lost")
        return {}

    shared = SharedSessionCreator(FunctionSessionCreator(step))
    async with MonitoredSession([StopsWhenLost()], shared) as a, MonitoredSession([], shared) as b:
        await a.run([])
        with pytest.raises(StopTraining):
            await a.run([])
        assert a.should_stop()
        assert b.should_stop()
    assert a.stop_reason == b.stop_reason == REASON
    assert len(calls) == 2


async def test_a_worker_that_opens_while_a_stop_for_all_holds_ends_at_once() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as first:
        first.request_stop(REASON, all_workers=True)
        log: list[tuple[str, str]] = []
        async with MonitoredSession([RecordingHook("a", log)], creator) as second:
            assert second.should_stop()
            with pytest.raises(StopTraining):
                await second.global_step.wait_for(5)
            await second.run([])
            raise AssertionError("it ran")
        assert [moment for _, moment in log] == ["begin", "after_create_session", "end"]
        assert second.stop_reason is REASON


async def test_a_stop_for_all_is_forgotten_with_the_last_worker() -> None:
    creator = SharedSessionCreator(counting_creator())
    for number in range(3):
        async with MonitoredSession([], creator) as first, MonitoredSession([], creator) as second:
            assert [first.should_stop(), second.should_stop()] == [False, False]
            assert await first.run("calls") == number + 1
            second.request_stop(REASON, all_workers=True)
            await first.run([])
            raise AssertionError("it ran")
        assert first.stop_reason is second.stop_reason is REASON


async def test_a_worker_that_asked_before_opening_stops_all_when_it_opens() -> None:
    creator = SharedSessionCreator(counting_creator())
    late = MonitoredSession([], creator)
    late.request_stop(REASON, all_workers=True)
    async with MonitoredSession([], creator) as first:
        await first.run([])
        # those that are open are stopped at once
        with pytest.raises(StopTraining):
            late.request_stop(REASON, all_workers=True)
            await first.run([])
    async with MonitoredSession([], creator) as other:
        await other.run([])
        async with late:
            assert other.should_stop()
            await late.run([])
            raise AssertionError("it ran")
        assert other.stop_reason is REASON


async def test_a_closed_session_may_still_stop_the_others() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as other:
        async with MonitoredSession([], creator) as first:
            pass
        first.request_stop(REASON, all_workers=True)
        assert other.stop_reason is REASON
    first.request_stop(REASON, all_workers=True)  # none is open: there is nothing to stop
    async with MonitoredSession([], creator) as fresh:
        assert not fresh.should_stop()


async def test_a_stop_for_all_of_an_unshared_creator_is_a_plain_one() -> None:
    async with (
        MonitoredSession([], counting_creator()) as one,
        MonitoredSession([], counting_creator()) as other,
    ):
        one.request_stop(all_workers=True)
        assert one.should_stop()
        assert not other.should_stop()


async def test_the_first_stop_for_all_gives_the_reason() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as one, MonitoredSession([], creator) as other:
        one.request_stop("first", all_workers=True)
        other.request_stop("second", all_workers=True)
        async with MonitoredSession([], creator) as third:
            pass
    reasons = {str(each.stop_reason) for each in (one, other, third)}
    assert reasons == {"session.request_stop: first"}


async def test_a_stop_for_all_ends_the_waits_of_all() -> None:
    creator = SharedSessionCreator(counting_creator())
    ended: list[str] = []

    async def waits(how: str) -> None:
        async with MonitoredSession([], creator) as session:
            if how == "step":
                await session.global_step.wait_for(100)
            else:
                await session.or_stop(anyio.sleep_forever)
        ended.append(how)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(waits, "step")
            group.start_soon(waits, "elsewhere")
            await settle()
            async with MonitoredSession([], creator) as session:
                session.request_stop(REASON, all_workers=True)
    assert sorted(ended) == ["elsewhere", "step"]


async def test_a_run_of_another_worker_that_is_under_way_completes() -> None:
    step, calls = counting_step()
    creator = SharedSessionCreator(FunctionSessionCreator(step))
    is_inside, may_go_on = anyio.Event(), anyio.Event()

    class Waits(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            is_inside.set()
            await may_go_on.wait()

    async def other() -> None:
        async with MonitoredSession([Waits()], creator) as session:
            assert await session.run("calls") == 2
            await session.run([])
            raise AssertionError("it ran")

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        await is_inside.wait()
        async with MonitoredSession([], creator) as session:
            await session.run([])
            session.request_stop(REASON, all_workers=True)
        may_go_on.set()
    assert calls == [1, 2]


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_stop_for_all_from_a_thread_is_seen_by_workers_in_threads(runner: Any) -> None:
    step, calls = counting_step()
    creator = SharedSessionCreator(FunctionSessionCreator(step))
    sessions = [MonitoredSession([], creator, step_runner=runner) for _ in range(4)]
    ran = [0] * 4

    async def work(i: int) -> None:
        async with sessions[i] as session:
            while True:
                await session.run([])
                ran[i] += 1
                if len(calls) >= 40 and i == 2:
                    call_in_thread(lambda: session.request_stop(REASON, all_workers=True))
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for i in range(4):
                group.start_soon(work, i)
    assert sum(ran) == len(calls)
    assert {each.stop_reason for each in sessions} == {REASON}


async def test_a_side_task_that_fails_is_named_to_all_workers() -> None:
    creator = SharedSessionCreator(counting_creator())
    sessions = [MonitoredSession([], creator) for _ in range(3)]

    async def fail() -> None:
        raise ERROR

    async with sessions[0], sessions[1]:
        with pytest.raises(OSError, match="gone"):
            async with sessions[2]:
                sessions[2].start_soon(fail, name="rollouts")
                await settle()
                await sessions[2].run([])
        with pytest.raises(StopTraining, match="the side task 'rollouts'"):
            await sessions[0].run([])
    assert {str(each.stop_reason) for each in sessions} == {f"the side task 'rollouts': {ERROR!r}"}


@pytest.mark.parametrize("looks", [False, True])
async def test_the_limit_is_worded_in_one_way_however_the_block_ends(looks: bool) -> None:
    creator = SharedSessionCreator(counting_creator())
    sessions = [MonitoredSession([StopAtStepHook(last_step=9)], creator) for _ in range(3)]

    async def work(session: MonitoredSession) -> None:
        async with session:
            while not (looks and session.should_stop()):
                await session.run([])
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(work, session)
    reasons = {str(each.stop_reason) for each in sessions}
    assert reasons == {"the limit: global_step is at 9 of 9"}


async def test_a_smaller_last_step_is_worded_in_one_way_however_it_is_seen() -> None:
    creator = SharedSessionCreator(counting_creator())
    small = [MonitoredSession([StopAtStepHook(last_step=3)], creator) for _ in range(2)]
    async with MonitoredSession([StopAtStepHook(last_step=5)], creator):
        async with small[0]:
            async with small[1]:
                for _ in range(3):  # by the third run's after_run
                    await small[1].run([])
                await small[1].run([])
            await small[0].run([])  # before its first run
    reasons = {str(each.stop_reason) for each in small}
    assert reasons == {"StopAtStepHook: global_step has reached 3"}


async def test_an_input_s_end_after_a_stop_keeps_the_reason() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        session.request_stop(REASON)
        raise StopTraining("of my own")
    assert session.stop_reason == REASON


async def test_a_worker_stopped_by_a_plain_request_keeps_its_reason_when_all_are_stopped() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as one, MonitoredSession([], creator) as other:
        one.request_stop("enough of one")
        other.request_stop(StopReason("a", "b"), all_workers=True)
    assert str(one.stop_reason) == "session.request_stop: enough of one"
    assert str(other.stop_reason) == "a: b"


async def test_a_stop_in_the_pause_before_a_recovery_leaves_as_the_loss() -> None:
    """There is no session left that could end cleanly: what was not saved is lost."""
    lost, away = PreemptionError("lost"), PreemptionError("still away")
    creator = ScriptedSessionCreator([ScriptedSession([{}, lost]), away, away, ScriptedSession()])
    recovery = Recovery(first_pause_secs=60.0, longest_pause_secs=60.0)
    session = MonitoredSession([], creator, recovery=recovery)

    async def ask() -> None:
        await settle()
        session.request_stop(REASON)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            with pytest.raises(PreemptionError, match="still away"):
                async with session:
                    await session.run([])
                    group.start_soon(ask)
                    await session.run([])
    assert session.stop_reason is REASON


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_run_reads_no_item_of_the_input(kind: str) -> None:
    items = iter(range(100))
    seen: list[int] = []

    def step(x: int) -> dict[str, int]:
        seen.append(x)
        return {"x": x}

    async def suspends(x: int) -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return step(x)

    hooks = [FeedFnHook(lambda: {"x": next(items)})]
    creator = FunctionSessionCreator(step if kind == "plain" else suspends)
    async with MonitoredSession(hooks, creator) as session:
        for number in range(10):
            if number == AT:
                session.request_stop(REASON)
            await session.run("x")
    assert seen == [0, 1, 2]
    assert next(items) == 3


async def test_a_loop_over_batches_and_one_that_feeds_end_alike() -> None:
    source = range(100)
    seen: list[int] = []
    async with MonitoredSession([], FunctionSessionCreator(lambda x: {"x": x})) as session:
        async for x in session.batches(source):
            seen.append(await session.run("x", {"x": x}))
            if len(seen) == AT:
                session.request_stop(REASON)
    assert seen == [0, 1, 2]


async def test_a_loop_that_swallows_the_end_of_training_lets_others_run() -> None:
    num_refused = 0
    async with MonitoredSession([StopAtStepHook(last_step=2)], counting_creator()) as session:
        with anyio.move_on_after(0.05) as scope:
            while True:
                try:
                    await session.run([])
                except Exception:
                    num_refused += 1
    assert scope.cancelled_caught
    assert session.global_step.value == 2
    assert num_refused > 1
