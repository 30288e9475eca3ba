"""Whatever fails when: updates are exact, every second counts once, all engines agree."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
)
from asynchooks.simulation import (
    Constant,
    Crashes,
    Delay,
    Exponential,
    Partition,
    Preemption,
    Simulation,
    Slowdown,
    Uniform,
    Worker,
)

from .clusters import check_report
from .engines import BACKENDS

P = 3
DELAYS: list[Delay] = [Constant(1.0), Exponential(1.0), Uniform(0.5, 1.5)]
PROTOCOLS: list[Protocol] = [
    Asynchronous(), Synchronous(), KSync(2), KBatchSync(2), KAsync(2), KBatchAsync(3),
    StaleSynchronous(0), StaleSynchronous(2), DiscardStale(KBatchAsync(2), 1),
]  # fmt: skip
WORKERS = st.one_of(st.none(), st.sets(st.integers(0, P - 1), min_size=1, max_size=P))
TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25])
FAILURES = st.one_of(
    st.builds(
        Crashes,
        st.sampled_from([Exponential(6.0), Constant(4.0)]),
        st.sampled_from([Exponential(1.0), Constant(0.0), Constant(1.5)]),
        loses_work=st.booleans(),
        workers=WORKERS,
    ),
    st.builds(Preemption, TIMES, st.sampled_from([0.0, 1.0, 5.0]), workers=WORKERS),
    st.builds(Preemption, TIMES, st.just(math.inf), workers=st.sampled_from([{0}, {1}])),
    st.builds(Slowdown, TIMES, TIMES, st.sampled_from([1.0, 3.0, math.inf]), workers=WORKERS),
    st.builds(Partition, TIMES, TIMES, workers=WORKERS),
)
LINKS = st.sampled_from([None, Constant(0.25), Exponential(0.5)])
OPTIONS = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from(PROTOCOLS),
        "compute": st.sampled_from(DELAYS),
        "pull": LINKS,
        "push": LINKS,
        "service": st.sampled_from([None, Constant(0.25)]),
        "failures": st.lists(FAILURES, max_size=3),
    }
)


class Watched:
    """A cluster whose programs are counted, on one engine."""

    def __init__(self, backend: Any, seed: int, in_session: bool, options: dict[str, Any]) -> None:
        self.simulation = Simulation(seed, backend, keep_trace=True)
        self.cluster = self.simulation.cluster(P, keep_timeline=True, **options)
        self.in_session = in_session
        self.running = [0] * P
        self.times: list[float] = []

    async def program(self, worker: Worker) -> None:
        self.running[worker.index] += 1
        assert self.running[worker.index] == 1
        try:
            await (self.train_in_session if self.in_session else self.train)(worker)
        finally:
            self.running[worker.index] -= 1

    async def train(self, worker: Worker) -> None:
        while True:
            await worker.pull()
            self.times.append(self.simulation.now)
            if await worker.compute():
                await worker.push(self.cluster.nothing)

    async def train_in_session(self, worker: Worker) -> None:
        async with worker.session() as session:
            while not session.should_stop():
                await session.run("computed")
                self.times.append(self.simulation.now)

    def run(self, **arguments: Any) -> tuple[Any, bytes]:
        report = self.cluster.run(self.program, **arguments)
        check_report(report)
        assert self.running == [0] * P
        assert self.times == sorted(self.times)
        events = [event.time for event in self.simulation.trace.events]
        assert events == sorted(events)
        self.check_timeline(report)
        return report, self.simulation.trace.to_bytes()

    def check_timeline(self, report: Any) -> None:
        """The spans of a worker overlap nowhere, and add up to what the report says."""
        for worker in range(P):
            spans = [each for each in self.cluster.timeline.spans if each.worker == worker]
            spans.sort(key=lambda each: each.begin)
            ends = [0.0, *(each.end for each in spans)]
            assert all(each.begin >= end for each, end in zip(spans, ends, strict=False))
            busy = report.secs - report.workers[worker].secs_idle
            assert math.isclose(sum(each.end - each.begin for each in spans), busy, abs_tol=1e-9)


@settings(max_examples=60, deadline=None)
@given(OPTIONS, st.integers(0, 99), st.booleans())
def test_updates_are_made_exactly_and_all_engines_agree(
    options: dict[str, Any], seed: int, in_session: bool
) -> None:
    found = [Watched(each, seed, in_session, options).run(updates=12) for each in BACKENDS]
    assert found[0] == found[1] == found[2]
    report = found[0][0]
    assert report.updates == 12
    assert len(report.workers) == P


@settings(max_examples=30, deadline=None)
@given(OPTIONS, st.integers(0, 99), st.booleans(), st.sampled_from([0.0, 0.5, 4.0, 7.3]))
def test_until_cuts_at_its_time_wherever_workers_are(
    options: dict[str, Any], seed: int, in_session: bool, until: float
) -> None:
    found = [Watched(each, seed, in_session, options).run(until=until) for each in BACKENDS]
    assert found[0] == found[1] == found[2]
    assert found[0][0].secs == until
