"""MetricsHook: which values reach the sinks, at which steps, in which lives of a training."""

import math
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    EvaluationHook,
    FeedHook,
    HistoryHook,
    MetricError,
    MetricsHook,
    MonitoredSession,
    OnFailure,
    StopAtStepHook,
)
from asynchooks.data import batch
from asynchooks.metrics import (
    Point,
    Sink,
    data_wait,
    histogram,
    mean,
    steps_per_sec,
)
from asynchooks.simulation import Simulation

from ..support.kept import Kept, Model
from ..support.moments import at
from ..support.moments import train as run_until_stopped
from .inputs import saving
from .training import run_session


async def train(hooks: list[Any], *, steps: int = 10, step: Any = None) -> None:
    hooks = [*hooks, StopAtStepHook(last_step=steps)]
    await run_session(hooks, step or Model(), fetches="loss")


async def test_points_are_of_step_1_of_multiples_and_of_the_end_in_every_sink() -> None:
    sink, seen = Kept(), []
    hook = MetricsHook([sink, lambda step, values: seen.append((step, values))], "loss", 4)
    await train([hook])
    assert sink.points == seen == [(step, {"loss": step}) for step in (1, 4, 8, 10)]
    await train([hook])  # a hook may be used by one session after another
    assert sink.steps == [1, 4, 8, 10] * 2
    assert [resume.step for resume in sink.resumes] == [0, 0]


async def test_names_are_the_users_where_there_is_a_mapping() -> None:
    sink = Kept()
    values = {
        "train/loss": "loss", "rate": lambda: math.nan, "opt": lambda: {"a": math.inf, "b": 2},
        "nothing": lambda: None,
    }  # fmt: skip
    await train([MetricsHook(sink, values, every_n_steps=10)], steps=1)
    expected = "[(1, {'train/loss': 1.0, 'rate': nan, 'opt/a': inf, 'opt/b': 2.0})]"
    assert str(sink.points) == expected


async def test_histograms_are_of_the_array_as_it_was() -> None:
    sink, array = Kept(), np.zeros(4)

    def step() -> dict[str, Any]:
        array[:] += 1
        return {"loss": 0.0, "weights": array}

    await train([MetricsHook(sink, histogram("weights"), every_n_steps=2)], steps=4, step=step)
    found = [(step, (each.least, each.greatest, each.num)) for step, each in sink.of("weights")]
    assert found == [(step, (step, step, 4)) for step in (1, 2, 4)]


async def test_what_is_logged_reaches_each_metrics_hook_at_the_present_step() -> None:
    first, second = Kept(), Kept()
    early = at(after_create_session=lambda *_: opening.log_metrics({"early": 1.0}))
    hooks = [early, MetricsHook(first, "loss", every_n_steps=2), MetricsHook(second)]
    async with (opening := MonitoredSession(hooks, Model())) as session:
        for _ in range(3):
            await session.run("loss")
        await anyio.to_thread.run_sync(session.log_metrics, {"reward": np.float32(0.5)})
        await session.run("loss")
    for sink in (first, second):
        assert (sink.of("early"), sink.of("reward")) == ([(0, 1.0)], [(3, 0.5)])
    assert (set(first.steps), set(second.steps)) == ({0, 1, 2, 3, 4}, {0, 3})


async def test_an_evaluation_of_another_session_is_not_given() -> None:
    evaluates = EvaluationHook(lambda _, step: {"accuracy": step / 100}, every_n_steps=4)
    sink = Kept()
    await train([evaluates])
    hook = MetricsHook(sink, evaluates.metric("accuracy"), every_n_steps=1)
    await train([evaluates, hook], steps=3)
    assert sink.steps == [3]
    with pytest.raises(RuntimeError, match="an EvaluationHook that is none of the session's hooks"):
        await train([HistoryHook(evaluates.metric("accuracy"))])
    with pytest.raises(MetricError, match="gave no 'accurracy' at step 4, but 'accuracy'"):
        await train([evaluates, HistoryHook(evaluates.metric("accurracy"))])


