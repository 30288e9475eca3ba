"""A run that is killed anywhere loses no checkpoint whose save returned.

Killed is the process, not the machine: what a power cut adds, `test_writing` holds as an order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .stores import names_in, newest_step, opened, run_python, save

pytestmark = pytest.mark.faults

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
    directory = CheckpointDirectory(path / "run", retention=Retention(max_to_keep=2))
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
            # `open` itself dies at each of its calls too, and is tried again
            deaths = 0
            if int(sys.argv[3]):
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


@pytest.mark.parametrize(
    # a step again, and one that the retention deletes; then `open` killed at each of its calls too
    ("scenario", "is_open_killed"),
    [([5, 6, 5, 7], 0), ([5, 5], 1)],
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


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 300_000])
def test_killed_while_the_saver_writes_the_older_one_is_found(
    tmp_path: Path, num_bytes: int
) -> None:
    save(tmp_path, 1)
    code = f"""
    import os, signal, sys
    from asynchooks.checkpoints import CheckpointDirectory
    directory = CheckpointDirectory(sys.argv[1])
    directory.open()

    def write(prefix):
        with open(prefix, "wb") as file:
            file.write(bytes({num_bytes}))
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    if not (pid := os.fork()):
        directory.save(2, write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    """
    run_python(code, tmp_path)
    assert names_in(tmp_path) == [".new-model.ckpt-2-2", "model.ckpt-1"]
    assert newest_step(tmp_path) == 1
    with opened(tmp_path):
        assert names_in(tmp_path) == ["model.ckpt-1"]
