"""Checkpoints of graphs written beside training: who goes on from them, and from which."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import DamagedCheckpointError, Retention, SessionRunArgs, SessionRunHook
from asynchooks.checkpoints import CheckpointDirectory

from .models import ChiefSessionCreator, Model, counting_model, monitored
from .test_background_checkpoints import background_hook, content_of, prefixes, train

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def learning_model() -> tuple[Model, Any, Any]:
    """A model whose weights follow what is fed, with momentum; (model, feed, weights)."""
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        data = v1.placeholder(tf.float32, (3,))
        weights = v1.get_variable("w", initializer=tf.zeros(3))
        loss = tf.reduce_sum((weights - data) ** 2)
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        return Model(graph, step, optimizer.minimize(loss, step)), data, weights


class Draws(SessionRunHook):
    """Feeds what its generator draws, which is kept in checkpoints."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed
        self.random = np.random.default_rng(5)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.random.bit_generator.state}

    def load_state_dict(self, state: Any) -> None:
        self.random.bit_generator.state = state["state"]

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs(None, {self.feed: self.random.normal(size=3)})


async def learn(
    path: Path, num_runs: int, *, background: bool, is_first: bool = True
) -> tuple[list[float], list[float]]:
    """The weights at opening, and after some runs."""
    model, feed, weights = learning_model()
    hook = background_hook(path, background=background, save_steps=2)
    hooks = [Draws(feed), hook] if is_first else [hook, Draws(feed)]
    creator = ChiefSessionCreator(checkpoint_dir=str(path))
    async with monitored(model.graph, hooks, creator) as session:
        begun: list[float] = session.raw_session().run(weights).tolist()
        for _ in range(num_runs):
            await session.run(model.train_op)
        ended: list[float] = session.raw_session().run(weights).tolist()
    return begun, ended


@pytest.mark.parametrize(("background", "is_first"), [(True, False), (False, True), (False, False)])
async def test_what_was_stopped_goes_on_as_if_it_had_not_been(
    background: bool, is_first: bool, tmp_path: Path
) -> None:
    _, expected = await learn(tmp_path / "a", 5, background=background)
    for num_runs in (3, 2):
        _, found = await learn(tmp_path / "b", num_runs, background=background, is_first=is_first)
    assert found == expected


@pytest.mark.parametrize("modes", [[False, True, False], [True, False, True]])
async def test_a_switch_between_the_modes_goes_on_from_the_newest_model(
    modes: list[bool], tmp_path: Path
) -> None:
    last = [0.0] * 3
    for background in modes:
        begun, ended = await learn(tmp_path, 3, background=background)
        assert begun == last
        last = ended


@pytest.mark.parametrize("modes", [[False, True], [True, False]])
async def test_a_switch_between_the_modes_keeps_the_hooks_states(
    modes: list[bool], tmp_path: Path
) -> None:
    _, expected = await learn(tmp_path / "a", 6, background=True)
    for background in modes:
        _, found = await learn(tmp_path / "b", 3, background=background)
    assert found == expected


async def test_tensorflows_own_readers_find_the_newest(tmp_path: Path) -> None:
    model = counting_model()
    await train(model, [background_hook(tmp_path)], 3)
    newest = tf.train.latest_checkpoint(str(tmp_path))
    assert newest == prefixes(tmp_path)[3]
    assert tf.train.load_checkpoint(str(tmp_path)).get_tensor("global_step") == 3
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert list(state.all_model_checkpoint_paths) == list(prefixes(tmp_path).values())
    model = counting_model()
    with model.graph.as_default():
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_checkpoint_steps=1
        ) as session:
            assert session.run(model.train_op) == 4
    await train(counting_model(), [background_hook(tmp_path)], 1, checkpoint_dir=str(tmp_path))
    assert max(prefixes(tmp_path)) == 5


@pytest.mark.parametrize("save_graph_def", [True, False])
async def test_the_graph_is_written_beside_as_asked(save_graph_def: bool, tmp_path: Path) -> None:
    model = counting_model()
    await train(model, [background_hook(tmp_path, save_graph_def=save_graph_def)], 1)
    assert (tmp_path / "graph.pbtxt").exists() == save_graph_def
    prefix = prefixes(tmp_path)[1]
    assert tf.io.gfile.exists(f"{prefix}.meta") == save_graph_def
    if save_graph_def:
        with tf.Graph().as_default(), v1.Session() as session:
            v1.train.import_meta_graph(f"{prefix}.meta").restore(session, prefix)
            assert session.run(v1.train.get_global_step()) == 1


@pytest.mark.parametrize("suffix", [".index", "/manifest.json"])
async def test_the_newest_is_passed_over_with_a_warning_if_it_is_damaged(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(counting_model(), [background_hook(tmp_path)], 2)
    prefix = prefixes(tmp_path)[2]
    file = Path(prefix).parent / "manifest.json" if "/" in suffix else Path(prefix + suffix)
    os.truncate(file, file.stat().st_size - 1)
    model = counting_model()
    with caplog.at_level(logging.WARNING, "asynchooks"):
        creator = ChiefSessionCreator(checkpoint_dir=str(tmp_path))
        async with monitored(model.graph, [background_hook(tmp_path)], creator) as session:
            assert session.global_step.value == 1
    assert "model.ckpt-2" in caplog.text
    assert "passed over" in caplog.text


async def test_where_all_are_damaged_it_does_not_open(tmp_path: Path) -> None:
    await train(counting_model(), [background_hook(tmp_path)], 1)
    for prefix in prefixes(tmp_path).values():
        os.truncate(f"{prefix}.index", 1)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        await train(counting_model(), [background_hook(tmp_path)], 0, checkpoint_dir=str(tmp_path))
    assert len(prefixes(tmp_path)) == 2


async def test_the_best_is_still_known_to_be_the_best_after_a_restart(tmp_path: Path) -> None:
    for num_runs in (2, 0):
        model = counting_model()
        with model.graph.as_default():
            loss = -tf.cast(model.step, tf.float32)
        hook = background_hook(
            tmp_path, metric=loss, retention=Retention(max_to_keep=1, keep_best=1)
        )
        await train(model, [hook], num_runs, checkpoint_dir=str(tmp_path))
    metrics = {each.step: each.metric for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert metrics[2] is not None


async def test_a_model_that_was_not_restored_leaves_the_hooks_as_they_are(tmp_path: Path) -> None:
    states = []
    for seed in (5, 6):
        model, feed, _ = learning_model()
        draws = Draws(feed)
        draws.random = np.random.default_rng(seed)
        hooks = [draws, background_hook(tmp_path)]
        async with monitored(model.graph, hooks):  # without checkpoint_dir
            states.append(draws.random.bit_generator.state)
    assert states[1] == np.random.default_rng(6).bit_generator.state


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def gigabytes(path: Path) -> None:
    os.truncate(path, 3 << 30)


@pytest.mark.parametrize("harm", [fifo, link_to_a_device, gigabytes])
async def test_what_stands_for_the_hooks_beside_tensorflows_files_is_not_waited_for(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    await learn(tmp_path, 3, background=False)
    harm(tmp_path / "model.ckpt-3.hooks.json")
    with pytest.raises(DamagedCheckpointError, match="hooks.json' holds no state of hooks: "):
        await learn(tmp_path, 3, background=False)


async def test_hooks_of_the_plain_mode_stand_beside_tensorflows_files(tmp_path: Path) -> None:
    await learn(tmp_path, 3, background=False, is_first=True)
    assert (tmp_path / "model.ckpt-3.hooks.json").exists()
    assert content_of(str(tmp_path / "model.ckpt-3"))["global_step"] == 3
