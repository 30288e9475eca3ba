"""The default program in one loop does the same as a task for each worker, bit by bit."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import StepUnreachableError
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
    staleness_aware,
)
from asynchooks.simulation import (
    Constant,
    Crashes,
    Delay,
    Exponential,
    Network,
    PerWorker,
    Phases,
    Simulation,
    Stragglers,
    Uniform,
)
from asynchooks.simulation.cluster import _cluster, _flow

MOST_WORKERS = 10
WORKING: st.SearchStrategy[Delay] = st.sampled_from([
    Exponential(1.0),
    Constant(1.0),  # many equal times
    Constant(0.25),
    Uniform(0.0, 1.0),
    Phases(Exponential(1.0), [(2.0, 1.0), (1.0, 3.0), (0.5, math.inf)]),
    Stragglers(Constant(1.0), 0.2, 5.0),
    PerWorker([Constant(float(1 + worker % 3)) for worker in range(MOST_WORKERS)]),
])  # fmt: skip
MOVING = st.none() | WORKING | st.just(Constant(0.0))
PARAMETERS = [
    None,
    np.arange(4.0),
    np.ones(3, np.float32),
    {"a": np.ones(3), "b": np.zeros((2, 2), np.float32)},
]
CONDITION = {True: "condition"}
SELDOM = st.integers(0, 9).map(lambda number: number == 5)
CANCELLED = st.sampled_from([0.0, 1.0, 3.3, 7.0, 1000.0])
WHOLE_SECS = st.integers(1, 30).map(float)


@dataclass(frozen=True)
class Training:
    """What a cluster trains, and how."""

    num_workers: int
    protocol: Protocol
    delays: dict[str, Any]
    seed: int = 0
    parameters: int = 0
    """Which of `PARAMETERS`."""
    gradient: str | None = None
    update: str | None = None
    learning_rate: Any = 0.1
    has_loss: bool = False
    keep_timeline: bool = True
    keep_trace: bool = True
    shuffle_ties: bool = False
    max_turns: int = 10_000
    until: Any = None
    """As for `run`; or "condition"."""
    cancelled_after: float | None = None
    """Trains within a program, which cancels it after so many seconds; None: trains by `run`."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def can_flow(self) -> bool:
        """Whether it needs no tasks."""
        needs_tasks = self.keep_trace or self.shuffle_ties or self.max_turns < 100
        has_service = self.delays["service"] not in (None, Constant(0.0))
        return not (needs_tasks or has_service or self.until == "condition")


