"""EvaluationHook: when it evaluates, what it logs, and how its session may end meanwhile."""

from __future__ import annotations

import collections
import logging
import math
import threading
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FinishPhase,
    FunctionSessionCreator,
    MetricError,
    MonitoredSession,
    OnFailure,
    PreemptionError,
    Restart,
    SessionRunContext,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.base import Engine, Slot
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator, counting_step, settle
from .evaluations import Failing, Gated, Notes, stop_when_settled
from .event_files import scalars
from .training import Calls, run_session, run_to, suspending_step, tasks
from .virtual_time import Writer, on_trampoline, quarter_step

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("mode", list(Evaluate))


@both_modes
@pytest.mark.parametrize(
    ("first", "every", "at_end", "steps"), [(0, 3, True, [3, 6, 9, 10]), (7, 5, False, [12, 17])]
)
async def test_it_evaluates_every_n_steps_from_the_first_on_and_at_the_end(
    mode: Evaluate, first: int, every: int, at_end: bool, steps: list[int]
) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=every, mode=mode, at_end=at_end)
    creator = FunctionSessionCreator(counting_step()[0], initial_step=first)
    await run_session([hook], creator, to=18 if first else 10)
    assert notes.steps == steps
    assert (hook.latest, hook.latest_step) == ({"step": float(steps[-1])}, steps[-1])


async def test_training_goes_on_during_that_of_a_coroutine_function_by_default() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 50)
        assert (gated.begun, gated.ended) == ([2], [])
        gated.let(2)
        await settle()
        assert (hook.latest, hook.latest_step) == ({"step": 2.0}, 2)


async def test_an_evaluation_that_is_due_while_one_runs_is_put_off_and_not_dropped() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 9)
        assert gated.begun == [2]
        gated.let(2)
        await settle()
        assert gated.begun == [2], "it is begun by a run"
        await run_to(session, 10)
        assert gated.begun == [2, 10]
        await run_to(session, 13)
        gated.let(10)
        await settle()
        await run_to(session, 14)
        assert gated.begun == [2, 10, 14]
        gated.let(14)
    assert gated.most_at_once == 1


async def test_a_coroutine_comes_to_its_first_wait_before_the_next_step() -> None:
    step, calls = counting_step()
    seen = []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        seen.append((step, session.global_step.value, len(calls)))
        await anyio.lowlevel.checkpoint()
        return {}

    hook = EvaluationHook(evaluate, every_n_steps=100, at_end=False)
    creator = FunctionSessionCreator(step)
    async with MonitoredSession([hook], creator, step_runner="inline") as session:
        for last in (150, 250, 350):
            await run_to(session, last)
            await settle()
    assert seen == [(each, each, each) for each in (100, 200, 300)]


@pytest.mark.parametrize("way", ["exclusive", "concurrent, in exclusive()", "concurrent"])
async def test_no_worker_runs_a_step_during_an_exclusive_evaluation(way: str) -> None:
    seen = []

    async def watch(session: Any, step: int) -> dict[str, float]:
        begun = session.global_step.value
        await settle()
        seen.append((step, begun, session.global_step.value))
        return {"value": session.global_step.value}

    async def exclusively(session: Any, step: int) -> dict[str, float]:
        async with session.global_step.exclusive():
            return await watch(session, step)

    mode = Evaluate.EXCLUSIVE if way == "exclusive" else Evaluate.CONCURRENT
    evaluate = exclusively if way == "concurrent, in exclusive()" else watch
    hook = EvaluationHook(evaluate, every_n_steps=10, mode=mode, at_end=False)
    creator = SharedSessionCreator(FunctionSessionCreator(suspending_step))
    async with tasks() as group:
        for hooks in ([hook], [], []):
            group.start_soon(run_session, [*hooks, StopAtStepHook(last_step=100)], creator)
    if way == "concurrent":
        assert any(begun < ended for _, begun, ended in seen)
    else:
        assert len(seen) >= 5
        assert all(begun == ended for _, begun, ended in seen)
    if way == "exclusive":
        assert [step for step, begun, _ in seen] == [begun for _, begun, _ in seen]


@pytest.mark.parametrize("phase", FinishPhase)
async def test_exclusive_access_is_kept_for_saves_but_not_for_evaluations(
    phase: FinishPhase,
) -> None:
    held = []

    def after_run(run_context: SessionRunContext, run_values: Any) -> None:
        async def look() -> None:
            held.append(run_context.global_step.statistics().is_exclusive)

        run_context.finish_with(look, phase=phase)

    hook = EvaluationHook(Notes(), every_n_steps=1, mode=Evaluate.EXCLUSIVE, at_end=False)
    async with MonitoredSession([hook, Calls(after_run=after_run)], counting_creator()) as session:
        await session.run([])
        assert not session.global_step.statistics().is_exclusive
    assert held == [phase is not FinishPhase.EVALUATE]


