"""EvaluationHook: when it evaluates, what it logs, and how its session may end meanwhile."""

import logging
import math
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MetricError,
    MonitoredSession,
    PreemptionError,
    Restart,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import (
    cancelled_when_settled,
    counting_creator,
    counting_step,
    in_task,
    settle,
)
from ..support.moments import HeldStep, at, train
from .evaluations import Failing, Gated, Notes, stop_when_settled
from .training import run_session, run_to, suspending_step, tasks
from .virtual_time import Writer, now, pause, quarter_step, simulate

both_modes = pytest.mark.parametrize("mode", list(Evaluate))


def session_with(*hooks: Any, creator: Any = None) -> MonitoredSession:
    return MonitoredSession(hooks, creator or counting_creator(), step_runner="inline")


def beginning_at(step: int) -> FunctionSessionCreator:
    return FunctionSessionCreator(counting_step()[0], initial_step=step)


@both_modes
async def test_it_evaluates_every_n_steps_from_the_first_on_and_at_the_end(mode: Evaluate) -> None:
    notes, writer, ended = Notes(), Writer(), list[Any]()
    hook = EvaluationHook(notes, every_n_steps=3, mode=mode, summary_writer=writer)
    later = at(end=lambda session: ended.append(hook.latest_step))
    await run_session([hook, later], beginning_at(7), to=14)
    assert notes.steps == [10, 13, 14]
    assert (hook.latest, hook.latest_step) == ({"step": 14.0}, 14)
    assert ended == [14], "hooks that are listed later find the last result"
    assert writer.written == [("eval/step", step, step) for step in notes.steps]
    assert writer.flushes == 1


async def test_training_goes_on_during_a_concurrent_one_and_one_that_is_due_is_put_off() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, at_end=False)
    async with session_with(hook) as session:
        await run_to(session, 9)
        assert (gated.begun, gated.ended, hook.latest) == ([2], [], None)
        gated.let(2)
        await settle()
        assert (gated.begun, hook.latest_step) == ([2], 2), "the next one is begun by a run"
        await run_to(session, 13)
        gated.let(10)
        await settle()
        await run_to(session, 14)
        assert gated.begun == [2, 10, 14]
        gated.let(14)
    assert gated.most_at_once == 1


async def test_a_coroutine_comes_to_its_first_wait_before_the_next_step() -> None:
    seen = []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        seen.append((step, session.global_step.value))
        await anyio.lowlevel.checkpoint()
        return {}

    async with session_with(EvaluationHook(evaluate, 100, at_end=False)) as session:
        for last in (150, 250):
            await run_to(session, last)
            await settle()
    assert seen == [(100, 100), (200, 200)]


async def test_no_worker_runs_a_step_during_an_exclusive_evaluation() -> None:
    moves: list[int] = []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await settle()
        moves.append(session.global_step.value - step)
        return {}

    hook = EvaluationHook(evaluate, every_n_steps=10, mode=Evaluate.EXCLUSIVE, at_end=False)
    creator = SharedSessionCreator(suspending_step)
    async with tasks() as group:
        for hooks in ([hook], [], []):
            group.start_soon(run_session, [*hooks, StopAtStepHook(last_step=60)], creator)
    assert len(moves) >= 2
    assert not any(moves)


