"""The player stands in for timed work, and what it records has the figures of the program."""

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import FunctionSessionCreator
from asynchooks.planning import Dependence, Plan, PlanError, Spans, timed
from asynchooks.simulation import Simulation, current_simulation

from ..simulation.engines import BACKENDS
from ..support.step_loops import run_steps
from .planned import plan_of, service_of, train_on_rollouts, train_with_server
from .recorded import spans_of, with_spans

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
    simulation = current_simulation()

    async def one() -> None:
        creator = FunctionSessionCreator(step, thread_safe=thread_safe)
        await run_steps(creator, num, step_runner=runner)

    for task in [simulation.start(one) for _ in range(2)]:
        await task.wait()


@pytest.mark.parametrize(
    ("main", "plan", "staleness"),
    [
        (train_on_rollouts, ROLLOUTS, 2.0),  # 16 are held, of which each step takes 8
        (train_with_server, SERVER, 7.0),  # each of 8 workers pushes once between pull and push
    ],
)
def test_a_plan_of_constant_work_ends_when_the_program_does(
    main: Any, plan: Plan, staleness: float, backend: Any
) -> None:
    trace, simulation = plan.run(main, backend=backend), Simulation(backend=backend)
    simulation.run(main)
    assert trace.ended == simulation.now
    assert trace.figures().num_updates > 80
    assert trace.figures().staleness == pytest.approx(staleness, rel=0.03)


def test_figures_of_a_plan_are_the_same_on_every_backend() -> None:
    rng = np.random.default_rng(0)
    plan = plan_of(
        service_of("rollout", rng.lognormal(-1.0, 1.0, 500)),
        service_of("learn", rng.gamma(4.0, 0.05, 500)),
    )
    figures = {plan.run(train_on_rollouts, seed=3, backend=each).figures() for each in BACKENDS}
    assert len(figures) == 1
    assert plan.run(train_on_rollouts, seed=4).figures() not in figures


def test_a_trace_of_a_plan_has_what_a_recording_has() -> None:
    trace = ROLLOUTS.run(train_on_rollouts, concurrency=8, steps=20)
    assert trace.settings == {"concurrency": 8, "steps": 20}
    assert trace.figures().idle_share == pytest.approx(0.5, abs=0.02)  # waiting for rollouts
    learn = trace.find("learn")
    assert learn.is_on_session.all()
    assert not trace.find("rollout").is_on_session.any()
    assert len(learn) == len(trace.find("run")) == len(trace.find("step")) == 20
    assert len(spans_of(trace, "session")["session"]) == 1
    uses, made = trace.marks["use"].ident, spans_of(trace, "call")["rollout"]
    assert len(uses) == 20 * 8
    assert np.isin(uses, made.ident).all()
    assert trace.find("rollout").is_cut.any()  # those under way when the run ended


def twice() -> dict[str, float]:
    sync_step()
    return sync_step()


def in_turns() -> dict[str, float]:
    return sync_step()


@pytest.mark.parametrize(
    ("step", "options", "secs"),
    [
        (async_step, {}, 4 * 0.5),
        (sync_step, {"runner": "thread"}, 4 * 0.5),
        (sync_step, {"runner": "auto"}, 4 * 0.5),
        (sync_step, {"runner": "inline"}, 2 * 4 * 0.5),  # on the loop
        (sync_step, {"runner": "thread", "thread_safe": False}, 2 * 4 * 0.5),
        (twice, {"runner": "thread"}, 2 * 4 * 0.5),
    ],
)
def test_steps_of_two_sessions_overlap_but_on_the_loop(
    step: Any, options: dict[str, Any], secs: float, backend: Any
) -> None:
    trace = STEPS.run(partial(two_sessions, step, **options), backend=backend)
    assert trace.ended == secs
    assert all(each.is_on_session.all() for each in spans_of(trace, "work").values())


def test_steps_in_threads_share_a_service_and_fast_ones_leave_their_threads() -> None:
    plan = plan_of(service_of("sync", [0.5], dependence=Dependence.SHARED, slowdown=1.0))
    assert plan.run(partial(two_sessions, in_turns, "thread")).ended == 2 * 4 * 0.5
    trace = plan_of(service_of("sync", [0.001])).run(partial(two_sessions, sync_step, num=50))
    # the first of each session in a thread; the others one after the other on the loop
    assert trace.ended == pytest.approx(0.001 * (1 + 2 * 49))


def test_returns_get_the_calls_arguments_and_what_was_drawn_and_errors_name_the_work() -> None:
    def returns(prompt: str, *, temperature: float, drawn: Any) -> str:
        assert (prompt, temperature, drawn) == ("abc", 0.5, (0.5, 3.0))
        return "xxx"

    @timed("rollout", output_size=len, returns=returns)
    async def rollout(prompt: str, *, temperature: float) -> str:
        raise AssertionError

    async def main(temperature: float) -> None:
        assert await rollout("abc", temperature=temperature) == "xxx"

    plan = plan_of(service_of("rollout", [0.5], sizes=np.array([3.0])))
    plan.run(main, temperature=0.5)
    with pytest.raises(AssertionError) as caught:
        plan.run(main, temperature=9.0)
    assert any("`returns` of timed('rollout')" in each for each in caught.value.__notes__)


async def spins() -> None:
    while True:
        await anyio.lowlevel.checkpoint()


@timed("reward")
async def reward() -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("main", "match"),
    [
        (partial(two_sessions, lambda: {"loss": 0.0}), "it has called no timed function"),
        (spins, "spent no virtual time: it has called no timed function"),
        (reward, r"'reward', of which nothing .* are: 'async', 'sync'"),
        (partial(anyio.to_thread.run_sync, sync_step), "'sync' is a plain function.*async one"),
    ],
)
def test_what_cannot_be_planned_is_refused(main: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
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
        [with_spans(trace, "save", saves)],
        services=dict(STEPS.services),
    )
    planned = plan.run(partial(two_sessions, async_step), backend=backend)
    # one of two in the fourth run of all, and in the eighth: 0.25 s each
    assert spans_of(planned, "save")["write a checkpoint"].secs.tolist() == [0.25, 0.25]
    assert planned.ended == 4 * 0.5 + 2 * 0.25
