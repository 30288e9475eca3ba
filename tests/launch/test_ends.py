"""The first failure ends all and is reported last; no process is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from asynchooks.launch._cluster import Cluster, Task
from asynchooks.launch._launcher import launch as launch_cluster

from .conftest import Launch
from .launched import is_gone

pytestmark = pytest.mark.faults


def test_a_run_succeeds_when_all_processes_exit_with_0(launch: Launch) -> None:
    launched = launch("print('done')", "--ps 2 --workers 2")
    assert launched.end() == 0
    assert launched.errors() == ""


def test_a_ps_may_end_early(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    launched = launch(
        "print('pid', os.getpid())\nif task['type'] == 'worker': print(open(sys.argv[1]).read())",
        "",
        str(tmp_path / "fifo"),
    )
    launched.read_until("ps:0     | pid", "worker:0 | pid")
    assert is_gone(launched.numbers("pid")["ps:0"]), "and is no zombie"
    (tmp_path / "fifo").write_text("go on")
    assert launched.end() == 0
    assert launched.printed.endswith(b"worker:0 | go on\n")


@pytest.mark.parametrize("failing", ["ps:1", "worker:1"])
def test_the_first_failure_ends_all_and_gives_its_exit_code(launch: Launch, failing: str) -> None:
    launched = launch(
        f"if name == '{failing}': sys.stdin.read(); print('last'); raise SystemExit(3)\nidle()",
        "--ps 2 --workers 2",
    )
    assert launched.end() == 3
    pattern = f"asynchooks launch: error: {failing} \\(process \\d+\\) ended with exit code 3"
    with pytest.raises(AssertionError, match=f"^{pattern}; it wrote nothing to stderr\n$"):
        raise AssertionError(launched.errors())
    assert f"{failing:<8} | last".encode() in launched.printed
    assert all(is_gone(pid) for pid in launched.numbers("pid").values())


def test_the_traceback_comes_last_below_the_noise_of_others(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    launched = launch(
        "def noise():\n"
        "    for i in range(1000): print('noise', file=sys.stderr)\n"
        "    sys.exit(9)\n"
        "if name == 'worker:0':\n"
        "    on(signal.SIGTERM, noise); open(sys.argv[1], 'w').close(); idle()\n"
        "if name == 'worker:1':\n"
        "    open(sys.argv[1]).read()\n"
        "    for i in range(50): print('before', i, file=sys.stderr)\n"
        "    raise ValueError('the cause')",
        "--workers 2",
        str(tmp_path / "fifo"),
    )
    assert launched.end() == 1
    assert launched.printed.count(b"worker:0 | noise\n") == 1000, "no line is lost"
    lines = launched.errors().splitlines()
    assert "worker:1 (process " in lines[0]
    assert lines[0].endswith(") ended with exit code 1; its stderr ended so:")
    assert lines[-1] == "ValueError: the cause"
    assert "Traceback (most recent call last):" in lines
    assert len(lines) == 41
    assert "noise" not in lines


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_a_signal_killed_is_a_failure(launch: Launch, number: int) -> None:
    launched = launch(f"if task['index']: os.kill(os.getpid(), {number:d})\nidle()", "--workers 2")
    assert launched.end() == 128 + number
    assert f") ended with signal {signal.Signals(number).name}; " in launched.errors()


def test_of_two_failures_at_once_one_is_reported_with_its_code(
    launch: Launch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    launched = launch(
        "if name == 'ps:0': sys.exit()\n"
        "open(sys.argv[1], 'rw'[task['index']]).close()  # both wait for the other\n"
        "sys.exit(7 + task['index'])",
        "--workers 2",
        str(tmp_path / "fifo"),
    )
    code = launched.end()
    assert code in (7, 8)
    (line,) = launched.errors().splitlines()
    assert line.startswith(f"asynchooks launch: error: worker:{code - 7} ")


def test_a_failure_that_the_first_one_causes_is_not_reported(
    launch: Launch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    launched = launch(
        "on(signal.SIGTERM, lambda: sys.exit(print('SIGTERM') or 5))\n"
        "if name == 'worker:0': open(sys.argv[1], 'w').close(); idle()\n"
        "if name == 'worker:1': open(sys.argv[1]).read(); sys.exit(4)",
        "--workers 2",
        str(tmp_path / "fifo"),
    )
    assert launched.end() == 4
    assert b"worker:0 | SIGTERM\n" in launched.printed
    assert "worker:1" in launched.errors()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(
    launch: Launch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    launched = launch(
        "if name == 'worker:0': open(sys.argv[1]).read(); sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').close()\n"
        "idle()",
        "--grace 0.3",
        str(tmp_path / "fifo"),
    )
    assert launched.end() == 4
    first, last = launched.errors().splitlines()
    assert first == "asynchooks launch: ps:0: not ended 0.3 s after SIGTERM; killed"
    assert "worker:0" in last
    assert is_gone(launched.numbers("pid")["ps:0"])


CHILD = """
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); "
child = subprocess.Popen([sys.executable, "-c", deaf + "time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
print("pid", child.pid)
"""


@pytest.mark.parametrize("code", [0, 6])
def test_children_that_a_process_left_end_too(launch: Launch, code: int) -> None:
    launched = launch(f"if name == 'ps:0': sys.exit()\n{CHILD}os._exit({code})", "--grace 0.2")
    assert launched.end() == code
    assert is_gone(launched.numbers("pid")["worker:0"])


def test_nothing_stays_behind_when_the_launcher_is_killed(launch: Launch) -> None:
    launched = launch(f"{CHILD}print('own', os.getpid()); idle()", "--workers 2")
    launched.read_until(*(f"{name:<8} | own" for name in ("ps:0", "worker:0", "worker:1")))
    launched.process.kill()
    launched.end()
    pids = [*launched.numbers("own").values(), *launched.numbers("pid").values()]
    assert len(pids) == 6
    assert all(is_gone(pid) for pid in pids)


def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(
    launch: Launch, tmp_path: Path
) -> None:
    launched = launch("idle()", "--workers 20")
    launched.read_until("pid")
    launched.process.kill()
    launched.end()
    assert all(is_gone(pid) for pid in launched.numbers("pid").values())
    script = str(tmp_path / "script.py").encode()
    found = [each for each in Path("/proc").glob("[0-9]*/cmdline") if script in _text(each)]
    assert all(is_gone(int(each.parent.name)) for each in found)


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def cluster(first: str, other: str, linger_secs: float) -> Cluster:
    commands = [[sys.executable, "-uc", code] for code in (first, other)]
    first_task, other_task = Task("first", commands[0]), Task("other", commands[1])
    return Cluster([[first_task], [other_task]], linger_secs)


REPORTS_ITS_END = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("SIGTERM") or 5))
open({fifo!r}, "w").close()
signal.pause()
"""


def test_the_others_get_sigterm_when_the_first_stage_has_ended(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    first = f"open({fifo!r}).read()"
    assert launch_cluster(cluster(first, REPORTS_ITS_END.format(fifo=fifo), 0), 10, "launch") == 0
    assert capfd.readouterr() == ("other | SIGTERM\n", "")


def test_the_others_may_end_by_themselves_before(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    first, other = f"import os; os.open({fifo!r}, os.O_WRONLY)", f"print(open({fifo!r}).read(), 1)"
    assert launch_cluster(cluster(first, other, 30), 10, "launch") == 0
    assert capfd.readouterr() == ("other |  1\n", "")


def test_one_that_fails_meanwhile_is_a_failure(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    first = f"import os; os.open({fifo!r}, os.O_WRONLY)"
    other = f"import sys; open({fifo!r}).read(); sys.exit('lost')"
    assert launch_cluster(cluster(first, other, 30), 10, "launch") == 1
    printed, errors = capfd.readouterr()
    assert printed == "other | lost\n"
    assert errors.endswith(" ended with exit code 1; its stderr ended so:\nlost\n")


def test_a_process_that_cannot_be_started_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    too_long = Task("other", [sys.executable, "-c", "x" * 10**7])
    waits = Task("first", [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(OSError, match=r"^other could not be started \(\[Errno 7\] "):
        launch_cluster(Cluster([[too_long], [waits]]), 10, "launch")
    assert capfd.readouterr() == ("", "")
