"""Resuming on graphs: in any order of workers, and from the last checkpoint before NaN."""

import math
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    Retention,
    SessionCreator,
)

from ..checkpoints.stores import steps_in
from ..hooks.lives import NUM_ITEMS, Life, LifeModel
from ..support.moments import at
from .models import ChiefSessionCreator, chief, monitored, results, tf, v1

pytestmark = pytest.mark.exhaustive


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
        creator: SessionCreator = ChiefSessionCreator(checkpoint_dir=str(path))
        return creator

    def saving(self, path: Path) -> CheckpointSaverHook:
        return CheckpointSaverHook(path, save_steps=4, background=self._background)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("num_workers", "saver_place", "num_turns", "feeds"),
    [(2, 1, 0, False), (8, 7, 0, True), (2, 0, 2, True), (2, 0, 2, False)],
)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int,
    saver_place: int,
    num_turns: int,
    feeds: bool,
    background: bool,
    tmp_path: Path,
) -> None:
    """With turns, workers open after the steps of the saver, with an item in hand if it is fed."""
    holds_item = feeds and num_turns > 0
    options: dict[str, Any] = {"feeds": feeds, "num_turns": num_turns, "holds_item": holds_item}
    for crashes_at in (5, 4, 0, 0):
        model = GraphModel(background=background)
        with model.graph.as_default():
            options["crashes_at"] = crashes_at
            await Life(model, tmp_path, num_workers, saver_place, **options).train()
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
    assert reader.get_tensor("counts").tolist() == [1] * NUM_ITEMS


class Noisy:
    """A graph whose loss is that of the weight before the update, which adds the noise."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            step = v1.train.get_or_create_global_step()
            self.noise = v1.placeholder_with_default(1.0, ())
            self.weight = v1.get_variable("weight", shape=(), initializer=v1.ones_initializer)
            loss = tf.identity(self.weight.read_value(), name="loss")
            with tf.control_dependencies([loss]):
                update = self.weight.assign_add(self.noise, read_value=False)
            with tf.control_dependencies([update]):
                self.train_op = v1.assign_add(step, 1)


async def train(
    directory: Path, breaks: list[int], background: bool = True, last_step: int = 8, **options: Any
) -> int:
    """Train with the noise 1, but NaN in these steps, once in each; returns where it began."""
    model = Noisy()
    saver = CheckpointSaverHook(directory, save_steps=1, background=background)
    hooks = [NanTensorHook("loss:0", **options), saver][:: 1 if background else -1]
    creator = chief(model.graph, checkpoint_dir=str(directory))
    async with monitored(model.graph, hooks, creator) as session:
        begun = session.global_step.value
        while not session.should_stop() and (step := session.global_step.value + 1) <= last_step:
            noise = 1.0
            if step in breaks:
                breaks.remove(step)
                noise = math.nan
            await session.run(model.train_op, {model.noise: noise})
    return begun


def rejected_in(directory: Path) -> list[str]:
    """The checkpoints that were moved aside."""
    return sorted(path.name.split(".")[1] for path in directory.glob("*.rejected*"))


async def test_training_goes_on_from_the_last_good_checkpoint_in_the_next_session_or_at_once(
    tmp_path: Path,
) -> None:
    """A run that is made again has the same feeds: the noise of step 6 comes in step 5 again."""
    first, second = tmp_path / "a", tmp_path / "b"
    with pytest.raises(NanLossDuringTrainingError, match="The last good checkpoint is") as caught:
        await train(first, [5])
    assert caught.value.checkpoint == str(first / "model.ckpt-4")
    assert (steps_in(first), rejected_in(first)) == ([1, 2, 3, 4], ["ckpt-5"])
    assert await train(first, []) == 4
    await train(second, [3, 6], max_rollbacks=2)
    assert rejected_in(second) == ["ckpt-3", "ckpt-6"]
    for each in (first, second):
        path = tf.train.latest_checkpoint(str(each))
        assert tf.train.load_checkpoint(path).get_tensor("weight") == 9.0


async def test_early_stopping_brings_the_best_variables_back(tmp_path: Path) -> None:
    """The loss is 1, 2, 3 ...: each looks worse, and the checkpoint of step 1 is the best."""
    model, seen = Noisy(), []  # type: tuple[Noisy, list[float]]
    with model.graph.as_default():
        tf.identity(model.weight, name="weight_now")
    retention = Retention(max_to_keep=1, keep_best=1)
    hooks = [
        CheckpointSaverHook(
            tmp_path, save_steps=1, background=True, metric="loss:0", retention=retention
        ),
        EarlyStoppingHook("loss:0", 2, restore_best=True),
        at(end=lambda session: seen.append(float(session.run("weight_now:0")))),
    ]
    async with monitored(model.graph, hooks) as session:
        await results(session, model.train_op)
    assert session.global_step.value == 3, "of the training"
    assert seen == [2.0]  # of the checkpoint of step 1: after its update


async def test_of_tensorflows_own_files_none_is_moved_or_called_good_that_is_not(
    tmp_path: Path,
) -> None:
    await train(tmp_path, [], background=False, last_step=4)
    with pytest.raises(NanLossDuringTrainingError) as caught:
        await train(tmp_path, [5], background=False)
    assert tf.train.latest_checkpoint(str(tmp_path)) is not None
    assert rejected_in(tmp_path) == []
    assert caught.value.checkpoint is None
    assert "last good checkpoint" not in str(caught.value)
