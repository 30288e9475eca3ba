"""PreemptionHook where only a process of its own can tell: forks, its deadline, reports of tasks.

In forked children signals do what they did before the hook.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ...support.loops import LOOPS

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes"),
]

PRELUDE = """
import multiprocessing, os, signal, sys, time
import anyio
from asynchooks import *

fork = multiprocessing.get_context("fork")
TERM = signal.SIGTERM


def run(step, hooks=None, last_step=1, name="inline"):
    hooks = [PreemptionHook()] if hooks is None else hooks

    async def main():
        hooks_and_limit = [*hooks, StopAtStepHook(last_step=last_step)]
        async with MonitoredSession(hooks_and_limit, step, step_runner=name) as session:
            while not session.should_stop():
                await session.run([])

    backend, options = "asyncio", {"use_uvloop": loop == "uvloop"}
    if loop == "trio":
        backend, options = "trio", {}
    anyio.run(main, backend=backend, backend_options=options)


def play(program):
    global loop
    for loop in sys.argv[1:]:
        try:
            program()
        except (SystemExit, KeyboardInterrupt) as left:
            print(loop, type(left).__name__, *left.args, flush=True)
"""


def loops() -> list[str]:
    return [each for each in LOOPS if each != "uvloop" or find_spec("uvloop")]


def output_of(program: str, *arguments: str, code: int = 0) -> tuple[list[str], list[str]]:
    """The lines of standard output and standard error, of a program that ends so."""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


FORKS = """
import warnings
warnings.filterwarnings("ignore", message=".*fork.*")


def busy():
    while True:
        time.sleep(0.05)


def sent(number, child=busy):
    # how a forked child ends that gets the signal at once
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(7)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def looks_what_a_signal_wakes():
    os._exit(3 if signal.set_wakeup_fd(-1) == -1 else 4)


def tell(fact, found):
    print(f"{fact}: {found}", flush=True)


def alone():
    tell("terminated at once", sorted({sent(n) for n in [TERM, signal.SIGUSR1] * 5}))
    found = sent(signal.SIGCONT, looks_what_a_signal_wakes)
    tell("a signal wakes no event loop of the parent", found)
    below = signal.getsignal(TERM)
    signal.signal(TERM, lambda number, frame: below(number, frame))
    tell("a handler over the hook's", sent(TERM, lambda: signal.raise_signal(TERM)))
    signal.signal(TERM, below)
    return {}


def of_two_hooks():
    tell("two hooks", sent(TERM))
    return {}


def beside_own_handlers():
    tell("the program's own handler", sent(signal.SIGUSR1))
    tell("the program ignores it", sent(TERM, lambda: time.sleep(0.05)))
    return {}


def of_multiprocessing():
    child = fork.Process(target=busy)
    child.start()
    child.terminate()
    child.join()
    tell("joined", child.exitcode)
    fork.Process(target=busy, daemon=True).start()  # the end of the program terminates it
    with fork.Pool(2) as pool:
        pool.apply_async(busy)
    return {}


def signals_itself():
    os.kill(os.getpid(), TERM)
    return {}


def whose_child_trains():
    child = fork.Process(target=run, args=(signals_itself, None, 10**6))
    child.start()
    child.join()
    tell("a child that trains", child.exitcode)
    return {}


def of_a_signal_later():
    sent(TERM)
    tell("the parent then blocks", signal.pthread_sigmask(signal.SIG_BLOCK, []))
    return signals_itself()


def program():
    run(alone)
    run(of_two_hooks, [PreemptionHook(), PreemptionHook()])
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(5))
    signal.signal(TERM, signal.SIG_IGN)
    run(beside_own_handlers)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(TERM, signal.SIG_DFL)
    run(of_multiprocessing)
    run(of_multiprocessing, name="thread")
    run(whose_child_trains, name="thread")
    run(of_a_signal_later, last_step=10**6)


play(program)
"""

FOUND = {
    "terminated at once: [-15, -10]",
    "a signal wakes no event loop of the parent: 3",
    "a handler over the hook's: -15",
    "two hooks: -15",
    "the program's own handler: 5",
    "the program ignores it: 7",
    "joined: -15",
    "a child that trains: 143",
    "the parent then blocks: set()",
}


def test_signals_do_in_forked_children_what_they_did_and_the_parent_ends_in_order() -> None:
    printed, _ = output_of(FORKS, *loops())
    assert set(printed) == FOUND | {f"{loop} SystemExit 143" for loop in loops()}
    assert printed.count("joined: -15") == 2 * len(loops()), "from a thread, too"


HANGS = """
class Closes(SessionRunHook):
    async def after_close(self, exception):
        print("closing", flush=True)
        await anyio.sleep_forever()


def step():
    os.kill(os.getpid(), TERM)
    return {}


play(lambda: run(step, [PreemptionHook(deadline_secs=0.3), Closes()], last_step=10**6))
print("behind the block", flush=True)
"""


def test_an_after_close_that_hangs_is_ended_by_the_deadline() -> None:
    assert output_of(HANGS, "trio", code=143)[0] == ["closing"]


GROUPS = """
import asyncio, gc, itertools

async def train():
    async with MonitoredSession([PreemptionHook()], lambda: dict(loss=0.0)) as session:
        signal.raise_signal(number)
        await session.or_stop(anyio.sleep_forever)

async def main():
    async with make_group() as group:
        start = getattr(group, "start_soon", None)
        for fn in (train, anyio.sleep_forever):
            start(fn) if start else group.create_task(fn())

for make_group in (asyncio.TaskGroup, anyio.create_task_group):
    for number in (signal.SIGTERM, signal.SIGINT):
        play(lambda: anyio.run(main, backend_options=dict(use_uvloop=loop == "uvloop")))
        gc.collect()
"""


def test_a_signal_leaves_asyncios_task_groups_without_a_report_of_tasks() -> None:
    names = loops()[:-1]
    printed, logged = output_of(GROUPS, *names)
    left = [
        [f"{loop} {name}" for loop in names] for name in ("SystemExit 143", "KeyboardInterrupt")
    ]
    assert printed == [*left[0], *left[1]] * 2
    assert [line.partition(":")[0] for line in logged] == [
        name for _ in range(2) for name in ("SIGTERM", "SIGINT") for _ in names
    ]
