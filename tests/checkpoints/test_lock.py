"""One run per directory: real processes hold the lock, end, are killed, and fork."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from asynchooks._errors import CheckpointError, CheckpointInUseError
from asynchooks.checkpoints import CheckpointDirectory, _lock

from .stores import REPOSITORY, make_socket, names_in, newest_step, opened, run_python, writer

HOLD = """
import os, sys
from asynchooks.checkpoints import CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1])
directory.open()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.faults
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        directory = CheckpointDirectory(tmp_path)
        words = f"{tmp_path} is in use by the run with process id {holder.pid}; wait for its end"
        with pytest.raises(CheckpointInUseError, match=words) as caught:
            directory.open()
        assert caught.value.pid == holder.pid
        directory.close()  # of one that is not open: the holder keeps its lock
        with pytest.raises(CheckpointInUseError):
            directory.open()
        assert directory.newest_intact() is None
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / "lock").read_text() == f"{holder.pid}\n"
    directory.open()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    directory.close()
    directory.close()
    assert (tmp_path / "lock").exists()


def test_this_process_is_refused_too(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        for directory in (first, CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path, "b")):
            with pytest.raises(CheckpointInUseError, match="this process uses it already") as error:
                directory.open()
            assert error.value.pid == os.getpid()
        first.save(1, writer())  # still open
    with opened(tmp_path) as again:
        again.save(2, writer())


@pytest.mark.parametrize("text", ["", "nonsense", "-5"])
def test_a_pid_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    with opened(tmp_path):
        (tmp_path / "lock").write_text(text)
        with pytest.raises(CheckpointInUseError, match="in use by another run") as caught:
            CheckpointDirectory(tmp_path).open()
        assert caught.value.pid is None


@pytest.mark.parametrize("text", ["999999999\n", "\0\0\0", "12\0\0", "", "\n", "77\r\n"])
def test_a_lock_that_a_dead_run_left_or_a_crash_cut_off_is_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    with opened(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def linked(lock: Path) -> None:
    lock.symlink_to("precious")


def linked_to_nothing(lock: Path) -> None:
    (lock.parent / "precious").rename(lock.parent / "moved")
    lock.symlink_to("precious")


def linked_hard(lock: Path) -> None:
    os.link(lock.parent / "precious", lock)


def of_gigabytes(lock: Path) -> None:
    lock.touch()
    os.truncate(lock, 3 << 30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (linked, "lock is a symlink where a file was written"),
        (linked_to_nothing, "lock is a symlink where a file was written"),
        (linked_hard, "it holds something else than a process id"),
        (lambda lock: lock.write_text("nonsense"), "it holds something else than a process id"),
        (lambda lock: lock.write_text("-5"), "it holds something else than a process id"),
        (of_gigabytes, "it holds something else than a process id"),
        (os.mkfifo, "lock is a special file where a file was written"),
        (make_socket, "lock is a special file where a file was written"),
        (Path.mkdir, "lock is a directory where a file was written"),
        (lambda lock: lock.symlink_to("lock"), "lock is a symlink where a file was written"),
    ],
)  # fmt: skip
def test_what_is_named_like_the_lock_and_is_none_stays_as_it_is(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "precious").write_text("of years of work")
    make(path / "lock")
    before = os.lstat(path / "lock")
    with pytest.raises(CheckpointError, match=f"is not the lock of a run .{words}") as caught:
        CheckpointDirectory(path).open()
    assert "move it away, or give another directory" in str(caught.value)
    assert os.path.samestat(before, os.lstat(path / "lock"))
    assert os.lstat(path / "lock").st_size == before.st_size
    [kept] = [each for each in path.iterdir() if each.name in ("precious", "moved")]
    assert kept.read_text() == "of years of work"


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "data").symlink_to("disk")
    with opened(tmp_path / "data" / "run") as directory:
        directory.save(1, writer())
        with pytest.raises(CheckpointInUseError, match="this process uses it already"):
            CheckpointDirectory(tmp_path / "disk" / "run").open()
    (tmp_path / "run").symlink_to("disk/run")
    with opened(tmp_path / "run") as directory:
        directory.save(2, writer())
    assert newest_step(tmp_path / "data" / "run") == 2


def test_a_lock_that_is_replaced_by_a_link_to_it_is_missed(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        (tmp_path / "lock").rename(tmp_path / "moved")
        (tmp_path / "lock").symlink_to("moved")
        with pytest.raises(CheckpointError, match="is not the file that open.. locked"):
            directory.save(1, pytest.fail)


@pytest.mark.faults
def test_a_forked_child_that_closes_does_not_unlock_and_one_that_lives_on_does_not_lock(
    tmp_path: Path,
) -> None:
    code = """
    import os, sys
    from asynchooks.checkpoints import CheckpointDirectory
    from asynchooks._errors import CheckpointInUseError
    directory = CheckpointDirectory(sys.argv[1])
    directory.open()
    if not (pid := os.fork()):
        directory.close()
        os._exit(0)
    os.waitpid(pid, 0)
    try:
        CheckpointDirectory(sys.argv[1]).open()
    except CheckpointInUseError as error:
        print(error.pid == os.getpid())
    ends, end = os.pipe()
    if not (pid := os.fork()):
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    directory.close()
    CheckpointDirectory(sys.argv[1]).open()
    print("free")
    os.close(end)
    os.waitpid(pid, 0)
    """
    assert run_python(code, tmp_path).split() == ["True", "free"]


@pytest.mark.faults
def test_a_worker_process_that_outlives_a_killed_run_does_not_lock(tmp_path: Path) -> None:
    code = """
    import multiprocessing, os, signal, sys
    from asynchooks.checkpoints import CheckpointDirectory
    directory = CheckpointDirectory(sys.argv[1])
    directory.open()
    context = multiprocessing.get_context("fork")
    has_begun = context.Event()

    def work():
        os.setsid()
        has_begun.set()
        signal.pause()

    worker = context.Process(target=work)
    worker.start()
    has_begun.wait()
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        run.wait()
    try:
        os.kill(worker, 0)  # it lives
        with opened(tmp_path) as directory:
            directory.save(1, writer())
    finally:
        os.kill(worker, signal.SIGKILL)


def test_without_flock_there_is_a_warning_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_lock, "fcntl", None)  # as on Windows, where it cannot be imported
    with caplog.at_level(logging.WARNING), opened(tmp_path), opened(tmp_path) as directory:
        directory.save(1, writer())
    words = "is not locked (this platform has no flock): see to it that no second run uses it"
    assert [words in each for each in caplog.messages] == [True, True]


def test_a_replaced_directory_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with opened(path) as directory:
        saved = directory.save(1, writer())
        path.rename(tmp_path / "moved")
        with opened(path):
            """Another run recreates it: a lock of its own is in it now."""
        words = "removed, moved or replaced while it was in use, and is not recreated here"
        with pytest.raises(CheckpointError, match=words):
            directory.save(2, pytest.fail)
        with pytest.raises(CheckpointError, match=words):
            directory.reject(saved, "")
    assert names_in(tmp_path / "moved") == ["model.ckpt-1"]
    assert names_in(path) == []
