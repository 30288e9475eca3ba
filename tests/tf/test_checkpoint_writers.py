"""TensorFlow's event writers of graph checkpoints: which are closed at the end, and which stay."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from asynchooks import StepCounterHook

from .models import counting_model
from .test_background_checkpoints import background_hook, train

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def open_files(directory: Path) -> list[str]:
    """Of this process, those in the directory."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{each}")
        except OSError:  # that of the listing
            continue
        if path.startswith(str(directory)):
            found.append(os.path.basename(path))
    return found


def logged(directory: Path) -> list[tuple[int, int]]:
    """(Step, status) of all session logs, in the order of the files."""
    found = []
    for path in sorted(directory.glob("events.out.*"), key=lambda each: each.stat().st_mtime_ns):
        for event in v1.train.summary_iterator(str(path)):
            if event.HasField("session_log"):
                found.append((event.step, event.session_log.status))
    return found


def summarised(directory: Path) -> list[int]:
    """The steps of all summaries in the only file."""
    [path] = directory.glob("events.out.*")
    events = v1.train.summary_iterator(str(path))
    return [event.step for event in events if event.HasField("summary")]


def flush(directory: Path, is_closed: bool) -> None:
    if not is_closed:
        v1.summary.FileWriterCache.get(str(directory)).flush()


CHECKPOINT = v1.SessionLog.CHECKPOINT


async def test_a_session_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    await train(counting_model(), [background_hook(tmp_path / "warm")], 1)
    threads = set(threading.enumerate())
    for number in range(3):
        await train(counting_model(), [background_hook(tmp_path / str(number))], 2)
        assert logged(tmp_path / str(number))[-1] == (2, CHECKPOINT)
    left = [each.name for each in set(threading.enumerate()) - threads]
    assert [name for name in left if "EventLogger" in name or "asynchooks" in name] == []
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("background", [True, False])
async def test_sessions_that_follow_each_other_log_all_their_checkpoints(
    tmp_path: Path, background: bool
) -> None:
    for num_runs in (2, 1):
        hook = background_hook(tmp_path, background=background)
        await train(counting_model(), [hook], num_runs, checkpoint_dir=str(tmp_path))
        flush(tmp_path, background)
    assert (3, CHECKPOINT) in logged(tmp_path)
    assert (2, CHECKPOINT) in logged(tmp_path)
    assert bool(open_files(tmp_path)) is not background
    v1.summary.FileWriterCache.clear()


@pytest.mark.parametrize("background", [True, False])
async def test_a_writer_that_others_have_stays_open_and_cached(
    tmp_path: Path, background: bool
) -> None:
    with tf.Graph().as_default():
        mine: Any = v1.summary.FileWriterCache.get(str(tmp_path))
    await train(counting_model(), [background_hook(tmp_path, background=background)], 1)
    assert v1.summary.FileWriterCache.get(str(tmp_path)) is mine
    mine.add_session_log(v1.SessionLog(status=v1.SessionLog.STOP), 77)
    mine.close()
    assert logged(tmp_path)[-1] == (77, v1.SessionLog.STOP)
    v1.summary.FileWriterCache.clear()


async def test_another_hook_of_the_directory_may_write_after_the_end_of_the_saver(
    tmp_path: Path,
) -> None:
    counter = StepCounterHook(1, output_dir=str(tmp_path))
    await train(counting_model(), [background_hook(tmp_path), counter], 3)
    v1.summary.FileWriterCache.clear()
    assert summarised(tmp_path) == [2, 3]