async def test_what_a_plain_function_returns_may_be_awaited() -> None:
    notes = Notes()
    hook = EvaluationHook(lambda session, step: notes(session, step), every_n_steps=2)
    await run_session([hook], to=2)
    assert hook.latest == {"step": 2}


def test_by_seconds_it_is_due_when_they_have_passed_since_the_last_one_began(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = []

    async def main(engine: Engine) -> None:
        async def evaluate(session: Any, step: int) -> dict[str, float]:
            seen.append((engine.now(), step))
            await engine.park(Slot(engine, "an evaluation"), engine.now() + 1.24)
            return {"accuracy": 0.93, "loss": 0.21}

        hook = EvaluationHook(evaluate, every_n_secs=1.0, at_end=False)
        await run_session([hook], FunctionSessionCreator(quarter_step), to=15)

    with caplog.at_level(logging.INFO, "asynchooks"):
        on_trampoline(main)
    assert seen == [(1.0, 4), (2.25, 9), (3.5, 14)]
    assert "eval at step 4: accuracy = 0.93, loss = 0.21 (1.24 sec)" in caplog.messages


@both_modes
async def test_scalars_are_labelled_with_the_step_at_which_the_evaluation_began(
    mode: Evaluate, tmp_path: Path
) -> None:
    gated = Gated()
    hook = EvaluationHook(
        gated, every_n_steps=4, mode=mode, at_end=False, output_dir=str(tmp_path), name="test"
    )
    gated.let(8)
    async with MonitoredSession([hook], counting_creator()) as session:
        session.start_soon(gated.let_when_begun, 4)
        await run_to(session, 7)
        await settle()
        await run_to(session, 9)
    assert scalars(tmp_path) == {"test/step": [(4, 4.0), (8, 8.0)]}


async def test_a_writer_of_one_s_own_is_flushed_at_the_end() -> None:
    writer = Writer()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"loss": math.nan if step == 1 else 0.5}

    hook = EvaluationHook(evaluate, every_n_steps=1, summary_writer=writer)
    await run_session([hook], to=2)
    assert [(tag, step) for tag, _, step in writer.written] == [("eval/loss", 1), ("eval/loss", 2)]
    assert [math.isnan(value) for _, value, _ in writer.written] == [True, False]
    assert writer.flushes == 1


@pytest.mark.parametrize("mode", [None, *Evaluate])
async def test_a_plain_function_runs_in_a_thread_exclusively_unless_concurrent_is_asked_for(
    mode: Evaluate | None,
) -> None:
    begun, release, threads = threading.Event(), threading.Event(), []

    def evaluate(session: Any, step: int) -> dict[str, float]:
        threads.append(threading.current_thread())
        begun.set()
        assert release.wait(30)
        return {"step": step}

    hook = EvaluationHook(evaluate, every_n_steps=2, at_end=False, mode=mode)
    creator = SharedSessionCreator(counting_creator())
    async with (
        MonitoredSession([hook], creator, step_runner="inline") as session,
        MonitoredSession([], creator, step_runner="inline") as other,
    ):
        async with anyio.create_task_group() as group:
            group.start_soon(run_to, session, 2)
            await anyio.to_thread.run_sync(begun.wait, 30)
            group.start_soon(other.run, "calls")
            await settle()
            assert (other.global_step.value == 3) == (mode is Evaluate.CONCURRENT)
            release.set()
    assert hook.latest == {"step": 2.0}
    assert threads != [threading.current_thread()]


@pytest.mark.parametrize("last_step", [5, 6])
async def test_the_end_waits_for_evaluations_then_evaluates_the_last_step(last_step: int) -> None:
    gated, writer = Gated(), Writer()
    hook = EvaluationHook(gated, every_n_steps=3, summary_writer=writer)
    gated.let(5)
    hooks = [hook, StopAtStepHook(last_step=last_step)]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await run_to(session, 3)
        while not session.should_stop():
            await session.run([])
        session.start_soon(gated.let_when_begun, last_step)
        session.start_soon(gated.let_when_begun, 3)
    assert gated.ended == [3, last_step]
    assert [step for _, _, step in writer.written] == [3, last_step]


