"""A real disk that is full, read-only, failing or forbidden; a run that is killed anywhere.

Killed is the process, not the machine: what a power cut adds, test_directory holds as an order.
"""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointError
from asynchooks.checkpoints import CheckpointDirectory

from .stores import (
    mount_namespace,
    newest_step,
    run,
    run_python,
    save,
)


@pytest.mark.faults
def test_a_full_disk_leaves_the_older_ones_and_the_next_save_goes_on(tmp_path: Path) -> None:
    code = """
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=True)
    directory = CheckpointDirectory(path, retention=Retention(max_to_keep=2))
    directory.open()
    for step in (1, 2, 3):
        report(directory.save, step, write)  # two of them fit, and a third beside them
    def write_more(prefix):
        Path(prefix).write_bytes(b"w" * 800_000)
    report(directory.save, 4, write_more)
    report(lambda: directory.save(4, write, extra={"hooks.json": bytes(800_000)}))
    print(sorted(os.listdir(path)), directory.newest_intact().step)
    report(directory.save, 4, write)
    print(directory.newest_intact().step)
    """
    lines = run(code, tmp_path, mount_namespace())
    assert lines[:3] == ["done", "done", "done"]
    for line in lines[3:5]:
        words = f"CheckpointError {tmp_path}: the checkpoint of step 4 is not saved: [Errno 28] No"
        assert line.startswith(words)
        assert "(0 bytes are free); older checkpoints are untouched; free space there" in line
        assert "| OSError(28" in line
    assert lines[5:] == ["['lock', 'model.ckpt-2', 'model.ckpt-3'] 3", "done", "4"]


