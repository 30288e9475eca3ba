"""A plan knows what the program's own code takes on the event loop, beside timed work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks._engine.recording import Kind
from asynchooks.planning import Plan, Trace, record, timed
from asynchooks.planning._model import loop_secs
from asynchooks.planning._spans import Spans

SPIN_SECS = 0.004


def spans(begun: Any, secs: float) -> Spans:
    starts = np.asarray(begun, np.float64)
    return Spans.of(starts, starts + secs)


def trace_of(work: dict[str, Spans], cpu: Any, **about: Any) -> Trace:
    return Trace({Kind.WORK: work}, about={"cpu": cpu, **about})


SECONDS = range(11)


@pytest.mark.parametrize("jump", [0.0, 5.0], ids=["even", "an import or compilation"])
def test_processor_time_is_counted_by_the_calls_that_ended_meanwhile(jump: float) -> None:
    calls = spans(np.arange(0.05, 10.0, 0.1), 0.01)  # 10 in each second
    cpu = [(float(each), 0.02 * each + jump * (each > 3)) for each in SECONDS]
    assert loop_secs([trace_of({"work": calls}, cpu)]) == pytest.approx(0.002)


@pytest.mark.parametrize(("share", "expected"), [(0.32, 0.002), (0.1, 0.0)])
def test_what_plain_timed_functions_compute_is_theirs(share: float, expected: float) -> None:
    calls = spans(np.arange(0.05, 10.0, 0.1), 0.03)
    cpu = [(float(each), share * each) for each in SECONDS]
    found = loop_secs([trace_of({"work": calls}, cpu, inline=["work"])])
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("cpu", [[], [(0.0, 0.0), (5.0, 1.0), (9.0, 3.0)]])
def test_it_is_not_known_of_a_short_record(cpu: Any) -> None:
    assert loop_secs([trace_of({"work": spans(np.arange(0.05, 9.0, 0.1), 0.01)}, cpu)]) == 0.0


@timed("wait", returns=None)
async def wait() -> None:
    await anyio.sleep(0.004)


async def main(steps: int = 200) -> None:
    for _ in range(steps):
        await wait()
        until = time.thread_time() + SPIN_SECS
        while time.thread_time() < until:  # code of the program's own
            pass


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="there is no such clock")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_code_that_is_not_timed_is_planned(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"
    with record(path, flush_secs=0.1):
        anyio.run(main, backend=backend)
    secs = loop_secs([Trace.read(path)])
    assert 0.9 * SPIN_SECS <= secs < 2.0 * SPIN_SECS


def test_a_planned_run_computes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = trace_of(
        {"wait": spans(np.arange(0.05, 10.0, 0.1), 0.01)},
        [(float(second), 0.02 * second) for second in SECONDS],
    )
    monkeypatch.setattr(time, "thread_time", iter(np.arange(10**6) * 1.0).__next__)
    for backend in ("turbo", "asyncio", "trio"):
        found = Plan([waits]).run(main, backend=backend, steps=50)
        assert found.ended - found.began == pytest.approx(50 * 0.012)
        assert found.find("wait").secs == pytest.approx(0.01)
