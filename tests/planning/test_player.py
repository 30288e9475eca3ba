"""The player stands in for timed work, and what it records has the figures of the program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession, SessionRunHook, StopAtStepHook
from asynchooks._engine.recording import Kind
from asynchooks.data import map_concurrent
from asynchooks.planning import Dependence, Plan, PlanError, Spans, span, timed
from asynchooks.simulation import current_simulation

from .planned import (
    plan_of,
    run_in_virtual_time,
    service_of,
    train_on_rollouts,
    train_with_server,
)

ROLLOUTS = plan_of(service_of("rollout", [0.5]), service_of("learn", [0.25]))
SERVER = plan_of(service_of("compute", [0.08]), service_of("service", [0.006]))


@timed("sync", returns={"loss": 0.0})
def sync_step() -> dict[str, float]:
    raise AssertionError("a plan does not call it")


@timed("async", returns={"loss": 0.0})
async def async_step() -> dict[str, float]:
    raise AssertionError("a plan does not call it")


STEPS = plan_of(service_of("sync", [0.5]), service_of("async", [0.5]))


async def two_sessions(
    step: Any, runner: Any = "auto", num: int = 4, *, thread_safe: bool = True
) -> None:
    """Two sessions side by side, of 4 steps each."""

    async def one() -> None:
        hooks = [StopAtStepHook(last_step=num)]
        creator = FunctionSessionCreator(step, thread_safe=thread_safe)
        async with MonitoredSession(hooks, creator, step_runner=runner) as session:
            while not session.should_stop():
                await session.run("loss")

    simulation = current_simulation()
    for task in [simulation.start(one) for _ in range(2)]:
        await task.wait()


@pytest.mark.parametrize("main", [train_on_rollouts, train_with_server])
def test_a_plan_of_constant_work_ends_when_the_program_does(main: Any, backend: Any) -> None:
    plan = ROLLOUTS if main is train_on_rollouts else SERVER

    async def timed_main() -> float:
        await main()
        return current_simulation().now

    trace = plan.run(main, backend=backend)
    assert trace.ended == run_in_virtual_time(timed_main, backend)
    assert trace.figures().num_updates > 80


def test_figures_of_a_plan_are_the_same_on_every_backend() -> None:
    rng = np.random.default_rng(0)
    plan = plan_of(
        service_of("rollout", rng.lognormal(-1.0, 1.0, 500)),
        service_of("learn", rng.gamma(4.0, 0.05, 500)),
    )
    traces = [plan.run(train_on_rollouts, seed=3, backend=each)
              for each in ("asyncio", "trio", "turbo")]  # fmt: skip
    figures = {each.figures() for each in traces}
    assert len(figures) == 1
    assert plan.run(train_on_rollouts, seed=4).figures() not in figures


def test_staleness_of_a_plan_is_that_of_the_pipeline() -> None:
    # 16 are held, of which each step takes 8
    figures = ROLLOUTS.run(train_on_rollouts, concurrency=16, size=8).figures()
    assert figures.staleness == pytest.approx(2.0, abs=0.05)
    # each of 8 workers pushes once between a worker's pull and its push
    figures = SERVER.run(train_with_server, workers=8).figures()
    assert figures.staleness == pytest.approx(7.0, rel=0.01)  # at the end the others have left
    assert figures.max_staleness == 7.0


def test_a_trace_of_a_plan_has_what_a_recording_has() -> None:
    trace = ROLLOUTS.run(train_on_rollouts, steps=20)
    assert trace.settings == {"steps": 20}
    learn, runs = trace.find("learn"), trace.find("run", Kind.RUN)
    assert learn.is_on_session.all()
    assert not trace.find("rollout").is_on_session.any()
    assert len(learn) == len(runs) == len(trace.find("step", Kind.RUN)) == 20
    assert len(trace.find("session", Kind.SESSION)) == 1
    assert len(trace.marks["use"].ident) == 20 * 8
    made = trace.find("rollout", Kind.CALL)
    assert np.isin(trace.marks["use"].ident, made.ident).all()
    # those under way when the run ended were cut
    assert trace.find("rollout").is_cut.sum() == 16 - 8 or trace.find("rollout").is_cut.any()


def test_async_steps_of_two_sessions_overlap(backend: Any) -> None:
    trace = STEPS.run(partial(two_sessions, async_step), backend=backend)
    assert trace.ended == 4 * 0.5


def test_a_sync_step_on_the_loop_holds_up_the_other_session(backend: Any) -> None:
    trace = STEPS.run(partial(two_sessions, sync_step, "inline"), backend=backend)
    assert trace.ended == 2 * 4 * 0.5


@pytest.mark.parametrize("runner", ["thread", "auto"])
def test_sync_steps_in_threads_overlap(runner: str, backend: Any) -> None:
    trace = STEPS.run(partial(two_sessions, sync_step, runner), backend=backend)
    assert trace.ended == 4 * 0.5
    assert trace.find("sync").is_on_session.all()


def test_sync_steps_of_one_function_take_turns(backend: Any) -> None:
    program = partial(two_sessions, sync_step, "thread", thread_safe=False)
    assert STEPS.run(program, backend=backend).ended == 2 * 4 * 0.5


def test_a_fast_sync_step_leaves_its_thread_as_in_reality() -> None:
    plan = plan_of(service_of("sync", [0.001]))
    trace = plan.run(partial(two_sessions, sync_step, "auto", 50))
    # the first of each session in a thread; the others one after the other on the loop
    assert trace.ended == pytest.approx(0.001 * (1 + 2 * 49))


def test_a_step_in_a_thread_may_do_several_pieces_of_work_and_share_a_service() -> None:
    def step() -> dict[str, float]:
        sync_step()
        return sync_step()

    def shared() -> dict[str, float]:
        return sync_step()

    assert STEPS.run(partial(two_sessions, step, "thread")).ended == 2 * 4 * 0.5
    one_processor = service_of("sync", [0.5], dependence=Dependence.SHARED, slowdown=1.0)
    plan = plan_of(one_processor)
    assert plan.run(partial(two_sessions, shared, "thread")).ended == 2 * 4 * 0.5


def test_sync_calls_of_a_stage_overlap_in_their_threads() -> None:
    async def main() -> None:
        def call(number: int) -> int:
            sync_step()
            return number

        async with map_concurrent(call, range(8), 4) as items:
            assert [each async for each in items] == list(range(8))

    assert STEPS.run(main).ended == pytest.approx(2 * 0.5, rel=0.01)


def test_an_error_of_a_step_in_a_thread_leaves_the_plan() -> None:
    def step() -> dict[str, float]:
        sync_step()
        raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        STEPS.run(partial(two_sessions, step, "thread"))


def test_a_plan_ends_though_a_step_in_a_thread_is_under_way(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def step() -> dict[str, float]:
        try:
            return sync_step()
        finally:
            with log.open("a") as file:
                file.write("step ")

    async def main() -> None:
        simulation = current_simulation()
        simulation.start(two_sessions, step, "thread")
        await simulation.sleep(0.75)

    STEPS.run(main)
    assert log.read_text() == "step " * 4  # two are done, and two end with the plan


def test_timed_work_in_a_thread_of_the_programs_own_is_refused() -> None:
    async def main() -> None:
        await anyio.to_thread.run_sync(sync_step)

    with pytest.raises(PlanError, match=r"'sync' is a plain function.*async one around the thread"):
        STEPS.run(main)


def test_returns_get_the_calls_arguments_and_what_was_drawn() -> None:
    def returns(prompt: str, *, temperature: float, drawn: Any) -> str:
        assert (prompt, temperature, drawn.secs, drawn.size) == ("abc", 0.5, 0.5, 3.0)
        return "x" * int(drawn.size)

    @timed("rollout", output_size=len, returns=returns)
    async def rollout(prompt: str, *, temperature: float) -> str:
        raise AssertionError

    async def main() -> None:
        assert await rollout("abc", temperature=0.5) == "xxx"

    plan_of(service_of("rollout", [0.5], sizes=np.array([3.0]))).run(main)


def test_an_error_of_returns_names_the_kind_of_work() -> None:
    @timed("rollout", returns=lambda prompt: prompt)
    async def rollout(prompt: str) -> str:
        raise AssertionError

    with pytest.raises(TypeError) as caught:
        ROLLOUTS.run(partial(rollout, "abc"))
    assert any("`returns` of timed('rollout')" in each for each in caught.value.__notes__)


def test_work_that_was_not_recorded_is_refused_with_the_kinds_that_were() -> None:
    @timed("reward")
    async def reward() -> None:
        raise AssertionError

    with pytest.raises(PlanError, match=r"'reward', of which nothing .* are: 'learn', 'rollout'"):
        ROLLOUTS.run(reward)


def test_a_program_that_spends_no_time_is_refused() -> None:
    async def main() -> None:
        await two_sessions(lambda: {"loss": 0.0})

    with pytest.raises(PlanError, match="spent no virtual time: it has called no timed function"):
        ROLLOUTS.run(main, backend="turbo")


def test_a_program_that_runs_on_without_time_is_refused() -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(PlanError, match="called no timed function"):
        ROLLOUTS.run(main)


def test_a_block_of_span_is_recorded_and_takes_what_is_timed_in_it() -> None:
    async def main() -> None:
        with span("both"):
            await async_step()
            await async_step()

    trace = STEPS.run(main)
    assert trace.find("both", Kind.BLOCK).secs.tolist() == [1.0]


def test_hooks_of_users_are_called_in_a_plan() -> None:
    class Log(SessionRunHook):
        def __init__(self) -> None:
            self.times: list[float] = []

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            self.times.append(current_simulation().now)

    log = Log()

    async def main() -> None:
        hooks = [log, StopAtStepHook(last_step=3)]
        async with MonitoredSession(hooks, FunctionSessionCreator(async_step)) as session:
            while not session.should_stop():
                await session.run("loss")
        assert log.times == [0.5, 1.0, 1.5]

    STEPS.run(main)


def test_runs_wait_for_the_saves_that_were_recorded(backend: Any) -> None:
    trace = STEPS.run(partial(two_sessions, async_step))  # 8 runs
    spans = Spans.of(
        np.array([1.0, 1.5, 1.6]),
        np.array([1.25, 1.75, 9.0]),
        is_on_session=np.array([True, True, False]),  # the last one is in the background
    )
    saves = {"write a checkpoint": spans}
    plan = Plan(
        [replace(trace, spans={**trace.spans, Kind.SAVE: saves})],
        services=dict(STEPS.services),
    )
    planned = plan.run(partial(two_sessions, async_step), backend=backend)
    # one of two in the fourth run of all, and in the eighth: 0.25 s each
    assert planned.find("write a checkpoint", Kind.SAVE).secs.tolist() == [0.25, 0.25]
    assert planned.ended == 4 * 0.5 + 2 * 0.25
