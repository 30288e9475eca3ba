"""Stops in simulated clusters: workers share the model by the step of their parameter server."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    Coordinator,
    EarlyStoppingHook,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StallError,
    StallHook,
    StopReason,
    TimeLimitHook,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.protocols import Asynchronous, StaleSynchronous, Synchronous
from asynchooks.simulation import Cluster, Constant, Preemption, Simulation, Worker

from .clusters import check_report, new_cluster

PROTOCOLS = [Asynchronous(), Synchronous(), StaleSynchronous(1)]
NUM_WORKERS = 3


class Program:
    """Workers that never look at should_stop(); the first one has the hooks.

    Those that are named in `secs` take so long for each step.
    """

    def __init__(self, cluster: Cluster, *hooks: Any, secs: dict[int, float] | None = None) -> None:
        self.cluster = cluster
        self.hooks = hooks
        self.secs = secs or {}
        self.stalled: list[int] = []
        self.sessions: list[MonitoredSession] = []
        self.num_runs = [0] * cluster.num_workers
        self.ended_at = [0.0] * cluster.num_workers

    async def __call__(self, worker: Worker) -> None:
        async def step() -> dict[str, Any]:
            return {"computed": await worker.compute(self.secs[worker.index])}

        session = worker.session(
            self.hooks if worker.index == 0 else [],
            step=step if worker.index in self.secs else None,
        )
        self.sessions.append(session)
        try:
            async with session:
                for _ in range(10_000):
                    await session.run("computed")
                    self.num_runs[worker.index] += 1
                raise AssertionError("no run ended the block")
        except StallError:
            self.stalled.append(worker.index)
        self.ended_at[worker.index] = self.cluster.simulation.now

    @property
    def reasons(self) -> set[str]:
        return {str(each.stop_reason) for each in self.sessions}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
def test_a_time_limit_of_one_worker_ends_all(protocol: Any, backend: Any) -> None:
    cluster = new_cluster(NUM_WORKERS, backend, protocol=protocol, compute=Constant(1.0))
    program = Program(cluster, TimeLimitHook(9.5))
    report = cluster.run(program)
    assert program.num_runs == [10] * NUM_WORKERS  # the step under way ends, and counts
    assert program.ended_at == [10.0] * NUM_WORKERS
    assert program.reasons == {"TimeLimitHook: 9.5 s have passed"}
    check_report(report)


def test_workers_that_wait_for_the_slowest_end_at_once(backend: Any) -> None:
    cluster = new_cluster(2, backend, protocol=Synchronous(), compute=Constant(1.0))
    program = Program(cluster, TimeLimitHook(5.0), secs={1: 100.0})
    cluster.run(program)
    assert program.ended_at == [5.0, 100.0]


def test_a_stall_of_one_worker_ends_all_with_its_reason() -> None:
    cluster = new_cluster(2, compute=Constant(1.0))
    program = Program(cluster, StallHook(5.5), secs={0: 1000.0})
    cluster.run(program)
    assert program.stalled == [0]
    assert program.ended_at == [1000.0, 6.0]
    assert program.reasons == {
        "StallHook: no run of its session has ended for 5.5 s, since global step 5"
    }


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
def test_early_stopping_of_one_worker_ends_all(protocol: Any) -> None:
    cluster = new_cluster(NUM_WORKERS, protocol=protocol, compute=Constant(1.0))
    program = Program(cluster, EarlyStoppingHook(lambda: 1.0, patience=4, mode="max"))
    cluster.run(program)
    assert program.num_runs[0] == 5
    assert max(program.num_runs) <= 6
    assert max(program.ended_at) <= 6.0
    assert program.reasons == {
        "EarlyStoppingHook: no better than 1 of step 1 for 4 looks (Mode.MAX: larger is better)"
    }


def test_a_worker_that_is_back_after_a_stop_for_all_ends_at_once(backend: Any) -> None:
    failures = [Preemption(at=5.5, secs=20.0, workers=[2])]
    cluster = new_cluster(3, backend, compute=Constant(1.0), failures=failures)
    program = Program(cluster, TimeLimitHook(9.5))
    cluster.run(program)
    assert program.num_runs == [10, 10, 5]
    assert program.ended_at == [10.0, 10.0, 25.5]
    assert len(program.sessions) == 4
    assert str(program.sessions[3].stop_reason) == "TimeLimitHook: 9.5 s have passed"


class Stops(SessionRunHook):
    """Stops after so many runs: its session, or all."""

    def __init__(self, num_runs: int, *, all_workers: bool = False) -> None:
        self.num_left, self.all_workers = num_runs, all_workers

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            run_context.request_stop("enough", all_workers=self.all_workers)


def test_one_worker_s_own_stop_leaves_the_others_training() -> None:
    cluster = new_cluster(2, compute=Constant(1.0))
    program = Program(cluster, Stops(1))
    cluster.run(program, updates=10)
    assert program.num_runs == [1, 9]
    assert program.reasons == {
        "after_run of Stops: enough",
        "the limit: global_step is at 10 of 10",
    }


def test_a_stop_of_all_comes_at_the_same_moment_in_each_run(backend: Any) -> None:
    def ends() -> tuple[list[float], list[int]]:
        cluster = new_cluster(8, backend, seed=3)
        program = Program(cluster, Stops(6, all_workers=True))
        cluster.run(program)
        return program.ended_at, program.num_runs

    ended_at, num_runs = ends()
    assert num_runs[0] == 6
    assert min(ended_at) == ended_at[0]  # the others' steps under way count
    assert ends() == (ended_at, num_runs)


@dataclass(frozen=True)
class Ask:
    """How a worker stops: after its n-th run (0: never), by which way, and which workers."""

    at: int
    how: str
    all_workers: bool


class Worlds:
    """Workers of one model, each with steps of its own lengths and an `Ask`; in virtual time."""

    def __init__(self, asks: list[Ask], seed: int) -> None:
        self.asks = asks
        self.random = random.Random(seed)
        self.creator = SharedSessionCreator(FunctionSessionCreator(self.step))
        self.sessions: list[MonitoredSession] = []
        self.begun: list[list[float]] = [[] for _ in asks]  # when each run began, of each worker
        self.num_ended = [0] * len(asks)
        self.num_steps = 0
        self.first_all: tuple[float, str] | None = None  # when all were stopped, and why
        self.own: dict[int, str] = {}  # the reasons of those that were stopped alone, before that

    async def step(self) -> dict[str, Any]:
        engine = current_engine()
        await engine.park(Slot(engine, "a step"), engine.now() + self.random.random())
        self.num_steps += 1
        return {}

    def asked(self, i: int) -> StopReason:
        ask = self.asks[i]
        reason = StopReason(f"worker {i}", ask.how)
        if self.first_all is None and ask.all_workers:
            self.first_all = current_engine().now(), str(reason)
        elif self.first_all is None:
            self.own[i] = str(reason)
        return reason

    async def work(self, i: int) -> None:
        ask, world = self.asks[i], self

        class Hook(SessionRunHook):
            async def after_create_session(self, session: Any, coord: Coordinator) -> None:
                self.coord = coord

            async def before_run(self, run_context: SessionRunContext) -> None:
                world.begun[i].append(current_engine().now())

            async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
                world.num_ended[i] += 1
                if ask.how == "hook" and world.num_ended[i] == ask.at:
                    reason = world.asked(i)
                    run_context.request_stop(reason, all_workers=ask.all_workers)

        hook = Hook()
        self.sessions.append(MonitoredSession([hook], self.creator))
        async with self.sessions[-1] as session:
            while True:
                await session.run([])
                if self.num_ended[i] != ask.at or ask.how == "hook":
                    continue
                reason = self.asked(i)
                if ask.how == "session":
                    session.request_stop(reason, all_workers=ask.all_workers)
                else:
                    hook.coord.request_stop(reason=reason, all_workers=ask.all_workers)

    async def main(self) -> None:
        tasks = [current_engine().start(self.work, i) for i in range(len(self.asks))]
        for task in tasks:
            await task.wait()

    def check(self) -> None:
        assert self.num_steps == sum(self.num_ended) == sum(map(len, self.begun))
        assert self.first_all is not None
        at, why = self.first_all
        assert max(max(each) for each in self.begun) <= at
        for i, session in enumerate(self.sessions):
            assert str(session.stop_reason) == self.own.get(i, why)
            if i in self.own or f"worker {i}:" in why:
                assert self.num_ended[i] == self.asks[i].at


HOW = st.sampled_from(["hook", "session", "coord"])
ASKS = st.builds(Ask, st.integers(1, 9), HOW, st.booleans())


@given(st.lists(ASKS, max_size=5), st.integers(0, 5), HOW, st.integers(0, 10**6))
def test_stops_of_some_and_of_all_at_any_time(
    asks: list[Ask], place: int, how: str, seed: int
) -> None:
    asks.insert(place, Ask(10, how, all_workers=True))  # so that all end
    worlds = Worlds(asks, seed)
    Simulation(seed, "turbo").run(worlds.main)
    worlds.check()
