"""TensorBoardSink: what TensorBoard shows of it, beside what other hooks write."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
    StopAtStepHook,
    SummarySaverHook,
)
from asynchooks.metrics import Histogram, Point, Resume, TensorBoardSink
from asynchooks.metrics._event_files import (
    EVENT_FILES,
    EventFile,
    events_in,
    names_in,
    scalar_summary,
)

from .disks import Disk
from .readers import steps_shown

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ml_dtypes"),
]
NEW = Resume(0, None)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert not EVENT_FILES.directories


def opened(directory: Path | str, resume: Resume = NEW) -> TensorBoardSink:
    sink = TensorBoardSink(directory)
    sink.check()
    sink.open(resume)
    return sink


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


def written(directory: Path, last: int) -> Any:
    """Let a process write steps and end; returns its position."""
    sink = opened(directory)
    write(sink, 1, last)
    position = sink.flush()
    sink.close()
    return position


def test_a_point_is_one_event_with_its_time_and_all_its_values(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.write(Point(7, 1893456000.25, {"loss": 0.5, "rate": math.nan}))
    sink.flush()
    sink.close()
    [name] = names_in(str(tmp_path))
    _, event = events_in(str(tmp_path), name)
    assert (event.step, event.wall_time) == (7, 1893456000.25)
    loss, rate = event.summary.value
    assert (loss.tag, loss.simple_value, rate.tag) == ("loss", 0.5, "rate")
    assert math.isnan(rate.simple_value)


def test_both_plugins_for_histograms_show_them(tmp_path: Path) -> None:
    sink = opened(tmp_path / "run")
    numbers = np.array([-1.0, 0.0, 0.5, 3.0])
    sink.write(Point(1, 0.0, {"w": Histogram.of(numbers, 4)}))
    sink.write(Point(2, 0.0, {"w": Histogram.of(np.zeros(5), 2)}))
    sink.write(Point(3, 0.0, {"w": Histogram.of(np.array([math.nan]))}))
    sink.flush()
    sink.close()

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = TBContext(data_provider=provider)
    histograms, _ = HistogramsPlugin(context).histograms_impl(RequestContext(), "w", "run", "")
    assert [(step, buckets) for _, step, buckets in histograms] == [
        (1, [[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [2.0, 3.0, 1.0]]),
        (2, [[0.0, 0.0, 5.0]]),
        (3, []),
    ]
    shown, _ = DistributionsPlugin(context).distributions_impl(RequestContext(), "w", "run", "")
    assert [step for _, step, _ in shown] == [1, 2, 3]
    quantiles = [value for _, value in shown[0][2]]
    assert (quantiles[0], quantiles[-1]) == (-1.0, 3.0)
    assert quantiles == sorted(quantiles)


def test_what_a_killed_process_wrote_of_later_steps_is_hidden(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 6)
    position = first.flush()
    write(first, 7, 9)
    first.flush()
    first.close()
    sink = opened(tmp_path, Resume(6, position))
    write(sink, 7, 8, 2000.0)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert starts(tmp_path) == [7, 7]


def test_points_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 2)
    position = first.flush()
    write(first, 3, 5)
    first.flush()
    first.close()
    sink = opened(tmp_path, Resume(6, position))
    write(sink, 3, 6)  # of which a checkpoint holds that they were not flushed
    write(sink, 7, 7)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert starts(tmp_path) == []  # nothing was to be hidden


def test_points_before_the_restore_are_written_by_the_next_flush(tmp_path: Path) -> None:
    position = written(tmp_path, 2)
    sink = opened(tmp_path, Resume(4, position))
    write(sink, 3, 4)
    sink.flush()
    assert steps_shown(tmp_path) == [1, 2, 3, 4]
    sink.close()


def test_points_before_the_restore_that_are_hidden_are_written_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 3)
    position = first.flush()
    write(first, 4, 5)
    first.flush()
    first.close()
    opened(tmp_path, Resume(3, position)).close()  # an older checkpoint was restored
    assert steps_shown(tmp_path) == [1, 2, 3]
    sink = opened(tmp_path, Resume(5, position))  # and then the newer one
    write(sink, 4, 6)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("last", [5, 6])
@pytest.mark.parametrize("are_there", [False, True])
def test_a_rewind_before_the_restore_is_repeated(
    tmp_path: Path, are_there: bool, last: int
) -> None:
    first = opened(tmp_path)
    write(first, 1, 3)
    position = first.flush()
    if are_there:  # the process was killed after it has written all
        write(first, 4, last)
        first.rewind(3)
        write(first, 4, 5, 2000.0)
        first.flush()
    first.close()
    sink = opened(tmp_path, Resume(5, position))
    write(sink, 4, last)
    sink.rewind(3)
    write(sink, 4, 5, 2000.0)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("position", [{"bytes": 10**9, "first": None}, 7])
def test_the_position_of_another_kind_of_sink_is_left_alone(tmp_path: Path, position: Any) -> None:
    written(tmp_path, 5)
    sink = opened(tmp_path, Resume(2, position))
    write(sink, 1, 3)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [1, 2, 3]


def test_points_of_step_0_are_not_written_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    position = first.flush()
    write(first, 0, 2)
    first.flush()
    first.close()
    sink = opened(tmp_path, Resume(0, position))
    write(sink, 0, 1)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [0, 1]


def test_only_what_is_behind_the_position_is_read(tmp_path: Path) -> None:
    position = written(tmp_path, 5)
    (name,) = names_in(str(tmp_path))
    with (tmp_path / name).open("r+b") as file:
        file.write(b"\0" * 20)  # else it would end at once
    earlier = tmp_path / "events.out.tfevents.0000000001.host"
    earlier.write_bytes(b"nothing of TensorBoard's")
    with (tmp_path / name).open("ab") as file:
        late = EventFile(str(tmp_path / "other"))
        late.flush()
        begin = late.size
        late.add_summary(scalar_summary("loss", 1.0), 9)
        late.close()
        file.write((tmp_path / "other" / late.name).read_bytes()[begin:])
    opened(tmp_path, Resume(5, position)).close()
    assert starts(tmp_path) == [6, 6]


def test_a_new_training_hides_an_earlier_one(tmp_path: Path) -> None:
    written(tmp_path, 5)
    sink = opened(tmp_path)
    write(sink, 1, 2, 2000.0)
    sink.flush()
    sink.close()
    assert starts(tmp_path) == [1, 1]
    assert steps_shown(tmp_path) == [1, 2]


def test_what_hides_an_earlier_training_is_on_the_disk_before_training_begins(
    tmp_path: Path,
) -> None:
    """Else a process that is killed soon after its first checkpoint would leave a step twice."""
    for _ in range(20):
        sink = opened(tmp_path)
        *earlier, name = names_in(str(tmp_path))
        starts = [event.HasField("session_log") for event in events_in(str(tmp_path), name)]
        assert starts.count(True) == (2 if earlier else 0)
        sink.write(Point(1, 1.0, {"loss": 1.0}))
        sink.flush()
        sink.close()


def test_a_rewind_hides_the_later_steps(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    write(sink, 1, 6)
    sink.rewind(3)
    write(sink, 4, 4, 2000.0)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path) == [1, 2, 3, 4]


def test_a_second_sink_of_the_directory_hides_nothing_of_the_first(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 5)
    first.flush()
    second = opened(tmp_path, Resume(3, None))
    for sink in (second, first):
        sink.flush()
        sink.close()
    assert len(names_in(str(tmp_path))) == 1
    assert steps_shown(tmp_path) == [1, 2, 3, 4, 5]


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


def test_a_directory_that_cannot_be_made_is_an_error_of_open(tmp_path: Path) -> None:
    (tmp_path / "logs").write_bytes(b"a file")
    sink = TensorBoardSink(tmp_path / "logs" / "run")
    with pytest.raises(OSError, match="logs"):
        sink.open(NEW)
    (tmp_path / "logs").unlink()
    sink.open(NEW)
    write(sink, 1, 1)
    sink.flush()
    sink.close()
    assert steps_shown(tmp_path / "logs" / "run") == [1]


def test_without_tensorboard_the_check_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[tensorboard\]'"):
        TensorBoardSink(tmp_path).check()


@pytest.mark.parametrize("bad", [3, None, b"logs"])
def test_a_directory_that_is_no_path_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="give the path of a directory"):
        TensorBoardSink(bad)


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


async def test_hooks_of_a_directory_share_the_file_and_hide_nothing_of_each_other(
    tmp_path: Path,
) -> None:
    await train(tmp_path, 6)
    assert len(names_in(str(tmp_path / "logs"))) == 1
    assert steps_shown(tmp_path / "logs", "eval/score") == [1, 2, 3, 4, 5, 6]
    for tag in ("loss", "own"):
        assert steps_shown(tmp_path / "logs", tag) == [1, 2, 3, 4, 5, 6]
    await train(tmp_path, 3)  # on from step 4
    assert len(names_in(str(tmp_path / "logs"))) == 2
    for tag in ("loss", "own", "eval/score"):
        assert steps_shown(tmp_path / "logs", tag) == [1, 2, 3, 4, 5, 6, 7]
    assert steps_shown(tmp_path / "logs", "global_step/sec") == [2, 3, 4, 5, 6, 7]
    assert starts(tmp_path / "logs")[-1] == 5


async def test_a_stuck_disk_holds_up_neither_the_steps_nor_hooks_of_the_directory(
    tmp_path: Path, disk: Disk
) -> None:
    hooks = [
        StepCounterHook(every_n_steps=1, output_dir=str(tmp_path)),
        MetricsHook(TensorBoardSink(tmp_path), "loss", every_n_steps=1),
    ]
    async with MonitoredSession(hooks, FunctionSessionCreator(Model().step)) as session:
        disk.takes.clear()
        for _ in range(200):  # TensorBoard's own writer takes ten
            await session.run("loss")
        assert disk.is_waiting.wait(20)
        assert session.global_step.value == 200
        disk.takes.set()
    assert steps_shown(tmp_path) == list(range(1, 201))
    assert steps_shown(tmp_path, "global_step/sec") == list(range(2, 201))


def record(length: int, data: bytes) -> bytes:
    """A record with this length and the checksum that belongs to it."""
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc32c(head)) + data + bytes(4)


@pytest.mark.parametrize("length", [7, 8, 1 << 40, 1 << 63, (1 << 64) - 13])
async def test_a_crafted_record_costs_no_memory_and_no_point(tmp_path: Path, length: int) -> None:
    """7 bytes that are no event, or a length that is not that of what follows."""
    crafted = tmp_path / "events.out.tfevents.0000000001.host.1"
    crafted.write_bytes(record(length, b"\xff" * 7))
    hook = MetricsHook(TensorBoardSink(tmp_path), "loss", every_n_steps=1)
    hooks = [hook, StopAtStepHook(last_step=3)]
    async with MonitoredSession(hooks, FunctionSessionCreator(lambda: {"loss": 1.0})) as session:
        while not session.should_stop():
            await session.run("loss")
    assert hook.num_dropped == 0
    crafted.unlink()
    assert steps_shown(tmp_path) == [1, 2, 3]
