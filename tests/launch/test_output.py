"""Lines of all processes come whole, once, and behind the name of their task."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks._engine.current import now
from asynchooks.launch import _output
from asynchooks.launch._output import Lines

from .conftest import Launch
from .launched import LAUNCH, START, is_gone

pytestmark = pytest.mark.faults

needs_rich = pytest.mark.skipif(find_spec("rich") is None, reason="it colours and draws")
WORKER = 'if task["type"] == "ps": sys.exit()\n'


def test_each_process_gets_its_task(launch: Launch) -> None:
    launched = launch(
        'print(json.dumps([name, os.environ["TF_CONFIG"]]))',
        "--ps 2 --workers 3 --workers-per-process 8",
    )
    assert launched.end() == 0
    assert launched.errors() == ""
    configs = {}
    for line in launched.printed.decode().splitlines():
        prefix, _, rest = line.partition(" | ")
        name, config = json.loads(rest)
        assert prefix.strip() == name
        configs[name] = json.loads(config)
    assert sorted(configs) == ["ps:0", "ps:1", "worker:0", "worker:1", "worker:2"]
    cluster = configs["ps:0"]["cluster"]
    assert {kind: len(addresses) for kind, addresses in cluster.items()} == {"ps": 2, "worker": 3}
    assert len({*cluster["ps"], *cluster["worker"]}) == 5
    assert all(each.startswith("127.0.0.1:") for each in cluster["ps"] + cluster["worker"])
    for name, config in configs.items():
        kind, _, index = name.partition(":")
        assert config == {
            "cluster": cluster,
            "task": {"type": kind, "index": int(index)},
            "workers_per_process": 8,
        }


def test_arguments_after_the_script_belong_to_the_script(launch: Launch) -> None:
    arguments = ["--steps", "3", "--help", "--", "--ps", "a b"]
    launched = launch(WORKER + "print(sys.argv[1:])", "", *arguments)
    assert launched.end() == 0
    assert launched.printed.decode() == f"worker:0 | {arguments}\n"


def test_prefixes_are_aligned_and_stderr_is_merged(launch: Launch) -> None:
    launched = launch("print('out'); print('err', file=sys.stderr)")
    assert launched.end() == 0
    lines = launched.printed.splitlines()
    names = [b"ps:0     | ", b"worker:0 | "]
    assert sorted(lines) == sorted(name + what for name in names for what in (b"err", b"out"))


def test_a_last_line_without_its_end_gets_one(launch: Launch) -> None:
    launched = launch(WORKER + "sys.stdout.write('a\\n\\nb'); sys.stderr.write('c')")
    assert launched.end() == 0
    lines = launched.printed.decode().splitlines()
    assert sorted(lines) == [f"worker:0 | {each}" for each in ("", "a", "b", "c")]


def test_bytes_that_are_not_text_are_unchanged(launch: Launch) -> None:
    launched = launch(WORKER + "sys.stdout.buffer.write(bytes(range(256)) * 3)")
    assert launched.end() == 0
    expected = (bytes(range(256)) * 3 + b"\n").replace(b"\n", b"\nworker:0 | ")
    assert b"worker:0 | " + expected == launched.printed + b"worker:0 | "


def test_huge_lines_of_two_processes_do_not_mix(launch: Launch) -> None:
    script = "print(str(task['index']) * 3_000_000); print('short', 'x' * 200_000)"
    launched = launch(WORKER + script, "--workers 2")
    assert launched.end() == 0
    lines = sorted(launched.printed.decode().splitlines())
    short = "short " + "x" * 200_000
    long = [str(index) * 3_000_000 for index in range(2)]
    assert lines == [f"worker:{i} | {text}" for i in range(2) for text in (long[i], short)]


def test_ten_megabytes_come_whole_in_some_seconds(launch: Launch) -> None:
    start = now()
    launched = launch(WORKER + "for i in range(100_000): print(f'{i:0100}')")
    assert launched.end() == 0
    assert now() - start < 15
    expected = "".join(f"worker:0 | {i:0100}\n" for i in range(100_000))
    assert launched.printed.decode() == expected


def test_a_line_that_is_read_after_the_end_of_its_process_comes_whole(launch: Launch) -> None:
    launched = launch(WORKER + "print('pid', os.getpid()); print('x' * 150_000)")
    launched.read_until("pid ")
    assert is_gone(launched.numbers("pid")["worker:0"])
    time.sleep(1.0)  # longer than one write is waited for at the end
    assert launched.end() == 0
    assert b"x" * 150_000 + b"\n" in launched.printed


def test_a_line_comes_while_its_process_runs(launch: Launch) -> None:
    launched = launch(WORKER + "idle()")
    launched.read_until("pid ")
    assert launched.process.poll() is None


def test_a_child_in_a_session_of_its_own_holds_nothing_up(launch: Launch) -> None:
    launched = launch(
        WORKER + "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print('pid', child.pid)"
    )
    try:
        assert launched.end() == 0
    finally:
        os.kill(launched.numbers("pid")["worker:0"], signal.SIGKILL)


def test_without_a_reader_all_end_and_the_exit_code_is_1(launch: Launch) -> None:
    launched = launch(WORKER + "print('pid', os.getpid())\nwhile True: print('x' * 1000)")
    launched.read_until("pid ")
    launched._stdout.close()
    assert launched.process.wait(20) == 1
    (line,) = launched.errors().splitlines()
    assert line.startswith("asynchooks launch: error: stdout cannot be written to (")
    assert is_gone(launched.numbers("pid")["worker:0"])


def test_ctrl_c_twice_ends_a_launcher_whose_lines_are_not_read(launch: Launch) -> None:
    script = "signal.signal(2, signal.SIG_IGN); print('pid', os.getpid())\nprint('x' * 10**7)"
    launched = launch(WORKER + script + "\nidle()")
    launched.read_until("pid ")
    launched.interrupt()
    while "SIGINT" not in launched.errors():
        assert launched.process.poll() is None
    time.sleep(1.1)  # longer than signals count as the same
    launched.interrupt()
    assert launched.process.wait(20) == 130
    assert is_gone(launched.numbers("pid")["worker:0"])


@given(st.lists(st.lists(st.sampled_from([b"\n", b"a", b"\r", b"\xff"])).map(b"".join)))
def test_pieces_become_whole_lines(pieces: list[bytes]) -> None:
    lines = Lines()
    whole = [lines.add(piece) for piece in pieces]
    assert all(each.endswith(b"\n") for each in whole if each)
    data = b"".join(pieces)
    shown = b"".join(whole)
    assert shown == data[: data.rfind(b"\n") + 1], "nothing waits that is whole"
    end = lines.end()
    assert shown + end == data + (b"" if not data or data.endswith(b"\n") else b"\n")
    assert lines.end() == b""


def test_a_line_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "LONGEST_LINE", 10)
    lines = Lines()
    assert lines.add(b"a\n" + b"b" * 10) == b"a\n"
    assert lines.add(b"b") == b"b" * 11 + b"\n"
    assert lines.add(b"c\n") == b"c\n"


OWN_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """The launcher on a terminal of its own, as a shell would run it."""

    def __init__(self, directory: Path, script: str, is_piped: bool = False) -> None:
        path = directory / "script.py"
        path.write_text(START + script)
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *LAUNCH, str(path)],
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


@needs_rich
def test_ctrl_c_of_a_terminal_reaches_each_worker_once(tmp_path: Path) -> None:
    script = "on(signal.SIGINT, lambda: print('SIGINT') or sys.exit())\nidle()"
    with closing(Terminal(tmp_path, script)) as terminal:
        terminal.read_until(rb"ps:0     \| .*pid \d+\x1b")
        terminal.read_until(rb"worker:0 \| .*pid \d+\x1b")
        terminal.type(b"\x03")
        assert terminal.end() == 130
    assert [line for line in terminal.lines if line.endswith("| SIGINT")] == ["worker:0 | SIGINT"]
    assert terminal.lines[-1] == "asynchooks launch: interrupted"
    pids = [int(line.rpartition(" ")[2]) for line in terminal.lines if "| pid" in line]
    assert all(is_gone(pid) for pid in pids)


@needs_rich
def test_prefixes_are_coloured_and_progress_shows_the_last_step(tmp_path: Path) -> None:
    script = "if name == 'ps:0': sys.exit()\nprint('loss 0.5, global_step: 1234')\nidle()"
    with closing(Terminal(tmp_path, script)) as terminal:
        terminal.read_until(rb"1 of 2 processes, \d+ s, step 1234 was printed last")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
    assert re.search(rb"\x1b\[\d+mworker:0 \| \x1b\[0m", terminal.shown)
    assert "worker:0 | loss 0.5, global_step: 1234" in terminal.lines
    assert not [line for line in terminal.lines if "processes" in line], "progress does not stay"


@needs_rich
def test_a_failure_is_the_last_that_a_terminal_shows(tmp_path: Path) -> None:
    with closing(
        Terminal(tmp_path, "if name == 'ps:0': idle()\nsys.exit('the cause')")
    ) as terminal:
        assert terminal.end() == 1
    assert re.match(r"asynchooks launch: error: worker:0 .* ended so:", terminal.lines[-2])
    assert terminal.lines[-1] == "the cause"


@needs_rich
def test_lines_for_a_pipe_have_no_colour_though_stderr_is_a_terminal(tmp_path: Path) -> None:
    with closing(Terminal(tmp_path, "print('step', 7)", is_piped=True)) as terminal:
        assert terminal.process.stdout is not None
        lines = terminal.process.stdout.readlines()
        assert terminal.end() == 0
    assert sorted(lines) == [b"ps:0     | step 7\n", b"worker:0 | step 7\n"]
    assert b"of 2 processes" in terminal.shown
