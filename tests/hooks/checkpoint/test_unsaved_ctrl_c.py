"""CheckpointSaverHook at a real Ctrl-C: what is said of the steps that no checkpoint holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ...checkpoints.stores import newest_step

pytestmark = pytest.mark.faults

PROGRAM = """
import os, signal, sys
import anyio
import numpy as np
from asynchooks import *

directory, backend, preempts = sys.argv[1:]
weights, steps = np.zeros(1), []
signal.signal(signal.SIGINT, signal.default_int_handler)


async def step():
    await anyio.sleep(0.001)
    weights[:] += 1.0
    steps.append(weights[0])
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return {}


async def main():
    saver = StateDictSaver(model={"w": weights})
    hooks = [CheckpointSaverHook(directory, save_secs=600, saver=saver)]
    hooks += [PreemptionHook()] * (preempts == "preempts")
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        print("from step", session.global_step.value)
        while not session.should_stop():
            await session.run([])


uses_uvloop = backend == "uvloop"
options = {"use_uvloop": True} if uses_uvloop else {}
try:
    anyio.run(main, backend="asyncio" if uses_uvloop else backend, backend_options=options)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_ctrl_c_says_what_is_not_saved_and_what_saves_it_does(backend: str, tmp_path: Path) -> None:
    if backend == "uvloop":
        pytest.importorskip("uvloop")

    def run(preempts: str) -> tuple[list[str], str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), backend, preempts]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines(), done.stderr

    lines, said = run("")
    assert lines == ["from step 0", "interrupted"]
    assert said.count("\n") == 1
    assert "The newest checkpoint in" in said
    assert "or by a Ctrl-C or signal that a PreemptionHook() handles" in said
    lines, said = run("preempts")
    assert lines == ["from step 0", "interrupted"]
    assert "not saved" not in said
    assert newest_step(tmp_path) > 1
