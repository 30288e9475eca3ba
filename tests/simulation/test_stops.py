"""Stops in simulated clusters: workers share the model by the step of their parameter server."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    EarlyStoppingHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    StallError,
    StallHook,
    TimeLimitHook,
)
from asynchooks.protocols import Asynchronous, StaleSynchronous, Synchronous
from asynchooks.simulation import (
    Cluster,
    Constant,
    Exponential,
    Preemption,
    Worker,
    current_simulation,
)

from ..support.moments import at
from .clusters import check_report, new_cluster, speeds


class Program:
    """Workers that never look at should_stop(), with a hook each, or none."""

    def __init__(self, cluster: Cluster, hooks: dict[int, Any]) -> None:
        self.cluster, self.hooks = cluster, hooks
        self.stalled: list[int] = []
        self.sessions: list[MonitoredSession] = []
        self.num_runs = [0] * cluster.num_workers
        self.ended_at = [0.0] * cluster.num_workers

    async def __call__(self, worker: Worker) -> None:
        session = worker.session([self.hooks[i] for i in self.hooks if i == worker.index])
        self.sessions.append(session)
        try:
            async with session:
                while True:
                    await session.run("computed")
                    self.num_runs[worker.index] += 1
        except StallError:
            self.stalled.append(worker.index)
        self.ended_at[worker.index] = self.cluster.simulation.now

    @property
    def reasons(self) -> set[str]:
        return {str(each.stop_reason) for each in self.sessions}


@pytest.mark.parametrize("protocol", [Asynchronous(), Synchronous(), StaleSynchronous(1)])
def test_a_time_limit_of_one_worker_ends_all(protocol: Any, backend: Any) -> None:
    cluster = new_cluster(3, backend, protocol=protocol, compute=Constant(1.0))
    program = Program(cluster, {0: TimeLimitHook(9.5)})
    report = cluster.run(program)
    assert program.num_runs == [10] * 3  # the step under way ends, and counts
    assert program.ended_at == [10.0] * 3
    assert program.reasons == {"TimeLimitHook: 9.5 s have passed"}
    check_report(report)


def test_a_stall_of_one_worker_ends_all_with_its_reason() -> None:
    cluster = new_cluster(2, compute=speeds(1000.0, 1.0))
    program = Program(cluster, {0: StallHook(5.5)})
    cluster.run(program)
    assert program.stalled == [0]
    assert program.ended_at == [1000.0, 6.0]
    [reason] = program.reasons
    assert reason.startswith("StallHook: no run of its session has ended for 5.5 s")


def test_early_stopping_of_one_worker_ends_all() -> None:
    cluster = new_cluster(3, compute=Constant(1.0))
    program = Program(cluster, {0: EarlyStoppingHook(lambda: 1.0, patience=4, mode="max")})
    cluster.run(program)
    assert program.num_runs[0] == 5
    assert max(program.num_runs) <= max(program.ended_at) <= 6.0
    [reason] = program.reasons
    assert reason.startswith("EarlyStoppingHook: no better than 1 of step 1 for 4 looks")


def test_a_worker_that_is_back_after_a_stop_for_all_ends_at_once() -> None:
    failures = [Preemption(at=5.5, secs=20.0, workers=[2])]
    cluster = new_cluster(3, compute=Constant(1.0), failures=failures)
    program = Program(cluster, {0: TimeLimitHook(9.5)})
    cluster.run(program)
    assert program.num_runs == [10, 10, 5]
    assert program.ended_at == [10.0, 10.0, 25.5]
    assert str(program.sessions[3].stop_reason) == "TimeLimitHook: 9.5 s have passed"


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 10**6),
)
def test_stops_of_some_and_of_all_at_any_time(stops: list[tuple[int, bool]], seed: int) -> None:
    asks = [*stops, (10, True)]  # so that all end
    stopped_at = [math.inf] * len(asks)

    def stopping(worker: int, num: int, all_workers: bool) -> SessionRunHook:
        def stop(run_context: SessionRunContext, _: object) -> None:
            if program.num_runs[worker] == num - 1:
                stopped_at[worker] = current_simulation().now
                run_context.request_stop("enough", all_workers=all_workers)

        return at(after_run=stop)

    cluster = new_cluster(len(asks), seed=seed, compute=Exponential(1.0))
    program = Program(cluster, {i: stopping(i, *ask) for i, ask in enumerate(asks)})
    cluster.run(program)
    first = min(secs for secs, (_, of_all) in zip(stopped_at, asks, strict=True) if of_all)
    for i, (num, _) in enumerate(asks):
        if stopped_at[i] <= first:
            assert (program.num_runs[i], program.ended_at[i]) == (num, stopped_at[i])
        else:
            assert program.num_runs[i] <= num
            assert program.ended_at[i] >= first
    assert cluster.server.num_applied == sum(program.num_runs)  # steps under way count
