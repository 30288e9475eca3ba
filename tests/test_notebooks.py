"""Notebooks as they are stored, which test_site runs, and a kernel that is interrupted."""

import json
from pathlib import Path

import pytest

from .support.jupyter import run_with_kernels

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_three_notebooks_are_stored_without_outputs() -> None:
    assert [each.stem for each in NOTEBOOKS] == ["first-steps", "live-training", "virtual-time"]
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert notebook["nbformat"] == 4
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
        assert all(each["outputs"] == [] and each["execution_count"] is None for each in cells)
        lines = [line.rstrip("\n") for each in cells for line in each["source"]]
        assert max(map(len, lines)) <= 84


INTERRUPT = """
import sys
from jupyter_client import KernelManager

manager = KernelManager(kernel_name="python3")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)


def finish(request):
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"]["msg_id"] == request:
            return reply["content"]


def run(code):
    content = finish(client.execute(code))
    assert content["status"] == "ok", content
    return content


try:
    run(SETUP)
    request = client.execute(TRAINS, stop_on_error=False)  # else the next one may be aborted
    while True:  # until the cell prints that it trains
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and "trains" in message["content"]["text"]:
            break
    manager.interrupt_kernel()
    content = finish(request)
    assert content["status"] == "error", content
    assert content["ename"] in ("CancelledError", "KeyboardInterrupt"), content
    run(AFTERWARDS)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""
SETUP = """
import asyncio
import numpy as np
from asynchooks import *

model = {"weights": np.zeros(1)}
history = HistoryHook("weight", every_n_steps=1)

async def step():
    await asyncio.sleep(0.001)
    model["weights"] += 1
    return {"weight": float(model["weights"][0])}

def new_session():
    saver = CheckpointSaverHook("saved", save_steps=10, saver=StateDictSaver(model=model))
    return MonitoredSession([history, saver], FunctionSessionCreator(step))
"""
TRAINS = """
session = new_session()
async with session:
    while not session.should_stop():
        await session.run([])
        if session.global_step.value == 25:
            print("it trains", flush=True)
"""
AFTERWARDS = """
status = session.status()
assert status.phase == "closed", status
assert status.step >= 25
reached = status.step // 10 * 10
async with new_session() as session:
    assert session.global_step.value == reached, (session.global_step.value, status)
    assert model["weights"][0] == reached
    await session.run([])
    assert [row["step"] for row in history.rows] == list(range(1, reached + 2))
"""


@pytest.mark.faults
def test_an_interrupted_cell_closes_its_session_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("jupyter_client")
    cells = f"SETUP, TRAINS, AFTERWARDS = {(SETUP, TRAINS, AFTERWARDS)!r}\n"
    run_with_kernels(cells + INTERRUPT, home=tmp_path, monkeypatch=monkeypatch)