@st.composite
def protocols(draw: st.DrawFn, num_workers: int) -> Protocol:
    k, number = draw(st.integers(1, num_workers)), draw(st.integers(0, 12))
    protocol: Protocol = draw(st.sampled_from([
        Asynchronous(), Synchronous(), KSync(k), KAsync(k), KBatchSync(number + 1),
        KBatchAsync(number + 1), StaleSynchronous(number % 5),
    ]))  # fmt: skip
    for bound in draw(st.lists(st.integers(0, 5), max_size=2)):
        protocol = DiscardStale(protocol, bound)
    return protocol


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    num_workers = draw(st.integers(1, MOST_WORKERS))
    updates = draw(st.none() | st.integers(1, 50))
    until = draw(st.none() | st.floats(1.0, 40.0) | WHOLE_SECS | SELDOM.map(CONDITION.get))
    arguments: dict[str, Any] = {"updates": updates, "loss_every": draw(st.integers(1, 4))}
    if updates is None and until is None:
        arguments["updates"] = 20
    if draw(st.integers(0, 5)) == 0:
        arguments["max_secs_without_update"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    arguments["warm_up"] = draw(st.none() | st.sampled_from([0.0, 2.5, 7.0]))
    has_loss = draw(st.booleans())
    if has_loss:
        arguments["target_loss"] = draw(st.none() | st.sampled_from([-9.0, 1.0, 2.9, 5.9, 99.0]))
    moving = {name: draw(MOVING) for name in ("pull", "push")}
    moving["service"] = draw(MOVING) if draw(SELDOM) else None
    return Training(
        num_workers=num_workers,
        protocol=draw(protocols(num_workers)),
        delays={"compute": draw(WORKING), **moving},
        seed=draw(st.integers(0, 1000)),
        parameters=draw(st.integers(0, len(PARAMETERS) - 1)),
        gradient=draw(
            st.sampled_from(
                [None, "plain", "rng", "fails", "interrupts", "ends", "closes", "leaves"]
            )
        ),
        update=draw(st.sampled_from([None, None, "decay", "fails"])),
        learning_rate=draw(st.sampled_from([0.1, 0.5, staleness_aware(0.3)])),
        has_loss=has_loss,
        keep_timeline=draw(st.booleans()),
        keep_trace=draw(SELDOM),
        shuffle_ties=draw(SELDOM),
        max_turns=draw(st.sampled_from([1, 10_000, 10_000, 10_000, 10_000])),
        until=until,
        cancelled_after=draw(SELDOM.flatmap(lambda is_part: CANCELLED if is_part else st.none())),
        arguments=arguments,
    )


class _Run:
    """One run, and all that a user could see of it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._num_calls = 0
        self._seen: list[Any] = []
        self._simulation = Simulation(
            training.seed,
            "turbo",
            keep_trace=training.keep_trace,
            shuffle_ties=training.shuffle_ties,
            max_turns=training.max_turns,
        )
        self._cluster = self._simulation.cluster(
            training.num_workers,
            protocol=training.protocol,
            parameters=PARAMETERS[training.parameters],
            learning_rate=training.learning_rate,
            update=None if training.update is None else self._update,
            keep_timeline=training.keep_timeline,
            **training.delays,
        )

    def result(self) -> list[Any]:
        training, cluster, error = self._training, self._cluster, None
        try:
            options = {
                "gradient": None if training.gradient is None else self._gradient,
                "loss": _loss if training.has_loss else None,
                **training.arguments,
            }
            until = self._is_over if training.until == "condition" else training.until
            if training.cancelled_after is None:
                cluster.run(until=until, **options)
            else:
                for only_of_run in ("target_loss", "warm_up"):
                    options.pop(only_of_run, None)
                self._simulation.run(self._main, options, until=until)
        except (Exception, KeyboardInterrupt) as raised:
            # a line of asynchooks that waits is another one
            texts = [str(raised), *getattr(raised, "__notes__", [])]
            texts = [re.sub(r" at \S*asynchooks[^\s:]+:\d+ in [\w.]+", "", each) for each in texts]
            error = (type(raised), texts)
        state, timeline = cluster.server.state_dict(), cluster.timeline
        arrays = _mapped(state.pop("parameters"), lambda each: (each.dtype, each.tobytes()))
        return [
            error, repr(cluster.report()), self._simulation.now, self._seen, arrays, str(state),
            timeline.spans, timeline.pushes, timeline.runs,
            self._simulation.trace.to_bytes() if training.keep_trace else None,
        ]  # fmt: skip

    async def _main(self, options: dict[str, Any]) -> None:
        assert self._training.cancelled_after is not None
        await self._simulation.sleep(1.0)
        training = self._simulation.start(lambda: self._cluster.train(**options))
        await self._simulation.sleep(self._training.cancelled_after)
        training.cancel()
        await training.wait()

    def _gradient(self, parameters: Any, worker: Any) -> Any:
        kind, cluster = self._training.gradient, self._cluster
        self._num_calls += 1
        account, clock = worker.time, cluster.server.clock(worker.index)
        self._seen.append((worker.index, worker.version, worker.num_computed, clock))
        self._seen.append((self._simulation.now, account.compute, account.lost, account.wait))
        if kind == "fails" and self._num_calls > 15:
            raise KeyError("a gradient")
        if kind == "interrupts" and self._num_calls == 11:
            signal.raise_signal(signal.SIGINT)
        if kind == "ends" and self._num_calls % 7 == 0:
            raise StepUnreachableError("enough")
        if kind == "closes" and self._num_calls == 20:
            cluster.server.close()
        if kind == "leaves" and self._num_calls in (9, 13):
            cluster.server.leave((worker.index + 1) % cluster.num_workers)
        factor = worker.rng.normal() if kind == "rng" else 0.1
        return _mapped(parameters, lambda each: each * factor + 0.01)

    def _update(self, parameters: Any, gradient: Any, rate: float) -> Any:
        self._num_calls += 1
        if self._training.update == "fails" and self._num_calls > 12:
            raise ZeroDivisionError("an update")
        if isinstance(parameters, dict):
            return {name: each * 0.9 - rate * gradient[name] for name, each in parameters.items()}
        return parameters * 0.9 - rate * gradient

    def _is_over(self) -> bool:
        return self._cluster.server.num_applied >= 30 or self._simulation.now > 50


def _mapped(arrays: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(arrays, dict):
        return {name: fn(each) for name, each in arrays.items()}
    return fn(arrays)


def _loss(parameters: Any) -> float:
    arrays = parameters.values() if isinstance(parameters, dict) else [parameters]
    return float(sum(np.sum(each) for each in arrays))


def check_equal(training: Training) -> None:
    """Check that it gives the same with and without tasks."""
    with pytest.MonkeyPatch.context() as patch:
        used: list[bool] = []

        def can_flow(*args: Any, **kwargs: Any) -> bool:
            used.append(_flow.can_flow(*args, **kwargs))
            return used[-1]

        patch.setattr(_cluster, "can_flow", can_flow)
        in_one_loop = _Run(training).result()
        assert used == [training.can_flow]
        patch.setattr(_cluster, "can_flow", lambda *_, **__: False)
        by_tasks = _Run(training).result()
    for ours, theirs in zip(in_one_loop, by_tasks, strict=True):
        assert ours == theirs


@settings(max_examples=150, deadline=None)
@given(trainings())
def test_results_are_the_same_as_by_tasks(training: Training) -> None:
    check_equal(training)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(trainings())
def test_results_of_many_trainings_are_the_same_as_by_tasks(training: Training) -> None:
    check_equal(training)


class _Own(Protocol):
    def num_gradients(self, server: Any) -> int:
        return 1


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("asyncio", {}),
        ("turbo", {"protocol": _Own()}),
        ("turbo", {"protocol": DiscardStale(_Own(), 3)}),
        ("turbo", {"failures": [Crashes(Exponential(5.0), Constant(1.0))]}),
        ("turbo", {"network": Network(latency=0.1)}),
        ("turbo", {"service": Constant(0.1), "num_servers": 2}),
    ],
)
def test_what_it_does_not_support_runs_as_coroutines(
    monkeypatch: pytest.MonkeyPatch, backend: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(_cluster, "Flow", None)  # calling it would fail
    cluster = Simulation(backend=backend).cluster(3, compute=Exponential(1.0), **options)
    assert cluster.run(updates=10).updates == 10
