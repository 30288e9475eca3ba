"""ProfilerHook where the comparison with TensorFlow's does not reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asynchooks.tf import ProfilerHook

from .models import (
    ChiefSessionCreator,
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    monitored,
    raising,
)

tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_timelines_go_to_any_file_system_of_tensorflow(tmp_path: Path) -> None:
    directory = f"ram:/{tmp_path}"  # a name of its own
    model = counting_model()
    hook = ProfilerHook(save_steps=1, output_dir=directory)
    async with monitored(model.graph, [hook]) as session:
        for _ in range(2):
            await session.run(model.train_op)
    with tf.io.gfile.GFile(f"{directory}/timeline-2.json") as file:
        assert json.loads(file.read())["traceEvents"]


async def test_a_step_may_be_traced_again_after_a_recovery(tmp_path: Path) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    hooks = [
        ProfilerHook(save_steps=1, output_dir=str(tmp_path)),
        Moments(before_run=raising(None, None, aborted())),
    ]
    creator = ChiefSessionCreator(checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, hooks, creator) as session:
        steps = [await session.run(model.train_op) for _ in range(4)]
    assert steps == [11, 12, 11, 12]
    assert json.loads((tmp_path / "timeline-12.json").read_text())["traceEvents"]


async def test_runs_that_do_not_move_the_step_are_no_error(tmp_path: Path) -> None:
    """Unlike in TensorFlow's, whose writer refuses the second trace of a step."""
    model = counting_model()
    hook = ProfilerHook(save_steps=1, output_dir=str(tmp_path))
    async with monitored(model.graph, [hook]) as session:
        assert [await session.run(model.step) for _ in range(4)] == [0, 0, 0, 0]
        await session.run(model.train_op)
        assert [await session.run(model.step) for _ in range(2)] == [1, 1]
    assert (tmp_path / "timeline-1.json").exists()
