"""A plan knows what the program's own code takes on the event loop, beside timed work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks._engine.recording import Kind
from asynchooks.planning import Plan, Spans, Trace, record, timed

from ..simulation.engines import BACKENDS

SPIN_SECS = 0.004


@timed("wait")
async def wait() -> None:
    await anyio.sleep(0.004)


async def main(steps: int = 60, *, spins: bool = True) -> None:
    for _ in range(steps):
        await wait()
        until = time.thread_time() + SPIN_SECS
        while spins and time.thread_time() < until:  # code of the program's own
            pass


def secs_beside(plan: Plan, backend: Any = "turbo") -> float:
    """What a planned call takes beside its work."""
    found = plan.run(main, backend=backend, steps=50, spins=False)
    return (found.ended - found.began - float(found.find("wait").secs.sum())) / 50


SECONDS = range(11)


def plan_of_calls(secs: float, cpu: Any, last: float = 10.0, **about: Any) -> Plan:
    """Ten calls in each second."""
    begun = np.arange(0.05, last, 0.1)
    spans = {Kind.WORK: {"wait": Spans.of(begun, begun + secs)}}
    return Plan([Trace(spans, about={"cpu": cpu, **about})])


@pytest.mark.parametrize("jump", [0.0, 5.0], ids=["even", "an import or compilation"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_processor_time_is_counted_by_the_calls_that_ended_meanwhile(
    jump: float, backend: str
) -> None:
    cpu = [(float(each), 0.02 * each + jump * (each > 3)) for each in SECONDS]
    assert secs_beside(plan_of_calls(0.01, cpu), backend) == pytest.approx(0.002)


@pytest.mark.parametrize(("share", "expected"), [(0.32, 0.002), (0.1, 0.0)])
def test_what_plain_timed_functions_compute_is_theirs(share: float, expected: float) -> None:
    cpu = [(float(each), share * each) for each in SECONDS]
    assert secs_beside(plan_of_calls(0.03, cpu, inline=["wait"])) == pytest.approx(expected)


def test_it_is_not_known_of_a_short_record() -> None:
    for cpu in ([], [(0.0, 0.0), (5.0, 1.0), (9.0, 3.0)]):
        assert secs_beside(plan_of_calls(0.01, cpu, 9.0)) == pytest.approx(0.0)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="there is no such clock")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_code_that_is_not_timed_is_planned(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"
    with record(path, flush_secs=0.05):
        anyio.run(main, backend=backend)
    assert 0.9 * SPIN_SECS <= secs_beside(Plan.read(path)) < 2.0 * SPIN_SECS
