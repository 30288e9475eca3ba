"""States of hooks in a checkpoint that somebody has changed: refused as damaged, or harmless."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DamagedCheckpointError,
    EarlyStoppingHook,
    EvaluationHook,
    FunctionSessionCreator,
    HistoryHook,
    LoggingTensorHook,
    MetricsHook,
    MonitoredSession,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from asynchooks.metrics import CsvSink, JsonLinesSink, Point, Sink, TensorBoardSink, mean

pytestmark = pytest.mark.anyio


class Slow(Sink):
    """Has flushed nothing yet, so that its points are in the state."""

    def write(self, point: Point) -> None: ...

    def flush(self) -> Any:
        raise OSError("not now")


def evaluate(session: Any, step: int) -> dict[str, float]:
    return {"accuracy": step / 10}


# makes a hook that has a state, given a directory
HOOKS: dict[str, Callable[[Path], SessionRunHook]] = {
    "history": lambda at: HistoryHook(["loss", mean("accuracy")], every_n_steps=2),
    "history by seconds": lambda at: HistoryHook("loss", every_n_secs=0.0),
    "metrics": lambda at: MetricsHook(
        [JsonLinesSink(at / "m.jsonl"), CsvSink(at / "m.csv"), TensorBoardSink(at), Slow()],
        ["loss", mean("accuracy")], every_n_steps=2,
    ),
    "evaluation": lambda at: EvaluationHook(evaluate, every_n_steps=2),
    "early stopping": lambda at: EarlyStoppingHook("loss", patience=100),
    "logging": lambda at: LoggingTensorHook(["loss"], every_n_iter=2),
    "step counter": lambda at: StepCounterHook(every_n_steps=2),
    "summaries": lambda at: SummarySaverHook(save_steps=2, summary_op="loss"),
}  # fmt: skip

VALUES: list[Any] = [
    None, -1, 10**30, 2**63, -(2**63), 1e308, 0.5, True, "NaN", "\ud800", "/etc/passwd", [], {},
    [[[]]], {"rewind": "x"}, np.zeros(2), np.array(["a"]), np.zeros((2, 2), np.int64),
]  # fmt: skip


def places_in(state: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a state, its own first."""
    yield before
    if isinstance(state, (Mapping, list, tuple)):
        keys = list(state) if isinstance(state, Mapping) else range(len(state))
        for key in keys:
            yield from places_in(state[key], (*before, key))


def changed(state: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in this place."""
    if not place:
        return value
    first, *rest = place
    if isinstance(state, Mapping):
        return {**state, first: changed(state[first], tuple(rest), value)}
    return [changed(old, tuple(rest), value) if i == first else old for i, old in enumerate(state)]


async def train(hooks: list[Any], last_step: int = 5) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": 0.5, "accuracy": 0.25})
    async with MonitoredSession([*hooks, StopAtStepHook(last_step=last_step)], creator) as session:
        while not session.should_stop():
            await session.run([])


class StateOf(SessionRunHook):
    """Saves a state as that of another hook."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None: ...


def saver(at: Path) -> CheckpointSaverHook:
    model = StateDictSaver(model={"w": np.zeros(1)})
    return CheckpointSaverHook(str(at / "model"), save_steps=100, saver=model)


@pytest.mark.parametrize("name", HOOKS)
async def test_whatever_is_in_a_state_the_hook_refuses_it_or_trains(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with MonitoredSession(
        [hook := HOOKS[name](tmp_path)],
        FunctionSessionCreator(lambda: {"loss": 0.5, "accuracy": 0.25}),
    ) as session:
        for _ in range(5):
            await session.run([])
        state = copy.deepcopy(dict(hook.state_dict()))
    seeded, num_refused = random.Random(name), 0
    every = [(place, value) for place in places_in(state) if place for value in VALUES]
    for place, value in seeded.sample(every, min(60, len(every))):
        fresh = HOOKS[name](tmp_path)
        try:
            fresh.load_state_dict(changed(state, place, value))
        except (TypeError, ValueError, LookupError, ArithmeticError):
            num_refused += 1
            continue
        try:
            await train([fresh], 8)
        except Exception as error:  # says which state it was
            raise AssertionError(f"the state with {value!r} in {place} was taken") from error
        failed = [each.getMessage() for each in caplog.records if "failed" in each.getMessage()]
        assert all(f"{Slow.__qualname__} object" in each for each in failed), (place, value, failed)
    assert num_refused


DAMAGES: dict[str, Any] = {
    "no states of sinks": (MetricsHook, {"sinks": 7}),
    "a sink without a class": (MetricsHook, {"sinks": [{"position": None, "pending": []}]}),
    "a point that is none": (
        MetricsHook, {"sinks": [{"sink": "FunctionSink", "position": None, "pending": [1e308]}]},
    ),
    "a point with a text": (
        MetricsHook,
        {"sinks": [{"sink": "FunctionSink", "position": None, "pending": [
            {"step": 1, "time": 1.0, "values": {"loss": "cos\nsystem"}}]}]},
    ),
    "a point of a name that no file can hold": (
        MetricsHook,
        {"sinks": [{"sink": "FunctionSink", "position": None, "pending": [
            {"step": 1, "time": 1.0, "values": {"\ud800": 1.0}}]}]},
    ),
    "columns without steps": (
        HistoryHook, {"secs": 1.0, "rows": {"l": [None, np.zeros(1)]}},
    ),
    "rows without secs": (
        HistoryHook, {"secs": 1.0, "rows": {"l": [np.arange(3), np.zeros(3)]}},
    ),
    "results that are none": (EvaluationHook, {"timer": {}, "latest": [1], "latest_step": 1}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_checkpoint_with_such_a_state_is_damaged(damage: str, tmp_path: Path) -> None:
    kind, state = DAMAGES[damage]
    if kind is not EvaluationHook:
        state = {"interval": {}, "values": {"means": {}}, **state}
    of_that_name = type(kind.__name__, (StateOf,), {})
    await train([saver(tmp_path), of_that_name(state)])
    hooks: dict[Any, SessionRunHook] = {
        MetricsHook: MetricsHook(lambda step, values: None, "loss"),
        HistoryHook: HistoryHook("loss"),
        EvaluationHook: EvaluationHook(evaluate, every_n_steps=2),
    }
    with pytest.raises(
        DamagedCheckpointError, match=f"{kind.__name__} cannot go on from its saved"
    ):
        await train([saver(tmp_path), hooks[kind]])
