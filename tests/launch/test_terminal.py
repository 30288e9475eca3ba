"""On a terminal prefixes are coloured, and a line shows the progress of the run."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .launched import LAUNCH, START, is_gone

pytestmark = pytest.mark.faults

pytest.importorskip("rich")

OWN_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """The launcher on a terminal of its own, as a shell would run it."""

    def __init__(self, script: Path, is_piped: bool = False) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *LAUNCH, str(script)],
            stdin=theirs,
            stdout=subprocess.PIPE if is_piped else theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self.shown = b""

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, pattern: bytes) -> None:
        while not re.search(pattern, self.shown):
            assert select.select([self._ours], [], [], 20)[0], self.shown
            self.shown += os.read(self._ours, 4096)

    def end(self) -> int:
        while True:
            try:
                self.shown += os.read(self._ours, 4096)
            except OSError:  # on Linux the end of a terminal
                return self.process.wait(20)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self._ours)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def lines(self) -> list[str]:
        """What stays on the screen."""
        text = re.sub(rb"[^\n]*\r\x1b\[2K", b"", self.shown)
        return re.sub(rb"\x1b\[[\d;]*m|\r", b"", text).decode().splitlines()


def written(directory: Path, script: str) -> Path:
    path = directory / "script.py"
    path.write_text(START + script)
    return path


def test_ctrl_c_of_a_terminal_reaches_each_worker_once(tmp_path: Path) -> None:
    script = written(tmp_path, "on(signal.SIGINT, lambda: print('SIGINT') or sys.exit())\nidle()")
    terminal = Terminal(script)
    try:
        terminal.read_until(rb"ps:0     \| .*pid \d+\x1b")
        terminal.read_until(rb"worker:0 \| .*pid \d+\x1b")
        terminal.type(b"\x03")
        assert terminal.end() == 130
    finally:
        terminal.close()
    assert [line for line in terminal.lines if line.endswith("| SIGINT")] == ["worker:0 | SIGINT"]
    assert terminal.lines[-1] == "asynchooks launch: interrupted"
    pids = [int(line.rpartition(" ")[2]) for line in terminal.lines if "| pid" in line]
    assert all(is_gone(pid) for pid in pids)


def test_prefixes_are_coloured_and_progress_shows_the_last_step(tmp_path: Path) -> None:
    script = "if name == 'ps:0': sys.exit()\nprint('loss 0.5, global_step: 1234')\nidle()"
    terminal = Terminal(written(tmp_path, script))
    try:
        terminal.read_until(rb"1 of 2 processes, \d+ s, step 1234 was printed last")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
    finally:
        terminal.close()
    assert re.search(rb"\x1b\[\d+mworker:0 \| \x1b\[0m", terminal.shown)
    assert "worker:0 | loss 0.5, global_step: 1234" in terminal.lines
    assert not [line for line in terminal.lines if "processes" in line], "progress does not stay"


def test_a_failure_is_the_last_that_a_terminal_shows(tmp_path: Path) -> None:
    terminal = Terminal(written(tmp_path, "if name == 'ps:0': idle()\nsys.exit('the cause')"))
    try:
        assert terminal.end() == 1
    finally:
        terminal.close()
    assert re.match(r"asynchooks launch: error: worker:0 .* ended so:", terminal.lines[-2])
    assert terminal.lines[-1] == "the cause"


def test_lines_for_a_pipe_have_no_colour_though_stderr_is_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal(written(tmp_path, "print('step', 7)"), is_piped=True)
    try:
        assert terminal.process.stdout is not None
        lines = terminal.process.stdout.readlines()
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert sorted(lines) == [b"ps:0     | step 7\n", b"worker:0 | step 7\n"]
    assert b"of 2 processes" in terminal.shown
