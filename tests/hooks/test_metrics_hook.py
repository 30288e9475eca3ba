"""MetricsHook: which values reach the sinks, at which steps, in which lives of a training."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    Evaluate,
    EvaluationHook,
    FeedHook,
    FetchError,
    FunctionSessionCreator,
    HistoryHook,
    MetricError,
    MetricsHook,
    MonitoredSession,
    OnFailure,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.data import batch
from asynchooks.metrics import (
    Histogram,
    Point,
    Resume,
    Sink,
    data_wait,
    histogram,
    mean,
    steps_per_sec,
)
from asynchooks.simulation import Simulation

pytestmark = pytest.mark.anyio


class Kept(Sink):
    """What it was given; a later life goes on with the lists."""

    open_secs = 30.0

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, Any]]] = []
        self.resumes: list[Resume] = []
        self.rewinds: list[int] = []

    def open(self, resume: Resume) -> None:
        self.resumes.append(resume)
        if resume.position is not None:
            del self.points[resume.position :]

    def write(self, point: Point) -> None:
        self.points.append((point.step, dict(point.values)))

    def flush(self) -> int:
        return len(self.points)

    def rewind(self, step: int) -> None:
        self.rewinds.append(step)
        self.points = [each for each in self.points if each[0] <= step]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]


def halving(start: float = 1.0) -> FunctionSessionCreator:
    """Its loss is 1 / step, its accuracy step / 10."""
    num = 0

    def step() -> dict[str, Any]:
        nonlocal num
        num += 1
        return {"loss": start / num, "accuracy": np.float32(num) / 10, "grads": np.full(3, num)}

    return FunctionSessionCreator(step)


async def train(hooks: list[Any], *, steps: int = 10, creator: Any = None) -> None:
    creator = creator or halving()
    async with MonitoredSession([*hooks, StopAtStepHook(last_step=steps)], creator) as session:
        while not session.should_stop():
            await session.run("loss")


async def test_points_are_of_step_1_and_of_multiples_labelled_with_the_step_after_the_run() -> None:
    sink = Kept()
    await train([MetricsHook(sink, "loss", every_n_steps=4)])
    assert sink.points[:-1] == [(1, {"loss": 1.0}), (4, {"loss": 1 / 4}), (8, {"loss": 1 / 8})]
    assert sink.points[-1] == (10, {"loss": 1 / 10}), "at the end the last step comes, too"


async def test_names_are_the_users_where_there_is_a_mapping() -> None:
    sink = Kept()
    values = {"train/loss": "loss", "rate": lambda: 0.1, "opt": lambda: {"a": 1, "b": 2}}
    await train([MetricsHook(sink, values, every_n_steps=10)], steps=1)
    assert sink.points == [(1, {"train/loss": 1.0, "rate": 0.1, "opt/a": 1.0, "opt/b": 2.0})]


async def test_a_function_that_returns_none_gives_no_value() -> None:
    sink = Kept()
    await train([MetricsHook(sink, {"nothing": lambda: None}, every_n_steps=1)], steps=3)
    assert sink.points == []


async def test_means_are_over_all_runs_since_the_last_point() -> None:
    sink = Kept()
    await train([MetricsHook(sink, ["loss", mean("accuracy")], every_n_steps=5)])
    expected = [(1, [1]), (5, [2, 3, 4, 5]), (10, [6, 7, 8, 9, 10])]
    assert sink.steps == [step for step, _ in expected]
    for (_, values), (step, seen) in zip(sink.points, expected, strict=True):
        assert values == {
            "loss": 1 / step,
            "accuracy": pytest.approx(sum(seen) / len(seen) / 10, rel=1e-6),
        }


async def test_histograms_are_of_the_array_as_it_was() -> None:
    sink = Kept()
    array = np.zeros(4)

    def step() -> dict[str, Any]:
        array[:] += 1
        return {"loss": 0.0, "weights": array}

    hook = MetricsHook(sink, histogram("weights"), every_n_steps=2)
    await train([hook], steps=4, creator=FunctionSessionCreator(step))
    spreads = [values["weights"] for _, values in sink.points]
    assert all(isinstance(each, Histogram) for each in spreads)
    assert [(each.least, each.greatest, each.num) for each in spreads] == [
        (1.0, 1.0, 4), (2.0, 2.0, 4), (4.0, 4.0, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "numbers",
    [[1.0, np.nextafter(1.0, 2)], [1e308, -1e308], [1e200], [5e-324, 0.0], [-3e307, 1.7e308], []],
)
async def test_histograms_are_of_numbers_however_close_or_far_apart(numbers: list[float]) -> None:
    made = Histogram.of(np.array(numbers))
    assert (made.counts.sum(), made.num) == (len(numbers), len(numbers))
    assert np.isfinite(made.edges).all()
    assert (made.edges[:-1] < made.edges[1:]).all()
    for number in numbers:
        assert made.edges[0] <= number <= made.edges[-1]


async def test_several_sinks_get_the_same_points() -> None:
    sink, seen = Kept(), []
    hook = MetricsHook([sink, lambda step, values: seen.append((step, values))], "loss", 5)
    await train([hook])
    assert sink.points == seen == [(1, {"loss": 1.0}), (5, {"loss": 0.2}), (10, {"loss": 0.1})]


async def test_what_is_logged_reaches_each_metrics_hook_at_the_present_step() -> None:
    first, second = Kept(), Kept()
    hooks = [MetricsHook(first, "loss", every_n_steps=2), MetricsHook(second)]
    async with MonitoredSession(hooks, halving()) as session:
        for _ in range(3):
            await session.run("loss")
        session.log_metrics({"reward": np.float32(0.5)})
        await anyio.to_thread.run_sync(session.log_metrics, {"other": 1})
        await session.run("loss")
    assert set(first.steps) == {1, 2, 3, 4}
    assert set(second.steps) == {3}
    logged = {name: value for _, values in second.points for name, value in values.items()}
    assert logged == {"reward": 0.5, "other": 1.0}


async def test_a_side_task_may_log_metrics_up_to_its_own_end() -> None:
    sink = Kept()

    async def report(session: MonitoredSession) -> None:
        try:
            await session.global_step.wait_for(100)
        finally:
            session.log_metrics({"last": 1.0})

    async with MonitoredSession([MetricsHook(sink)], halving()) as session:
        session.start_soon(report, session)
        await session.run("loss")
    assert sink.points == [(1, {"last": 1.0})]


@pytest.mark.parametrize("mode", Evaluate)
@pytest.mark.parametrize("is_first", [True, False])
async def test_results_of_evaluations_are_of_the_step_that_was_evaluated(
    mode: Evaluate, is_first: bool
) -> None:
    """Also that of the end, and wherever the hook stands."""
    sink = Kept()

    def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"accuracy": step / 100}

    evaluation = EvaluationHook(evaluate, every_n_steps=4, mode=mode)
    accuracy = evaluation.metric("accuracy")
    history = HistoryHook(accuracy, every_n_steps=3)
    hooks = [MetricsHook(sink, ["loss", accuracy], every_n_steps=5), history]
    await train([evaluation, *hooks] if is_first else [*hooks, evaluation])
    name = "eval/accuracy"
    seen = [(step, values[name]) for step, values in sink.points if name in values]
    assert seen[-1] == (10, 0.1)
    if mode is Evaluate.EXCLUSIVE:  # else they come when they come
        assert seen == [(4, 0.04), (8, 0.08), (10, 0.1)]
        rows = [(row["step"], row[name]) for row in history.rows if name in row]
        assert rows == [(4, 0.04), (8, 0.08), (10, 0.1)]


async def test_an_evaluation_of_a_session_before_is_not_given() -> None:
    evaluation = EvaluationHook(lambda session, step: {"accuracy": 0.5}, every_n_steps=4)
    await train([evaluation])
    sink = Kept()
    hook = MetricsHook(sink, evaluation.metric("accuracy"), every_n_steps=1)
    await train([evaluation, hook], steps=3)
    assert sink.steps == [3]
    await train([evaluation], steps=3)  # the hook has left
    assert sink.steps == [3]


async def test_an_evaluation_that_is_none_of_the_sessions_hooks_is_refused() -> None:
    evaluation = EvaluationHook(lambda session, step: {"accuracy": 0.5}, every_n_steps=4)
    message = "HistoryHook keeps a metric of an EvaluationHook that is none of the session's hooks"
    with pytest.raises(RuntimeError, match=message):
        await train([HistoryHook(evaluation.metric("accuracy"))])


async def test_a_metric_that_an_evaluation_does_not_give_is_an_error() -> None:
    evaluation = EvaluationHook(lambda session, step: {"accuracy": 0.5}, every_n_steps=4)
    with pytest.raises(MetricError, match="gave no 'accurracy' at step 4, but 'accuracy'"):
        await train([evaluation, HistoryHook(evaluation.metric("accurracy"))])


def test_statistics_are_of_the_time_since_the_last_point() -> None:
    simulation = Simulation(seed=1, backend="turbo")
    sink = Kept()

    async def step() -> dict[str, float]:
        await simulation.sleep(0.25)
        return {"loss": 1.0}

    hook = MetricsHook(sink, ["loss", steps_per_sec()], every_n_secs=1.0)
    simulation.run(lambda: train([hook], creator=FunctionSessionCreator(step)))
    assert sink.points[:-1] == [(step, {"loss": 1.0, "steps_per_sec": 4.0}) for step in (1, 6)]
    assert sink.points[-1] == (10, {"loss": 1.0}), "no statistic of a part of the time"


def test_the_share_of_waiting_for_data_and_the_depth_of_its_queue() -> None:
    simulation = Simulation(seed=1, backend="turbo")
    sink = Kept()

    async def records() -> Any:
        for index in range(6):
            await simulation.sleep(1.0)
            yield index

    async def step(x: object) -> dict[str, float]:
        await simulation.sleep(0.5)
        return {}

    source = batch(records(), 1)
    values = data_wait(source)
    hooks = [FeedHook(source, "x"), MetricsHook(sink, values, every_n_steps=2)]

    async def main() -> None:
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                await session.run([])

    simulation.run(main)
    # the first item is waited for whole, the others are read during the step before
    assert [values["data_wait"] for _, values in sink.points] == [1.0 / 1.5, 0.5, 0.5, 0.5]


async def test_a_resumed_training_gives_the_points_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Also where the first life wrote points after its last checkpoint."""
    sink, weights = Kept(), {"w": np.zeros(1)}

    def hooks() -> list[Any]:
        saver = StateDictSaver(model=weights)
        save = CheckpointSaverHook(str(tmp_path), save_steps=3, saver=saver)
        return [save, MetricsHook(sink, ["loss", mean("accuracy")], every_n_steps=2)]

    def creator() -> FunctionSessionCreator:
        def step() -> dict[str, Any]:
            weights["w"] += 1
            return {"loss": float(weights["w"][0]), "accuracy": float(weights["w"][0])}

        return FunctionSessionCreator(step)

    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession(hooks(), creator()) as session:
            for _ in range(8):
                await session.run("loss")
            raise ZeroDivisionError
    assert sink.steps == [1, 2, 4, 6, 8]
    weights["w"][:] = 0
    await train(hooks(), steps=11, creator=creator())
    assert sink.resumes[1].step == 6  # of the last checkpoint
    assert sink.steps == [1, 2, 4, 6, 8, 10, 11]
    means = [values["accuracy"] for _, values in sink.points]
    assert means == [1.0, 2.0, 3.5, 5.5, 7.5, 9.5, 11.0]


