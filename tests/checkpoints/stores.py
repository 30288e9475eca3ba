"""What the tests of checkpoints share: writers, open directories, other processes."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asynchooks.checkpoints import Checkpoint, CheckpointDirectory, Retention

REPOSITORY = Path(__file__).parents[2]


def writer(content: bytes = b"weights") -> Callable[[str], None]:
    """Write a file at the prefix, one beside it, and a directory with an empty file."""

    def write(prefix: str) -> None:
        Path(prefix).write_bytes(content)
        Path(f"{prefix}.index").write_bytes(b"index of " + content)
        Path(f"{prefix}.parts").mkdir()
        (Path(f"{prefix}.parts") / "empty").touch()

    return write


@contextmanager
def opened(
    path: Path, basename: str = "model.ckpt", retention: Retention | None = None
) -> Iterator[CheckpointDirectory]:
    directory = CheckpointDirectory(path, basename, retention)
    directory.open()
    try:
        yield directory
    finally:
        directory.close()


def save(path: Path, *steps: int, **options: Any) -> list[Checkpoint]:
    with opened(path, retention=Retention(max_to_keep=None)) as directory:
        return [directory.save(step, writer(b"step %d" % step), **options) for step in steps]


def leaves(state: Any) -> Any:
    """Something that is equal only for equal states; of PyTorch's, too."""
    if isinstance(state, dict):
        return {key: leaves(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return [leaves(each) for each in state]
    return (type(state), state.tolist() if hasattr(state, "tolist") else state)


def steps_in(path: Path) -> list[int]:
    return [each.step for each in CheckpointDirectory(path).checkpoints()]


def newest_step(path: Path) -> int:
    newest = CheckpointDirectory(path).newest_intact()
    assert newest is not None
    return newest.step


def names_in(path: Path) -> list[str]:
    return sorted(each for each in os.listdir(path) if each != "lock")


def rewrite(path: Path, **changes: object) -> None:
    """Change a manifest, or with None leave something out, such that its checksum is right."""
    content = json.loads(path.read_bytes()) | changes
    for name in [name for name, value in changes.items() if value is None]:
        del content[name]
    content.pop("checksum")
    encoded = json.dumps(content, indent=1, sort_keys=True).encode()
    content["checksum"] = hashlib.sha256(encoded).hexdigest()
    path.write_bytes(json.dumps(content, indent=1, sort_keys=True).encode())


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket may have some 100 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def run_python(code: str, *args: object, namespace: str = "") -> str:
    """Run code in a fresh process, perhaps in a mount namespace of its own; return its output."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(
        [*namespace.split(), *command], capture_output=True, text=True, cwd=REPOSITORY, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# `report` prints the checkpoint's error that a call raises
PRELUDE = """
import os, subprocess, sys
from pathlib import Path
from typing import Any
from asynchooks import CheckpointError
from asynchooks.checkpoints import CheckpointDirectory, Retention

def report(fn, *args):
    try:
        fn(*args)
    except CheckpointError as error:
        print(type(error).__name__, error, "|", repr(error.__cause__))
    else:
        print("done")

def write(prefix):
    Path(prefix).write_bytes(b"w" * 300_000)

path = Path(sys.argv[1])
"""


def run(code: str, path: Path, namespace: str = "") -> list[str]:
    """Run code in a fresh process, with the names above; return the lines that it prints."""
    return run_python(PRELUDE + textwrap.dedent(code), path, namespace=namespace).splitlines()


def mount_namespace() -> str:
    """The command that gives a process its own mounts; skips where that is not allowed."""
    flags = "-m" if os.geteuid() == 0 else "-Umr"
    command = f"unshare {flags}"
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("there is no unshare here")
    probe = [*command.split(), "sh", "-c", "mount -t tmpfs none /mnt"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("mounts are not allowed here")
    return command
