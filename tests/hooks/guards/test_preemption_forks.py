"""PreemptionHook and forked children: signals do there what they did before the hook."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes"),
]

PRELUDE = """
import multiprocessing, os, signal, sys, time
import anyio
from asynchooks import *

fork = multiprocessing.get_context("fork")


def busy():
    while True:
        time.sleep(0.05)


def sent(number, child=busy):
    \"\"\"How a forked child ends that gets the signal at once.\"\"\"
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(7)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(step, hooks=None, last_step=1, name="inline"):
    hooks = [PreemptionHook()] if hooks is None else hooks

    async def main():
        creator = FunctionSessionCreator(step)
        hooks_and_limit = [*hooks, StopAtStepHook(last_step=last_step)]
        async with MonitoredSession(hooks_and_limit, creator, step_runner=name) as session:
            while not session.should_stop():
                await session.run([])

    uses_uvloop = sys.argv[1] == "uvloop"
    backend, options = ("asyncio", {"use_uvloop": True}) if uses_uvloop else (sys.argv[1], {})
    anyio.run(main, backend=backend, backend_options=options)
"""


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    name: str = request.param
    return name


def output_of(program: str, backend: str, code: int = 0) -> list[str]:
    command = [sys.executable, "-c", PRELUDE + program, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def test_a_child_that_is_terminated_at_once_ends_by_the_signal(backend: str) -> None:
    program = """
def step():
    print({sent(number) for number in [signal.SIGTERM, signal.SIGUSR1] * 10})
    return {}

run(step)
"""
    assert output_of(program, backend) in (["{-15, -10}"], ["{-10, -15}"])


def test_children_that_are_terminated_end_so_joins_pools_and_the_program_do(backend: str) -> None:
    program = """
def step():
    child = fork.Process(target=busy)
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode)
    fork.Process(target=busy, daemon=True).start()  # the end of the program terminates it
    with fork.Pool(2) as pool:
        pool.apply_async(busy)
    return {}

run(step, name="inline")
run(step, name="thread")
print("ended", flush=True)
"""
    assert output_of(program, backend) == ["-15", "-15", "ended"]


def test_handlers_of_the_program_are_those_of_a_child_too(backend: str) -> None:
    program = """
signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(5))
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def wait_a_little():
    time.sleep(0.05)

def step():
    print(sent(signal.SIGUSR1), sent(signal.SIGTERM, wait_a_little))
    return {}

run(step)
"""
    assert output_of(program, backend) == ["5 7"]


def test_a_handler_that_was_put_over_the_hooks_passes_on_to_the_one_below(backend: str) -> None:
    program = """
def step():
    below = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: below(number, frame))
    print(sent(signal.SIGTERM, lambda: signal.raise_signal(signal.SIGTERM)))
    signal.signal(signal.SIGTERM, below)
    return {}

run(step)
"""
    assert output_of(program, backend) == ["-15"]


def test_handlers_of_several_hooks_are_all_put_back_in_a_child(backend: str) -> None:
    program = """
def step():
    print(sent(signal.SIGTERM))
    return {}

run(step, [PreemptionHook(), PreemptionHook()])
"""
    assert output_of(program, backend) == ["-15"]


def test_a_signal_in_a_child_wakes_no_event_loop_of_the_parent(backend: str) -> None:
    program = """
def child():
    os._exit(3 if signal.set_wakeup_fd(-1) == -1 else 4)

def step():
    print(sent(signal.SIGCONT, child))
    return {}

run(step)
"""
    assert output_of(program, backend) == ["3"]


def test_the_parent_stops_in_an_orderly_way_after_it_has_forked(backend: str) -> None:
    program = """
def step():
    print(sent(signal.SIGTERM))
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    os.kill(os.getpid(), signal.SIGTERM)
    return {}

try:
    run(step, last_step=10**6)
finally:
    print("the block has ended")
"""
    lines = output_of(program, backend, 143)  # another step may have begun by then
    assert (lines[:2], lines[-1]) == (["-15", "set()"], "the block has ended")


def test_a_child_that_trains_has_a_hook_of_its_own(backend: str) -> None:
    program = """
def train():
    def step():
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    run(step, last_step=10**6)

def step():
    child = fork.Process(target=train)
    child.start()
    child.join()
    print(child.exitcode)
    return {}

run(step, name="thread")
print("the parent goes on")
"""
    assert output_of(program, backend) == ["143", "the parent goes on"]
