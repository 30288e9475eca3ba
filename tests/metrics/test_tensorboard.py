"""TensorBoardSink: what TensorBoard shows of it, beside what other hooks write."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.distribution.distributions_plugin import DistributionsPlugin
from tensorboard.plugins.histogram.histograms_plugin import HistogramsPlugin

from asynchooks import (
    CheckpointSaverHook,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MetricsHook,
    MonitoredSession,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
    SummarySaverHook,
)
from asynchooks.metrics import Histogram, Point, Resume, TensorBoardSink
from asynchooks.metrics._event_files import (
    EVENT_FILES,
    events_in,
    names_in,
)

from ..support.step_loops import run_steps
from .readers import steps_shown

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ml_dtypes"),
]
NEW = Resume(0, None)


def opened(directory: Path | str, resume: Resume = NEW) -> TensorBoardSink:
    sink = TensorBoardSink(directory)
    sink.check()
    sink.open(resume)
    return sink


def ended(sink: TensorBoardSink) -> Any:
    """Its position at its end; no file stays open."""
    position = sink.flush()
    sink.close()
    assert not EVENT_FILES.directories
    return position


def write(sink: TensorBoardSink, first: int, last: int, time: float = 1000.0) -> None:
    for step in range(first, last + 1):
        sink.write(Point(step, time + step, {"loss": step / 8}))


def starts(directory: Path) -> list[int]:
    """The steps of the starts of sessions in all files."""
    return [
        event.step
        for name in names_in(str(directory))
        for event in events_in(str(directory), name)
        if event.HasField("session_log")
    ]


def test_a_point_is_one_event_with_its_time_and_all_its_values(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.write(Point(7, 1893456000.25, {"loss": 0.5, "rate": math.nan}))
    ended(sink)
    [name] = names_in(str(tmp_path))
    _, event = events_in(str(tmp_path), name)
    assert (event.step, event.wall_time) == (7, 1893456000.25)
    assert str([(each.tag, each.simple_value) for each in event.summary.value]) == (
        "[('loss', 0.5), ('rate', nan)]"
    )


def test_both_plugins_for_histograms_show_them(tmp_path: Path) -> None:
    sink = opened(tmp_path / "run")
    spreads = [Histogram.of(np.array([-1.0, 0.0, 0.5, 3.0]), 4), Histogram.of(np.zeros(5), 2),
               Histogram.of(np.array([math.nan]))]  # fmt: skip
    for step, spread in enumerate(spreads, 1):
        sink.write(Point(step, 0.0, {"w": spread}))
    ended(sink)
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context, request = TBContext(data_provider=provider), RequestContext()
    histograms, _ = HistogramsPlugin(context).histograms_impl(request, "w", "run", "")
    assert [(step, buckets) for _, step, buckets in histograms] == [
        (1, [[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [2.0, 3.0, 1.0]]),
        (2, [[0.0, 0.0, 5.0]]),
        (3, []),
    ]
    shown, _ = DistributionsPlugin(context).distributions_impl(request, "w", "run", "")
    quantiles = [[value for _, value in each] for _, _, each in shown]
    assert (len(quantiles), quantiles[0][0], quantiles[0][-1]) == (3, -1.0, 3.0)


@pytest.mark.parametrize("position", [{"bytes": 10**9, "first": None}, 7])
def test_the_position_of_another_kind_of_sink_is_left_alone(tmp_path: Path, position: Any) -> None:
    for resume, last in ((NEW, 5), (Resume(2, position), 3)):
        sink = opened(tmp_path, resume)
        write(sink, 1, last)
        ended(sink)
    assert steps_shown(tmp_path) == [1, 2, 3]


def test_only_what_is_behind_the_position_is_read(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    write(sink, 1, 5)
    position = sink.flush()
    write(sink, 6, 9)
    ended(sink)
    (name,) = names_in(str(tmp_path))
    with (tmp_path / name).open("r+b") as file:
        file.write(b"\0" * 20)  # else reading it would end at once
    (tmp_path / "events.out.tfevents.0000000001.host").write_bytes(b"nothing of TensorBoard's")
    ended(opened(tmp_path, Resume(5, position)))
    assert starts(tmp_path) == [6, 6]


def test_what_hides_an_earlier_training_is_on_the_disk_before_training_begins(
    tmp_path: Path,
) -> None:
    """Else a process that is killed soon after its first checkpoint would leave a step twice."""
    for _ in range(8):
        sink = opened(tmp_path)
        *earlier, name = names_in(str(tmp_path))
        starts = [event.HasField("session_log") for event in events_in(str(tmp_path), name)]
        assert starts.count(True) == (2 if earlier else 0)
        write(sink, 1, 1)
        ended(sink)


class AfterClose(SessionRunHook):
    """Calls a function when the other hooks have ended, and sinks have not closed."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn = fn

    async def after_close(self, exception: BaseException | None) -> None:
        self._fn()