@pytest.mark.faults
def test_a_read_only_disk_is_reported_at_open_and_at_save_and_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code = """
    def mount(options):
        subprocess.run(["mount", "-o", options, path, path], check=True)
    directory = CheckpointDirectory(path)
    directory.open()
    mount("bind")  # over it, with the same files: the mount that is in use stays writable
    mount("remount,ro,bind")
    report(directory.save, 2, write)
    print(directory.newest_intact().step)
    directory.close()
    report(directory.open)
    report(CheckpointDirectory(path / "below").open)
    """
    lines = run(code, tmp_path, mount_namespace())
    words = "Read-only file system: "
    assert [words in line and "mount it for writing, or" in line for line in lines] == [
        True, False, True, True,
    ]  # fmt: skip
    assert lines[1] == "1"
    assert f"CheckpointError {tmp_path}: cannot be used for checkpoints: [Errno 30]" in lines[2]


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_missing_permissions_are_reported(tmp_path: Path) -> None:
    save(tmp_path / "mine", 1)
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_mode & 0o77 == 0:
            each.chmod(0o755)  # pytest's are closed to others
    code = """
    path.chmod(0o777)
    mine = path / "mine"
    (mine / "lock").chmod(0o666)
    (mine / "model.ckpt-1/manifest.json").chmod(0o600)
    os.seteuid(65534)
    report(CheckpointDirectory(mine / "below" / "that").open)
    report(CheckpointDirectory(mine, "other").open)
    report(CheckpointDirectory(mine).newest_intact)
    locked = path / "theirs"
    locked.mkdir(mode=0o300)
    report(CheckpointDirectory(locked).newest_intact)
    report(CheckpointDirectory(locked).open)
    below = CheckpointDirectory(locked / "below")
    report(below.open)
    """
    lines = run(code, tmp_path)
    assert all(line.startswith("CheckpointError ") for line in lines[:-1])
    assert all("[Errno 13] Permission denied" in line for line in lines[:-1])
    for number in (0, 1, 3, 4):
        assert "give this process's user the right to write there, or give another" in lines[number]
    assert "model.ckpt-1 cannot be read now" in lines[2]
    assert "no other checkpoint is taken instead: repair that and try again" in lines[2]
    assert lines[-1] == "done"


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    [saved] = save(tmp_path, 2, extra={"hooks.json": b"{}"})
    directory, lowest_free = CheckpointDirectory(tmp_path), os.dup(0)
    os.close(lowest_free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for read in (directory.newest_intact, lambda: directory.read_extra(saved, "hooks.json")):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
        try:
            with pytest.raises(CheckpointError, match="Too many open files") as caught:
                read()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert type(caught.value) is CheckpointError
    assert newest_step(tmp_path) == 2


@pytest.mark.faults
def test_a_disk_that_cannot_read_a_file_has_damaged_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    code = """
    # a process's memory cannot be read at address 0, and looks like an empty file
    name = path / "model.ckpt-2/model.ckpt-2.parts/empty"
    subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", name], check=True)
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    print(CheckpointDirectory(path).newest_intact().step)
    """
    lines = run(code, tmp_path, mount_namespace())
    assert "model.ckpt-2: cannot be read: [Errno 5] Input/output error" in lines[0]
    assert lines[1:] == ["1"]


def test_a_file_in_the_place_of_the_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        directory = CheckpointDirectory(path)
        words = "Not a directory: .*move away the file that stands where a directory should"
        for use in (directory.open, directory.newest_intact):
            with pytest.raises(CheckpointError, match=words):
                use()
        directory.close()


# Forks one child for each system call that a scenario makes; the child is killed before the call,
# or after it. What is there afterwards is written down for the test to judge.
ENUMERATE = """
import json, os, shutil, signal, sys, traceback
from pathlib import Path
from asynchooks.checkpoints import CheckpointDirectory, Retention

CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "ftruncate")
path, scenario = Path(sys.argv[1]), sys.argv[2]
# so that rmtree goes through the names below as well: one way for all platforms' calls
assert shutil.rmtree.avoids_symlink_attacks


def die_at(count, when):
    seen = [0]
    def wrap(real):
        def call(*args, **options):
            seen[0] += 1
            if seen[0] == count and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **options)
            finally:
                if seen[0] == count and when == "after":
                    os.kill(os.getpid(), signal.SIGKILL)
        return call
    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def content_of(step, attempt):
    return b"%d.%d" % (step, attempt)


def save(directory, step, attempt):
    def write(prefix):
        Path(prefix).mkdir()
        (Path(prefix) / "data").write_bytes(content_of(step, attempt))
    return directory.save(step, write, extra={"hooks.json": content_of(step, attempt)})


def report(returned, serial):
    os.write(returned, b"%d\\n" % serial)


def run(returned):
    directory = CheckpointDirectory(path / "run", retention=Retention(max_to_keep=1))
    directory.open()
    for attempt, step in enumerate(json.loads(scenario)):
        report(returned, save(directory, step, attempt).serial)
    directory.close()


def child(fn, *args):
    pid = os.fork()
    if pid == 0:
        try:
            fn(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_run(count, when, returned):
    die_at(count, when)
    run(returned)


def look():
    directory = CheckpointDirectory(path / "run")
    newest = directory.newest_intact()
    if newest is None:
        return None
    text = (Path(newest.prefix) / "data").read_bytes()
    assert directory.read_extra(newest, "hooks.json") == text
    return newest.serial, newest.step, text.decode()


def adopted():
    directory = CheckpointDirectory(path / "run")
    directory.open()
    found = look()
    left = sorted(name for name in os.listdir(path / "run") if name.startswith("."))
    next_serial = save(directory, 99, 0).serial
    directory.close()
    return found, left, next_serial


for when in ("before", "after"):
    count = 0
    while True:
        count += 1
        shutil.rmtree(path / "run", ignore_errors=True)
        read, returned = os.pipe()
        code = child(killed_run, count, when, returned)
        os.close(returned)
        serials = [int(line) for line in os.read(read, 4096).split()]
        os.close(read)
        if code == -signal.SIGKILL:
            # `open` itself dies at each of its calls too, and is tried again; after each third
            # kill, as this takes long
            deaths = 0
            if int(sys.argv[3]) and count % 3 == 0:
                for second in range(1, 200):
                    def reopen():
                        die_at(second, when)
                        CheckpointDirectory(path / "run").open()
                    second_code = child(reopen)
                    assert second_code in (0, -signal.SIGKILL), second_code
                    deaths += second_code != 0
                    if second_code == 0:
                        break
            found, left, next_serial = adopted()
            print(json.dumps([when, count, serials, found, left, next_serial, deaths]))
        else:
            assert code == 0, code
            break
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    # one that the retention deletes; a step again, with `open` killed at each of its calls too
    ("scenario", "is_open_killed"),
    [([5, 6], 0), ([5, 5], 1)],
)
def test_killed_at_any_system_call_the_newest_completed_one_is_found(
    tmp_path: Path, scenario: list[int], is_open_killed: int
) -> None:
    lines = run_python(ENUMERATE, tmp_path, json.dumps(scenario), is_open_killed).splitlines()
    outcomes: list[Any] = [json.loads(line) for line in lines]
    assert len(outcomes) > 2 * 20 * len(scenario)  # calls that a save makes
    for when, count, returned, found, left, next_serial, deaths in outcomes:
        where = f"killed {when} call {count}, {deaths} times at open"
        last = max(returned, default=0)
        assert left == [], where
        if found is None:
            assert last == 0, where
            continue
        serial, step, text = found
        assert serial in (last, last + 1), where
        assert (step, text) == (scenario[serial - 1], f"{step}.{serial - 1}"), where
        assert next_serial > serial, where
    adopted = [each for each in outcomes if each[3] and each[3][0] > max(each[2], default=0)]
    assert adopted, "complete, though its save did not return"
    assert bool(is_open_killed) == any(each[6] for each in outcomes)
