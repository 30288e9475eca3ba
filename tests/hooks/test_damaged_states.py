"""States of hooks in a checkpoint that somebody has changed: refused as damaged, or harmless."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import HistoryHook, MetricsHook

from ..support.hook_plays import PLAYS, Model
from .training import run_session

HOOKS = [
    "EarlyStoppingHook", "EvaluationHook", "HistoryHook", "LoggingTensorHook",
    "MetricsHook, files", "StepCounterHook", "SummarySaverHook",
]  # fmt: skip

VALUES: list[Any] = [
    None, -1, 10**30, 2**63, 1e308, 0.5, True, "NaN", "\ud800", [], {}, [[[]]], {"rewind": "x"},
    np.zeros(2), np.array(["a"]), np.zeros((2, 2), np.int64),
]  # fmt: skip


def mutants(state: Any, value: Any) -> Iterator[Any]:
    """Copies of a state, each with the value in another place."""
    is_mapping = isinstance(state, Mapping)
    places: Any = ()
    if is_mapping or isinstance(state, (list, tuple)):
        places = list(state) if is_mapping else range(len(state))
    for place in places:
        for inner in (value, *mutants(state[place], value)):
            copy: Any = dict(state) if is_mapping else list(state)
            copy[place] = inner
            yield copy


async def train(*hooks: Any, runs: int = 5) -> None:
    await run_session(hooks, Model().step, runs=runs)


@pytest.mark.parametrize("name", HOOKS)
async def test_whatever_is_in_a_state_the_hook_refuses_it_or_trains(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return PLAYS[name](tmp_path, Model()).hooks[0]

    hook, seeded, num_refused = make(), random.Random(name), 0
    await train(hook)
    state = dict(hook.state_dict())
    every = [mutant for value in VALUES for mutant in mutants(state, value)]
    for mutant in seeded.sample(every, min(40, len(every))):
        fresh = make()
        try:
            fresh.load_state_dict(mutant)
        except (TypeError, ValueError, LookupError, ArithmeticError):
            num_refused += 1
            continue
        try:
            await train(fresh, runs=3)
        except Exception as error:  # says which state it was
            raise AssertionError(f"the state {mutant!r} was taken") from error
        assert "failed" not in caplog.text, mutant
    assert num_refused


def of_sink(point: Any) -> dict[str, Any]:
    return {"sinks": [{"sink": "FunctionSink", "position": None, "pending": [point]}]}


def of_point(values: Any) -> dict[str, Any]:
    return of_sink({"step": 1, "time": 1.0, "values": values})


def of_rows(steps: Any) -> dict[str, Any]:
    return {"secs": 1.0, "rows": {"l": [steps, np.zeros(3)]}}


METRICS, HISTORY = MetricsHook(lambda step, values: None, "loss"), HistoryHook("loss")
DAMAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "no states of sinks": (METRICS, {"sinks": 7}),
    "a sink without a class": (METRICS, {"sinks": [{"position": None, "pending": []}]}),
    "a point that is none": (METRICS, of_sink(1e308)),
    "a name that no file can hold": (METRICS, of_point({"\ud800": 1.0})),
    "columns without steps": (HISTORY, of_rows(None)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_such_a_state_is_refused(damage: str) -> None:
    hook, state = DAMAGES[damage]
    with pytest.raises((TypeError, ValueError, LookupError)):
        hook.load_state_dict({"interval": {}, "values": {"means": {}}, **state})