def test_by_seconds_it_is_due_when_they_have_passed_since_the_last_one_began(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = []

    async def main() -> None:
        async def evaluate(session: Any, step: int) -> dict[str, float]:
            seen.append((now(), step))
            await pause(1.24)
            return {"accuracy": 0.93, "loss": 0.21}

        hook = EvaluationHook(evaluate, every_n_secs=1.0, at_end=False)
        await run_session([hook], quarter_step, to=15)

    with caplog.at_level(logging.INFO, "asynchooks"):
        simulate(main)
    assert seen == [(1.0, 4), (2.25, 9), (3.5, 14)]
    assert "eval at step 4: accuracy = 0.93, loss = 0.21 (1.24 sec)" in caplog.messages


@pytest.mark.parametrize("mode", [None, Evaluate.CONCURRENT])
async def test_a_plain_function_runs_in_a_thread_exclusively_unless_concurrent_is_asked_for(
    mode: Evaluate | None,
) -> None:
    evaluate = HeldStep(lambda: {"step": 1})
    hook = EvaluationHook(evaluate, every_n_steps=1, at_end=False, mode=mode)
    creator = SharedSessionCreator(counting_creator())
    async with session_with(creator=creator) as other, session_with(hook, creator=creator) as one:
        async with in_task(one.run, []):
            await evaluate.has_begun()
            async with in_task(other.run, []):
                assert other.global_step.value == (1 if mode is None else 2)
                evaluate.may_end.set()
    assert hook.latest == {"step": 1.0}


@pytest.mark.parametrize("last_step", [5, 6])
async def test_the_end_waits_for_evaluations_then_evaluates_the_last_step(last_step: int) -> None:
    """Each is labelled with the step at which it began; a stop ends no wait of others' own."""
    gated, writer = Gated(), Writer()
    async with session_with(EvaluationHook(gated, 3, summary_writer=writer)) as session:
        await run_to(session, last_step)
        session.request_stop("enough")
        session.start_soon(gated.let_when_begun, last_step)
        session.start_soon(gated.let_when_begun, 3)
    assert gated.ended == [3, last_step]
    assert writer.written == [("eval/step", step, step) for step in gated.ended]


async def test_a_result_of_the_same_step_of_an_earlier_session_does_not_count() -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=4)
    for first in (0, 2):
        await run_session([hook], beginning_at(first), to=4)
    assert notes.steps == [4, 4]


@pytest.mark.parametrize("where", ["the block", "another worker"])
async def test_after_an_error_nothing_is_evaluated_at_the_end_and_the_writer_is_flushed(
    where: str,
) -> None:
    notes, writer = Notes(), Writer()
    hook = EvaluationHook(notes, every_n_steps=3, summary_writer=writer)
    creator = SharedSessionCreator(counting_creator())
    leaves = pytest.raises(OSError, match="elsewhere")
    with nullcontext() if where == "another worker" else leaves:
        async with session_with(hook, creator=creator) as session:
            await run_to(session, 4)
            if where == "the block":
                raise OSError("elsewhere")
            with leaves:
                async with session_with(creator=creator):
                    raise OSError("elsewhere")
    assert notes.steps == [3]
    assert writer.flushes


