"""Which saved state goes to which hook: by what a hook is about, not by its place in the list."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    EarlyStoppingHook,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FunctionSessionCreator,
    HistoryHook,
    MetricsHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.metrics import CsvSink, JsonLinesSink, Point, Resume, Sink
from asynchooks.simulation import Simulation

from ..hooks.forwarding import Forwards, ForwardsAll, Wrap, bare, twice

pytestmark = pytest.mark.anyio

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


class Seen(SessionRunHook):
    """Calls a function when the session is ready, before its first run."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.look = look

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.look()


async def train(
    path: Path,
    hooks: Hooks,
    last_step: int,
    look: Callable[[], object] = lambda: None,
    weights: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Train up to the step, with a loss that falls and an accuracy that rises; returns feeds."""
    model = {"step": np.zeros(1, int) if weights is None else weights}
    fed: list[dict[str, Any]] = []

    def step(**feeds: Any) -> dict[str, float]:
        fed.append(feeds)
        model["step"] += 1
        at = int(model["step"][0])
        return {"loss": 10 - at / 10, "accuracy": at / 100}

    saving = CheckpointSaverHook(path, save_steps=100, saver=StateDictSaver(model=model))
    last = [saving, Seen(look), StopAtStepHook(last_step=last_step)]
    async with MonitoredSession([*hooks, *last], FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run([])
    return fed


def stopping(wrap: Wrap = bare) -> tuple[dict[str, EarlyStoppingHook], dict[str, SessionRunHook]]:
    hooks = {name: EarlyStoppingHook(name, patience=50) for name in ("loss", "accuracy")}
    return hooks, {name: wrap(each) for name, each in hooks.items()}


@pytest.mark.parametrize("wrap", [bare, Forwards, ForwardsAll, twice])
async def test_states_follow_the_metric_where_hooks_are_reordered(
    tmp_path: Path, wrap: Wrap
) -> None:
    hooks, listed = stopping(wrap)
    await train(tmp_path, [listed["loss"], listed["accuracy"]], 20)
    bests = {name: each.best for name, each in hooks.items()}
    assert bests["loss"] != bests["accuracy"]
    hooks, listed = stopping(wrap)
    found: dict[str, Any] = {}
    look = lambda: found.update({name: each.best for name, each in hooks.items()})  # noqa: E731
    await train(tmp_path, [listed["accuracy"], listed["loss"]], 30, look)
    assert found == bests


@pytest.mark.parametrize("kept", ["loss", "accuracy"])
async def test_the_state_of_a_hook_that_was_removed_goes_to_no_other(
    tmp_path: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks, _ = stopping()
    await train(tmp_path, list(hooks.values()), 20)
    best, other = hooks[kept].best, EarlyStoppingHook(kept, patience=50)
    found: list[Any] = []
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path, [other], 30, lambda: found.append(other.best))
    assert found == [best]
    assert "does not have: EarlyStoppingHook" in caplog.text


async def test_another_metric_does_not_begin_with_the_best_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(tmp_path, [EarlyStoppingHook("loss", patience=50)], 20)
    other = EarlyStoppingHook("accuracy", patience=50)
    found: list[Any] = []
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path, [other], 30, lambda: found.append(other.best))
    assert found == [None]
    assert "start afresh: EarlyStoppingHook 'accuracy'" in caplog.text
    assert "does not have: EarlyStoppingHook 'loss'" in caplog.text


async def test_patience_may_change_and_the_state_is_the_hooks_still(tmp_path: Path) -> None:
    await train(tmp_path, [EarlyStoppingHook("loss", patience=50)], 20)
    other = EarlyStoppingHook("loss", patience=70, min_delta=0.5)
    found: list[Any] = []
    await train(tmp_path, [other], 30, lambda: found.append(other.best_step))
    assert found == [20]


def evaluation(name: str) -> EvaluationHook:
    return EvaluationHook(lambda session, step: {name: step}, every_n_steps=5, name=name)


async def test_an_evaluation_that_is_added_begins_without_results(tmp_path: Path) -> None:
    await train(tmp_path, [evaluation("test")], 20)
    dev, test = evaluation("dev"), evaluation("test")
    found: list[Any] = []
    await train(tmp_path, [dev, test], 21, lambda: found.extend([dev.latest, test.latest]))
    assert found == [None, {"test": 20.0}]


async def test_early_stopping_by_an_evaluation_is_known_by_both_names(tmp_path: Path) -> None:
    def hooks(*names: str) -> dict[str, tuple[EvaluationHook, EarlyStoppingHook]]:
        made = {name: evaluation(name) for name in names}
        return {
            name: (each, EarlyStoppingHook(each.metric(name), patience=50))
            for name, each in made.items()
        }

    one = hooks("dev")
    await train(tmp_path, list(one["dev"]), 20)
    both = hooks("test", "dev")
    found: list[Any] = []
    look = lambda: found.extend(each[1].best_step for each in both.values())  # noqa: E731
    await train(tmp_path, [*both["test"], *both["dev"]], 21, look)
    assert found == [None, one["dev"][1].best_step]


async def test_two_inputs_go_on_at_their_own_positions(tmp_path: Path) -> None:
    def feeds(*names: str) -> list[SessionRunHook]:
        sources = {"a": range(100), "b": range(1000, 1100), "c": range(2000, 2100)}
        return [FeedHook(sources[name], name) for name in names]

    await train(tmp_path, feeds("a", "b"), 3)
    fed = await train(tmp_path, feeds("b", "a"), 4)
    assert fed == [{"a": 3, "b": 1003}]
    fed = await train(tmp_path, feeds("c", "b", "a"), 5)
    assert fed == [{"a": 4, "b": 1004, "c": 2000}]
    fed = await train(tmp_path, feeds("b"), 6)
    assert fed == [{"b": 1005}]


async def test_an_input_whose_parameter_is_renamed_goes_on_at_its_position(tmp_path: Path) -> None:
    await train(tmp_path, [FeedHook(range(100), "a")], 3)
    assert await train(tmp_path, [FeedHook(range(100), "images")], 4) == [{"images": 3}]


class Left:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        return {type(self).__name__.lower(): self.count}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Right(Left):
    def __init__(self) -> None:
        self.count = 50


async def test_feed_functions_are_told_apart_by_their_classes(tmp_path: Path) -> None:
    await train(tmp_path, [FeedFnHook(Left()), FeedFnHook(Right())], 2)
    fed = await train(tmp_path, [FeedFnHook(Right()), FeedFnHook(Left())], 3)
    assert fed == [{"right": 53, "left": 3}]


async def test_histories_are_told_apart_by_their_values(tmp_path: Path) -> None:
    await train(tmp_path, [HistoryHook("loss", 1), HistoryHook("accuracy", 1)], 3)
    accuracy, loss = HistoryHook("accuracy", 1), HistoryHook("loss", 1)
    await train(tmp_path, [accuracy, loss], 4)
    assert [list(row) for row in loss.rows] == [["step", "secs", "loss"]] * 4
    assert [list(row) for row in accuracy.rows] == [["step", "secs", "accuracy"]] * 4


async def test_hooks_of_a_users_class_are_told_apart_by_their_state_names(tmp_path: Path) -> None:
    await train(tmp_path, [Counts(1, "ones"), Counts(10, "tens")], 2)
    hooks = [Counts(100, "hundreds"), Counts(10, "tens"), Counts(1, "ones")]
    await train(tmp_path, hooks, 3)
    assert [each.count for each in hooks] == [100, 30, 3]


async def test_hooks_that_say_nothing_go_on_in_their_order(tmp_path: Path) -> None:
    await train(tmp_path, [Counts(1), Counts(10)], 2)
    hooks = [Counts(1), Counts(10)]
    await train(tmp_path, hooks, 3)
    assert [each.count for each in hooks] == [3, 30]


async def test_the_state_of_a_hook_may_begin_with_its_session(tmp_path: Path) -> None:
    class Opens(Counts):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.opened = getattr(self, "given", 0) + 1

        def state_dict(self) -> dict[str, Any]:
            return {"opened": self.opened}  # an AttributeError before

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.given = state["opened"]

    await train(tmp_path, [Opens()], 2)
    hook = Opens()
    await train(tmp_path, [hook], 3)
    assert hook.opened == 2


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
async def test_another_number_of_hooks_that_say_nothing_is_refused_and_changes_nothing(
    tmp_path: Path, before: int, after: int
) -> None:
    await train(tmp_path, [Counts() for _ in range(before)], 2)
    weights, hooks = np.zeros(1, int), [Counts() for _ in range(after)]
    match = (
        rf"states of {before} hooks of the class Counts, and this session has {after}, which "
        "cannot be told apart.*the hooks that it was saved with, in the same order.*state_name"
    )
    with pytest.raises(CheckpointError, match=match):
        await train(tmp_path, hooks, 3, weights=weights)
    assert weights.tolist() == [0]
    assert [each.count for each in hooks] == [0] * after


async def test_a_hook_without_a_state_keeps_its_place_among_those_that_say_nothing(
    tmp_path: Path,
) -> None:
    await train(tmp_path, [Counts(1), Counts(0)], 2)
    hooks = [Counts(1), Counts(0)]
    await train(tmp_path, hooks, 3)
    assert [each.count for each in hooks] == [3, 0]
    with pytest.raises(CheckpointError, match="this session has 1, which cannot be told apart"):
        await train(tmp_path, [Counts(1)], 4)


async def test_hooks_that_had_no_state_may_become_more_or_fewer(tmp_path: Path) -> None:
    await train(tmp_path, [Counts(0), Counts(0)], 2)
    await train(tmp_path, [Counts(0)], 3)
    hooks = [Counts(1), Counts(2), Counts(3)]
    await train(tmp_path, hooks, 4)
    assert [each.count for each in hooks] == [1, 2, 3]


async def test_states_of_hooks_of_which_none_is_left_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(tmp_path, [Counts(1), Counts(2)], 2)
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path, [], 3)
    assert "does not have: Counts, Counts#2" in caplog.text


async def test_timers_alone_are_never_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def counters(*every: int) -> list[SessionRunHook]:
        return [StepCounterHook(every_n_steps=each) for each in every]

    await train(tmp_path, counters(7, 7), 2)
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path, counters(7, 7, 7), 3)
        await train(tmp_path, counters(7), 4)
    assert "order" not in caplog.text


async def test_a_state_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    hook = Counts(1)
    hook.state_name = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="state_name of Counts is 3; give a text"):
        await train(tmp_path, [hook], 1)


async def test_nan_hooks_keep_their_own_counts_of_rollbacks(tmp_path: Path) -> None:
    def hooks(*names: str) -> list[SessionRunHook]:
        return [NanTensorHook(name, max_rollbacks=3) for name in names]

    await train(tmp_path, hooks("loss", "accuracy"), 2)
    await train(tmp_path, hooks("accuracy", "loss", "loss"), 3)  # none of them has any


def rows_of(path: Path) -> list[int]:
    with path.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("is_one_hook", [True, False], ids=["one hook", "two hooks"])
async def test_sinks_of_one_class_go_on_in_their_own_files(
    tmp_path: Path, is_one_hook: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def hooks(*names: str) -> list[SessionRunHook]:
        sinks = [CsvSink(tmp_path / f"{name}.csv") for name in names]
        if is_one_hook:
            return [MetricsHook(sinks, "loss", every_n_steps=1)]
        return [MetricsHook(sink, "loss", every_n_steps=1) for sink in sinks]

    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path / "ckpt", hooks("a"), 3)
        await train(tmp_path / "ckpt", hooks("b", "a"), 5)
        await train(tmp_path / "ckpt", hooks("a", "c", "b"), 7)
    assert rows_of(tmp_path / "a.csv") == [1, 2, 3, 4, 5, 6, 7]
    assert rows_of(tmp_path / "b.csv") == [4, 5, 6, 7]
    assert rows_of(tmp_path / "c.csv") == [6, 7]
    assert "points are missing" not in caplog.text  # which the wrong position would mean


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
        if is_one_hook:
            return [MetricsHook(sinks, "loss", every_n_steps=1)]
        return [MetricsHook(sink, "loss", every_n_steps=1) for sink in sinks]

    # in virtual time, a checkpoint holds what is flushed by then
    Simulation(seed=0).run(train, tmp_path, hooks([Kept("a"), Kept("b")]), 3)
    sinks = [Kept(name) for name in names]
    Simulation(seed=0).run(train, tmp_path, hooks(sinks), 4)
    assert [each.resumed for each in sinks] == [[None if n == "c" else n] for n in names]


async def test_a_sink_whose_file_was_moved_goes_on_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hooks(place: Path) -> list[SessionRunHook]:
        sinks = [CsvSink(place / "a.csv"), JsonLinesSink(place / "a.jsonl")]
        return [MetricsHook(sinks, "loss", every_n_steps=1)]

    await train(tmp_path / "ckpt", hooks(tmp_path / "old"), 3)
    (tmp_path / "old").rename(tmp_path / "new")
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path / "ckpt", hooks(tmp_path / "new"), 5)
    assert rows_of(tmp_path / "new" / "a.csv") == [1, 2, 3, 4, 5]
    assert len((tmp_path / "new" / "a.jsonl").read_text().splitlines()) == 5
    assert caplog.text == ""


def save_as_before(path: Path, states: Mapping[str, Any], step: int = 2) -> None:
    """Save a checkpoint as earlier versions did, which knew classes and their order alone."""
    directory = CheckpointDirectory(path)
    directory.open()
    saver = StateDictSaver(model={"step": np.full(1, step)})
    directory.save(step, saver.save, extra={"hooks.json": json.dumps(states).encode()})
    directory.close()


def best(value: float, step: int = 2) -> dict[str, Any]:
    return {"best": value, "best_step": step, "num_worse": 0, "metric": {"last_taken": None}}


async def test_one_state_of_an_earlier_version_goes_to_the_one_hook_of_its_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_as_before(tmp_path, {"EarlyStoppingHook": best(0.5), "Counts": {"count": 7}})
    hooks = (EarlyStoppingHook("loss", patience=50), Counts(1, "ones"))
    found: list[Any] = []
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train(tmp_path, hooks, 3, lambda: found.extend([hooks[0].best, hooks[1].count]))
    assert found == [0.5, 7]
    assert "order" not in caplog.text


async def test_states_of_an_earlier_version_go_by_order_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_as_before(tmp_path, {"EarlyStoppingHook": best(0.5), "EarlyStoppingHook#2": best(0.25)})
    hooks, _ = stopping()
    found: list[Any] = []
    with caplog.at_level(logging.WARNING, "asynchooks"):
        look = lambda: found.extend(each.best for each in hooks.values())  # noqa: E731
        await train(tmp_path, list(hooks.values()), 3, look)
    assert found == [0.5, 0.25]
    assert "by the order of the hooks alone" in caplog.text


@pytest.mark.parametrize("num_hooks", [1, 3])
async def test_states_of_an_earlier_version_are_refused_for_another_number_of_hooks(
    tmp_path: Path, num_hooks: int
) -> None:
    save_as_before(tmp_path, {"EarlyStoppingHook": best(0.5), "EarlyStoppingHook#2": best(0.25)})
    hooks = [EarlyStoppingHook(name, 50) for name in ("loss", "accuracy", "loss")[:num_hooks]]
    match = f"states of 2 hooks of the class EarlyStoppingHook.* this session has {num_hooks}"
    with pytest.raises(CheckpointError, match=match):
        await train(tmp_path, hooks, 3)


@pytest.mark.parametrize("of", ["x", [1, 2], ["a"], None, {}])
async def test_a_state_that_says_in_another_shape_whose_it_is_is_damaged(
    tmp_path: Path, of: Any
) -> None:
    save_as_before(tmp_path, {"Counts": {"asynchooks.of": of, "count": 1}})
    with pytest.raises(DamagedCheckpointError, match="state of the hook Counts is damaged: whose"):
        await train(tmp_path, [Counts()], 3)