@pytest.mark.parametrize("opens_at_the_end", [False, True])
async def test_however_long_opening_takes_each_step_is_shown_once(
    opens_at_the_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold disk, or a slow import: the points of the session wait for it."""
    await train(tmp_path, 6)
    may_open, open_sink = threading.Event(), TensorBoardSink.open

    def open_late(sink: TensorBoardSink, resume: Resume) -> None:
        assert may_open.wait(20)
        open_sink(sink, resume)

    monkeypatch.setattr(TensorBoardSink, "open", open_late)
    if opens_at_the_end:
        await train(tmp_path, 6, AfterClose(may_open.set))  # on from step 4
    else:
        await train(tmp_path, 6, when_trained=may_open.set)

    for tag in ("loss", "own", "eval/score"):
        assert steps_shown(tmp_path / "logs", tag) == list(range(1, 11)), tag


def test_without_tensorboard_the_check_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[tensorboard\]'"):
        TensorBoardSink(tmp_path).check()


@pytest.mark.faults
def test_tensorflow_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from asynchooks.metrics import *; "
        "sink = TensorBoardSink(sys.argv[1]); sink.check(); sink.open(Resume(0, None)); "
        "sink.write(Point(1, 0.0, {'loss': 1.0})); sink.flush(); sink.close(); "
        "print('tensorflow' in sys.modules)"
    )
    args = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert steps_shown(tmp_path) == [1]


class Model:
    """Its loss is its number of steps."""

    def __init__(self) -> None:
        self.state = {"steps": np.zeros(())}

    def step(self) -> dict[str, float]:
        self.state["steps"] += 1
        return {"loss": float(self.state["steps"]), "own": 0.5}


async def train(
    directory: Path,
    num_steps: int,
    *further: SessionRunHook,
    when_trained: Callable[[], object] = lambda: None,
) -> None:
    """Continue a training whose hooks all write to one directory; killed without a last save."""
    model = Model()
    logs = str(directory / "logs")
    hooks = [
        *further,
        CheckpointSaverHook(
            directory / "saved", save_steps=4, saver=StateDictSaver(arrays=model.state)
        ),
        StepCounterHook(every_n_steps=1, output_dir=logs),
        MetricsHook(TensorBoardSink(logs), "loss", every_n_steps=1),
        SummarySaverHook(save_steps=1, output_dir=logs, summary_op="own"),
        EvaluationHook(
            lambda session, step: {"score": 1.0}, every_n_steps=1, at_end=False,
            mode=Evaluate.EXCLUSIVE, output_dir=logs,
        ),
    ]  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            for _ in range(num_steps):
                await session.run("loss")
            when_trained()
            raise ZeroDivisionError


@pytest.mark.parametrize("length", [7, 8, 1 << 40, (1 << 64) - 13])
async def test_a_crafted_record_costs_no_memory_and_no_point(tmp_path: Path, length: int) -> None:
    """7 bytes that are no event, or a length that is not that of what follows."""
    crafted = tmp_path / "events.out.tfevents.0000000001.host.1"
    head = struct.pack("<Q", length)
    crafted.write_bytes(head + struct.pack("<I", masked_crc32c(head)) + b"\xff" * 7 + bytes(4))
    hook = MetricsHook(TensorBoardSink(tmp_path), "loss", every_n_steps=1)
    await run_steps(lambda: {"loss": 1.0}, 3, hook)
    assert hook.num_dropped == 0
    crafted.unlink()
    assert steps_shown(tmp_path) == [1, 2, 3]
