"""MonitoredTrainingSession and SingularMonitoredSession: their hooks, and their differences."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import SessionRunHook, StopAtStepHook
from asynchooks.testing import RecordingHook
from asynchooks.tf import MonitoredTrainingSession, SingularMonitoredSession

from .hooks_beside import TheirSession, model_of_one_seed
from .leftovers import Left, differences, read_back
from .models import (
    Created,
    Model,
    checkpoint_of,
    counting_model,
    results,
    tf,
    v1,
)


def made_by(library: Any, **options: Any) -> list[tuple[Any, ...]]:
    """The hooks of a session by their names, and after how many seconds or steps each is due."""
    base = v1.train.SessionRunHook if library is v1.train else SessionRunHook
    first, last = (type(name, (base,), {})() for name in ("First", "Last"))
    with counting_model().graph.as_default():
        session = library.MonitoredTrainingSession(
            hooks=[last], chief_only_hooks=[first], **options
        )
        if library is v1.train:
            session.close()
    found = []
    hooks = session._hooks  # neither library shows them
    for hook in hooks if library is v1.train else hooks.hooks:
        timer = getattr(hook, "_timer", None)
        times = () if timer is None else (timer._every_secs, timer._every_steps)
        found.append((type(hook).__name__, *times))
    return found


OFF = {"save_checkpoint_secs": 0, "save_summaries_steps": 0, "log_step_count_steps": 0}


@pytest.mark.parametrize(
    ("options", "num_hooks"),
    [
        *[({}, 5), ({"checkpoint_dir": None}, 2), ({"log_step_count_steps": 7}, 5), (OFF, 2)],
        *[({"log_step_count_steps": None}, 4), ({"log_step_count_steps": -1}, 4)],
        *[({"save_summaries_secs": 5}, 5), ({"save_summaries_steps": None}, 4)],
        *[({"save_checkpoint_secs": 0}, 4), ({"save_checkpoint_steps": None}, 4)],
        ({"save_checkpoint_steps": 9, "save_checkpoint_secs": None}, 5),
    ],
    ids=str,
)
def test_the_hooks_of_a_chief_and_their_order_are_tensorflows(
    options: dict[str, Any], num_hooks: int, tmp_path: Path
) -> None:
    options = {"checkpoint_dir": str(tmp_path), **options}
    ours = made_by(asynchooks.tf, **options)
    assert ours == made_by(v1.train, **options)
    assert len(ours) == num_hooks
    if options["checkpoint_dir"] is None:
        options["summary_dir"] = str(tmp_path)
        assert made_by(asynchooks.tf, **options) == made_by(v1.train, **options) != ours


def test_of_steps_and_seconds_one_is_given_or_the_other_turned_off(tmp_path: Path) -> None:
    """TensorFlow looks at intervals of hooks that it does not make, too."""
    of_both = {"save_summaries_steps": 1, "save_summaries_secs": 2}
    with pytest.raises(ValueError, match="save_summaries_steps=1 and save_summaries_secs=2; give"):
        made_by(asynchooks.tf, checkpoint_dir=str(tmp_path), **of_both)
    assert made_by(asynchooks.tf, **of_both) == [("First",), ("Last",)]
    worker = made_by(asynchooks.tf, checkpoint_dir=str(tmp_path), is_chief=False, **of_both)
    assert worker == [("Last",)]
    zero = {"save_summaries_steps": 0, "save_summaries_secs": 5, "save_checkpoint_secs": 0}
    hooks = made_by(asynchooks.tf, checkpoint_dir=tmp_path, save_checkpoint_steps=3, **zero)
    assert hooks[2:4] == [("SummarySaverHook", 5, None), ("CheckpointSaverHook", None, 3)]


async def test_a_worker_ignores_the_directories_and_waits_for_its_chief(tmp_path: Path) -> None:
    options: dict[str, Any] = {"is_chief": False, "checkpoint_dir": str(tmp_path / "new")}
    with tf.Graph().as_default():  # without variables it is ready at once
        seven = tf.constant(7)
        session = MonitoredTrainingSession(**options)
    async with session:
        assert await session.run(seven) == 7
    assert os.listdir(tmp_path) == []
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(**options, max_wait_secs=0)
    with pytest.raises(tf.errors.DeadlineExceededError, match="max_wait_secs=0"):
        await session.open()


async def script(library: Any, directory: Path, last_step: int, **options: Any) -> list[int]:
    """Train to a step; returns the steps that the runs have read."""
    model = model_of_one_seed()
    often = {"save_checkpoint_steps": 5, "save_summaries_steps": 4, "log_step_count_steps": 3}
    options |= {"checkpoint_dir": str(directory), **often}
    with model.graph.as_default():
        if library is asynchooks.tf:
            session: Any = MonitoredTrainingSession(
                hooks=[StopAtStepHook(last_step=last_step)], **options
            )
        else:
            hooks = [v1.train.StopAtStepHook(last_step=last_step)]
            make = v1.train.MonitoredTrainingSession
            session = TheirSession(model.graph, hooks, make=make, **options)
    async with session:
        return [int(step) for step, _ in await results(session, [model.read, model.train_op])]


@pytest.mark.parametrize("saves_graph", [True, False])
async def test_both_scripts_leave_the_same_files(
    saves_graph: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorflow")
    caplog.set_level(logging.INFO, "asynchooks")
    left: list[Left] = []
    for library in (v1.train, asynchooks.tf):
        directory = tmp_path / f"{len(left)}"
        steps = await script(library, directory, 7, save_graph_def=saves_graph)
        steps += await script(library, directory, 13, save_graph_def=saves_graph)
        left.append(read_back(directory, steps, [], caplog))
    assert "\n".join(differences(left[1], left[0])) == ""
    assert left[1].outcome == list(range(13))
    files = left[1].files.keys()
    assert {"checkpoint", "model.ckpt-13.index"} <= files
    graphs = [name for name in files if name.endswith((".pbtxt", ".meta"))]
    assert (len(graphs) > 2) == saves_graph
    assert bool(graphs) == saves_graph


def singular(model: Model, hooks: Any = None, **options: Any) -> SingularMonitoredSession:
    with model.graph.as_default():
        return SingularMonitoredSession(hooks, **options)


async def test_should_stop_raises_what_the_coordinator_holds_and_so_does_the_end() -> None:
    model, created, recorder = counting_model(), Created(), RecordingHook("a")
    with pytest.raises(OSError, match="a thread"):
        async with singular(model, [recorder, created]) as session:
            assert not session.should_stop()
            created.coords[0].request_stop(OSError("a thread"))
            with pytest.raises(OSError, match="a thread"):
                session.should_stop()
            assert await session.run(model.train_op) == 1
    assert ("a", "end") in recorder.log
    assert session.should_stop(), "closed"


async def test_a_checkpoint_is_restored(tmp_path: Path) -> None:
    model = counting_model()
    older, _ = (checkpoint_of(model, tmp_path, step) for step in (5, 7))
    for options, step in (
        ({"checkpoint_filename_with_path": older}, 5),
        ({"checkpoint_dir": str(tmp_path)}, 7),
    ):
        async with singular(model, **options) as session:
            assert session.global_step.value == step