@both_modes
async def test_one_that_waits_when_training_is_stopped_counts_as_not_finished(
    mode: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await session_of_run.global_step.wait_for(10**9)
        return {"step": step}

    hook = EvaluationHook(evaluate, every_n_steps=2, mode=mode, at_end=False)
    with caplog.at_level(logging.INFO, "asynchooks"):
        async with session_with(hook) as session:
            session_of_run = session
            await session.run([])
            session.start_soon(stop_when_settled, session)
            await session.run([])
            await session.or_stop(anyio.sleep_forever)
    assert hook.latest is None
    assert "eval at step 2 was not finished: a stop was requested while waiting" in caplog.text


@both_modes
async def test_a_cancellation_ends_the_evaluation_and_flushes(mode: Evaluate) -> None:
    gated, writer = Gated(), Writer()
    hook = EvaluationHook(gated, every_n_steps=2, mode=mode, summary_writer=writer)

    async def evaluate_and_wait() -> None:
        async with session_with(hook) as session:
            await run_to(session, 2)
            await anyio.sleep_forever()

    assert await cancelled_when_settled(evaluate_and_wait)
    assert (gated.begun, gated.ended, writer.flushes) == ([2], [], 1)


async def test_an_error_in_a_concurrent_evaluation_stops_training_and_leaves_as_itself() -> None:
    error = ValueError("no data")
    failing = Failing(error)
    with pytest.raises(ValueError, match="no data") as caught:
        async with session_with(EvaluationHook(failing, every_n_steps=2)) as session:
            await train(session)
    assert caught.value is error
    assert error.__notes__ == ["in the side task 'eval'"]
    assert str(session.stop_reason) == f"the side task 'eval': {error!r}"
    assert failing.steps == [2], "none at the end of a session that fails"


async def test_an_error_in_an_exclusive_evaluation_leaves_the_run() -> None:
    error = ValueError("no data")
    hook = EvaluationHook(Failing(error), every_n_steps=2, mode=Evaluate.EXCLUSIVE)
    async with session_with(hook) as session:
        with pytest.raises(ValueError, match="no data") as caught:
            await run_to(session, 2)
        assert caught.value is error
        assert error.__notes__ == ["in after_run of EvaluationHook"]
        await run_to(session, 4)
    assert hook.latest_step == 4


def test_a_restarted_evaluation_keeps_its_place_and_sees_the_step_of_then() -> None:
    failing = Failing(ValueError("first"), ValueError("second"))
    restart = Restart(max_attempts=2, first_pause_secs=1.1)
    hook = EvaluationHook(failing, every_n_steps=4, on_failure=restart, at_end=False)

    async def main() -> None:
        async with MonitoredSession([hook], quarter_step) as session:
            await run_to(session, 8)
            assert failing.steps == [4, 4], "after 1 s of the pause"
            await run_to(session, 9)

    simulate(main)
    assert (failing.steps, hook.latest_step) == ([4, 4, 8, 9], 9)


async def test_a_recovery_ends_running_evaluations_and_restarts_the_count() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=4, at_end=False)
    lost = ScriptedSession([{}] * 6 + [PreemptionError("lost")])
    raws = ScriptedSessionCreator([lost, ScriptedSession()])
    async with MonitoredSession([hook], raws, stop_grace_period_secs=0.01) as session:
        await run_to(session, 6)
        await session.run([])
        assert session.global_step.value == 1, "the new session begins at 0"
        gated.let(4)
        await run_to(session, 4)
        await settle()
    assert (gated.begun, gated.ended) == ([4, 4], [4])


async def test_a_shared_session_that_others_replace_stays_open_until_the_evaluation_ends() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=1, at_end=False)
    lost, new = ScriptedSession([{}, PreemptionError("lost")]), ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([lost, new]))
    async with session_with(hook, creator=creator) as session:
        async with session_with(creator=creator) as other:
            await session.run([])
            await other.run([])
            assert (lost.is_closed, new.num_runs) == (False, 1)
            gated.let(1)
    assert lost.is_closed


@pytest.mark.parametrize(
    ("results", "message"),
    [
        *(({"a": each}, "the metric 'a' of evaluate of EvaluationHook 'eval' is .*; give one")
          for each in (None, np.array([0.5, 0.5]))),
        *((each, "of EvaluationHook 'eval' .*; give a mapping of names") for each in (None, [1])),
        ({3: 0.5}, "the name of a result of .* is 3; give a text"),
    ],
)  # fmt: skip
async def test_what_is_no_result_is_an_error_of_the_hook(results: Any, message: str) -> None:
    async def evaluate() -> Any:
        return results

    # what a plain function returns may be awaited
    hook = EvaluationHook(lambda session, step: evaluate(), every_n_steps=1)
    with pytest.raises((MetricError, TypeError), match=message):
        await run_session([hook], runs=1)


async def test_numbers_of_any_library_become_floats() -> None:
    values = [True, Fraction(1, 4), np.array(0.5), math.inf, math.nan]
    results: dict[str, Any] = dict(zip("abcde", values, strict=True))
    hook = EvaluationHook(lambda session, step: results, every_n_steps=1)
    await run_session([hook], runs=1)
    assert str(hook.latest) == str({key: float(each) for key, each in results.items()})


@both_modes
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_the_end_of_an_input_of_the_evaluation_is_not_the_end_of_training(
    error: type[Exception], mode: Evaluate
) -> None:
    def evaluate(session: Any, step: int) -> dict[str, float]:
        raise error

    with pytest.raises(RuntimeError, match="of EvaluationHook 'eval' let .* out: its input"):
        await run_session([EvaluationHook(evaluate, every_n_steps=1, mode=mode)], runs=1)