async def test_a_recovery_takes_back_the_points_of_later_steps(tmp_path: Path) -> None:
    sink, weights = Kept(), {"w": np.zeros(1)}
    is_lost = False

    def step() -> dict[str, Any]:
        nonlocal is_lost
        if weights["w"][0] == 6 and not is_lost:
            is_lost = True
            raise PreemptionError("the machine has gone")
        weights["w"] += 1
        return {"loss": float(weights["w"][0]) + 100 * is_lost}

    hooks = [
        CheckpointSaverHook(str(tmp_path), save_steps=4, saver=StateDictSaver(model=weights)),
        MetricsHook(sink, "loss", every_n_steps=1),
    ]
    await train(hooks, steps=8, creator=FunctionSessionCreator(step))
    assert sink.rewinds == [4]
    assert sink.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [values["loss"] for _, values in sink.points][4:] == [105.0, 106.0, 107.0, 108.0]


async def test_a_hook_may_be_used_by_one_session_after_another() -> None:
    sink = Kept()
    hook = MetricsHook(sink, "loss", every_n_steps=5)
    await train([hook])
    await train([hook])
    assert sink.steps == [1, 5, 10, 1, 5, 10]
    assert [resume.step for resume in sink.resumes] == [0, 0]


async def test_workers_of_one_model_make_up_for_steps_that_others_have_passed() -> None:
    sink = Kept()
    creator = SharedSessionCreator(halving())

    async def worker(hooks: list[Any]) -> None:
        async with MonitoredSession(hooks, creator) as session:
            while (await session.run("loss")) and session.global_step.value < 40:
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(worker, [MetricsHook(sink, "loss", every_n_steps=10)])
        group.start_soon(worker, [])
    assert sink.steps == sorted(set(sink.steps))
    assert {1, 2, 3} <= {step // 10 for step in sink.steps}


class Hangs(Sink):
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def write(self, point: Point) -> None:
        self.may_end.wait()


async def test_a_sink_that_hangs_holds_up_neither_training_nor_its_end() -> None:
    sink, other = Hangs(), Kept()
    hook = MetricsHook([sink, other], "loss", every_n_steps=1)
    try:
        async with MonitoredSession([hook], halving(), stop_grace_period_secs=0.05) as session:
            for _ in range(4_000):
                await session.run("loss")
        assert hook.num_dropped >= 4_000
        assert other.steps == list(range(1, 4_001))
    finally:
        sink.may_end.set()


class Raises(Sink):
    def write(self, point: Point) -> None:
        raise ConnectionError("the tracker is away")


async def test_a_sink_that_raises_is_logged_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = MetricsHook(Raises(), "loss", every_n_steps=1)
    await train([hook])
    assert hook.num_dropped == 10
    assert caplog.text.count("failed, and may go on failing") == 1
    assert "dropped and counted, and training goes on" in caplog.text
    assert "the tracker is away" in caplog.text


async def test_a_sink_that_raises_stops_training_where_that_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = MetricsHook(Raises(), "loss", every_n_steps=1, on_failure=OnFailure.STOP)
    with pytest.raises(ConnectionError, match="the tracker is away"):
        async with MonitoredSession([hook], halving()) as session:
            while not session.should_stop():
                await session.run("loss")
                await anyio.lowlevel.checkpoint()
    assert "training goes on" not in caplog.text


async def test_the_first_error_of_a_sink_at_the_end_or_after_a_recovery_is_raised_too() -> None:
    class Full(Kept):
        is_full = True

        def flush(self) -> int:
            if self.is_full:
                raise OSError("the disk is full")
            return 0

    sink = Full()
    with pytest.raises(OSError, match="the disk is full"):
        await train([MetricsHook(sink, "loss", on_failure=OnFailure.STOP)], steps=1)

    sink.is_full, num = False, 0

    def step() -> dict[str, Any]:
        nonlocal num
        num += 1
        if num == 2:
            raise PreemptionError("the machine has gone")
        sink.is_full = True
        return {"loss": 1.0}

    hook = MetricsHook(sink, "loss", every_n_steps=1, on_failure=OnFailure.STOP)
    with pytest.raises(OSError, match="the disk is full"):
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            sink.is_full = False
            while not session.should_stop():
                await session.run("loss")
                await anyio.lowlevel.checkpoint()


async def test_an_error_of_training_is_not_hidden_by_one_of_a_sink() -> None:
    with pytest.raises(ZeroDivisionError):
        hook = MetricsHook(Raises(), "loss", on_failure=OnFailure.STOP)
        async with MonitoredSession([hook], halving()) as session:
            await session.run("loss")
            raise ZeroDivisionError


async def test_a_sink_belongs_to_one_hook_and_one_session_at_a_time() -> None:
    sink = Kept()
    with pytest.raises(ValueError, match="is there twice; give each sink once"):
        MetricsHook([sink, sink])
    with pytest.raises(RuntimeError, match="used by another hook, or by a session that has not"):
        await train([MetricsHook(sink), MetricsHook(sink)])
    hook = MetricsHook(sink, "loss")
    async with MonitoredSession([hook], halving()):
        with pytest.raises(RuntimeError, match="give each hook a sink of its own"):
            await train([hook])
    await train([hook])
    assert sink.steps == [1, 10]


async def test_what_is_logged_while_the_session_opens_is_kept() -> None:
    class LogsEarly(SessionRunHook):
        uses_default_graph = False

        async def after_create_session(self, session: Any, coord: Any) -> None:
            opening.log_metrics({"early": 1.0})

    sink = Kept()
    hooks = [LogsEarly(), MetricsHook(sink, "loss", every_n_steps=1)]
    async with (opening := MonitoredSession(hooks, halving())) as session:
        await session.run("loss")
    assert sink.points == [(0, {"early": 1.0}), (1, {"loss": 1.0})]


async def test_each_sink_finds_its_state_in_a_list_that_has_changed() -> None:
    class Other(Kept):
        pass

    sinks = Other(), Kept(), Kept()
    hook = MetricsHook(sinks)
    state = hook.state_dict()
    state["sinks"] = [
        {"sink": "Kept", "position": 3, "pending": []},
        {"sink": "Gone", "position": 4, "pending": []},
        {"sink": "Kept", "position": 5, "pending": []},
    ]
    hook.load_state_dict(state)
    await train([hook], steps=1)
    assert [sink.resumes for sink in sinks] == [
        [Resume(0, None)], [Resume(0, 3)], [Resume(0, 5)],
    ]  # fmt: skip


class NotInstalled(Sink):
    def check(self) -> None:
        raise ImportError("pip install 'asynchooks[tracker]'")

    def write(self, point: Point) -> None: ...


async def test_a_library_that_is_missing_fails_the_opening() -> None:
    with pytest.raises(ImportError, match="pip install") as raised:
        await train([MetricsHook(NotInstalled())])
    assert raised.value.__notes__ == ["in begin of MetricsHook"]  # and no error of `on_error`


async def test_an_output_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(FetchError, match="accuracy"):
        await train([MetricsHook(Kept(), "los")])


@pytest.mark.parametrize("value", ["a text", None, np.zeros(3), object()])
async def test_a_value_that_is_no_number_is_an_error(value: Any) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": value})
    with pytest.raises(MetricError, match="the metric 'loss' is .*; give one number"):
        await train([MetricsHook(Kept(), "loss")], creator=creator)
    with pytest.raises(MetricError, match="'loss'"):
        async with MonitoredSession([], halving()) as session:
            session.log_metrics({"loss": value})


async def async_function(*_: Any) -> float:
    return 1.0


async def test_nan_and_infinities_are_numbers() -> None:
    sink = Kept()
    values = {"nan": lambda: math.nan, "inf": lambda: math.inf}
    await train([MetricsHook(sink, values)], steps=1)
    assert str(sink.points) == "[(1, {'nan': nan, 'inf': inf})]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "sink is None; give a sink of asynchooks.metrics"),
        ((Kept,), "give a sink"),
        ((async_function,), "a sink is the async function .*; give a plain one"),
        ((print, {"x": async_function}), "the value 'x' is the async function"),
        (([],), "give at least one sink"),
        ((print, "loss", 10, 5.0), "give at most one of them"),
        ((print, "loss", 0), "give an integer >= 1"),
        ((print, [lambda: 1.0]), "has no name; give it one"),
        ((print, ["loss", mean("loss")]), "two values called 'loss'"),
        ((print, {1: "loss"}), "the name of a value is 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(")):
        MetricsHook(*arguments)


async def test_metrics_that_are_no_mapping_of_texts_to_numbers() -> None:
    async with MonitoredSession([], halving()) as session:
        with pytest.raises(TypeError, match="give a mapping of names to numbers"):
            session.log_metrics([1.0])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the name of a metric is 1"):
            session.log_metrics({1: 1.0})  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match="after the session was closed"):
        session.log_metrics({"loss": 1.0})


async def test_an_error_of_the_session_leaves_what_was_put_in_the_sink() -> None:
    sink = Kept()
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession([MetricsHook(sink, "loss", 1)], halving()) as session:
            await session.run("loss")
            raise ZeroDivisionError
    assert sink.steps == [1]
