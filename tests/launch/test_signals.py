"""Signals to the launcher end all in order; a second one ends all at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import Launch
from .launched import Launched, is_gone

pytestmark = pytest.mark.faults

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
    launch: Launch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    launched = launch(
        "if name == 'ps:0': sys.exit()\n"
        "if name == 'worker:1': open(sys.argv[1]).read(); sys.exit('the cause')\n"
        "on(signal.SIGTERM, lambda: print('not yet'))\n"
        "open(sys.argv[1], 'w').close()\n"
        "idle()",
        "--workers 2 --grace 1000",
        str(tmp_path / "fifo"),
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
