"""Resuming on graphs: in any order of workers, and from the last checkpoint before NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    EarlyStoppingHook,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    Retention,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
)

from ..hooks.lives import NUM_ITEMS, Life, LifeModel
from .models import ChiefSessionCreator, Moments, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.exhaustive]


QUICK = [(2, 1), (8, 7)]
"""The others take minutes: they run with the slow tests."""

ORDERS = [
    pytest.param(n, place, marks=() if (n, place) in QUICK else pytest.mark.slow)
    for n in range(1, 9)
    for place in range(n)
]


class GraphModel(LifeModel):
    """A graph that counts how often it was trained with each item."""

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self.graph = tf.Graph()
        with self.graph.as_default():
            step = v1.train.get_or_create_global_step()
            self.feed = v1.placeholder(tf.int32, ())
            self._counts = v1.get_variable("counts", initializer=tf.zeros(NUM_ITEMS, tf.int32))
            counted = v1.assign_add(self._counts, tf.one_hot(self.feed, NUM_ITEMS, dtype=tf.int32))
            with tf.control_dependencies([counted]):
                self.fetches = [v1.assign_add(step, 1)]

    def creator(self, path: Path) -> SessionCreator:
        creator: Any = ChiefSessionCreator(checkpoint_dir=str(path))
        return creator  # type: ignore[no-any-return]

    def saving(self, path: Path) -> CheckpointSaverHook:
        return CheckpointSaverHook(path, save_steps=4, background=self._background)

    def saved_counts(self, path: Path) -> list[int]:
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(path)))
        counts: list[int] = reader.get_tensor("counts").tolist()
        return counts


async def check_lives(
    path: Path,
    num_workers: int,
    saver_place: int = 0,
    *,
    background: bool,
    feeds: bool,
    num_turns: int = 0,
    holds_item: bool = False,
) -> None:
    for crashes_at in (5, 4, 0, 0):
        model = GraphModel(background=background)
        with model.graph.as_default():
            life = Life(
                model,
                path,
                num_workers,
                saver_place,
                feeds=feeds,
                num_turns=num_turns,
                holds_item=holds_item,
                crashes_at=crashes_at,
            )
            await life.train()
    assert model.saved_counts(path) == [1] * NUM_ITEMS


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("feeds", [True, False], ids=["feed", "loop"])
@pytest.mark.parametrize(("num_workers", "saver_place"), ORDERS)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int, saver_place: int, feeds: bool, background: bool, tmp_path: Path
) -> None:
    await check_lives(tmp_path, num_workers, saver_place, background=background, feeds=feeds)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("feeds", "holds_item"),
    [(True, False), (True, True), (False, False)],
    ids=["feed", "feed-with-item", "loop"],
)
@pytest.mark.parametrize("num_workers", [2, 8])
async def test_each_item_is_trained_once_where_workers_open_after_the_steps_of_the_saver(
    num_workers: int, feeds: bool, holds_item: bool, background: bool, tmp_path: Path
) -> None:
    await check_lives(
        tmp_path,
        num_workers,
        background=background,
        feeds=feeds,
        num_turns=2,
        holds_item=holds_item,
    )


class CountRuns(SessionRunHook):
    """Counts the runs of its session, in checkpoints, too."""

    def __init__(self) -> None:
        self.num_runs = 0

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.num_runs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_runs": self.num_runs}

    def load_state_dict(self, state: Any) -> None:
        self.num_runs = state["num_runs"]


@pytest.mark.parametrize("num_early", [0, 1])
async def test_a_late_saver_finds_the_step_that_its_creator_has_restored_or_is_refused(
    num_early: int, tmp_path: Path
) -> None:
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        train_op = v1.assign_add(step, 1)
        shared = SharedSessionCreator(ChiefSessionCreator(checkpoint_dir=str(tmp_path)))
        saving, counter = CheckpointSaverHook(tmp_path, save_steps=9), CountRuns()
        async with MonitoredSession([counter, saving], shared) as session:
            for _ in range(3):
                await session.run(train_op)
        counter.num_runs = -1
        early, late = (MonitoredSession(each, shared) for each in ([], [counter, saving]))
    async with early:
        assert early.global_step.value == 3
        for _ in range(num_early):
            await early.run(train_op)
        if num_early:
            got = "opens late: others have trained the model to step 4"
            with pytest.raises(CheckpointError, match=got):
                await late.open()
            assert (await early.run(train_op), counter.num_runs) == (5, -1)
            return
        async with late:
            assert (late.global_step.value, counter.num_runs) == (3, 3)
            await early.run(train_op)


class Model(NamedTuple):
    """A graph whose loss is that of the weight before the update, which adds the noise."""

    graph: Any
    weight: Any
    noise: Any
    loss: Any
    train_op: Any


def noisy_model() -> Model:
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        noise = v1.placeholder(tf.float32, ())
        weight = v1.get_variable("weight", shape=(), initializer=v1.ones_initializer)
        loss = tf.identity(weight.read_value(), name="loss")
        with tf.control_dependencies([loss]):
            update = weight.assign_add(noise, read_value=False)
        with tf.control_dependencies([update]):
            train_op = v1.assign_add(step, 1)
    return Model(graph, weight, noise, loss, train_op)


async def train(
    directory: Path,
    breaks: list[int],
    *hooks: Any,
    background: bool = True,
    last_step: int = 8,
    look: Callable[[int], None] = lambda step: None,
) -> None:
    """Train with the noise 1, but NaN in these steps, each as often as it is listed."""
    model = noisy_model()
    saver = CheckpointSaverHook(str(directory), save_steps=1, background=background)
    creator = ChiefSessionCreator(checkpoint_dir=str(directory))
    all_hooks = [*hooks, saver] if background else [saver, *hooks]
    async with monitored(model.graph, all_hooks, creator) as session:
        look(session.global_step.value)
        while not session.should_stop() and session.global_step.value < last_step:
            step = session.global_step.value + 1
            noise = 1.0
            if step in breaks:
                breaks.remove(step)
                noise = math.nan
            await session.run(model.train_op, {model.noise: noise})


def steps_in(directory: Path) -> tuple[list[int], list[int]]:
    """(Steps that may be chosen, steps that were moved aside)."""
    names = [path.name.removeprefix("model.ckpt-") for path in directory.glob("model.ckpt-*")]
    rejected = [int(name.partition(".")[0]) for name in names if "rejected" in name]
    return sorted(int(name) for name in names if name.isdecimal()), sorted(rejected)


def weight_in(directory: Path, step: int) -> float:
    [index] = directory.glob(f"model.ckpt-{step}/*.index")
    return float(tf.train.load_checkpoint(str(index.with_suffix(""))).get_tensor("weight"))


async def test_the_next_session_goes_on_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NanLossDuringTrainingError, match="The last good checkpoint is") as caught:
        await train(tmp_path, [5], NanTensorHook("loss:0"))
    assert caught.value.checkpoint == str(tmp_path / "model.ckpt-4")
    assert steps_in(tmp_path) == ([1, 2, 3, 4], [5])
    begun: list[int] = []
    await train(tmp_path, [], NanTensorHook("loss:0"), look=begun.append)
    assert begun == [4]
    assert weight_in(tmp_path, 8) == 9.0


async def test_training_goes_back_and_ends_well_when_the_noise_is_another(tmp_path: Path) -> None:
    await train(tmp_path, [3, 6], NanTensorHook("loss:0", max_rollbacks=2))
    assert steps_in(tmp_path)[1] == [3, 6]
    assert weight_in(tmp_path, 8) == 9.0


async def test_training_gives_up_after_so_many_rollbacks(tmp_path: Path) -> None:
    """A run that is made again has the same feeds: the noise of step 6 comes in step 5 again."""
    with pytest.raises(NanLossDuringTrainingError, match="The last good checkpoint is") as caught:
        await train(tmp_path, [5, 6, 7], NanTensorHook("loss:0", max_rollbacks=2))
    assert caught.value.checkpoint == str(tmp_path / "model.ckpt-6")
    assert steps_in(tmp_path) == ([3, 4, 5, 6], [5, 5, 7])


async def test_early_stopping_brings_the_best_variables_back(tmp_path: Path) -> None:
    """The loss is 1, 2, 3 ...: each looks worse, and the checkpoint of step 1 is the best."""
    seen: list[float] = []
    hook = EarlyStoppingHook("loss:0", 2, restore_best=True)

    model = noisy_model()
    saver = CheckpointSaverHook(
        str(tmp_path), save_steps=1, background=True, metric="loss:0",
        retention=Retention(max_to_keep=1, keep_best=1),
    )  # fmt: skip
    with model.graph.as_default():
        tf.identity(model.weight, name="weight_now")
    looks = Moments(end=lambda session: seen.append(float(session.run("weight_now:0"))))
    async with monitored(model.graph, [saver, hook, looks]) as session:
        while not session.should_stop():
            await session.run(model.train_op, {model.noise: 1.0})
    assert session.global_step.value == 3
    assert seen == [2.0]  # of the checkpoint of step 1: after its update


async def test_of_tensorflows_own_files_none_is_moved_or_called_good_that_is_not(
    tmp_path: Path,
) -> None:
    await train(tmp_path, [], NanTensorHook("loss:0"), background=False, last_step=4)
    with pytest.raises(NanLossDuringTrainingError) as caught:
        await train(tmp_path, [5], NanTensorHook("loss:0"), background=False)
    assert tf.train.latest_checkpoint(str(tmp_path)) is not None
    assert steps_in(tmp_path)[1] == []
    assert caught.value.checkpoint is None
    assert "last good checkpoint" not in str(caught.value)
