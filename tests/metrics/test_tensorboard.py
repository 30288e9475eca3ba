"""TensorBoardSink: what TensorBoard shows of it, beside what other hooks write."""

import math
import struct
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
from tensorboard.plugins.histogram.histograms_plugin import HistogramsPlugin

from asynchooks import (
    MetricsHook,
    MonitoredSession,
    SummarySaverHook,
)
from asynchooks.metrics import Histogram, Point, Resume, TensorBoardSink

from ..hooks.preemptions import saving
from ..support.kept import Model
from ..support.step_loops import run_steps
from .readers import NEW, event_files, events_in, steps_shown, written

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ml_dtypes"),
]


def points(first: int, last: int) -> list[Point]:
    return [Point(step, 1000.0 + step, {"loss": step / 8}) for step in range(first, last + 1)]


def test_a_point_is_one_event_with_its_time_and_all_its_values(tmp_path: Path) -> None:
    values = {"loss": 0.5, "rate": math.nan}
    written(TensorBoardSink(tmp_path), Point(7, 1893456000.25, values))
    [file] = event_files(tmp_path)
    _, event = events_in(file)
    assert (event.step, event.wall_time) == (7, 1893456000.25)
    assert str([(each.tag, each.simple_value) for each in event.summary.value]) == (
        "[('loss', 0.5), ('rate', nan)]"
    )


def test_histograms_are_shown_with_their_bins(tmp_path: Path) -> None:
    spreads = [
        Histogram.of(np.array([-1.0, 0.0, 0.5, 3.0]), 4),
        Histogram.of(np.zeros(5), 2),
        Histogram.of(np.array([math.nan])),
    ]
    points = [Point(step, 0.0, {"w": spread}) for step, spread in enumerate(spreads, 1)]
    written(TensorBoardSink(tmp_path / "run"), *points)
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    plugin = HistogramsPlugin(TBContext(data_provider=provider))
    histograms, _ = plugin.histograms_impl(RequestContext(), "w", "run", "")
    assert [(step, buckets) for _, step, buckets in histograms] == [
        (1, [[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [2.0, 3.0, 1.0]]),
        (2, [[0.0, 0.0, 5.0]]),
        (3, []),
    ]


@pytest.mark.parametrize("position", [{"bytes": 10**9, "first": None}, 7])
def test_the_position_of_another_kind_of_sink_is_left_alone(tmp_path: Path, position: Any) -> None:
    written(TensorBoardSink(tmp_path), *points(1, 5))
    written(TensorBoardSink(tmp_path), *points(1, 3), resume=Resume(2, position))
    assert steps_shown(tmp_path) == [1, 2, 3]


def test_only_what_is_behind_the_position_is_read(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.open(NEW)
    for each in points(1, 9):
        if each.step == 6:
            position = sink.flush()
        sink.write(each)
    sink.close()
    (name,) = event_files(tmp_path)
    with name.open("r+b") as file:
        file.write(b"\0" * 20)  # else reading it would end at once
    (tmp_path / "events.out.tfevents.0000000001.host").write_bytes(b"nothing of TensorBoard's")
    written(TensorBoardSink(tmp_path), resume=Resume(5, position))
    [_, _, later] = event_files(tmp_path)
    assert [each.step for each in events_in(later)] == [0, 6, 6]


def test_what_hides_an_earlier_training_is_on_the_disk_before_training_begins(
    tmp_path: Path,
) -> None:
    """Else a process that is killed soon after its first checkpoint would leave a step twice."""
    for _ in range(8):
        sink = TensorBoardSink(tmp_path)
        sink.open(NEW)
        *earlier, file = event_files(tmp_path)
        starts = [event.HasField("session_log") for event in events_in(file)]
        assert starts.count(True) == (2 if earlier else 0)
        sink.write(*points(1, 1))
        sink.flush()
        sink.close()


async def test_however_long_opening_takes_each_step_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold disk, or a slow import: the points of the session wait for it."""
    await train(tmp_path)
    may_open, open_sink = threading.Event(), TensorBoardSink.open

    def open_late(sink: TensorBoardSink, resume: Resume) -> None:
        assert may_open.wait(20)
        open_sink(sink, resume)

    monkeypatch.setattr(TensorBoardSink, "open", open_late)
    await train(tmp_path, may_open.set)  # on from step 4
    for tag in ("loss", "own"):
        assert steps_shown(tmp_path / "logs", tag) == list(range(1, 11)), tag


async def train(directory: Path, when_trained: Callable[[], object] = lambda: None) -> None:
    """Continue a training whose hooks all write to one directory; killed without a last save."""
    model, logs = Model(), str(directory / "logs")

    async def step() -> dict[str, float]:
        return {**await model(), "own": 0.5}

    hooks = [
        saving(directory / "saved", model, 4),
        MetricsHook(TensorBoardSink(logs), "loss", every_n_steps=1),
        SummarySaverHook(save_steps=1, output_dir=logs, summary_op="own"),
    ]
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession(hooks, step) as session:
            for _ in range(6):
                await session.run("loss")
            when_trained()
            raise ZeroDivisionError


def crafted(length: int) -> bytes:
    """7 bytes that are no event, or a length that is not that of what follows."""
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc32c(head)) + b"\xff" * 7 + bytes(4)


@pytest.mark.parametrize("length", [7, 8, 1 << 40, (1 << 64) - 13, None])
async def test_a_crafted_record_costs_no_memory_and_no_point(
    tmp_path: Path, length: int | None
) -> None:
    foreign = tmp_path / "events.out.tfevents.0000000001.host.1"
    foreign.write_bytes(bytes(100) if length is None else crafted(length))  # as after a power cut
    hook = MetricsHook(TensorBoardSink(tmp_path), "loss", every_n_steps=1)
    await run_steps(lambda: {"loss": 1.0}, 3, hook)
    assert hook.num_dropped == 0
    foreign.unlink()
    assert steps_shown(tmp_path) == [1, 2, 3]
