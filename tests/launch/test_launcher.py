"""All processes end in order, after a failure, or at a signal; no process is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from asynchooks.launch._cluster import Cluster, Task
from asynchooks.launch._launcher import launch as launch_cluster

from .conftest import Launch
from .launched import Launched, is_gone, with_and_without_waitid

pytestmark = pytest.mark.faults


@with_and_without_waitid
def test_a_run_succeeds_when_all_processes_exit_with_0(launch: Launch) -> None:
    launched = launch("print('done')", "--ps 2 --workers 2")
    assert launched.end() == 0
    assert launched.errors() == ""


def test_a_ps_may_end_early(launch: Launch, fifo: str) -> None:
    launched = launch(
        "print('pid', os.getpid())\nif task['type'] == 'worker': print(open(sys.argv[1]).read())",
        "",
        fifo,
    )
    launched.read_until("ps:0     | pid", "worker:0 | pid")
    assert is_gone(launched.numbers("pid")["ps:0"]), "and is no zombie"
    Path(fifo).write_text("go on")
    assert launched.end() == 0
    assert launched.printed.endswith(b"worker:0 | go on\n")


@with_and_without_waitid
@pytest.mark.parametrize("failing", ["ps:1", "worker:1"])
def test_the_first_failure_ends_all_and_gives_its_exit_code(launch: Launch, failing: str) -> None:
    launched = launch(
        f"if name == '{failing}': sys.stdin.read(); print('last'); raise SystemExit(3)\nidle()",
        "--ps 2 --workers 2",
    )
    assert launched.end() == 3
    pattern = f"asynchooks launch: error: {failing} \\(process \\d+\\) ended with exit code 3; "
    assert re.fullmatch(f"{pattern}it wrote nothing to stderr\n", launched.errors())
    assert f"{failing:<8} | last".encode() in launched.printed
    assert all(is_gone(pid) for pid in launched.numbers("pid").values())


def test_the_traceback_comes_last_below_the_noise_of_others(launch: Launch, fifo: str) -> None:
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
        fifo,
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


@with_and_without_waitid
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_a_signal_killed_is_a_failure(launch: Launch, number: int) -> None:
    launched = launch(f"if task['index']: os.kill(os.getpid(), {number:d})\nidle()", "--workers 2")
    assert launched.end() == 128 + number
    assert f") ended with signal {signal.Signals(number).name}; " in launched.errors()


def test_of_two_failures_at_once_one_is_reported_with_its_code(launch: Launch, fifo: str) -> None:
    launched = launch(
        "if name == 'ps:0': sys.exit()\n"
        "open(sys.argv[1], 'rw'[task['index']]).close()  # both wait for the other\n"
        "sys.exit(7 + task['index'])",
        "--workers 2",
        fifo,
    )
    code = launched.end()
    assert code in (7, 8)
    (line,) = launched.errors().splitlines()
    assert line.startswith(f"asynchooks launch: error: worker:{code - 7} ")


def test_a_failure_that_the_first_one_causes_is_not_reported(launch: Launch, fifo: str) -> None:
    launched = launch(
        "on(signal.SIGTERM, lambda: sys.exit(print('SIGTERM') or 5))\n"
        "if name == 'worker:0': open(sys.argv[1], 'w').close(); idle()\n"
        "if name == 'worker:1': open(sys.argv[1]).read(); sys.exit(4)",
        "--workers 2",
        fifo,
    )
    assert launched.end() == 4
    assert b"worker:0 | SIGTERM\n" in launched.printed
    assert "worker:1" in launched.errors()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(
    launch: Launch, fifo: str
) -> None:
    launched = launch(
        "if name == 'worker:0': open(sys.argv[1]).read(); sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').close()\n"
        "idle()",
        "--grace 0.3",
        fifo,
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
    scripts = {"first": first, "other": other}
    tasks = [[Task(name, [sys.executable, "-uc", code])] for name, code in scripts.items()]
    return Cluster(tasks, linger_secs)


REPORTS_ITS_END = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("SIGTERM") or 5))
open(FIFO, "w").close()
signal.pause()
"""
READS, OPENS = "open(FIFO).read()", "import os; os.open(FIFO, os.O_WRONLY)"
FAILS = "import sys; open(FIFO).read(); sys.exit('lost')"
LOST = "with exit code 1; its stderr ended so:\nlost\n"


