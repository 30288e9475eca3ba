"""Event files: one for each directory of a process, whose writers never wait for the disk."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

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


def test_what_was_flushed_is_in_the_file(tmp_path: Path) -> None:
    writer = opened(tmp_path / "made" / "for it")
    add(writer, 1, 3)
    writer.flush()
    [path] = (tmp_path / "made" / "for it").iterdir()
    assert path.stat().st_size == writer.size
    assert steps_shown(path.parent) == [1, 2, 3]
    writer.close()


def test_closing_writes_what_was_added_and_ends_the_thread(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    add(writer, 1, 500)
    writer.close()
    assert steps_shown(tmp_path) == list(range(1, 501))
    assert threads_left("asynchooks-events") == []
    with pytest.raises(OSError, match="is closed"):
        add(writer, 501, 501)


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
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "see whether that disk is stuck" in caplog.text


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


def test_a_file_that_cannot_be_begun_is_made_by_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, data: bytes, size: int) -> int:
        raise OSError("no space left")

    events = Events(str(tmp_path))
    events.open()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(_event_files, "append_whole", full)
        events.writer.flush()
    assert names_in(str(tmp_path)) == []
    events.writer.flush()
    assert names_in(str(tmp_path)) == [events.writer.name]
    events.close()


def test_a_later_file_is_read_later_also_within_a_second(tmp_path: Path) -> None:
    for step in range(1, 13):
        writer = opened(tmp_path)
        add(writer, step, step)
        writer.close()
    assert len(names_in(str(tmp_path))) == 12
    assert steps_shown(tmp_path) == list(range(1, 13))


def test_a_file_from_the_future_is_read_before_the_next_one(tmp_path: Path) -> None:
    future = tmp_path / "events.out.tfevents.9000000000.host.99"
    future.write_bytes(b"")
    writer = opened(tmp_path)
    writer.close()
    assert names_in(str(tmp_path)) == [future.name, writer.name]


@pytest.mark.parametrize("num_bytes", [0, 7, 12, 40])
def test_a_torn_record_ends_what_can_be_read(tmp_path: Path, num_bytes: int) -> None:
    writer = opened(tmp_path)
    add(writer, 1, 2)
    writer.flush()
    size = writer.size
    add(writer, 3, 3)
    writer.close()
    path = tmp_path / writer.name
    os.truncate(path, size + num_bytes)
    steps = [each.step for each in events_in(str(tmp_path), writer.name)]
    assert steps == ([0, 1, 2, 3] if path.stat().st_size == writer.size else [0, 1, 2])
    with path.open("r+b") as file:  # as after a power cut
        file.truncate(size)
        file.truncate(size + 100)
    assert [each.step for each in events_in(str(tmp_path), writer.name)] == [0, 1, 2]


def test_events_may_be_read_from_an_offset_on(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    add(writer, 1, 2)
    writer.flush()
    size = writer.size
    add(writer, 3, 4)
    writer.close()
    assert [each.step for each in events_in(str(tmp_path), writer.name, size)] == [3, 4]


def test_summaries_may_be_given_as_bytes(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    summary = Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
    writer.add_summary(summary.SerializeToString(), 7)
    writer.close()
    assert steps_shown(tmp_path) == [7]


def starts(directory: Path) -> list[int]:
    return [
        event.step
        for name in names_in(str(directory))
        for event in events_in(str(directory), name)
        if event.HasField("session_log")
    ]


def test_the_events_of_a_directory_begin_once_in_each_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third = Events("logs"), Events(str(tmp_path / "logs")), Events("./logs")
    for step, each in enumerate((first, second)):
        each.open()
        each.begin(step)
    first.close()
    third.open()
    assert third.others_have_begun
    second.close()
    assert not third.others_have_begun
    third.close()
    assert starts(tmp_path / "logs") == [1, 1]  # twice of the first one


def test_a_session_that_was_dropped_leaves_its_file_to_others(tmp_path: Path) -> None:
    dropped, other = Events(str(tmp_path / "logs")), Events(str(tmp_path / "other"))
    dropped.open()
    dropped.begin(None)
    dropped.is_dropped = True
    assert threads_left("asynchooks-events")
    other.open()
    other.close()
    assert threads_left("asynchooks-events") == []


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