@both_modes
async def test_hooks_that_are_listed_later_find_the_last_result_at_the_end(mode: Evaluate) -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=100, mode=mode)
    seen = []
    later = Calls(end=lambda session: seen.append(hook.latest_step))
    async with MonitoredSession([hook, later], counting_creator()) as session:
        await run_to(session, 2)
        session.start_soon(gated.let_when_begun, 2)
    assert seen == [2]


@both_modes
async def test_a_result_of_the_same_step_of_an_earlier_session_does_not_count(
    mode: Evaluate,
) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=4, mode=mode)
    await run_session([hook], to=4)
    creator = FunctionSessionCreator(counting_step()[0], initial_step=2)
    await run_session([hook], creator, to=4)
    assert notes.steps == [4, 4]


@both_modes
async def test_after_an_error_in_the_block_the_writer_is_flushed_without_results(
    mode: Evaluate,
) -> None:
    notes, writer = Notes(), Writer()
    hook = EvaluationHook(notes, every_n_steps=3, mode=mode, summary_writer=writer)
    with pytest.raises(ValueError, match="in the block"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 4)
            raise ValueError("in the block")
    assert (notes.steps, writer.flushes) == ([3], 1)


@pytest.mark.parametrize("where", ["another worker", "a side task"])
async def test_after_an_error_elsewhere_nothing_is_evaluated_at_the_end(where: str) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=3)
    creator = SharedSessionCreator(counting_creator())

    async def fail() -> None:
        raise OSError("elsewhere")

    leaves = pytest.raises(OSError, match="elsewhere")
    with leaves if where == "a side task" else nullcontext():
        async with MonitoredSession([hook], creator) as session:
            await run_to(session, 4)
            if where == "a side task":
                session.start_soon(fail)
                await settle()
            else:
                with leaves:
                    async with MonitoredSession([], creator):
                        await fail()
            assert session.should_stop()
    assert notes.steps == [3]


async def test_after_an_evaluation_that_fails_when_training_has_stopped_there_is_no_other() -> None:
    failing = Failing(ValueError("too late"))
    may_fail = anyio.Event()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await may_fail.wait()
        return await failing(session, step)

    hook = EvaluationHook(evaluate, every_n_steps=2)
    with pytest.raises(ValueError, match="too late"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 3)
            session.request_stop("enough")
            may_fail.set()
    assert failing.steps == [2]


@both_modes
async def test_an_error_of_the_evaluation_at_the_end_leaves_the_block(mode: Evaluate) -> None:
    writer = Writer()
    failing = Failing(ValueError("at the end"))
    hook = EvaluationHook(failing, every_n_steps=100, mode=mode, summary_writer=writer)
    with pytest.raises(ValueError, match="at the end"):
        await run_session([hook], to=2)
    assert failing.steps == [2]
    assert writer.flushes >= 1


@both_modes
async def test_one_that_waits_when_training_is_stopped_counts_as_not_finished(
    mode: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        if step == 2:
            await session_of_run.global_step.wait_for(10**9)
        return {"step": step}

    hook = EvaluationHook(evaluate, every_n_steps=2, mode=mode, at_end=False)
    with caplog.at_level(logging.INFO, "asynchooks"):
        async with MonitoredSession([hook], counting_creator()) as session:
            session_of_run = session
            await session.run([])
            session.start_soon(stop_when_settled, session)
            await session.run([])
            while not session.should_stop():
                await settle()
    assert hook.latest is None
    assert "eval at step 2 was not finished: a stop was requested while waiting" in caplog.text


async def test_a_stop_leaves_an_evaluation_that_does_not_wait_through_asynchooks_alone() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 2)
        session.request_stop("enough")
        session.start_soon(gated.let_when_begun, 2)
    assert gated.ended == [2]
    assert hook.latest_step == 2


@both_modes
async def test_a_cancellation_ends_the_evaluation_and_flushes(mode: Evaluate) -> None:
    gated, writer = Gated(), Writer()
    hook = EvaluationHook(gated, every_n_steps=2, mode=mode, summary_writer=writer)
    async with tasks() as group:

        async def train() -> None:
            async with MonitoredSession([hook], counting_creator()) as session:
                await run_to(session, 2)
                await anyio.sleep_forever()

        group.start_soon(train)
        await gated.wait_for_begun(2)
        await settle()
        group.cancel_scope.cancel()
    assert (gated.begun, gated.ended) == ([2], [])
    assert writer.flushes == 1


