"""Stops in simulated clusters: workers share the model by the step of their parameter server."""

import math
from contextlib import suppress
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
        self.sessions: list[MonitoredSession] = []
        self.num_runs = [0] * cluster.num_workers
        self.ended_at = [0.0] * cluster.num_workers

    async def __call__(self, worker: Worker) -> None:
        session = worker.session([self.hooks[i] for i in self.hooks if i == worker.index])
        self.sessions.append(session)
        with suppress(StallError):
            async with session:
                while True:
                    await session.run("computed")
                    self.num_runs[worker.index] += 1
        self.ended_at[worker.index] = self.cluster.simulation.now


LIMIT = "TimeLimitHook: 9.5 s have passed"


@pytest.mark.parametrize(
    ("hook", "options", "num_runs", "ended_at", "reason"),
    [
        # the step under way ends, and counts
        *(
            (lambda: TimeLimitHook(9.5), {"protocol": each}, [10] * 3, [10.0] * 3, LIMIT)
            for each in (Asynchronous(), Synchronous(), StaleSynchronous(1))
        ),
        (  # one that is back after the stop ends at once
            lambda: TimeLimitHook(9.5), {"failures": [Preemption(5.5, secs=20.0, workers=[2])]},
            [10, 10, 5], [10.0, 10.0, 25.5], LIMIT,
        ),
        (
            lambda: StallHook(5.5), {"compute": speeds(1000.0, 1.0, 1.0)}, [1, 6, 6],
            [1000.0, 6.0, 6.0], "StallHook: no run of its session has ended for 5.5 s",
        ),
        (
            lambda: EarlyStoppingHook(lambda: 1.0, patience=4, mode="max"), {}, [5, 5, 5],
            [5.0, 5.0, 5.0], "EarlyStoppingHook: no better than 1 of step 1 for 4 looks",
        ),
    ],
)  # fmt: skip
def test_a_stop_of_one_worker_ends_all_with_its_reason(
    hook: Any, options: dict[str, Any], num_runs: list[int], ended_at: list[float], reason: str,
    backend: Any,
) -> None:  # fmt: skip
    cluster = new_cluster(3, backend, **{"compute": Constant(1.0), **options})
    program = Program(cluster, {0: hook()})
    check_report(cluster.run(program))
    assert (program.num_runs, program.ended_at) == (num_runs, ended_at)
    for session in [*program.sessions[:2], program.sessions[-1]]:
        assert str(session.stop_reason).startswith(reason)


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
