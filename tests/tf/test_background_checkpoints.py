"""Checkpoints of graphs written beside training: one step, TensorFlow's files, and readers."""

from __future__ import annotations

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
    Retention,
    SharedSessionCreator,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..checkpoints.stores import REPOSITORY
from .models import ChiefSessionCreator, Model, counting_model, monitored
from .test_checkpoint_saver import NUM_VARIABLES, model_of_equal_variables, saver_of

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