async def test_an_error_in_a_concurrent_evaluation_stops_training_and_leaves_as_itself() -> None:
    error = ValueError("no data")
    failing = Failing(error)
    hook = EvaluationHook(failing, every_n_steps=2)
    with pytest.raises(ValueError, match="no data") as caught:
        async with MonitoredSession([hook], counting_creator()) as session:
            while not session.should_stop():
                await session.run([])
    assert caught.value is error
    assert error.__notes__ == ["in the side task 'eval'"]
    assert str(session.stop_reason) == f"the side task 'eval': {error!r}"
    assert failing.steps == [2], "none at the end of a session that fails"


async def test_an_error_in_an_exclusive_evaluation_leaves_the_run() -> None:
    error = ValueError("no data")
    hook = EvaluationHook(Failing(error), every_n_steps=2, mode=Evaluate.EXCLUSIVE)
    async with MonitoredSession([hook], counting_creator()) as session:
        await session.run([])
        with pytest.raises(ValueError, match="no data") as caught:
            await session.run([])
        assert caught.value is error
        assert error.__notes__ == ["in after_run of EvaluationHook"]
        await run_to(session, 4)
    assert hook.latest_step == 4


async def test_a_logged_error_lets_training_go_on(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(ValueError("no data"))
    hook = EvaluationHook(failing, every_n_steps=2, on_failure=OnFailure.LOG)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 3)
        assert hook.latest is None
        await run_to(session, 5)
    assert failing.steps == [2, 4, 5]
    assert "The side task eval failed; training goes on without it" in caplog.text


def test_a_restarted_evaluation_keeps_its_place_and_sees_the_step_of_then() -> None:
    failing = Failing(ValueError("first"), ValueError("second"))
    restart = Restart(max_attempts=2, first_pause_secs=1.1)
    hook = EvaluationHook(failing, every_n_steps=4, on_failure=restart, at_end=False)

    async def main(engine: Engine) -> None:
        async with MonitoredSession([hook], FunctionSessionCreator(quarter_step)) as session:
            await run_to(session, 8)
            assert failing.steps == [4, 4], "after 1 s of the pause"
            await run_to(session, 9)

    on_trampoline(main)
    assert failing.steps == [4, 4, 8, 9]
    assert hook.latest_step == 9


async def test_when_the_restarts_are_used_up_the_error_stops_training() -> None:
    failing = Failing(*(ValueError(str(n)) for n in range(5)))
    restart = Restart(max_attempts=2, first_pause_secs=0)
    hook = EvaluationHook(failing, every_n_steps=2, on_failure=restart)
    with pytest.raises(ValueError, match="2"):
        await run_session([hook], to=2)
    assert failing.steps == [2, 2, 2]


async def test_a_stop_keeps_what_failed_from_restarting_and_the_end_does_not_wait_for_it() -> None:
    failing = Failing(*(ValueError(str(n)) for n in range(5)))
    restart = Restart(first_pause_secs=3600, longest_pause_secs=3600)
    hook = EvaluationHook(failing, every_n_steps=2, on_failure=restart, at_end=False)
    with anyio.fail_after(10):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 3)
            while len(failing.steps) < 2:  # the first restart comes at once
                await settle()
            session.start_soon(stop_when_settled, session)
    assert (failing.steps[0], len(failing.steps)) == (2, 2)


async def test_a_recovery_ends_running_evaluations_and_restarts_the_count() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=4, at_end=False)
    lost = ScriptedSession([{}] * 6 + [PreemptionError("lost")])
    raws = ScriptedSessionCreator([lost, ScriptedSession()])
    async with MonitoredSession([hook], raws, stop_grace_period_secs=0.01) as session:
        await run_to(session, 6)
        await session.run([])
        assert session.global_step.value == 1, "the new session begins at 0"
        for step in (4, 8):
            gated.let(step)
        await run_to(session, 4)
        await gated.wait_for_begun(4)
        await settle()
        await run_to(session, 8)
    assert gated.begun == [4, 4, 8]
    assert gated.ended == [4, 8]


async def test_a_result_after_a_recovery_is_newer_than_one_of_a_later_step_before() -> None:
    hook = EvaluationHook(Notes(), every_n_steps=4, at_end=False)
    lost = ScriptedSession([{}] * 9 + [PreemptionError("lost")])
    raws = ScriptedSessionCreator([lost, ScriptedSession()])
    async with MonitoredSession([hook], raws) as session:
        await run_to(session, 9)
        await settle()
        assert hook.latest_step == 8
        await session.run([])
        assert hook.latest_step == 8
        await run_to(session, 4)
        await settle()
        assert hook.latest_step == 4


