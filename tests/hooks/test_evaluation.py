"""EvaluationHook: when it evaluates, concurrently or exclusively, and what it logs."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.base import Engine, Slot

from ..support.helpers import counting_creator, counting_step, settle
from .evaluations import Gated, Notes, run_to
from .virtual_time import Writer, on_trampoline, quarter_step

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("mode", list(Evaluate))


@both_modes
async def test_it_evaluates_at_multiples_and_at_the_end(mode: Evaluate) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=3, mode=mode)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 10)
    assert notes.steps == [3, 6, 9, 10]
    assert (hook.latest, hook.latest_step) == ({"step": 10.0}, 10)


@both_modes
async def test_it_counts_from_the_step_at_which_the_session_was_created(mode: Evaluate) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=5, mode=mode, at_end=False)
    creator = FunctionSessionCreator(counting_step()[0], initial_step=7)
    async with MonitoredSession([hook], creator) as session:
        await run_to(session, 18)
    assert notes.steps == [12, 17]


async def test_training_goes_on_during_a_concurrent_evaluation() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 50)
        assert gated.begun == [2]
        assert gated.ended == []
        gated.let(2)
        await settle()
        assert (hook.latest, hook.latest_step) == ({"step": 2.0}, 2)


@pytest.mark.parametrize("max_at_once", [1, 2])
async def test_what_is_due_while_enough_are_under_way_is_put_off_and_not_dropped(
    max_at_once: int,
) -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, max_at_once=max_at_once, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 9)
        first = [2, 4][:max_at_once]
        assert gated.begun == first
        gated.let(2)
        await settle()
        assert gated.begun == first, "it is begun by a run"
        await run_to(session, 10)
        assert gated.begun == [*first, 10]
        await run_to(session, 13)
        for step in (4, 10):
            gated.let(step)
        await settle()
        await run_to(session, 14)
        assert gated.begun == [*first, 10, 14]
        gated.let(14)
    assert gated.most_at_once == max_at_once


async def test_a_coroutine_comes_to_its_first_wait_before_the_next_step() -> None:
    step_fn, calls = counting_step()
    seen = []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        seen.append((step, session.global_step.value, len(calls)))
        await anyio.lowlevel.checkpoint()
        return {}

    hook = EvaluationHook(evaluate, every_n_steps=100, at_end=False)
    creator = FunctionSessionCreator(step_fn)
    async with MonitoredSession([hook], creator, step_runner="inline") as session:
        for step in (150, 250, 350):
            await run_to(session, step)
            await settle()
    assert seen == [(each, each, each) for each in (100, 200, 300)]


@pytest.mark.parametrize("way", ["exclusive", "concurrent, in exclusive()", "concurrent"])
async def test_no_worker_runs_a_step_during_an_exclusive_evaluation_or_in_exclusive(
    way: str,
) -> None:
    seen = []

    async def watch(session: Any, step: int) -> dict[str, float]:
        begun = session.global_step.value
        await settle()
        seen.append((step, begun, session.global_step.value))
        return {"value": session.global_step.value}

    async def exclusively(session: Any, step: int) -> dict[str, float]:
        async with session.global_step.exclusive():
            return await watch(session, step)

    async def step() -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {}

    mode = Evaluate.EXCLUSIVE if way == "exclusive" else Evaluate.CONCURRENT
    evaluate = exclusively if way == "concurrent, in exclusive()" else watch
    hook = EvaluationHook(evaluate, every_n_steps=10, mode=mode, at_end=False)
    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def worker(hooks: list[Any]) -> None:
        hooks = [*hooks, StopAtStepHook(last_step=100)]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for hooks in ([hook], [], []):
                group.start_soon(worker, hooks)
    if way == "concurrent":
        assert any(begun < ended for _, begun, ended in seen)
    else:
        assert len(seen) >= 5
        assert all(begun == ended for _, begun, ended in seen)
    if way == "exclusive":
        assert [step for step, begun, _ in seen] == [begun for _, begun, _ in seen]


@both_modes
async def test_a_plain_function_runs_in_a_thread(mode: Evaluate) -> None:
    loop_goes_on = threading.Event()
    threads = []

    def evaluate(session: Any, step: int) -> dict[str, float]:
        threads.append(threading.current_thread())
        assert loop_goes_on.wait(10)
        return {"step": step}

    async def watch() -> None:
        while not threads:
            await anyio.lowlevel.checkpoint()
        loop_goes_on.set()

    hook = EvaluationHook(evaluate, every_n_steps=2, mode=mode, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        session.start_soon(watch)
        await run_to(session, 3)
    assert hook.latest == {"step": 2}
    assert threads != [threading.current_thread()]


async def test_what_a_plain_function_returns_may_be_awaited() -> None:
    notes = Notes()
    hook = EvaluationHook(lambda session, step: notes(session, step), every_n_steps=2)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 2)
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
        async with MonitoredSession([hook], FunctionSessionCreator(quarter_step)) as session:
            await run_to(session, 15)

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
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["test/step"]
    assert [(e.step, e.value) for e in events.Scalars("test/step")] == [(4, 4.0), (8, 8.0)]


async def test_a_writer_of_one_s_own_is_flushed_at_the_end_and_after_an_error() -> None:
    writer = Writer()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"loss": math.nan if step == 1 else 0.5}

    hook = EvaluationHook(evaluate, every_n_steps=1, summary_writer=writer)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 2)
    assert [(tag, step) for tag, _, step in writer.written] == [("eval/loss", 1), ("eval/loss", 2)]
    assert [math.isnan(value) for _, value, _ in writer.written] == [True, False]
    assert writer.flushes == 1
    with pytest.raises(ValueError, match="in the block"):
        async with MonitoredSession([hook], counting_creator()):
            raise ValueError("in the block")
    assert writer.flushes == 2


async def test_a_plain_function_is_exclusive_unless_concurrent_is_asked_for() -> None:
    begun, release = threading.Event(), threading.Event()

    def evaluate(session: Any, step: int) -> dict[str, float]:
        begun.set()
        assert release.wait(30)
        return {"step": step}

    for mode, goes_on in ((None, False), (Evaluate.CONCURRENT, True)):
        begun.clear()
        release.clear()
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
                assert (other.global_step.value == 3) == goes_on
                release.set()
        assert hook.latest == {"step": 2.0}


async def test_a_coroutine_function_is_concurrent_by_default() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 3)
        assert (gated.begun, gated.ended) == ([2], [])
        gated.let(2)
