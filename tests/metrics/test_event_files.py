"""Event files: one for each directory of a process, whose writers never wait for the disk."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.compat.proto.summary_pb2 import Summary

from asynchooks.metrics import _event_files
from asynchooks.metrics._event_files import (
    EventFile,
    Events,
    events_in,
    names_in,
    scalar_summary,
)

from ..support.threads import threads_left
from .disks import Disk
from .readers import steps_shown

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def opened(directory: Path) -> EventFile:
    writer = EventFile(str(directory))
    writer.flush()  # makes the file
    return writer


def add(writer: EventFile, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.add_summary(scalar_summary("loss", 0.5), step)


def test_what_was_flushed_or_added_before_the_end_is_in_the_file(tmp_path: Path) -> None:
    writer = opened(tmp_path / "made" / "for it")
    add(writer, 1, 3)
    writer.flush()
    [path] = (tmp_path / "made" / "for it").iterdir()
    assert path.stat().st_size == writer.size
    assert steps_shown(path.parent) == [1, 2, 3]
    summary = Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
    writer.add_summary(summary.SerializeToString(), 4)
    writer.close()
    assert steps_shown(path.parent) == [1, 2, 3, 4]
    assert threads_left("asynchooks-events") == []
    with pytest.raises(OSError, match="is closed"):
        add(writer, 5, 5)


def test_a_stuck_disk_holds_up_none_that_adds_events(tmp_path: Path, disk: Disk) -> None:
    writer = opened(tmp_path)
    disk.takes.clear()
    disk.is_waiting.clear()
    add(writer, 1, 1)
    assert disk.is_waiting.wait(20)
    flushing = threading.Thread(target=writer.flush)
    flushing.start()
    add(writer, 2, 1000)  # TensorBoard's own writer takes ten
    assert flushing.is_alive()
    disk.takes.set()
    flushing.join()
    writer.close()
    assert steps_shown(tmp_path) == list(range(1, 1001))


def test_what_no_memory_is_for_is_dropped_and_said_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_event_files, "MAX_BYTES", 1000)
    writer = opened(tmp_path)
    disk.takes.clear()
    add(writer, 1, 500)
    disk.takes.set()
    writer.flush()
    add(writer, 501, 501)
    writer.close()
    *early, last = steps_shown(tmp_path)
    assert early == list(range(1, len(early) + 1))
    assert 20 < len(early) < 60
    assert last == 501
    assert caplog.text.count("see whether that disk is stuck") == len(caplog.records) == 1


def test_an_error_of_the_disk_is_raised_once_and_the_file_goes_on(
    tmp_path: Path, disk: Disk
) -> None:
    writer = opened(tmp_path)
    add(writer, 1, 2)
    writer.flush()
    disk.error = OSError("no space left")
    add(writer, 3, 3)
    with pytest.raises(OSError, match="no space left"):
        writer.flush()
    disk.error = None
    add(writer, 4, 4)
    writer.close()
    assert steps_shown(tmp_path) == [1, 2, 4]


def test_a_later_file_is_read_later_also_within_a_second(tmp_path: Path) -> None:
    future = tmp_path / "events.out.tfevents.9000000000.host.99"
    future.write_bytes(b"")
    for step in range(1, 13):
        writer = opened(tmp_path)
        add(writer, step, step)
        writer.close()
    assert (names_in(str(tmp_path))[0], len(names_in(str(tmp_path)))) == (future.name, 13)
    assert steps_shown(tmp_path) == list(range(1, 13))


@pytest.mark.parametrize("num_bytes", [0, 7, 12, None, -100])  # -100: as after a power cut
def test_a_torn_record_ends_what_can_be_read(tmp_path: Path, num_bytes: int | None) -> None:
    writer = opened(tmp_path)
    add(writer, 1, 2)
    writer.flush()
    size = writer.size
    add(writer, 3, 3)
    writer.close()
    with (tmp_path / writer.name).open("r+b") as file:
        if num_bytes is not None:
            file.truncate(size + max(0, num_bytes))
            file.truncate(size + abs(num_bytes))
    for offset, expected in ((0, [0, 1, 2]), (size, [])):
        steps = [each.step for each in events_in(str(tmp_path), writer.name, offset)]
        assert steps == expected + [3] * (num_bytes is None)


@pytest.mark.faults
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: that is the point
def test_a_forked_process_has_files_of_its_own(tmp_path: Path) -> None:
    parents = Events(str(tmp_path))
    parents.open()
    child = os.fork()
    if child == 0:
        try:
            childs = Events(str(tmp_path))
            childs.open()
            is_new = childs.writer is not parents.writer
            childs.close()
            parents.close()  # whose file has no thread here
            os._exit(0 if is_new else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    others = Events(str(tmp_path))
    others.open()
    assert others.writer is parents.writer
    parents.close()
    others.close()
    assert len(names_in(str(tmp_path))) == 2
