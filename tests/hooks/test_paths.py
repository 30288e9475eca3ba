"""Paths are those of where a hook or a sink was made, and names that are too long are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FunctionSessionCreator,
    MetricsHook,
    MonitoredSession,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TraceHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.metrics import CsvSink, JsonLinesSink, MlflowSink, TensorBoardSink
from asynchooks.planning import record

pytestmark = pytest.mark.anyio


def saving(path: str) -> SessionRunHook:
    saver = StateDictSaver(weights={"w": np.zeros(1)})
    return CheckpointSaverHook(path, save_steps=1, saver=saver)


MAKERS: dict[str, Callable[[str], SessionRunHook]] = {
    "CheckpointSaverHook": saving,
    "CsvSink": lambda path: MetricsHook(CsvSink(path), "loss", every_n_steps=1),
    "JsonLinesSink": lambda path: MetricsHook(JsonLinesSink(path), "loss", every_n_steps=1),
    "TensorBoardSink": lambda path: MetricsHook(TensorBoardSink(path), "loss", every_n_steps=1),
    "StepCounterHook": lambda path: StepCounterHook(every_n_steps=1, output_dir=path),
    "SummarySaverHook": lambda path: SummarySaverHook(
        save_steps=1, output_dir=path, summary_op="loss"
    ),
    "TraceHook": TraceHook,
}


async def train(hook: SessionRunHook, last_step: int, during: Callable[[], object]) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": 0.5})
    async with MonitoredSession([hook, StopAtStepHook(last_step=last_step)], creator) as session:
        during()
        while not session.should_stop():
            await session.run([])


@pytest.mark.parametrize("name", MAKERS)
async def test_a_relative_path_is_that_of_where_it_was_given(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("TensorBoardSink", "StepCounterHook", "SummarySaverHook"):
        pytest.importorskip("tensorboard")
    places = [tmp_path / each for each in ("made", "opened", "trained", "again")]
    for each in places:
        each.mkdir()
    monkeypatch.chdir(places[0])
    hook = MAKERS[name]("out")
    monkeypatch.chdir(places[1])
    await train(hook, 2, lambda: monkeypatch.chdir(places[2]))
    monkeypatch.chdir(places[3])
    await train(hook, 4, lambda: None)
    assert set(os.listdir(places[0])) - {"out-1"} == {"out"}  # a new training moves files aside
    assert [os.listdir(each) for each in places[1:]] == [[], [], []]
    if name == "CheckpointSaverHook":
        newest = CheckpointDirectory(places[0] / "out").newest_intact()
        assert newest is not None
        assert newest.step == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
async def test_a_relative_store_of_mlflow_is_that_of_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("alembic")  # for a database of MLflow's own
    (tmp_path / "made").mkdir()
    (tmp_path / "opened").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    hook = MetricsHook(MlflowSink("e", tracking_uri="sqlite:///m.db"), "loss", every_n_steps=1)
    assert "tracking_uri='sqlite:///m.db'" in repr(hook)
    monkeypatch.chdir(tmp_path / "opened")
    await train(hook, 1, lambda: None)
    assert os.listdir(tmp_path / "made") == ["m.db"]
    assert os.listdir(tmp_path / "opened") == []


def test_a_recording_is_written_where_its_path_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "entered").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    recording = record("run.pftrace")
    monkeypatch.chdir(tmp_path / "entered")
    with recording:
        pass
    assert os.listdir(tmp_path / "made") == ["run.pftrace"]
    assert os.listdir(tmp_path / "entered") == []


LONG = "n" * 256
TOO_LONG: dict[str, Callable[[Path], Any]] = {
    "checkpoint_dir": lambda path: saving(str(path / LONG)),
    "checkpoint_dir above": lambda path: saving(str(path / LONG / "ckpt")),
    "checkpoint_basename": lambda path: CheckpointSaverHook(
        path, save_steps=1, saver=StateDictSaver(w={"w": 1}), checkpoint_basename="b" * 200
    ),
    "directory": lambda path: CheckpointDirectory(path / LONG),
    "basename": lambda path: CheckpointDirectory(path, "b" * 200),
    "basename in bytes": lambda path: CheckpointDirectory(path, "ü" * 100),
    "path of CsvSink": lambda path: CsvSink(path / ("n" * 250)),
    "path of JsonLinesSink": lambda path: JsonLinesSink(path / ("n" * 250)),
    "directory of TensorBoardSink": lambda path: TensorBoardSink(path / LONG),
    "output_dir": lambda path: StepCounterHook(every_n_steps=1, output_dir=str(path / LONG)),
    "path": lambda path: TraceHook(path / LONG),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_name_that_is_too_long_is_refused_where_it_is_given(tmp_path: Path, name: str) -> None:
    argument = name.split()[0]
    match = rf"{argument} has the name '.* of 2\d\d bytes in it; give one of at most \d+, as names"
    with pytest.raises(ValueError, match=match):
        TOO_LONG[name](tmp_path)
    assert os.listdir(tmp_path) == []


async def test_the_longest_basename_saves_resumes_and_is_moved_aside(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give one of at most \d+") as caught:
        CheckpointDirectory(tmp_path, "b" * 255)
    most = int(re.findall(r"at most (\d+), as", str(caught.value))[0])
    directory = CheckpointDirectory(tmp_path, "b" * most)
    saver = StateDictSaver(weights={"w": np.zeros(1)})
    directory.open()
    directory.save(10**18, saver.save)
    directory.save(10**18, saver.save)
    (newest,) = directory.checkpoints()
    directory.reject(newest, "it diverged")
    directory.save(10**18, saver.save)
    directory.close()


def test_a_directory_that_takes_no_long_names_is_refused_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def short_mkdir(path: Any, *args: Any, **options: Any) -> None:
        if len(os.path.basename(path)) > 143:  # as eCryptfs
            raise OSError(36, "File name too long", path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", short_mkdir)
    directory = CheckpointDirectory(tmp_path, "b" * 100)
    with pytest.raises(CheckpointError, match="File name too long.*give a shorter basename"):
        directory.open()