def test_statistics_are_of_the_time_since_the_last_point() -> None:
    simulation, sink = Simulation(backend="turbo"), Kept()

    async def records() -> Any:
        for index in range(6):
            await simulation.sleep(1.0)
            yield index

    async def step(x: object) -> dict[str, float]:
        await simulation.sleep(0.5)
        return {"loss": 1.0}

    source = batch(records(), 1)
    values = ["loss", steps_per_sec(), data_wait(source)]
    hooks = [FeedHook(source, "x"), MetricsHook(sink, values, every_n_secs=1.5)]
    simulation.run(lambda: run_session(hooks, step))
    # the first item is waited for whole, the others are read during the step before
    assert sink.of("data_wait") == [(1, 1.0 / 1.5), (4, 0.5)]
    assert sink.of("steps_per_sec") == [(1, 1 / 1.5), (4, 1.0)]
    assert sink.points[-1] == (6, {"loss": 1.0}), "no statistic of a part of the time"


@pytest.mark.parametrize("lost_at", [0, 9])
async def test_a_resumed_or_recovered_training_gives_the_points_of_an_uninterrupted_one(
    lost_at: int, tmp_path: Path
) -> None:
    """Also where the first life wrote points after its last checkpoint."""
    sink = Kept()

    def hooks(model: Any) -> list[Any]:
        hook = MetricsHook(sink, mean("loss"), every_n_steps=2)
        return [saving(tmp_path, model, every=5), hook]

    model = Model(lost_at)
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession(hooks(model), model) as session:
            for _ in range(11 if lost_at else 8):  # three are made again
                await session.run("loss")
            raise ZeroDivisionError
    assert sink.steps == [1, 2, 4, 6, 8]
    assert sink.rewinds == ([5] if lost_at else [])
    model = Model()
    await train(hooks(model), steps=11, step=model)
    assert sink.resumes[1].step == 5  # of the last checkpoint
    assert sink.steps == [1, 2, 4, 6, 8, 10, 11]
    means = [value for _, value in sink.of("loss")]
    assert means == [1.0, 2.0, 3.5, 5.5, 7.5, 9.5, 11.0]


class Hangs(Sink):
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def write(self, point: Point) -> None:
        self.may_end.wait()


async def test_a_sink_that_hangs_holds_up_neither_training_nor_its_end() -> None:
    sink, other = Hangs(), Kept()
    hook = MetricsHook([sink, other], "loss", every_n_steps=1)
    try:
        await run_session([hook], Model(), runs=1000, stop_grace_period_secs=0.05)
        assert hook.num_dropped >= 1000
        assert other.steps == list(range(1, 1001))
    finally:
        sink.may_end.set()


class Raises(Sink):
    def write(self, point: Point) -> None:
        raise ConnectionError("the tracker is away")


@pytest.mark.parametrize("on_failure", [OnFailure.LOG, OnFailure.STOP])
async def test_a_sink_that_raises_is_logged_and_training_goes_on_unless_a_stop_is_asked_for(
    on_failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hook = MetricsHook(Raises(), "loss", every_n_steps=1, on_failure=on_failure)
    if on_failure is OnFailure.LOG:
        await train([hook])
        assert hook.num_dropped == 10
        assert caplog.text.count("failed, and may go on failing") == 1
        assert "the tracker is away" in caplog.text
        return
    with pytest.raises(ConnectionError, match="the tracker is away"):
        async with MonitoredSession([hook], Model()) as session:
            await run_until_stopped(session)
    with pytest.raises(ConnectionError, match="the tracker is away"):
        await train([hook], steps=1)  # at the end


async def test_a_sink_belongs_to_one_hook_and_one_session_at_a_time() -> None:
    sink = Kept()
    hook = MetricsHook(sink, "loss")
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession([hook], Model()) as session:
            with pytest.raises(RuntimeError, match="give each hook a sink of its own"):
                await train([hook])
            await session.run("loss")
            raise ZeroDivisionError
    assert sink.steps == [1], "an error of the session leaves what was put in the sink"
    await train([hook])
    assert sink.steps == [1, 1, 10]


async def test_each_sink_finds_its_state_in_a_list_that_has_changed() -> None:
    class Other(Kept):
        pass

    sinks = Other(), Kept(), Kept()
    hook = MetricsHook(sinks)
    state = hook.state_dict()
    state["sinks"] = [
        {"sink": name, "position": place, "pending": []}
        for place, name in enumerate(["Kept", "Gone", "Kept"], 3)
    ]
    hook.load_state_dict(state)
    await train([hook], steps=1)
    assert [sink.resumes[0].position for sink in sinks] == [None, 3, 5]