@pytest.mark.parametrize(
    ("first", "other", "linger_secs", "code", "line", "error"),
    [
        (READS, REPORTS_ITS_END, 0, 0, "SIGTERM", ""),
        (OPENS, "print(open(FIFO).read(), 1)", 30, 0, " 1", ""),
        (OPENS, FAILS, 30, 1, "lost", LOST),
    ],
    ids=["they get SIGTERM", "they may end by themselves before", "one fails meanwhile"],
)
def test_the_others_end_when_the_first_stage_has_ended(
    capfd: pytest.CaptureFixture[str], fifo: str,
    first: str, other: str, linger_secs: float, code: int, line: str, error: str,
) -> None:  # fmt: skip
    first, other = (text.replace("FIFO", repr(fifo)) for text in (first, other))
    assert launch_cluster(cluster(first, other, linger_secs), 10, "launch") == code
    printed, errors = capfd.readouterr()
    assert printed == f"other | {line}\n"
    assert errors.endswith(error)
    assert bool(errors) == bool(error)


def test_a_process_that_cannot_be_started_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    too_long = Task("other", [sys.executable, "-c", "x" * 10**7])
    waits = Task("first", [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(OSError, match=r"^other could not be started \(\[Errno 7\] "):
        launch_cluster(Cluster([[too_long], [waits]]), 10, "launch")
    assert capfd.readouterr() == ("", "")


REPORTS = """
def end():
    say("got")
    if name == "worker:1":
        subprocess.run(["sleep", "0.2"])  # its end is what the ps waits for
    say("ends")
    sys.exit(task["index"])

on(signal.SIGINT, end if name != "ps:0" else lambda: say("SIGINT"))
on(signal.SIGTERM, end)
idle()
"""
ALL = [f"{name:<8} | pid" for name in ("ps:0", "worker:0", "worker:1")]


@with_and_without_waitid
def test_at_ctrl_c_the_workers_end_and_then_the_ps(launch: Launch) -> None:
    launched = launch(REPORTS, "--workers 2")
    launched.read_until(*ALL)
    launched.interrupt()
    assert launched.end() == 130
    got, ends = launched.numbers("got"), launched.numbers("ends")
    assert sorted(got) == sorted(ends)
    assert sorted(got) == ["ps:0", "worker:0", "worker:1"]
    assert launched.printed.count(b"got") == 3, "once each"
    assert got["ps:0"] > max(ends["worker:0"], ends["worker:1"])
    assert b"SIGINT" not in launched.printed
    assert launched.errors().splitlines() == [
        "asynchooks launch: SIGINT; all end in order, another one after 1 s kills them",
        "asynchooks launch: interrupted",
    ]
    assert all(is_gone(pid) for pid in launched.numbers("pid").values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_do_the_same(launch: Launch, number: signal.Signals) -> None:
    launched = launch("on(signal.SIGHUP, lambda: sys.exit(0))\n" + REPORTS, "--workers 2")
    launched.read_until(*ALL)
    launched.interrupt(number)
    assert launched.end() == 128 + number
    assert launched.errors().splitlines()[-1] == f"asynchooks launch: ended by {number.name}"
    if number is signal.SIGTERM:
        got, ends = launched.numbers("got"), launched.numbers("ends")
        assert got["ps:0"] > max(ends["worker:0"], ends["worker:1"])


DEAF = "signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); idle()"


def wait_for_error(launched: Launched, text: str) -> None:
    while text not in launched.errors():
        assert launched.process.poll() is None


def test_a_second_ctrl_c_kills_all_at_once(launch: Launch) -> None:
    launched = launch(DEAF, "--workers 2 --grace 1000")
    launched.read_until(*ALL)
    launched.interrupt()
    wait_for_error(launched, "SIGINT")
    launched.interrupt()
    launched.interrupt(signal.SIGTERM)
    time.sleep(1.1)  # longer than signals count as the same
    assert launched.process.poll() is None
    launched.interrupt()
    assert launched.end() == 130
    assert all(is_gone(pid) for pid in launched.numbers("pid").values())
    assert launched.errors().endswith("\nasynchooks launch: interrupted\n")


def test_workers_that_ignore_ctrl_c_are_killed_after_the_grace_period(launch: Launch) -> None:
    launched = launch(DEAF, "--workers 2 --grace 0.2")
    launched.read_until(*ALL)
    launched.interrupt()
    assert launched.end() == 130
    assert launched.errors().splitlines()[1:] == [
        "asynchooks launch: worker:0, worker:1: not ended 0.2 s after SIGINT; killed",
        "asynchooks launch: ps:0: not ended 0.2 s after SIGTERM; killed",
        "asynchooks launch: interrupted",
    ]


def test_ctrl_c_while_a_failure_ends_all_kills_them_and_the_failure_is_reported(
    launch: Launch, fifo: str
) -> None:
    launched = launch(
        "if name == 'ps:0': sys.exit()\n"
        "if name == 'worker:1': open(sys.argv[1]).read(); sys.exit('the cause')\n"
        "on(signal.SIGTERM, lambda: print('not yet'))\n"
        "open(sys.argv[1], 'w').close()\n"
        "idle()",
        "--workers 2 --grace 1000",
        fifo,
    )
    launched.read_until("worker:0 | not yet", "worker:1 | the cause")
    time.sleep(1.1)
    launched.interrupt()
    assert launched.end() == 1
    assert launched.errors().endswith(" with exit code 1; its stderr ended so:\nthe cause\n")


SAVES_FOR_LONG = """
import anyio
from asynchooks import CheckpointSaverHook, FunctionSessionCreator, MonitoredSession, PreemptionHook
from asynchooks.testing import RecordingHook

class Saver:
    def save(self, path):
        time.sleep(0.5 if count else 0.0)
        open(path, "w").write(str(count))

    def restore(self, path):
        raise NotImplementedError

count = 0

def step():
    global count
    count += 1
    return {}

async def train():
    hooks = [PreemptionHook(), CheckpointSaverHook(sys.argv[1], save_steps=10**9, saver=Saver())]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        await session.run([])
        print(f"pid {os.getpid()}")
        await session.global_step.wait_for(10**9)

if name == "worker:0":
    anyio.run(train)
else:
    idle()
"""


@pytest.mark.parametrize("is_launcher_first", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_checkpoint_is_saved_when_all_processes_of_a_group_get_the_signal(
    launch: Launch, tmp_path: Path, number: signal.Signals, is_launcher_first: bool
) -> None:
    """As a service manager or a batch system does; the launcher sends it to the workers again."""
    launched = launch(SAVES_FOR_LONG, "--workers 2", str(tmp_path / "saved"))
    launched.read_until(*ALL)
    processes = list(launched.numbers("pid").values())
    pids = [launched.process.pid, *processes] if is_launcher_first else processes
    for pid in pids:
        os.kill(pid, number)
    if not is_launcher_first:
        time.sleep(0.1)  # the workers without a hook have ended by then
        launched.interrupt(number)
    assert launched.end() == 128 + number
    assert (tmp_path / "saved" / "model.ckpt-1" / "model.ckpt-1").read_text() == "1"
    assert all(is_gone(pid) for pid in processes)
    is_ctrl_c = number is signal.SIGINT
    last = "interrupted" if is_ctrl_c else f"ended by {number.name}"
    assert launched.errors().splitlines()[-1] == f"asynchooks launch: {last}"
