"""One run per directory: real processes hold the lock, end, are killed, and fork."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asynchooks import CheckpointError, CheckpointInUseError
from asynchooks.checkpoints import CheckpointDirectory

from .stores import REPOSITORY, make_socket, names_in, newest_step, opened, run_python, writer

HOLD = """
import multiprocessing, os, signal, sys
from asynchooks.checkpoints import CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1])
directory.open()
context = multiprocessing.get_context("fork")
has_begun = context.Event()

def work():  # as a worker that loads data, and outlives the run
    os.setsid()
    has_begun.set()
    signal.pause()

worker = context.Process(target=work)
worker.start()
has_begun.wait()
print(worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.faults
def test_a_second_process_is_refused_until_the_first_is_killed_though_a_worker_of_it_lives(
    tmp_path: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    directory = CheckpointDirectory(tmp_path)
    try:
        words = f"{tmp_path} is in use by the run with process id {holder.pid}; wait for its end"
        for _ in range(2):
            with pytest.raises(CheckpointInUseError, match=words) as caught:
                directory.open()
            assert caught.value.pid == holder.pid
            directory.close()  # of one that is not open: the holder keeps its lock
        assert directory.newest_intact() is None
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # it lives
        directory.open()
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        directory.close()
        directory.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.kill()
        holder.communicate()


def test_this_process_is_refused_too(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        for directory in (first, CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path, "b")):
            with pytest.raises(CheckpointInUseError, match="this process uses it already") as error:
                directory.open()
            assert error.value.pid == os.getpid()
        first.save(1, writer())  # still open
        (tmp_path / "lock").write_text("nonsense")
        with pytest.raises(CheckpointInUseError, match="in use by another run") as error:
            CheckpointDirectory(tmp_path).open()
        assert error.value.pid is None


@pytest.mark.parametrize("text", ["999999999\n", "\0\0\0", "12\0\0", "", "77\r\n"])
def test_a_lock_that_a_dead_run_left_or_a_crash_cut_off_is_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    with opened(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


NO_LOCK = "it holds something else than a process id"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda lock: lock.symlink_to("precious"), "lock is a symlink where a file"),
        (lambda lock: lock.symlink_to("nothing"), "lock is a symlink where a file"),
        (lambda lock: os.link(lock.parent / "precious", lock), NO_LOCK),
        (lambda lock: lock.write_bytes(bytes(99)), NO_LOCK),
        (lambda lock: lock.write_text("-5"), NO_LOCK),
        *((each, "lock is a special file where a file") for each in (os.mkfifo, make_socket)),
        (Path.mkdir, "lock is a directory where a file"),
    ],
)
def test_what_is_named_like_the_lock_and_is_none_stays_as_it_is(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    (tmp_path / "precious").write_text("of years of work")
    make(tmp_path / "lock")
    before = os.lstat(tmp_path / "lock")
    with pytest.raises(CheckpointError, match=f"is not the lock of a run .{words}.*move it away"):
        CheckpointDirectory(tmp_path).open()
    after = os.lstat(tmp_path / "lock")
    assert os.path.samestat(before, after)
    assert after.st_size == before.st_size
    assert (tmp_path / "precious").read_text() == "of years of work"
    assert not (tmp_path / "nothing").exists()


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    with opened(tmp_path / "data") as directory:
        directory.save(1, writer())
        with pytest.raises(CheckpointInUseError, match="this process uses it already"):
            CheckpointDirectory(tmp_path / "disk").open()
    assert newest_step(tmp_path / "disk") == 1


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_replaced_directory_or_lock_is_not_written_to(is_linked: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with opened(path) as directory:
        saved = directory.save(1, writer())
        if is_linked:
            (path / "lock").rename(path / "moved")
            (path / "lock").symlink_to("moved")
        else:
            path.rename(tmp_path / "moved")
            with opened(path):
                """Another run recreates it: a lock of its own is in it now."""
        words = "removed, moved or replaced while it was in use, and is not recreated here"
        with pytest.raises(CheckpointError, match=words):
            directory.save(2, pytest.fail)
        with pytest.raises(CheckpointError, match=words):
            directory.reject(saved, "")
    assert names_in(path) == (["model.ckpt-1", "moved"] if is_linked else [])


@pytest.mark.faults
def test_a_forked_child_that_closes_does_not_unlock_and_one_that_lives_on_does_not_lock(
    tmp_path: Path,
) -> None:
    code = """
    import os, sys
    from asynchooks.checkpoints import CheckpointDirectory
    from asynchooks import CheckpointInUseError
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
def test_without_flock_there_is_a_warning_and_no_lock(tmp_path: Path) -> None:
    code = """
    import logging, sys
    sys.modules["fcntl"] = None  # as on Windows, where it cannot be imported
    from asynchooks.checkpoints import CheckpointDirectory
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    for _ in range(2):
        CheckpointDirectory(sys.argv[1]).open()
    """
    words = "is not locked (this platform has no flock): see to it that no second run uses it"
    assert [words in line for line in run_python(code, tmp_path).splitlines()] == [True, True]
