"""ProgressHook in a real terminal, in a notebook's kernel, and across a fork."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.jupyter import run_with_kernels
from .terminals import screen

pytestmark = pytest.mark.faults

ENV = {
    **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm",
    "PYTHONIOENCODING": "utf-8",
}  # fmt: skip

PROGRAM = """
import asyncio, logging, sys
import asynchooks as ah

logging.basicConfig(format="LOG %(message)s", level=logging.INFO)  # before the bar is there
BACKEND, NUM_STEPS = sys.argv[1], int(sys.argv[2])


async def step():
    await anyio.sleep(0.01)
    return {"loss": 0.5}


async def main():
    hooks = [ah.StopAtStepHook(NUM_STEPS), ah.ProgressHook("loss"), ah.StepCounterHook(20)]
    async with ah.MonitoredSession(hooks, ah.FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run([])
            if session.global_step.value == 50:
                print("half way", flush=True)
                if NUM_STEPS > 100:
                    await anyio.sleep_forever()


import anyio

anyio.run(main, backend=BACKEND)
print("after it")
"""


def in_terminal(*argv: str, on_output: Callable[[int, str], None] | None = None) -> tuple[int, str]:
    """Run a program in a terminal of its own; returns how it ended, and all that it wrote.

    Args:
        on_output: called with the process and all that it has written so far.
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *argv], env=ENV, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        written = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the program has closed its side
                break
            if not data:
                break
            written += data
            if on_output is not None:
                on_output(process.pid, written.decode(errors="replace"))
        os.close(ours)
    return process.returncode, written.decode()


def test_lines_stay_above_the_bar_which_ends_as_one_line() -> None:
    returned, written = in_terminal("-c", PROGRAM, "trio", "100")
    assert returned == 0, written
    assert re.search(r"training .*━.* \d+/100 [\d.]+ steps/s .* left .*loss 0\.5", written)
    shown = screen(written)
    logged = [line for line in shown if re.fullmatch(r"LOG global_step/sec: [\d.]+", line)]
    assert (len(logged), len(shown)) == (4, 8), shown
    assert "half way" in shown[2:4]
    assert re.fullmatch(r"done at step 100 of 100 in [\d.]+ s · .* loss 0\.5", shown[-3])
    assert shown[-2:] == ["after it", ""]


def test_an_interrupted_program_leaves_a_terminal_that_works() -> None:
    interrupted: list[int] = []

    def interrupt(pid: int, written: str) -> None:
        if "half way" in written and not interrupted:
            interrupted.append(pid)
            os.kill(pid, signal.SIGINT)

    returned, written = in_terminal("-c", PROGRAM, "asyncio", "100000", on_output=interrupt)
    assert returned not in (0, None)
    shown = screen(written)
    (last,) = (line for line in shown if re.match("cancelled at step 50 of 100,000 in ", line))
    assert shown[shown.index(last) + 1].startswith("Traceback")
    assert shown[-2] == "KeyboardInterrupt"


def test_a_terminal_that_takes_nothing_holds_up_neither_training_nor_the_exit() -> None:
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("level=logging.INFO", "level=60"), "trio", "60"],
            env=ENV, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
        os.close(ours)
    assert (done.returncode, done.stdout) == (0, "half way\nafter it\n")


FORKS_AND_LEAVES = """
import asyncio, os, signal, sys
import asynchooks as ah


async def open_session(num_steps):
    is_shown = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, is_shown.set)
    creator = ah.FunctionSessionCreator(lambda: {"loss": 0.5})
    hooks = [ah.ProgressHook("loss"), ah.StopAtStepHook(9)]
    session = await ah.MonitoredSession(hooks, creator).open()
    for _ in range(num_steps):
        await session.run([])
    await is_shown.wait()
    return session


async def forks():
    session = await open_session(1)
    assert type(sys.stdout).__name__ == "FileProxy"
    pid = os.fork()
    if not pid:
        assert type(sys.stdout).__name__ != "FileProxy"
        print("in the fork", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    await session.close()


async def leaves_it_open():
    global session
    session = await open_session(2)


asyncio.run(forks())
assert type(sys.stdout).__name__ != "FileProxy"
asyncio.run(leaves_it_open())
"""


def test_a_fork_writes_to_the_terminal_itself_and_an_exit_takes_away_the_bar_that_was_left() -> (
    None
):
    awaited = ["1/9", "2/9"]  # of one session after the other

    def tell_what_is_shown(pid: int, written: str) -> None:
        if awaited and awaited[0] in written:
            awaited.pop(0)
            os.kill(pid, signal.SIGUSR1)

    program = "-W", "ignore", "-c", FORKS_AND_LEAVES
    returned, written = in_terminal(*program, on_output=tell_what_is_shown)
    assert returned == 0, written
    assert "in the fork" in written
    left = written.rpartition("done at")[2]
    assert "2/9" in left
    assert [line for line in screen(left) if "training" in line] == []


CELLS = """
import sys
import nbclient
import nbformat

train = '''
import asyncio
import asynchooks as ah

async def step():
    await asyncio.sleep(0.002)
    return {"loss": 0.5}

hooks = [ah.StopAtStepHook(last_step=300), ah.ProgressHook("loss", name="<mine>")]
session = await ah.MonitoredSession(hooks, ah.FunctionSessionCreator(step)).open()

async def train():
    while not session.should_stop():
        await session.run([])
    await session.close()

task = asyncio.create_task(train())
'''
notebook = nbformat.v4.new_notebook()
notebook.cells = [nbformat.v4.new_code_cell(train), nbformat.v4.new_code_cell("await task")]
updates = []


class Client(nbclient.NotebookClient):
    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "update_display_data":
            updates.append(msg["content"]["data"])
        return super().process_message(msg, cell, cell_index)


Client(notebook, timeout=60, kernel_name="python3").execute()
assert notebook.cells[1].outputs == [], notebook.cells[1].outputs
(output,) = notebook.cells[0].outputs
assert any("<progress max=" in each["text/html"] for each in updates), updates
print(output["data"]["text/html"])
print(output["data"]["text/plain"])
"""


def test_a_notebook_has_one_output_that_is_updated_while_other_cells_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    printed = run_with_kernels(CELLS, home=tmp_path, monkeypatch=monkeypatch)
    html, plain = printed.splitlines()
    assert re.fullmatch(r"<div>&lt;mine&gt;: done at step 300 of 300 in .* loss 0\.5</div>", html)
    assert re.fullmatch(r"<mine>: done at step 300 of 300 in .* · loss 0\.5", plain)


def test_without_rich_a_terminal_gets_lines_and_one_hint() -> None:
    without = f"import sys; sys.modules['rich.console'] = None\n{PROGRAM}"
    returned, written = in_terminal("-c", without, "asyncio", "60")
    assert returned == 0, written
    hint = "pip install 'asynchooks[progress]' for a progress bar here"
    assert written.splitlines().count(hint) == 1
    assert "done at step 60 of 60" in written
    assert "\x1b" not in written
