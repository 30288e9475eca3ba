"""Predictions cover known truth, are flagged where none was recorded, and refused if wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession, StopAtStepHook
from asynchooks._engine.recording import Kind
from asynchooks.planning import Dependence, Estimate, Figures, Plan, PlanError, Trace, span, timed
from asynchooks.planning._prediction import estimates
from asynchooks.simulation import DeadlockError, ForeignAwaitError, current_simulation

from .planned import (
    learn,
    plan_of,
    service_of,
    train_on_rollouts,
    train_with_server,
)


def exhaustive_rows(*rows: tuple[int, ...]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]


RNG = np.random.default_rng(1)
ROLLOUTS = plan_of(
    service_of("rollout", RNG.gamma(4.0, 0.15, 20_000)),
    service_of("learn", RNG.gamma(20.0, 0.0025, 5_000)),
)
HEAVY = plan_of(
    service_of("rollout", RNG.lognormal(-1.0, 1.2, 20_000)),
    service_of("learn", RNG.gamma(20.0, 0.0025, 5_000)),
)
SHARED = plan_of(
    service_of("rollout", RNG.gamma(4.0, 0.05, 20_000), dependence=Dependence.SHARED, slowdown=0.1),
    service_of("learn", RNG.gamma(20.0, 0.0025, 5_000)),
)
SERVER = plan_of(
    service_of("compute", RNG.gamma(6.0, 0.08 / 6, 20_000)),
    service_of("service", 0.006 * RNG.uniform(0.7, 1.3, 5_000), dependence=Dependence.QUEUE),
)
ROLLOUT_SETTING: dict[str, Any] = {"concurrency": 16, "size": 8, "steps": 120}
SERVER_SETTING = {"workers": 8, "protocol": "async", "updates": 500}


@cache
def recorded(truth: Plan, seed: int = 0, **changes: Any) -> Trace:
    """A recording of a run whose services are the truth."""
    main, base = (
        (train_with_server, SERVER_SETTING)
        if truth is SERVER
        else (train_on_rollouts, ROLLOUT_SETTING)
    )
    return jittered(truth.run(main, seed=1000 + seed, backend="turbo", **{**base, **changes}))


def jittered(trace: Trace) -> Trace:
    """As an event loop records: what begins at one virtual time begins one after the other."""
    rng = np.random.default_rng(0)
    for name, spans in trace.spans[Kind.WORK].items():
        begun = np.minimum(spans.begun + rng.uniform(0.0, 1e-4, len(spans)), spans.ended)
        trace = changed(trace, name, begun=begun)
    return trace


def changed(trace: Trace, name: str, **columns: Any) -> Trace:
    """The trace with other columns in the spans of one kind of work."""
    work = dict(trace.spans[Kind.WORK])
    spans = replace(work[name], **columns)
    work[name] = spans.pick(np.argsort(spans.begun, kind="stable"))
    return replace(trace, spans={**trace.spans, Kind.WORK: work})


ROLLOUT_CHANGES: list[dict[str, Any]] = [{}, {"size": 4, "steps": 240}, {"size": 6}]
SERVER_CHANGES: list[dict[str, Any]] = [
    {}, {"workers": 4}, {"workers": 16}, {"protocol": "sync", "updates": 60}, {"protocol": "ssp:1"}
]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "num"), [(0, 2), *exhaustive_rows(*((first, 5) for first in range(2, 42, 5)))]
)
@pytest.mark.parametrize("truth", [ROLLOUTS, SERVER], ids=["rollouts", "server"])
def test_known_truth_is_covered(truth: Plan, first: int, num: int) -> None:
    changes = ROLLOUT_CHANGES if truth is ROLLOUTS else SERVER_CHANGES
    main = train_on_rollouts if truth is ROLLOUTS else train_with_server
    covers: list[tuple[bool, bool]] = []
    errors: list[tuple[float, float]] = []
    for seed in range(first, first + num):
        plan = Plan([recorded(truth, seed)])
        for change in changes:
            found = plan.predict(main, seed=seed, allow_mismatch=True, **change)
            true = recorded(truth, 5000 + seed, **change).figures()
            assert not found.is_extrapolated, found
            covers.append((found.rate.covers(true.rate), found.staleness.covers(true.staleness)))
            if true.staleness:
                errors.append(
                    (abs(found.rate.value / true.rate - 1),
                     abs(found.staleness.value / true.staleness - 1))
                )  # fmt: skip
    share = [statistics.mean(each) for each in zip(*covers, strict=True)]
    assert share[0] >= 0.6  # settings of one recording err alike
    assert share[1] >= 0.85
    median = [statistics.median(each) for each in zip(*errors, strict=True)]
    print(f"covered {share}, median errors {median}")
    assert median[0] <= 0.04
    assert median[1] <= 0.01


# What was not recorded


def test_a_load_that_was_not_recorded_is_flagged_and_the_truth_is_within() -> None:
    plan = Plan([recorded(SHARED)])
    assert not plan.predict(train_on_rollouts).is_extrapolated
    for concurrency in (8, 64):
        found = plan.predict(train_on_rollouts, concurrency=concurrency)
        assert found.is_extrapolated
        assert any("load that was not recorded" in each for each in found.notes)
        assert found.rate.covers(recorded(SHARED, 5000, concurrency=concurrency).figures().rate)


def test_work_that_was_slow_at_the_same_times_widens_the_rate_and_is_noted() -> None:
    work = RNG.gamma(4.0, 0.15, 2000)
    even, by_time = (
        plan_of(service_of("rollout", work, is_slow_together=each), service_of("learn", [0.05]))
        for each in (False, True)
    )
    rate = even.predict(train_on_rollouts, **ROLLOUT_SETTING).rate
    found = by_time.predict(train_on_rollouts, **ROLLOUT_SETTING)
    assert found.rate.high >= 1.1 * found.rate.value > rate.high
    assert "rollout: all work was slow at the same times" in "".join(found.notes)
    assert not found.is_extrapolated  # the setting is the recorded one


def test_loads_between_two_recordings_are_not_flagged_and_are_close() -> None:
    plan = Plan([recorded(SHARED, concurrency=8, size=4), recorded(SHARED, 1, concurrency=64)])
    found = plan.predict(train_on_rollouts, concurrency=24, size=8)
    assert not found.is_extrapolated, found
    true = recorded(SHARED, 5000, concurrency=24, size=8).figures()
    assert found.rate.value == pytest.approx(true.rate, rel=0.05)
    assert found.staleness.value == pytest.approx(true.staleness, rel=0.02)


def test_further_workers_than_were_recorded_are_flagged_where_those_differ() -> None:
    slow = service_of(
        "compute", RNG.gamma(6.0, 0.01, 4000) * np.tile([1.0, 2.0], 2000),
        workers=np.tile([0, 1], 2000), is_own=True,
    )  # fmt: skip
    truth = Plan([], services={"compute": slow, "service": SERVER.services["service"]})
    trace = truth.run(train_with_server, backend="turbo", workers=4, updates=800)
    plan = Plan([trace])
    assert not plan.predict(train_with_server).is_extrapolated
    found = plan.predict(train_with_server, workers=8)
    assert found.is_extrapolated
    assert any("8 workers, of which 4 were recorded" in each for each in found.notes)


@timed("learn", input_size=len, returns={"loss": 0.0})
async def learn_of(groups: Any) -> dict[str, float]:
    raise AssertionError


async def steps_of_size(size: int = 8, num: int = 60) -> None:
    async def step() -> dict[str, float]:
        return await learn_of(range(size))

    hooks = [StopAtStepHook(last_step=num)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run("loss")


async def steps_in_a_row(num: int) -> None:
    hooks = [StopAtStepHook(last_step=num)]
    async with MonitoredSession(hooks, FunctionSessionCreator(lambda: learn(None))) as session:
        while not session.should_stop():
            await session.run("loss")


def test_a_size_beyond_the_one_that_was_recorded_is_bracketed() -> None:
    truth = plan_of(service_of("learn", RNG.gamma(50.0, 0.01, 2000)))
    plan = Plan([truth.run(steps_of_size, size=8)])
    assert not plan.predict(steps_of_size).is_extrapolated
    found = plan.predict(steps_of_size, size=16)
    assert found.is_extrapolated
    assert found.rate.low < 1.05 < 1.95 < found.rate.high  # in proportion, and constant


def test_a_pipeline_that_rests_on_a_few_long_samples_is_flagged() -> None:
    async def in_order(concurrency: int = 16, size: int = 16, steps: int = 100) -> None:
        await train_on_rollouts(concurrency, size, steps)  # each batch waits for its slowest

    trace = HEAVY.run(in_order, backend="turbo", concurrency=16, size=16, steps=60)
    found = Plan([trace]).predict(in_order, allow_mismatch=True)
    assert any("longest samples" in each for each in found.notes)
    assert found.is_extrapolated


# Checks against what was recorded


def test_the_recorded_setting_is_checked_and_held() -> None:
    plan = Plan([recorded(SERVER)])
    check = plan.check(train_with_server)
    assert not check.is_mismatch
    assert check.prediction.rate.covers(check.measured.rate)
    assert check.error("rate") == 0.0
    assert "measured" in str(check)


def test_a_program_that_does_the_step_twice_is_refused() -> None:
    async def doubled(concurrency: int, size: int, steps: int) -> None:
        simulation = current_simulation()
        for task in [
            simulation.start(train_on_rollouts, concurrency // 2, size // 2, steps)
            for _ in range(2)
        ]:
            await task.wait()

    plan = Plan([recorded(ROLLOUTS)])
    with pytest.raises(PlanError, match=r"(?s)misses the recorded .* measured .* predicted"):
        plan.predict(doubled)
    found = plan.predict(doubled, allow_mismatch=True)
    measured = recorded(ROLLOUTS).figures().rate
    assert found.rate.low <= 1.001 * measured  # it is widened as far as that
    assert any("is missed" in each for each in found.notes)


def test_cut_spans_that_count_as_complete_are_caught() -> None:
    trace = recorded(ROLLOUTS)
    spans = trace.find("rollout")
    cut = np.arange(len(spans)) % 3 == 0  # a third was cancelled early, and said to be done
    ended = np.where(cut, spans.begun + 0.1 * spans.secs, spans.ended)
    with pytest.raises(PlanError, match="misses"):
        Plan([changed(trace, "rollout", ended=ended)]).predict(train_on_rollouts)


def test_client_spans_drawn_as_service_are_caught() -> None:
    trace = recorded(SERVER, workers=16)
    assert not Plan([trace]).check(train_with_server).is_mismatch
    client = service_of(
        "service", trace.find("service").secs, dependence=Dependence.QUEUE
    )  # a span holds the queue as well
    with pytest.raises(PlanError, match="misses"):
        Plan([trace], services={"service": client}).predict(train_with_server)


def test_settings_that_were_not_recorded_are_said_not_to_be_checked() -> None:
    trace = replace(recorded(SERVER), settings={})
    found = Plan([trace]).predict(train_with_server, num_runs=2, updates=300)
    assert any("record(path, settings={...})" in each for each in found.notes)


def test_closures_of_one_factory_are_several_programs() -> None:
    def made(num_times: int) -> Callable[..., Any]:
        async def main(concurrency: int, size: int, steps: int) -> None:
            simulation = current_simulation()
            for task in [
                simulation.start(train_on_rollouts, concurrency // num_times, size // num_times,
                                 steps)
                for _ in range(num_times)
            ]:  # fmt: skip
                await task.wait()

        return main

    plan = Plan([recorded(ROLLOUTS)])
    plan.predict(made(1), num_runs=4)
    with pytest.raises(PlanError, match="misses the recorded"):
        plan.predict(made(2), num_runs=4)


# Estimates


def figures(rate: float, staleness: float = 7.0, idle: float = 0.25) -> Figures:
    return Figures(rate, staleness, staleness, idle, 100, 10.0)


def test_an_identity_has_an_interval_of_the_floor() -> None:
    for is_extrapolated, share in ((False, 0.015), (True, 0.03)):
        found = estimates([figures(10.0)] * 4, [], {}, is_extrapolated=is_extrapolated)
        assert found["staleness"] == pytest.approx((7.0, 7.0 * (1 - share), 7.0 * (1 + share)))


def test_intervals_hold_the_runs_of_other_assumptions_and_the_error_of_the_model() -> None:
    runs = [figures(10.0)] * 4
    others = [figures(4.0), figures(20.0)]
    rate = estimates(runs, others, {}, is_extrapolated=True)["rate"]
    assert rate == pytest.approx((10.0, 4.0 * 0.97, 20.0 * 1.03))
    rate = estimates(runs, [], {"rate": 0.2}, is_extrapolated=False)["rate"]
    assert rate.low == pytest.approx(10 * (1 - np.hypot(0.2, 0.015)))


def test_seconds_and_cost_follow_from_the_rate() -> None:
    plan = Plan([recorded(SERVER)])
    found = replace(plan.predict(train_with_server, num_runs=2), rate=Estimate(10.0, 8.0, 12.5))
    assert found.secs_to(1000) == (100.0, 80.0, 125.0)
    assert found.cost(36_000, price_per_hour=2.0) == pytest.approx((2.0, 1.6, 2.5))
    with pytest.raises(ValueError, match="num_updates"):
        found.secs_to(0)


def test_one_seed_predicts_the_same_and_turbo_is_used_where_it_can_be() -> None:
    trace = recorded(SERVER)
    found = [
        Plan([trace]).predict(train_with_server, num_runs=2, backend=each, updates=200)
        for each in ("asyncio", "turbo", "trio")
    ]
    assert found[0] == found[1] == found[2]


def test_a_program_that_needs_an_event_loop_is_run_on_one() -> None:
    async def main(num: int = 40) -> None:
        import sniffio

        async def work() -> None:
            for _ in range(num):
                await learn(None)
                await anyio.sleep(0.0)
                assert sniffio.current_async_library() == "asyncio"

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            group.start_soon(work)
            async with MonitoredSession(
                [StopAtStepHook(last_step=num)], FunctionSessionCreator(lambda: learn(None))
            ) as session:
                while not session.should_stop():
                    await session.run("loss")

    plan = plan_of(service_of("learn", RNG.gamma(20.0, 0.0025, 100)))
    assert plan.predict(main, num_runs=2).rate.value == pytest.approx(20.0, rel=0.1)


# Misuse


def test_main_is_an_async_function_of_the_settings() -> None:
    plan = Plan([recorded(SERVER)])

    def plain() -> None: ...

    with pytest.raises(TypeError, match="give the async function that runs the program"):
        plan.predict(plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give the function, .*plan.predict\(train_with_server,"):
        plan.predict(train_with_server())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"argument 'wrokers'; it takes \['workers'"):
        plan.predict(train_with_server, wrokers=4)

    async def needy(depth: int) -> None: ...

    with pytest.raises(TypeError, match=r"needy: missing .*'depth'"):
        plan.predict(needy)
    with pytest.raises(ValueError, match="num_runs"):
        plan.predict(train_with_server, num_runs=1)
    with pytest.raises(TypeError, match=r"Plan\(\[trace\]\)"):
        Plan(recorded(SERVER))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="traces is empty"):
        Plan([])


def test_arguments_of_the_wrong_type_are_refused() -> None:
    plan = Plan([recorded(SERVER)])
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, r"traces is 3; give a list of Traces", lambda: Plan(3)),  # type: ignore[arg-type]
        (TypeError, r"services is \[3\]; give a dict", lambda: Plan([], services=[3])),  # type: ignore[arg-type]
        (TypeError, r"services\['a'\] is 3; give a Service", lambda: Plan([], services={"a": 3})),  # type: ignore[dict-item]
        (TypeError, r"path is None; give the path", lambda: Plan.read(None)),  # type: ignore[arg-type]
        (TypeError, r"trace is 3; give a Trace", lambda: plan.check(train_with_server, trace=3)),  # type: ignore[arg-type]
        (ValueError, r"name is 'speed'; give one of rate,",
         lambda: plan.check(train_with_server, num_runs=2).error("speed")),
        (ValueError, r"name is ''; give the name of the block", lambda: span("")),
    ]  # fmt: skip
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()


def test_work_that_was_only_cut_has_no_plan() -> None:
    trace = recorded(SERVER)
    cut = changed(trace, "compute", is_cut=np.ones(len(trace.find("compute")), np.bool_))
    with pytest.raises(PlanError, match=r"how long 'compute' takes is not known: all \d+ spans"):
        Plan([cut]).predict(train_with_server, num_runs=2)


def test_sessions_that_are_never_idle_have_an_idle_share_of_zero() -> None:
    for num in range(20, 40):
        assert ROLLOUTS.run(steps_in_a_row, backend="turbo", num=num).figures().idle_share >= 0.0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_of_its_own_is_refused(backend: Any) -> None:
    async def main() -> None:
        await learn(None)
        anyio.run(learn, None)

    with pytest.raises(RuntimeError) as caught:
        ROLLOUTS.run(main, backend=backend)
    assert any("an event loop runs already" in each for each in caught.value.__notes__)


def test_a_program_for_asyncio_is_refused_on_trio() -> None:
    import asyncio

    async def main() -> None:
        await learn(None)
        await asyncio.sleep(1.0)

    assert ROLLOUTS.run(main).ended > 1.0
    with pytest.raises(PlanError, match="needs asyncio, and was planned on trio"):
        ROLLOUTS.run(main, backend="trio")


def test_a_program_for_trio_is_refused_on_asyncio() -> None:
    import trio

    async def main() -> None:
        await learn(None)
        await trio.sleep(1.0)

    assert ROLLOUTS.run(main, backend="trio").ended > 1.0
    with pytest.raises(PlanError, match="needs trio, and was planned on asyncio"):
        ROLLOUTS.run(main)


def test_what_turbo_cannot_run_is_no_second_event_loop() -> None:
    async def main() -> None:
        await learn(None)
        async with anyio.create_task_group():
            pass

    with pytest.raises(ForeignAwaitError) as caught:
        ROLLOUTS.run(main, backend="turbo")
    assert not any("event loop runs" in each for each in getattr(caught.value, "__notes__", []))


def test_a_wait_for_ever_says_that_nothing_comes_from_outside() -> None:
    async def main() -> None:
        await learn(None)
        await anyio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        ROLLOUTS.run(main)
    assert any("nothing comes from outside" in each for each in caught.value.__notes__)


def test_a_program_without_updates_has_no_prediction() -> None:
    async def main() -> None:
        await learn(None)

    with pytest.raises(PlanError, match="too few updates"):
        ROLLOUTS.predict(main, num_runs=2)


def test_a_plan_shows_what_was_fitted() -> None:
    plan = Plan([recorded(SERVER)])
    assert sorted(plan.services) == ["compute", "service"]
    assert plan.services["service"].dependence is Dependence.QUEUE
    assert "queue for 1 server" in str(plan)
