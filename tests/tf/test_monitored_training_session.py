"""MonitoredTrainingSession: which hooks it makes, and that it leaves what TensorFlow's leaves."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from asynchooks import SessionRunHook, StopAtStepHook
from asynchooks.testing import RecordingHook
from asynchooks.tf import MonitoredTrainingSession, WorkerSessionCreator

from .hooks_beside import Model, model_of_one_seed
from .leftovers import Left, differences, read_back
from .models import counting_model

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class First(SessionRunHook):
    pass


class Last(SessionRunHook):
    pass


class TheirFirst(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    pass


class TheirLast(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    pass


def made(hooks: list[Any]) -> list[tuple[Any, ...]]:
    """The names of the hooks, and after how many seconds or steps each is due."""
    found = []
    for hook in hooks:
        timer = getattr(hook, "_timer", None)
        times = () if timer is None else (timer._every_secs, timer._every_steps)
        found.append((type(hook).__name__.removeprefix("Their"), *times))
    return found


def ours_makes(**options: Any) -> list[tuple[Any, ...]]:
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(
            hooks=[Last()], chief_only_hooks=[First(), First()], **options
        )
    return made(session._hooks.hooks)


def theirs_makes(**options: Any) -> list[tuple[Any, ...]]:
    with counting_model().graph.as_default():
        session = v1.train.MonitoredTrainingSession(
            hooks=[TheirLast()], chief_only_hooks=[TheirFirst(), TheirFirst()], **options
        )
        session.close()
    return made(session._hooks)


COUNTER, SUMMARIES = ("StepCounterHook", None, 100), ("SummarySaverHook", None, 100)
SAVER = ("CheckpointSaverHook", 600, None)
TABLE: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "defaults": ({}, [COUNTER, SUMMARIES, SAVER]),
    "no directory": ({"checkpoint_dir": None}, []),
    "only summary_dir": ({"checkpoint_dir": None, "summary_dir": "s"}, [COUNTER, SUMMARIES]),
    "no log": ({"log_step_count_steps": None}, [SUMMARIES, SAVER]),
    "log 0": ({"log_step_count_steps": 0}, [SUMMARIES, SAVER]),
    "log below 0": ({"log_step_count_steps": -1}, [SUMMARIES, SAVER]),
    "log 7": ({"log_step_count_steps": 7}, [("StepCounterHook", None, 7), SUMMARIES, SAVER]),
    "summaries none": ({"save_summaries_steps": None}, [COUNTER, SAVER]),
    "summaries 0": ({"save_summaries_steps": 0}, [COUNTER, SAVER]),
    "summaries both none": (
        {"save_summaries_steps": None, "save_summaries_secs": None},
        [COUNTER, SAVER],
    ),
    "summaries by secs": (
        {"save_summaries_secs": 5},
        [COUNTER, ("SummarySaverHook", 5, None), SAVER],
    ),
    "summaries by steps": (
        {"save_summaries_steps": 5},
        [COUNTER, ("SummarySaverHook", None, 5), SAVER],
    ),
    "summaries secs 0": ({"save_summaries_secs": 0}, [COUNTER, SAVER]),
    "checkpoints none": ({"save_checkpoint_secs": None}, [COUNTER, SUMMARIES]),
    "checkpoints 0": ({"save_checkpoint_secs": 0}, [COUNTER, SUMMARIES]),
    "checkpoints steps none": ({"save_checkpoint_steps": None}, [COUNTER, SUMMARIES]),
    "checkpoints by steps": (
        {"save_checkpoint_steps": 9},
        [COUNTER, SUMMARIES, ("CheckpointSaverHook", None, 9)],
    ),
    "checkpoints by steps, secs none": (
        {"save_checkpoint_steps": 9, "save_checkpoint_secs": None},
        [COUNTER, SUMMARIES, ("CheckpointSaverHook", None, 9)],
    ),
    "nothing": (
        {"save_checkpoint_secs": 0, "save_summaries_steps": 0, "log_step_count_steps": 0},
        [],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_hooks_of_a_chief_and_their_order_are_tensorflows(case: str, tmp_path: Path) -> None:
    options, between = TABLE[case]
    options = {"checkpoint_dir": str(tmp_path), **options}
    if "summary_dir" in options:
        options["summary_dir"] = str(tmp_path / options["summary_dir"])
    assert ours_makes(**options) == [("First",), ("First",), *between, ("Last",)]
    assert ours_makes(**options) == theirs_makes(**options)


@pytest.mark.parametrize("name", ["save_summaries", "save_checkpoint"])
def test_steps_and_seconds_together_are_an_error(name: str, tmp_path: Path) -> None:
    both = {"checkpoint_dir": str(tmp_path), f"{name}_steps": 5, f"{name}_secs": 6}
    with pytest.raises(ValueError, match=f"{name}_steps=5 and {name}_secs=6; give one"):
        ours_makes(**both)
    with pytest.raises(ValueError, match="Can not provide both every_secs and every_steps"):
        theirs_makes(**both)


def test_zero_turns_one_of_both_off(tmp_path: Path) -> None:
    options = {"save_summaries_steps": 0, "save_summaries_secs": 5, "save_checkpoint_secs": 0}
    hooks = ours_makes(checkpoint_dir=str(tmp_path), save_checkpoint_steps=3, **options)
    assert hooks[3:5] == [("SummarySaverHook", 5, None), ("CheckpointSaverHook", None, 3)]


async def test_a_worker_gets_hooks_alone_and_ignores_the_directories(tmp_path: Path) -> None:
    hook, directory = RecordingHook("a"), str(tmp_path / "new")
    graph = tf.Graph()
    with graph.as_default():  # without variables it is ready at once
        seven = tf.constant(7)
        session = MonitoredTrainingSession(
            is_chief=False, checkpoint_dir=directory, hooks=[hook], chief_only_hooks=[First()]
        )
    assert session._hooks.hooks == [hook]
    async with session:
        assert await session.run(seven) == 7
    assert os.listdir(tmp_path) == []


async def test_a_worker_without_a_chief_gives_up_after_max_wait_secs(tmp_path: Path) -> None:
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(is_chief=False, max_wait_secs=0)
    with pytest.raises(tf.errors.DeadlineExceededError, match="max_wait_secs=0"):
        await session.__aenter__()


def test_a_worker_waits_two_hours_by_default_and_its_creator_alone_half_an_hour() -> None:
    with counting_model().graph.as_default():
        creator = MonitoredTrainingSession(is_chief=False)._handle.creator
        assert isinstance(creator, WorkerSessionCreator)
        assert creator.max_wait_secs == 7200
        assert WorkerSessionCreator().max_wait_secs == 1800


FAST = {"save_checkpoint_steps": 5, "save_summaries_steps": 4, "log_step_count_steps": 3}


def run_theirs(directory: Path, last_step: int, steps: list[int], **options: Any) -> None:
    model = model_of_one_seed()
    with model.graph.as_default():
        hooks = [v1.train.StopAtStepHook(last_step=last_step)]
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(directory), hooks=hooks, **{**FAST, **options}
        ) as session:
            while not session.should_stop():
                steps.append(int(session.run([model.read, model.train_op])[0]))


async def run_ours(directory: Path, last_step: int, steps: list[int], **options: Any) -> None:
    model: Model = model_of_one_seed()
    with model.graph.as_default():
        session = MonitoredTrainingSession(
            checkpoint_dir=str(directory),
            hooks=[StopAtStepHook(last_step=last_step)],
            **{**FAST, **options},
        )
    async with session:
        while not session.should_stop():
            steps.append(int((await session.run([model.read, model.train_op]))[0]))


async def both_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last_steps: list[int], **options: Any
) -> Left:
    """What both leave, which must be the same."""
    caplog.set_level(logging.INFO, "tensorflow")
    caplog.set_level(logging.INFO, "asynchooks")
    left: list[Left] = []
    for run in (run_theirs, run_ours):
        steps: list[int] = []
        directory = tmp_path / run.__name__
        for last_step in last_steps:
            done: Any = run(directory, last_step, steps, **options)
            if done is not None:
                await done
        left.append(read_back(directory, steps, [], caplog))
    assert "\n".join(differences(left[1], left[0])) == ""
    return left[1]


async def test_one_script_leaves_the_same_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = await both_leave(tmp_path, caplog, [12])
    assert left.outcome == list(range(12))
    assert {"checkpoint", "graph.pbtxt", "model.ckpt-12.meta"} <= set(left.files)
    assert len(left.events) == 1


async def test_a_second_run_resumes_at_the_same_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = await both_leave(tmp_path, caplog, [7, 13])
    assert left.outcome == list(range(13))


async def test_without_graph_def_no_graph_is_left_beside_the_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = await both_leave(tmp_path, caplog, [6], save_graph_def=False)
    assert "model.ckpt-6.index" in left.files
    assert not [name for name in left.files if name.endswith((".pbtxt", ".meta"))]


async def test_summaries_go_to_summary_dir(tmp_path: Path) -> None:
    await run_ours(tmp_path, 6, [], summary_dir=str(tmp_path / "summaries"))
    v1.summary.FileWriterCache.clear()
    whats = []
    for directory in (tmp_path, tmp_path / "summaries"):
        (name,) = [name for name in os.listdir(directory) if "tfevents" in name]
        events = list(v1.train.summary_iterator(str(directory / name)))
        whats.append({event.WhichOneof("what") for event in events})
    assert ["summary" in each for each in whats] == [False, True]


async def test_intervals_of_hooks_that_are_not_made_are_not_looked_at(tmp_path: Path) -> None:
    both: dict[str, Any] = {
        "save_checkpoint_steps": 1,
        "save_checkpoint_secs": 1,
        "save_summaries_steps": 1,
    }
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        MonitoredTrainingSession(**both, save_summaries_secs=1)
        MonitoredTrainingSession(is_chief=False, checkpoint_dir=str(tmp_path), **both)
        with pytest.raises(ValueError, match="save_checkpoint_steps=1 and save_checkpoint_secs=1"):
            MonitoredTrainingSession(checkpoint_dir=str(tmp_path), **both)