async def test_a_shared_session_that_others_replace_stays_open_until_the_evaluation_ends() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=1, at_end=False)
    lost, new = ScriptedSession([{}, PreemptionError("lost")]), ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([lost, new]))
    async with (
        MonitoredSession([hook], creator) as session,
        MonitoredSession([], creator) as other,
    ):
        await session.run([])
        await other.run([])
        assert (lost.is_closed, new.num_runs) == (False, 1)
        gated.let(1)
    assert lost.is_closed


@both_modes
async def test_the_evaluation_at_the_end_is_of_the_newest_shared_session(mode: Evaluate) -> None:
    new = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([ScriptedSession(), new]))
    evaluated: list[object] = []

    def evaluate(session: object, step: int) -> dict[str, float]:
        evaluated.append(session)
        return {"loss": 0.0}

    may_lose, has_new, created = anyio.Event(), anyio.Event(), []

    def count(session: object, coord: object) -> None:
        created.append(session)
        if len(created) == 2:
            has_new.set()

    async def lose_once(run_context: object) -> None:
        if not may_lose.is_set():
            await may_lose.wait()
            raise PreemptionError("lost")

    async def wait_for_new(session: object) -> None:
        may_lose.set()
        await has_new.wait()

    loses = Calls(after_create_session=count, before_run=lose_once)
    ends = Calls(end=wait_for_new)
    evaluation = EvaluationHook(evaluate, every_n_steps=100, mode=mode)
    with anyio.fail_after(10):
        async with MonitoredSession([loses], creator) as other:
            async with anyio.create_task_group() as group:
                group.start_soon(other.run, [])
                await run_session([ends, evaluation], creator, runs=1)
    assert evaluated == [new.exposed]


async def latest_of(results: Any) -> dict[str, float]:
    async def evaluate(session: Any, step: int) -> Any:
        return results

    hook = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE)
    await run_session([hook], runs=1)
    assert hook.latest is not None
    return dict(hook.latest)


class Tensor:
    """What other libraries' tensors of shape () offer."""

    ndim = 0

    def __float__(self) -> float:
        return 0.25


class Row(Tensor):
    """PyTorch's tensors of one element pass for a number, too."""

    ndim = 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (Tensor(), 0.25),
        (Row(), 0.25),
        (-math.inf, -math.inf),
    ],
)
async def test_numbers_of_any_library_become_floats(value: Any, number: float) -> None:
    latest = await latest_of({"value": value})
    assert latest == {"value": number}
    assert type(latest["value"]) is float


async def test_nan_is_a_result_none_is_none_and_the_order_of_any_mapping_is_kept() -> None:
    assert math.isnan((await latest_of({"loss": math.nan}))["loss"])
    assert await latest_of({}) == {}
    results = collections.ChainMap({"b": 1.0}, {"a": 2.0})
    assert list(await latest_of(results)) == list(results)


@pytest.mark.parametrize(
    "value",
    [
        None, "0.5", b"0.5", 1j, [0.5], np.array([0.5, 0.5]), np.str_("0.5"), 10**400,
        np.array(None),
    ],
)  # fmt: skip
async def test_a_result_that_is_no_number_is_an_error_of_the_hook(value: Any) -> None:
    message = (
        "the metric 'value' of evaluate of EvaluationHook 'eval' is .*; give one number .of an"
    )
    with pytest.raises(MetricError, match=message):
        await latest_of({"value": value})


@pytest.mark.parametrize(
    ("results", "message"),
    [
        *((each, "give a mapping of names") for each in (None, 0.5, [("loss", 0.5)], {"loss"})),
        ({3: 0.5}, "the name of a result of .* is 3; give a text"),
    ],
)
async def test_what_is_no_result_is_an_error_of_the_hook(results: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"of EvaluationHook 'eval'.*{message}|{message}"):
        await latest_of(results)


@pytest.mark.parametrize("is_plain", [False, True])
@both_modes
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_the_end_of_an_input_of_the_evaluation_is_not_the_end_of_training(
    error: type[Exception], mode: Evaluate, is_plain: bool
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        raise error

    def plain(session: Any, step: int) -> dict[str, float]:
        raise error

    hook = EvaluationHook(plain if is_plain else evaluate, every_n_steps=1, mode=mode)
    with pytest.raises(RuntimeError, match="of EvaluationHook 'eval' let .* out: its input"):
        await run_session([hook], runs=1)
