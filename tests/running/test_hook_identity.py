"""Which saved state goes to which hook: by what a hook is about, not by its place in the list."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    EarlyStoppingHook,
    FeedHook,
    MetricsHook,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
)
from asynchooks.metrics import Point, Resume, Sink
from asynchooks.simulation import Simulation

from ..hooks.forwarding import Forwards, ForwardsAll, bare, twice
from ..support.moments import at
from ..support.step_loops import run_steps

Hooks = Sequence[SessionRunHook]


class Counts(SessionRunHook):
    """Counts runs by its own stride."""

    def __init__(self, stride: int = 1, name: str = "") -> None:
        self.stride, self.count = stride, 0
        self.state_name = name

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.count += self.stride

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


async def train(
    path: Path, hooks: Hooks, last_step: int, look: Callable[[], Any] = lambda: None
) -> tuple[Any, list[dict[str, Any]]]:
    """Train up to the step, with a loss that falls and an accuracy that rises.

    Returns what a look sees before the first run, and the feeds.
    """
    model, seen = {"step": np.zeros(1, int)}, list[Any]()
    fed: list[dict[str, Any]] = []

    def step(**feeds: Any) -> dict[str, float]:
        fed.append(feeds)
        model["step"] += 1
        now = int(model["step"][0])
        return {"loss": 10 - now / 10, "accuracy": now / 100}

    saving = CheckpointSaverHook(path, save_steps=100, saver=StateDictSaver(model=model))
    looks = at(after_create_session=lambda *_: seen.append(look()))
    await run_steps(step, last_step, *hooks, saving, looks)
    return seen[0], fed


def stopping(*names: str) -> list[EarlyStoppingHook]:
    return [EarlyStoppingHook(name, patience=50) for name in names]


BESTS = {"loss": 8.0, "accuracy": 0.2}
"""After twenty steps."""


BOTH = ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("wrap", "before", "after"),
    [
        *((each, BOTH, BOTH[::-1]) for each in (bare, Forwards, ForwardsAll, twice)),
        (bare, BOTH, ["loss"]),
        (twice, BOTH, ["accuracy"]),
        (bare, ["loss"], ["accuracy"]),
        (Forwards, ["accuracy"], BOTH),
    ],
)
async def test_states_follow_the_metric_where_hooks_are_reordered_removed_and_added(
    tmp_path: Path, wrap: Any, before: list[str], after: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    await train(tmp_path, [wrap(each) for each in stopping(*before)], 20)
    hooks = stopping(*after)
    with caplog.at_level(logging.WARNING, "asynchooks"):
        found, _ = await train(
            tmp_path, [wrap(each) for each in hooks], 30, lambda: [each.best for each in hooks]
        )
    assert found == [BESTS[name] if name in before else None for name in after]
    for name in {*before} ^ {*after}:
        words = "does not have" if name in before else "start afresh"
        assert re.search(f"{words}: [A-Za-z#2]* '{name}'", caplog.text)


async def test_inputs_go_on_at_their_own_positions_also_one_that_is_renamed(tmp_path: Path) -> None:
    def feeds(*names: str) -> list[SessionRunHook]:
        sources = {"a": range(100), "b": range(1000, 1100), "c": range(2000, 2100)}
        return [FeedHook(sources[name], name) for name in names]

    await train(tmp_path, feeds("a", "b"), 3)
    fed = [
        (await train(tmp_path, feeds(*names), step))[1]
        for step, names in ((4, "ba"), (5, "cba"), (6, "b"))
    ]
    assert fed == [[{"a": 3, "b": 1003}], [{"a": 4, "b": 1004, "c": 2000}], [{"b": 1005}]]
    _, images = await train(tmp_path, [FeedHook(range(1000, 1100), "images")], 7)
    assert images == [{"images": 1006}]


@pytest.mark.parametrize("are_named", [True, False])
async def test_hooks_of_a_users_class_go_on_by_their_state_names_or_in_order(
    tmp_path: Path, are_named: bool
) -> None:
    def counts(*strides: int) -> list[Counts]:
        return [Counts(each, str(each) if are_named else "") for each in strides]

    await train(tmp_path, counts(1, 10), 2)
    hooks = counts(100, 10, 1) if are_named else counts(1, 10)
    await train(tmp_path, hooks, 3)
    assert [each.count for each in hooks] == ([100, 30, 3] if are_named else [3, 30])


@pytest.mark.parametrize(
    ("before", "after"), [([1], [1, 1]), ([1, 1], [1]), ([1, 1], [1, 1, 1]), ([1, 0], [1])]
)
async def test_another_number_of_hooks_that_say_nothing_is_refused_and_changes_nothing(
    tmp_path: Path, before: list[int], after: list[int]
) -> None:
    await train(tmp_path, [Counts(each) for each in before], 2)
    hooks = [Counts(each) for each in after]
    match = (
        rf"states of {len(before)} hooks of the class Counts, and this session has {len(after)}, "
        "which cannot be told apart.*the hooks that it was saved with.*state_name"
    )
    with pytest.raises(CheckpointError, match=match):
        await train(tmp_path, hooks, 3)
    assert [each.count for each in hooks] == [0] * len(after)


async def test_hooks_without_a_state_may_become_more_or_fewer_and_keep_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hooks(*strides: int) -> list[Any]:
        timers = [StepCounterHook(every_n_steps=7) for _ in strides]
        return [*(Counts(each) for each in strides), *timers]

    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path, hooks(0, 0), 2)
        await train(tmp_path, hooks(0), 3)
        await train(tmp_path, hooks(1, 0, 2), 4)
        last = hooks(1, 0, 2)
        await train(tmp_path, last, 5)
    assert [each.count for each in last[:3]] == [2, 0, 4]
    assert "order" not in caplog.text


class Kept(Sink):
    """Has its own name as its position."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.resumed: list[Any] = []

    def __repr__(self) -> str:
        return f"Kept({self.name!r})"

    def open(self, resume: Resume) -> None:
        self.resumed.append(resume.position)

    def write(self, point: Point) -> None:
        pass

    def flush(self) -> Any:
        return self.name


@pytest.mark.parametrize("is_one_hook", [True, False], ids=["one hook", "two hooks"])
@pytest.mark.parametrize("names", ["ab", "ba", "cab", "b", "ac"])
def test_each_sink_is_given_its_own_position(tmp_path: Path, is_one_hook: bool, names: str) -> None:
    def hooks(sinks: list[Kept]) -> list[SessionRunHook]:
        groups = [sinks] if is_one_hook else [[each] for each in sinks]
        return [MetricsHook(each, "loss", every_n_steps=1) for each in groups]

    # in virtual time, a checkpoint holds what is flushed by then
    Simulation(seed=0).run(train, tmp_path, hooks([Kept("a"), Kept("b")]), 3)
    sinks = [Kept(name) for name in names]
    Simulation(seed=0).run(train, tmp_path, hooks(sinks), 4)
    assert [each.resumed for each in sinks] == [[None if n == "c" else n] for n in names]
