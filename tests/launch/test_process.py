"""The guard kills what it knows of, and a process's end is seen while its pipes are open."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import anyio
import pytest

from asynchooks._engine.current import now
from asynchooks.launch._cluster import Task
from asynchooks.launch._process import Guard, Process, adopted_orphans

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the launcher's own


def started(guard: Guard, code: str) -> Process:
    """Once it has written its first byte."""
    command = [sys.executable, "-uc", f"import os, signal, subprocess, sys; {code}"]
    process = guard.start(Task("task", command))
    assert select.select([process.stdout], [], [], 20)[0]
    return process


def ignores_sighup(pid: int) -> bool:
    """Whether the process ignores SIGHUP within some seconds: it may still be starting."""
    deadline = now() + 20
    while now() < deadline:
        ignored = Path(f"/proc/{pid}/status").read_text().split("SigIgn:")[1].split()[0]
        if int(ignored, 16) & 1 << signal.SIGHUP - 1:
            return True
        time.sleep(0.01)
    return False


async def ended(process: Process) -> int:
    with anyio.fail_after(20):
        status = await process.wait()
        await process.clear(10)
    process.close()
    return status


async def test_a_guard_that_ends_kills_what_was_not_forgotten() -> None:
    guard = Guard()
    known, forgotten = (started(guard, "print(1); signal.pause()") for _ in range(2))
    guard.forget(forgotten)
    guard.close()
    assert await ended(known) == -signal.SIGKILL
    forgotten.signal(signal.SIGUSR1)
    assert await ended(forgotten) == -signal.SIGUSR1


async def test_a_variable_that_the_user_has_set_overrides_a_tasks_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GIVEN", "by the user")
    guard = Guard()
    names = "[os.environ['GIVEN'], os.environ['OTHER']]"
    code = f"import os, sys; sys.exit({names} != ['by the user', 'by default'])"
    defaults = {"GIVEN": "by default", "OTHER": "by default"}
    process = guard.start(Task("task", [sys.executable, "-c", code], {}, defaults))
    assert await ended(process) == 0
    guard.close()


async def test_a_guard_ignores_signals() -> None:
    guard = Guard()
    process = started(guard, "print(1); signal.pause()")
    assert ignores_sighup(guard._popen.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        guard._popen.send_signal(number)
    guard.close()
    assert guard._popen.returncode == 0
    assert await ended(process) == -signal.SIGKILL


async def test_an_end_is_seen_though_a_child_holds_the_pipes() -> None:
    guard = Guard()
    process = started(guard, "subprocess.Popen(['sleep', '60']); print(1); os._exit(3)")
    with anyio.fail_after(20):
        assert await process.wait() == 3
        with adopted_orphans():
            await process.clear(10)
        assert await process.read(process.stdout) == b"1\n"
        assert await process.read(process.stdout) == b""
    process.close()
    guard.close()
    process.signal(signal.SIGKILL)  # its id may be reused: no process gets this


async def test_children_that_a_process_left_get_sigterm_first() -> None:
    guard = Guard()
    child = "trap 'echo SIGTERM; exit' TERM; echo 1; while :; do sleep 0.02; done"
    process = started(guard, f"subprocess.Popen(['sh', '-c', {child!r}]); signal.pause()")
    os.kill(process.pid, signal.SIGKILL)
    with anyio.fail_after(20), adopted_orphans():
        assert await process.wait() == -signal.SIGKILL
        await process.clear(10)
    assert await process.read(process.stdout) == b"1\nSIGTERM\n"
    process.close()
    guard.close()


async def test_processes_of_a_background_job_get_sigint() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        guard = Guard()
        process = started(guard, "os.write(1, repr(signal.getsignal(2)).encode())")
    finally:
        signal.signal(signal.SIGINT, before)
    assert await process.read(process.stdout) == repr(signal.default_int_handler).encode()
    assert await ended(process) == 0
    guard.close()


@pytest.mark.skipif(sys.platform != "linux", reason="others look now and then anyway")
async def test_an_end_is_seen_on_a_kernel_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    guard = Guard()
    assert await ended(started(guard, "print(1); sys.exit(4)")) == 4
    guard.close()
