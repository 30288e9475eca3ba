"""Recovery: which errors recreate the raw session, in which order, and within which bounds."""

import sys
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    Restart,
    SessionRunContext,
    SharedSessionCreator,
    StepContext,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession

from ..support.helpers import KeepsCoord, in_task, raises_at
from ..support.moments import (
    NOW,
    HeldStep,
    at,
    counting,
    losing,
    losing_step,
    lost,
    moments_of,
    scripted,
)


async def test_a_lost_session_is_recreated_and_the_run_repeated_hooks_included() -> None:
    raws, hook, keeps, seen = losing(), RecordingHook("a"), KeepsCoord(), list[Any]()
    sees = at(before_run=lambda _: seen.append(sys.exception()))
    async with scripted(raws, hook, keeps, sees) as session:
        async with in_task(session.global_step.wait_for, 1) as waiting:  # no wait ends
            assert await session.run([]) == []
        assert waiting.value == 1
        assert session.raw_session() is raws[1]
        assert session.global_step.epoch == 1
    assert moments_of(hook) == [
        "begin", "after_create_session", "before_run", "after_create_session", "before_run",
        "after_run", "end",
    ]  # fmt: skip
    assert seen == [None, None]  # no error is being handled
    assert raws[0].is_closed
    assert keeps.coords[0] is not keeps.coords[1]
    assert keeps.coords[0].joined


async def test_preemption_while_creating_is_retried_with_a_new_coordinator_each_time() -> None:
    class FailsTwice(KeepsCoord):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            await super().after_create_session(session, coord)
            if len(self.coords) < 3:
                raise lost()

    hook, raws = FailsTwice(), list[Any]([lost(), *(ScriptedSession() for _ in range(3))])
    async with scripted(raws, hook, recovery=NOW) as session:
        assert session.raw_session() is raws[3]
    assert len(set(map(id, hook.coords))) == 3
    with pytest.raises(PreemptionError):
        await counting(raises_at("begin", lost())).open()


@pytest.mark.parametrize("found", ["in the run", "before the next run"])
async def test_a_stop_of_a_hook_is_forgotten_with_the_raw_session(found: str) -> None:
    keeps, in_run = KeepsCoord(), found == "in the run"

    def stop(run_context: SessionRunContext, *_: object) -> None:
        if len(keeps.coords) == 1:
            run_context.request_stop()

    stops = at(before_run=stop) if in_run else at(after_run=stop)
    raws = losing() if in_run else [ScriptedSession(), ScriptedSession()]
    async with scripted(raws, keeps, stops) as session:
        await session.run([])
        if not in_run:
            assert session.should_stop()
            keeps.coord.request_stop(lost())
            assert not session.should_stop()
            await session.run([])
        assert not session.should_stop()
        assert session.raw_session() is raws[1]
    assert session.stop_reason is None, "no run was refused"
    assert raws[1].num_runs == 1


