"""session.log_metrics(): from anywhere, at the present step, without waiting."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from asynchooks import MetricError, MetricsHook, MonitoredSession, SessionRunHook
from asynchooks.metrics import Histogram

from ..support.helpers import counting_creator, settle

pytestmark = pytest.mark.anyio


async def test_the_status_has_the_newest_value_of_each_name() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        assert (session.status().metrics, session.status().metrics_step) == ({}, None)
        arrays: Any = {"loss": np.array([0.5]), "reward": np.float32(2.0)}
        session.log_metrics({"loss": 1, "accuracy": 0.25})
        await session.run([])
        session.log_metrics({**arrays, "weights": Histogram.of([1.0])})
        status = session.status()
    assert status.metrics == {"loss": 0.5, "accuracy": 0.25, "reward": 2.0}
    assert status.metrics_step == 1
    assert session.status().metrics == status.metrics, "they stay after the end"


async def test_values_that_are_not_finite_are_metrics() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        session.log_metrics({"loss": math.nan})
        assert math.isnan(session.status().metrics["loss"])


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ([("loss", 1.0)], TypeError, "give a mapping of names to numbers"),
        ({1: 1.0}, TypeError, "the name of a metric is 1"),
        ({"loss": "high"}, MetricError, "the metric 'loss' is 'high'"),
        ({"loss": np.zeros(3)}, MetricError, r"an array of shape \(3,\) and float64"),
        ({"loss": None}, MetricError, "the metric 'loss' is None"),
    ],
)
async def test_what_is_no_number_is_refused_whole(
    values: Any, error: type[Exception], match: str
) -> None:
    async with MonitoredSession([], counting_creator()) as session:
        with pytest.raises(error, match=match):
            session.log_metrics(values)
        assert session.status().metrics == {}


async def test_it_is_refused_before_and_after() -> None:
    session = MonitoredSession([], counting_creator())
    with pytest.raises(RuntimeError, match=r"log_metrics\(\) before the session was opened"):
        session.log_metrics({"loss": 1.0})
    async with session:
        pass
    with pytest.raises(RuntimeError, match=r"log_metrics\(\) after the session was closed"):
        session.log_metrics({"loss": 1.0})


async def test_hooks_may_log_from_their_begin_to_their_end() -> None:
    class Logs(SessionRunHook):
        session: Any = None

        async def begin(self) -> None:
            self.session.log_metrics({"begun": 1})

        async def end(self, session: Any) -> None:
            self.session.log_metrics({"ended": 1})

    hook = Logs()
    session = hook.session = MonitoredSession([hook], counting_creator())
    async with session:
        pass
    assert session.status().metrics == {"begun": 1.0, "ended": 1.0}


async def test_threads_lose_no_name() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        start = threading.Barrier(8)

        def log(index: int) -> None:
            start.wait()
            for value in range(100):
                session.log_metrics({f"{index}": value})

        threads = [threading.Thread(target=log, args=(index,)) for index in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert session.status().metrics == {f"{index}": 99.0 for index in range(8)}


async def test_a_side_task_logs_into_the_sinks_of_the_session() -> None:
    taken: list[tuple[int, dict[str, Any]]] = []
    hook = MetricsHook(lambda step, values: taken.append((step, values)))
    async with MonitoredSession([hook], counting_creator()) as session:

        async def evaluate() -> None:
            session.log_metrics({"accuracy": 0.5})
            await session.global_step.wait_for(2)
            session.log_metrics({"accuracy": 0.75})

        session.start_soon(evaluate)
        await settle()
        for _ in range(2):
            await session.run([])
        await settle()
    assert taken == [(0, {"accuracy": 0.5}), (2, {"accuracy": 0.75})]
