"""session.status(): in each phase, from threads, after errors and recoveries; metrics in it."""

import json
import math
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    MetricError,
    MonitoredSession,
    SharedSessionCreator,
    Status,
    StopAtStepHook,
    StopReason,
)
from asynchooks.metrics import Histogram
from asynchooks.simulation import Simulation

from ..simulation.engines import simulated
from ..support.helpers import settle
from ..support.moments import at, counting, train

MOMENTS = ["begin", "after_create_session", "before_run", "end", "after_close"]


async def test_phase_limit_and_reason_are_those_of_the_moment_and_metrics_may_be_logged() -> None:
    seen: list[str] = []

    def look(*_: object) -> None:
        seen.append(session.status().phase)
        if seen[-1] != "closed":
            session.log_metrics({"seen": len(seen)})

    hooks = [at(**dict.fromkeys(MOMENTS, look)), StopAtStepHook(last_step=1)]
    session = counting(*hooks)
    new = session.status()
    async with session:
        before = session.status()
        await train(session)
        reached = session.status()
    after = session.status()
    assert seen == ["opening", "opening", "open", "closing", "closed"]
    assert [each.phase for each in (new, before, after)] == ["new", "open", "closed"]
    assert (before.step, before.limit, before.should_stop, before.stop_reason) == (
        0,
        1,
        False,
        None,
    )
    for status in (reached, after):
        assert (status.step, status.limit, status.should_stop) == (1, 1, True)
        assert str(status.stop_reason) == "the limit: global_step is at 1 of 1"
    assert after.metrics == {"seen": 4.0}


@simulated
async def test_the_rate_is_that_of_the_last_ten_seconds_and_begins_afresh_at_a_loss(
    simulation: Simulation,
) -> None:
    rates, pause = list[Any](), 1.0

    async def step() -> dict[str, float]:
        await simulation.sleep(pause)
        return {}

    creator = SharedSessionCreator(step)
    async with MonitoredSession([StopAtStepHook(last_step=100)], creator) as session:
        rates.append(session.status())
        for _ in range(20):
            await session.run([])
        rates.append(session.status())
        pause = 0.25
        for _ in range(48):
            await session.run([])
            session.status()
        rates.append(session.status())
        session.global_step.restart(60)
        rates.append(session.status())
        await session.run([])
        rates.append(session.status())
    rates.append(session.status())
    assert [(each.steps_per_sec, each.secs_left) for each in rates] == [
        (None, None), (1.0, 80.0), (4.0, 8.0), (None, None), (4.0, 9.75), (None, None),
    ]  # fmt: skip


async def test_it_names_the_side_tasks_that_run() -> None:
    def start(session: Any, coord: Any) -> None:
        coord.start_soon(session.global_step.wait_for, 9, name="of a hook")

    async with counting(at(after_create_session=start)) as session:
        over = anyio.Event()
        session.start_soon(over.wait, name="of the caller")
        await settle()
        assert session.status().side_tasks == ("of the caller", "of a hook")
        over.set()
        await settle()
        assert session.status().side_tasks == ("of a hook",)
    assert session.status().side_tasks == ()


def test_a_status_is_json() -> None:
    reason = StopReason("the block", "it failed", OSError("disk"))
    metrics = {"loss": math.nan, "accuracy": 0.5}
    status = Status("open", 30, 90, 4.0, True, reason, ("watch",), metrics, 30)
    assert json.loads(json.dumps(status.as_dict(), allow_nan=False)) == {
        "phase": "open",
        "step": 30,
        "limit": 90,
        "steps_per_sec": 4.0,
        "secs_left": 15.0,
        "should_stop": True,
        "stop_reason": "the block: it failed",
        "error": "OSError('disk')",
        "side_tasks": ["watch"],
        "metrics": {"loss": None, "accuracy": 0.5},
        "metrics_step": 30,
    }


async def test_it_has_the_newest_value_of_each_metric() -> None:
    async with counting() as session:
        assert (session.status().metrics, session.status().metrics_step) == ({}, None)
        arrays: Any = {"loss": np.array([0.5]), "reward": np.float32(2.0)}
        session.log_metrics({"loss": 1, "accuracy": math.nan})
        await session.run([])
        with pytest.raises(MetricError, match="the metric 'loss' is 'high'"):  # refused whole
            session.log_metrics({"reward": 9, "loss": "high"})  # type: ignore[dict-item]
        session.log_metrics({**arrays, "weights": Histogram.of([1.0])})
        status = session.status()
    assert math.isnan(status.metrics["accuracy"])
    assert {**status.metrics, "accuracy": 0} == {"loss": 0.5, "accuracy": 0, "reward": 2.0}
    assert status.metrics_step == 1
