"""States of hooks in a checkpoint that somebody has changed: refused as damaged, or harmless."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import DamagedCheckpointError, HistoryHook, MetricsHook, SessionRunHook

from ..support.hook_plays import PLAYS, Model
from .preemptions import Counter, saving
from .training import run_session

pytestmark = pytest.mark.anyio


HOOKS = [
    "EarlyStoppingHook", "EvaluationHook", "HistoryHook", "LoggingTensorHook",
    "MetricsHook, files", "StepCounterHook", "SummarySaverHook",
]  # fmt: skip

VALUES: list[Any] = [
    None, -1, 10**30, 2**63, 1e308, 0.5, True, "NaN", "\ud800", [], {}, [[[]]], {"rewind": "x"},
    np.zeros(2), np.array(["a"]), np.zeros((2, 2), np.int64),
]  # fmt: skip


def places_in(state: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a state, but for its own."""
    keys: Any = ()
    if isinstance(state, (Mapping, list, tuple)):
        keys = list(state) if isinstance(state, Mapping) else range(len(state))
    for key in keys:
        yield (*before, key)
        yield from places_in(state[key], (*before, key))


def changed(state: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in this place."""
    if not place:
        return value
    first, *rest = place
    if isinstance(state, Mapping):
        return {**state, first: changed(state[first], tuple(rest), value)}
    return [changed(old, tuple(rest), value) if i == first else old for i, old in enumerate(state)]


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
    every = [(place, value) for place in places_in(state) for value in VALUES]
    for place, value in seeded.sample(every, min(40, len(every))):
        fresh = make()
        try:
            fresh.load_state_dict(changed(state, place, value))
        except (TypeError, ValueError, LookupError, ArithmeticError):
            num_refused += 1
            continue
        try:
            await train(fresh, runs=3)
        except Exception as error:  # says which state it was
            raise AssertionError(f"the state with {value!r} in {place} was taken") from error
        assert "failed" not in caplog.text, (place, value)
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
    "a point with a text": (METRICS, of_point({"loss": "cos\nsystem"})),
    "a name that no file can hold": (METRICS, of_point({"\ud800": 1.0})),
    "columns without steps": (HISTORY, of_rows(None)),
    "rows without secs": (HISTORY, of_rows(np.arange(3))),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_checkpoint_with_such_a_state_is_damaged(damage: str, tmp_path: Path) -> None:
    hook, state = DAMAGES[damage]
    name, methods = type(hook).__name__, dict[str, Any]()
    methods["state_dict"] = lambda self: {"interval": {}, "values": {"means": {}}, **state}
    methods["load_state_dict"] = lambda self, state: None
    await train(saving(tmp_path, Counter()), type(name, (SessionRunHook,), methods)())
    with pytest.raises(DamagedCheckpointError, match=f"{name} cannot go on from its saved"):
        await train(saving(tmp_path, Counter()), hook)
