"""Predictions cover known truth, are flagged where none was recorded, and refused if wrong."""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from asynchooks.planning import Dependence, Plan, PlanError, Trace, timed
from asynchooks.simulation import DeadlockError, current_simulation

from ..support.step_loops import run_steps
from .planned import (
    learn,
    plan_of,
    service_of,
    train_on_rollouts,
    train_with_server,
)
from .recorded import spans_of, with_spans

RNG = np.random.default_rng(1)
ROLLOUTS = plan_of(
    service_of("rollout", RNG.gamma(4.0, 0.15, 20_000)),
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
    trace = truth.run(main, seed=1000 + seed, backend="turbo", **{**base, **changes})
    # as an event loop records: what begins at one virtual time begins one after the other
    rng, work = np.random.default_rng(0), {}
    for name, spans in spans_of(trace, "work").items():
        begun = np.minimum(spans.begun + rng.uniform(0.0, 1e-4, len(spans)), spans.ended)
        work[name] = replace(spans, begun=begun).pick(np.argsort(begun, kind="stable"))
    return with_spans(trace, "work", work)


ROLLOUT_CHANGES: list[dict[str, Any]] = [{}, {"size": 4, "steps": 240}, {"size": 6}]
SERVER_CHANGES: list[dict[str, Any]] = [
    {}, {"workers": 4}, {"workers": 16}, {"protocol": "sync", "updates": 60}, {"protocol": "ssp:1"}
]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "num"),
    [
        (0, 1),
        *(pytest.param(each, 3, marks=pytest.mark.exhaustive) for each in (2, 5)),
    ],
)
@pytest.mark.parametrize(
    ("truth", "main", "changes"),
    [
        (ROLLOUTS, train_on_rollouts, ROLLOUT_CHANGES),
        (SERVER, train_with_server, SERVER_CHANGES),
    ],
    ids=["rollouts", "server"],
)
def test_known_truth_is_covered(
    truth: Plan, main: Any, changes: list[dict[str, Any]], first: int, num: int
) -> None:
    covers: list[list[bool]] = []
    errors: dict[str, list[float]] = {"rate": [], "staleness": []}
    for seed in range(first, first + num):
        plan = Plan([recorded(truth, seed)])
        for change in changes:
            found = plan.predict(main, seed=seed, num_runs=5, allow_mismatch=True, **change)
            true = recorded(truth, 5000 + seed, **change).figures()
            assert not found.is_extrapolated, found
            covers.append([getattr(found, each).covers(getattr(true, each)) for each in errors])
            if true.staleness:
                for each, seen in errors.items():
                    seen.append(abs(getattr(found, each).value / getattr(true, each) - 1))
    rate, staleness = [statistics.mean(each) for each in zip(*covers, strict=True)]
    assert rate >= 0.6  # settings of one recording err alike
    assert staleness >= 0.85
    assert statistics.median(errors["rate"]) <= 0.04
    assert statistics.median(errors["staleness"]) <= 0.01


# What was not recorded


def test_a_load_that_was_not_recorded_is_flagged_and_the_truth_is_within() -> None:
    plan = Plan([recorded(SHARED)])
    for concurrency in (8, 64):
        found = plan.predict(train_on_rollouts, num_runs=4, concurrency=concurrency)
        assert found.is_extrapolated
        assert any("load that was not recorded" in each for each in found.notes)
        assert found.rate.covers(recorded(SHARED, 5000, concurrency=concurrency).figures().rate)


def test_further_workers_than_were_recorded_are_flagged_where_those_differ() -> None:
    slow = service_of(
        "compute", RNG.gamma(6.0, 0.01, 4000) * np.tile([1.0, 2.0], 2000),
        workers=np.tile([0, 1], 2000), is_own=True,
    )  # fmt: skip
    truth = Plan([], services={"compute": slow, "service": SERVER.services["service"]})
    trace = truth.run(train_with_server, backend="turbo", workers=4, updates=800)
    plan = Plan([trace])
    assert not plan.predict(train_with_server, num_runs=3).is_extrapolated
    found = plan.predict(train_with_server, num_runs=3, workers=8)
    assert found.is_extrapolated
    assert any("8 workers, of which 4 were recorded" in each for each in found.notes)


