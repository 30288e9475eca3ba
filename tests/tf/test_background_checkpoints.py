"""Checkpoints of graphs written in the background: their files, readers and resuming."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverListener,
    DamagedCheckpointError,
    Retention,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..checkpoints.stores import REPOSITORY
from .models import (
    NUM_VARIABLES,
    ChiefSessionCreator,
    Model,
    counting_model,
    model_of_equal_variables,
    monitored,
    saver_of,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def background_hook(path: Path, **options: Any) -> Any:
    options = {"save_steps": 1, "background": True, **options}
    return asynchooks.CheckpointSaverHook(path, **options)


def prefixes(path: Path) -> dict[int, str]:
    return {each.step: each.prefix for each in CheckpointDirectory(path).checkpoints()}


async def train(model: Model, hooks: list[Any], num_runs: int, **options: Any) -> None:
    creator = ChiefSessionCreator(**options)
    async with monitored(model.graph, hooks, creator) as session:
        for _ in range(num_runs):
            await session.run(model.train_op)


@pytest.mark.parametrize("when_busy", [WhenBusy.WAIT, WhenBusy.SUPERSEDE])
async def test_each_holds_one_step_while_workers_run_in_threads(
    when_busy: Any, tmp_path: Path
) -> None:
    model = model_of_equal_variables()
    hook = background_hook(
        tmp_path, saver=saver_of(model), when_busy=when_busy, retention=Retention(max_to_keep=None)
    )
    shared = SharedSessionCreator(ChiefSessionCreator(), num_workers=4)

    is_over = anyio.Event()

    async def work_beside() -> None:
        async with monitored(model.graph, [], shared, step_runner="thread") as session:
            while not is_over.is_set():
                await session.run(model.train_op)

    async with anyio.create_task_group() as group:
        async with monitored(model.graph, [hook], shared, step_runner="thread") as session:
            for _ in range(3):
                group.start_soon(work_beside)
            for _ in range(8):
                await session.run(model.train_op)
                await (
                    hook.checkpointer.writer.wait_idle()
                ) if when_busy is WhenBusy.SUPERSEDE else None
        is_over.set()
    found = prefixes(tmp_path)
    assert len(found) >= 9
    for step, prefix in found.items():
        checkpoint = tf.train.load_checkpoint(prefix)
        values = [checkpoint.get_tensor(f"v{index}").item() for index in range(NUM_VARIABLES)]
        assert values == [step] * NUM_VARIABLES
        assert checkpoint.get_tensor("global_step") == step


def model_of_all_kinds() -> Model:
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        partitioner = v1.fixed_size_partitioner(3)
        with v1.variable_scope("parts", partitioner=partitioner):
            v1.get_variable("matrix", initializer=tf.reshape(tf.range(24.0), (6, 4)))
        v1.get_variable("half", initializer=tf.constant([0.5, -1.5], tf.bfloat16))
        v1.get_variable("flag", initializer=tf.constant(True))
        v1.get_variable("texts", initializer=tf.constant([b"a", b"bc\0", b""]))
        v1.get_variable("complex", initializer=tf.constant([1 + 2j], tf.complex64))
        v1.get_variable("empty", initializer=tf.zeros((0, 3)))
        v1.get_variable("big", initializer=tf.constant(2**60, tf.int64))
        with tf.device("/cpu:0"):
            v1.get_variable("placed", initializer=tf.constant([3, 4]))
        return Model(graph, step, v1.assign_add(step, 1))


def content_of(prefix: str) -> dict[str, Any]:
    checkpoint = tf.train.load_checkpoint(prefix)
    return {name: checkpoint.get_tensor(name) for name in checkpoint.get_variable_to_shape_map()}


SAVERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: v1.train.Saver(),
    "sharded": lambda: v1.train.Saver(sharded=True),
    "subset": lambda: v1.train.Saver(
        {"renamed": v1.global_variables()[-1], "global_step": v1.train.get_global_step()}
    ),
}


@pytest.mark.parametrize("kind", list(SAVERS))
async def test_the_files_hold_what_tensorflows_saver_would_have_saved(
    kind: str, tmp_path: Path
) -> None:
    model = model_of_all_kinds()
    with model.graph.as_default():
        saver = SAVERS[kind]()
    hook = background_hook(tmp_path / "ours", saver=saver, save_steps=9)

    class SavesToo(CheckpointSaverListener):
        def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
            saver.save(session, str(tmp_path / "theirs"), global_step=global_step_value)

    hook._listeners._listeners.append(SavesToo())
    await train(model, [hook], 2)
    for step in (0, 2):
        theirs, ours = (
            content_of(f"{tmp_path}/theirs-{step}"),
            content_of(prefixes(tmp_path / "ours")[step]),
        )
        assert sorted(theirs) == sorted(ours)
        for name, value in theirs.items():
            np.testing.assert_array_equal(value, ours[name], strict=isinstance(value, np.ndarray))
    restored = model_of_all_kinds()
    with restored.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        SAVERS[kind]().restore(session, prefixes(tmp_path / "ours")[2])
        assert session.run(restored.step) == 2


async def test_a_scalar_text_keeps_the_zeros_at_its_end(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        v1.get_variable("text", initializer=tf.constant(b"ab\0\0"))
    await train(model, [background_hook(tmp_path, saver=saver_of(model))], 0)
    assert content_of(prefixes(tmp_path)[0])["text"] == b"ab\0\0"


REF_VARIABLES = """
import sys, anyio, tensorflow as tf
from asynchooks import CheckpointSaverHook, ChiefSessionCreator, MonitoredSession
from asynchooks.checkpoints import CheckpointDirectory
v1 = tf.compat.v1
v1.disable_resource_variables()

