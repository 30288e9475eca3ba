"""Runs the launcher as users do, with scripts that print what happens."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asynchooks._engine.current import now

with_and_without_waitid = pytest.mark.parametrize(
    "launch", ["with waitid", "without waitid"], indirect=True
)
"""As on Linux, and as on macOS before Python 3.13."""
AS_ON_MACOS = """
import os, sys
from asynchooks import cli
from asynchooks.launch import _launcher
del os.waitid
sys.platform = "darwin"
sys.exit(cli.main(sys.argv[1:]))
"""
WITHOUT_WAITID = [sys.executable, "-c", AS_ON_MACOS, "launch"]
LAUNCH = [sys.executable, "-m", "asynchooks", "launch"]
START = """
import json, os, signal, subprocess, sys, time

task = json.loads(os.environ["TF_CONFIG"])["task"]
name = "{type}:{index}".format(**task)

def on(number, answer):
    signal.signal(number, lambda *_: answer())

def idle():
    print(f"pid {os.getpid()}")  # in one piece: it may be ended at any moment
    while True:
        signal.pause()

def say(what):
    print(what, time.monotonic_ns())
"""
"""Before each script: a ps that has nothing to do may leave, as those of these scripts do."""


def is_gone(pid: int) -> bool:
    """Whether there is no such process, not even a zombie, within some seconds."""
    deadline = now() + 10
    while now() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


class Launched:
    """A launcher that runs; a test makes it by the fixture, which ends it."""

    def __init__(self, directory: Path, script: str, options: str, *arguments: str) -> None:
        path = directory / "script.py"
        path.write_text(START + script)
        self._errors = directory / "stderr"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*LAUNCH, *options.split(), str(path), *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        self._stdout = self.process.stdout
        self._seen: list[bytes] = []

    def read_until(self, *wanted: str) -> None:
        """Read lines until each of these has come, in whatever order."""
        missing = {text.encode() for text in wanted}
        while missing:
            line = self._stdout.readline()
            assert line, f"{missing} did not come: {b''.join(self._seen)!r}, {self.errors()}"
            self._seen.append(line)
            missing = {text for text in missing if text not in line}

    def numbers(self, word: str) -> dict[str, int]:
        """By task, what a process printed after this word."""
        found = {}
        for line in self._seen:
            name, _, rest = line.decode().partition(" | ")
            first, _, number = rest.partition(" ")
            if first == word:
                found[name.strip()] = int(number)
        return found

    def errors(self) -> str:
        return self._errors.read_text()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Its exit code, when it has ended; all lines are read."""
        self._seen += self._stdout.readlines()
        return self.process.wait(20)

    @property
    def printed(self) -> bytes:
        return b"".join(self._seen)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self._stdout.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