@timed("learn", input_size=len, returns={"loss": 0.0})
async def learn_of(groups: Any) -> dict[str, float]:
    raise AssertionError


async def steps_of_size(size: int = 8, num: int = 60) -> None:
    await run_steps(lambda: learn_of(range(size)), num)


def test_a_size_beyond_the_one_that_was_recorded_is_bracketed() -> None:
    truth = plan_of(service_of("learn", RNG.gamma(50.0, 0.01, 2000)))
    plan = Plan([truth.run(steps_of_size, size=8)])
    assert not plan.predict(steps_of_size, num_runs=3).is_extrapolated
    found = plan.predict(steps_of_size, num_runs=3, size=16)
    assert found.is_extrapolated
    assert found.rate.low < 1.05 < 1.95 < found.rate.high  # in proportion, and constant


# Checks against what was recorded


def test_the_recorded_setting_is_checked_and_held() -> None:
    plan = Plan([recorded(SERVER)])
    assert plan.services["service"].dependence is Dependence.QUEUE
    check = plan.check(train_with_server)
    assert not check.is_mismatch
    assert check.prediction.rate.covers(check.measured.rate)
    assert check.error("rate") == 0.0
    unknown = Plan([replace(recorded(SERVER), settings={})])
    found = unknown.predict(train_with_server, num_runs=2, updates=300)
    assert any("record(path, settings={...})" in each for each in found.notes)


def test_a_program_that_does_the_step_twice_is_refused_also_from_the_same_factory() -> None:
    def made(num_times: int) -> Callable[..., Any]:
        async def main(concurrency: int, size: int, steps: int) -> None:
            simulation, share = current_simulation(), (concurrency // num_times, size // num_times)
            for task in [
                simulation.start(train_on_rollouts, *share, steps) for _ in range(num_times)
            ]:
                await task.wait()

        return main

    plan = Plan([recorded(ROLLOUTS)])
    plan.predict(made(1), num_runs=3)
    with pytest.raises(PlanError, match=r"(?s)misses the recorded .* measured .* predicted"):
        plan.predict(made(2), num_runs=3)
    found = plan.predict(made(2), num_runs=3, allow_mismatch=True)
    assert found.rate.low <= 1.001 * recorded(ROLLOUTS).figures().rate  # widened as far as that
    assert any("is missed" in each for each in found.notes)


# Misuse


def plain() -> None: ...


async def needy(depth: int) -> None: ...


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda plan: plan.predict(needy), "needy: missing .*'depth'"),
        (lambda plan: plan.predict(plain), "give the async function that runs the program"),
        (lambda plan: plan.predict(learn(None)), r"give the function, .*plan.predict\("),
        (lambda plan: plan.predict(train_with_server, wrokers=4), "argument 'wrokers'; it takes "),
        (lambda plan: plan.predict(train_with_server, num_runs=1), "num_runs"),
        (
            lambda plan: plan.check(train_with_server, num_runs=2).error("speed"),
            "give one of rate,",
        ),
        (lambda plan: Plan(recorded(SERVER)), r"Plan\(\[trace\]\)"),  # type: ignore[arg-type]
        (lambda plan: Plan([]), "traces is empty"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_what_is_no_program_and_no_plan_is_refused(act: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        act(Plan([recorded(SERVER)]))


@pytest.mark.parametrize(
    ("sleep", "own", "other"), [(asyncio.sleep, "asyncio", "trio"), (trio.sleep, "trio", "asyncio")]
)
def test_a_program_for_one_event_loop_is_run_on_it_and_refused_on_the_other(
    sleep: Any, own: Any, other: Any
) -> None:
    async def step() -> dict[str, float]:
        await sleep(0.5)
        return await learn(None)

    async def main(num: int = 40) -> None:
        await run_steps(step, num)

    plan = plan_of(service_of("learn", [0.5]))
    # work that always takes as long: what the model may miss is left
    assert plan.predict(main, num_runs=2, backend=own).rate == pytest.approx((1.0, 0.985, 1.015))
    with pytest.raises(PlanError, match=f"needs {own}, and was planned on {other}"):
        plan.run(main, backend=other)


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