async def main():
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        weights = v1.get_variable("w", initializer=tf.zeros(1000), use_resource=False)
        with tf.control_dependencies([v1.assign_add(weights, tf.ones(1000), use_locking=True)]):
            train_op = v1.assign_add(step, 1, use_locking=True)
        hook = CheckpointSaverHook(
            sys.argv[1], save_steps=1, saver=v1.train.Saver(), background=True
        )
        print(weights.op.type)
        async with MonitoredSession([hook], ChiefSessionCreator()) as session:
            for _ in range(4):
                await session.run(train_op)
    for each in CheckpointDirectory(sys.argv[1]).checkpoints():
        found = tf.train.load_checkpoint(each.prefix)
        print(each.step, found.get_tensor("global_step"), set(found.get_tensor("w").tolist()))

anyio.run(main)
"""


@pytest.mark.faults
def test_ref_variables_are_copied_as_they_were(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REF_VARIABLES), str(tmp_path)],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = [f"{step} {step} {{{float(step)}}}" for step in range(5)]
    assert done.stdout.splitlines() == ["VariableV2", *expected]


async def test_listeners_find_the_graph_and_may_read_the_model(tmp_path: Path) -> None:
    model, log = counting_model(), []  # type: tuple[Model, list[Any]]

    class Reads(CheckpointSaverListener):
        async def before_save(self, session: Any, global_step_value: int) -> None:
            self.note("before", session, global_step_value)

        async def after_save(self, session: Any, global_step_value: int) -> None:
            await anyio.lowlevel.checkpoint()
            self.note("after", session, global_step_value)

        def note(self, moment: str, session: Any, step: int) -> None:
            is_default = v1.get_default_graph() is model.graph
            log.append((moment, step, is_default, session.run(model.step).item() >= step))

    hook = background_hook(tmp_path, saver=saver_of(model), listeners=[Reads()])
    await train(model, [hook], 2)
    moments = [(moment, step) for step in (0, 1, 2) for moment in ("before", "after")]
    assert sorted(log) == sorted((*each, True, True) for each in moments)


async def test_steps_go_on_while_a_copy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, arrived, go_on = counting_model(), threading.Event(), threading.Event()

    class Holds(CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
            arrived.set()
            assert go_on.wait(20)

    hook = background_hook(tmp_path, saver=saver_of(model), save_steps=9, listeners=[Holds()])
    async with monitored(model.graph, [hook]) as session:
        assert await anyio.to_thread.run_sync(arrived.wait, 20)
        for _ in range(3):
            await session.run(model.train_op)
        assert sorted(prefixes(tmp_path)) == [0]
        go_on.set()
    assert content_of(prefixes(tmp_path)[0])["global_step"] == 0
    assert sorted(prefixes(tmp_path)) == [0, 3]


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


@pytest.mark.exhaustive
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