class ReportsInRun(KeepsCoord):
    """Reports an error to the first coordinator in a run, which goes on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def before_run(self, run_context: SessionRunContext) -> None:
        if len(self.coords) == 1:
            self.coord.request_stop(self.error)


async def test_a_run_error_while_the_coordinator_holds_a_preemption_recovers() -> None:
    hook = ReportsInRun(lost())
    raws = [ScriptedSession([ValueError("a consequence")]), ScriptedSession()]
    async with scripted(raws, hook) as session:
        assert await session.run([]) == []
        assert not session.should_stop()
    assert len(hook.coords) == 2


@pytest.mark.parametrize("of_run", [lost(), KeyError("of the run")])
async def test_another_error_of_the_coordinator_replaces_a_preemption_and_no_other_error(
    of_run: Exception,
) -> None:
    held, raw = ValueError("held"), ScriptedSession([of_run])
    with pytest.raises(ValueError, match="held") as caught:
        async with scripted([raw], ReportsInRun(held)) as session:
            with pytest.raises((ValueError, KeyError)) as left:
                await session.run([])
            with pytest.raises(StopTraining, match="no run begins after a stop"):
                await session.run([])
    assert left.value is (of_run if isinstance(of_run, KeyError) else held)
    assert caught.value is held
    assert raw.num_runs == 1


async def test_a_preemption_error_given_to_request_stop_recreates_nothing() -> None:
    error, created = lost("of the caller"), RecordingHook("a")

    def step() -> dict[str, int]:
        session.request_stop(error)
        raise ValueError("in the step")

    session = MonitoredSession([created], step, recovery=NOW)
    with pytest.raises(PreemptionError, match="of the caller") as caught:
        async with session:
            await session.run([])
    assert isinstance(caught.value.__context__, ValueError)
    assert moments_of(created).count("after_create_session") == 1


async def test_a_preemption_held_at_the_end_and_an_error_in_closing_are_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailsToClose(ScriptedSession):
        def close(self) -> None:
            raise ValueError("cannot close")

    keeps, hook = KeepsCoord(), RecordingHook("a")
    async with scripted([FailsToClose()], keeps, hook):
        keeps.coord.request_stop(lost())
    assert "the machine went away" in caplog.text
    assert "cannot close" in caplog.text
    assert hook.log[-1] == ("a", "end")


async def test_step_fn_is_called_again_with_the_new_raw_session() -> None:
    raws, seen = losing(after=1), list[Any]()

    async def step_fn(step_context: StepContext) -> str:
        seen.append(step_context.session)
        for _ in range(2):
            await step_context.run_with_hooks([])
        return "done"

    async with scripted(raws) as session:
        assert await session.run_step_fn(step_fn) == "done"
    assert seen == raws


async def test_a_function_session_keeps_its_step_when_recreated() -> None:
    async with MonitoredSession([], losing_step(3)) as session:
        assert [await session.run("calls") for _ in range(3)] == [1, 2, 4]
        assert (session.global_step.value, session.global_step.epoch) == (3, 0)


PAUSES = "give 0 <= first_pause_secs <= longest_pause_secs"


@pytest.mark.parametrize("kind", [Recovery, Restart])
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"max_attempts": -1}, "max_attempts is -1; give an integer"),
        ({"max_attempts": 2.5}, r"max_attempts is 2\.5; give an integer"),
        ({"first_pause_secs": -1}, f"first_pause_secs is -1; {PAUSES}"),
        ({"longest_pause_secs": 0.01}, f"first_pause_secs is 0.1; {PAUSES}"),
    ],
)
def test_pauses_double_up_to_the_longest_and_bounds_that_make_no_sense_are_refused(
    kind: Any, bad: dict[str, Any], match: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        kind(**bad)
    recovery = kind(first_pause_secs=0.5, longest_pause_secs=3)
    assert [recovery.pause_before(n) for n in (*range(1, 7), 10_000)] == [0, 0.5, 1, 2, 3, 3, 3]


async def test_a_subclass_s_run_surrounds_all_attempts_and_no_nested_run() -> None:
    calls: list[Any] = []

    class Logged(MonitoredSession):
        async def run(self, fetches: Any, *args: Any) -> Any:
            calls.append(fetches)
            return await super().run(fetches, *args)

    async def step_fn(step_context: StepContext) -> Any:
        return await step_context.run_with_hooks("calls")

    async with Logged([], losing_step(1)) as session:
        assert await session.run("calls") == 2
        assert await session.run_step_fn(step_fn) == 3
    assert calls == ["calls"]


async def test_an_error_of_a_hook_is_not_taken_for_the_loss_of_the_session() -> None:
    """Another worker has replaced it meanwhile."""
    creator, loses = SharedSessionCreator(losing_step(1)), True

    async def lose_and_fail(run_context: SessionRunContext) -> None:
        nonlocal loses
        if loses:
            loses = False
            await other.run([])
            raise OSError("the disk is full")

    async with (
        MonitoredSession([], creator) as other,
        MonitoredSession([at(before_run=lose_and_fail)], creator) as session,
    ):
        with pytest.raises(OSError, match="the disk is full"):
            await session.run([])
        await session.run([])
        assert session.global_step.value == 2


@pytest.mark.parametrize("how", ["async", "in a thread", "submitting"])
async def test_a_step_that_outlives_its_raw_session_counts_and_exclusive_waits_for_it(
    how: str,
) -> None:
    """It is one of those below the limit."""
    held, keeps, num_steps = HeldStep(dict), KeepsCoord(), 0

    def step(waits: bool = False) -> Any:
        nonlocal num_steps
        num_steps += 1
        return held() if waits else {}

    async def in_coroutine(waits: bool = False) -> Any:
        return await anyio.to_thread.run_sync(step, waits)

    def submit(waits: bool = False) -> Any:
        outputs = step(waits)

        async def later() -> Any:
            return outputs

        return later()

    steps: dict[str, Any] = {"async": in_coroutine, "in a thread": step, "submitting": submit}
    creator = SharedSessionCreator(FunctionSessionCreator(steps[how], thread_safe=True))
    waits = MonitoredSession([StopAtStepHook(last_step=2)], creator, step_runner="thread")
    loses = MonitoredSession([keeps], creator, step_runner="thread")
    with anyio.fail_after(20.0):
        async with waits, loses:
            lost_one = keeps.coord
            async with in_task(waits.run, [], {"waits": True}):
                await held.has_begun()
                lost_one.request_stop(lost())
                async with in_task(loses.run, []):
                    with pytest.raises(TimeoutError):
                        async with waits.global_step.exclusive(timeout=0.0):
                            pass
                    held.may_end.set()
            assert keeps.coord is not lost_one, "the raw session was replaced"
            async with loses.global_step.exclusive():
                assert loses.global_step.value == 2
            with pytest.raises(StopTraining):
                await loses.run([])
    assert num_steps == 2
