"""Event files: one for each directory of a process, whose writers never wait for the disk.

No disk is stuck on demand, so it is made so below the writer.
"""

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asynchooks.metrics import _event_files
from asynchooks.metrics._event_files import EventFile, Events, scalar_summary

from .disks import Disk
from .readers import event_files, steps_shown

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(_event_files, "append_whole", disk.append)
    yield disk
    disk.takes.set()


def opened(directory: Path) -> EventFile:
    writer = EventFile(str(directory))
    writer.flush()  # makes the file
    return writer


def add(writer: EventFile, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.add_summary(scalar_summary("loss", 0.5), step)


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


def test_a_later_file_is_read_later_also_within_a_second(tmp_path: Path) -> None:
    future = tmp_path / "events.out.tfevents.9000000000.host.99"
    future.write_bytes(b"")
    for step in range(1, 13):
        writer = opened(tmp_path)
        add(writer, step, step)
        writer.close()
    assert (event_files(tmp_path)[0], len(event_files(tmp_path))) == (future, 13)
    assert steps_shown(tmp_path) == list(range(1, 13))


@pytest.mark.faults
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: that is the point
def test_a_forked_process_has_files_of_its_own(tmp_path: Path) -> None:
    parents = Events(str(tmp_path))
    parents.open()

    def write() -> None:
        childs = Events(str(tmp_path))
        childs.open()
        assert childs.writer is not parents.writer
        childs.close()
        parents.close()  # whose file has no thread here

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join()
    assert child.exitcode == 0
    others = Events(str(tmp_path))
    others.open()
    assert others.writer is parents.writer
    parents.close()
    others.close()
    assert len(event_files(tmp_path)) == 2
