"""Paths are those of where a hook or a sink was made, and names that are too long are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    MetricsHook,
    MonitoredSession,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    TraceHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink
from asynchooks.planning import record

from ..checkpoints.stores import newest_step
from ..support.moments import at
from .inputs import Diary, saving
from .training import run_to

MAKERS: dict[str, Callable[[str], SessionRunHook]] = {
    "CheckpointSaverHook": lambda path: saving(path, Diary()),  # type: ignore[arg-type]
    "CsvSink": lambda path: MetricsHook(CsvSink(path), "loss", every_n_steps=1),
    "JsonLinesSink": lambda path: MetricsHook(JsonLinesSink(path), "loss", every_n_steps=1),
    "TensorBoardSink": lambda path: MetricsHook(TensorBoardSink(path), "loss", every_n_steps=1),
    "StepCounterHook": lambda path: StepCounterHook(every_n_steps=1, output_dir=path),
    "TraceHook": TraceHook,
    "record": lambda path: recording(path),
}


def recording(path: str) -> SessionRunHook:
    """A hook that is made with a recording, which it enters as the session opens."""
    made = record(path)

    def enter() -> None:
        with made:
            pass

    return at(begin=enter)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MAKERS)
async def test_a_relative_path_is_that_of_where_it_was_given(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / each for each in ("made", "opened", "trained", "again")]
    for each in places:
        each.mkdir()
    monkeypatch.chdir(places[0])
    hook = MAKERS[name]("out")
    for begin, last_step in ((1, 2), (3, 4)) if name != "record" else ((1, 2),):
        monkeypatch.chdir(places[begin])
        hooks = [hook, StopAtStepHook(last_step=last_step)]
        async with MonitoredSession(hooks, lambda: {"loss": 0.5}) as session:
            monkeypatch.chdir(places[2])
            await run_to(session, last_step)
    assert set(os.listdir(places[0])) - {"out-1"} == {"out"}  # a new training moves files aside
    assert [os.listdir(each) for each in places[1:]] == [[], [], []]
    if name == "CheckpointSaverHook":
        assert newest_step(places[0] / "out") == 4


LONG = "n" * 256
TOO_LONG: dict[str, Callable[[Path], Any]] = {
    "checkpoint_dir": lambda path: saving(path / LONG / "ckpt", Diary()),
    "checkpoint_basename": lambda path: CheckpointSaverHook(
        path, save_steps=1, saver=StateDictSaver(w={"w": 1}), checkpoint_basename="b" * 200
    ),
    "basename": lambda path: CheckpointDirectory(path, "ü" * 100),
    "path": lambda path: TraceHook(path / LONG),
    "path of JsonLinesSink": lambda path: JsonLinesSink(path / ("n" * 250)),
    "directory of TensorBoardSink": lambda path: TensorBoardSink(path / LONG),
    "output_dir": lambda path: StepCounterHook(every_n_steps=1, output_dir=str(path / LONG)),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_name_that_is_too_long_is_refused_where_it_is_given(tmp_path: Path, name: str) -> None:
    argument = name.split()[0]
    match = rf"{argument} has the name '.* of 2\d\d bytes in it; give one of at most \d+, as names"
    with pytest.raises(ValueError, match=match):
        TOO_LONG[name](tmp_path)
    assert os.listdir(tmp_path) == []
