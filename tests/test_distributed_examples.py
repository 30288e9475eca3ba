"""The examples on several processes, run as a reader runs them."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.timeout(300), pytest.mark.faults]


def started(script: str) -> subprocess.Popen[str]:
    environment = {key: os.environ[key] for key in os.environ if key != "TF_CONFIG"}
    return subprocess.Popen(
        [sys.executable, f"examples/{script}"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed_by(script: str) -> str:
    process = started(script)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, output + errors
    return output


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(", ")]


def descendants(pid: int) -> set[int]:
    """Processes below this one that run a script or a task of its own."""
    found = set[int]()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child} | descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.tensorflow
def test_digits_are_learnt_by_workers_in_several_processes_around_a_ps() -> None:
    for module in ("tensorflow", "sklearn"):
        pytest.importorskip(module)
    printed = printed_by("distributed_digits.py")
    rows = re.findall(
        r"^worker:(\d) began by the steps \[(.*)\], ran \[(.*)\] steps$", printed, re.M
    )
    assert sorted(row[0] for row in rows) == ["0", "1", "2"], printed
    for process, starts, _ in rows:
        due = [int(100 * math.log(3 * i + int(process) + 1)) for i in range(8)]
        # 0: training ended before it could begin; "None" would be no number
        began = [0 if each == "None" else int(each) for each in starts.split(", ")]
        assert all(start == 0 or start > step for start, step in zip(began, due, strict=True)), (
            printed
        )
    assert sum(sum(numbers(steps)) for _, _, steps in rows) == 2000
    end = re.search(r"^worker:0: final step (\d+), test accuracy ([\d.]+)$", printed, re.M)
    assert end is not None, printed
    assert int(end[1]) == 2000
    assert float(end[2]) >= 0.95


def test_digits_are_learnt_in_several_dask_processes() -> None:
    for module in ("distributed", "sklearn"):
        pytest.importorskip(module)
    printed = printed_by("distributed_digits_dask.py")
    rows = re.findall(r"^process (\d): its sessions ran \[(.*)\] steps$", printed, re.M)
    assert [int(number) for number, _ in rows] == [0, 1, 2]
    assert [len(numbers(row)) for _, row in rows] == [4, 4, 4]
    end = re.search(r"^final step 2000, test accuracy ([\d.]+)$", printed, re.M)
    assert end is not None, printed
    assert float(end[1]) >= 0.95


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it looks into /proc")
@pytest.mark.parametrize(
    ("script", "module", "num_processes"),
    [
        pytest.param("distributed_digits.py", "tensorflow", 4, marks=pytest.mark.tensorflow),
        ("distributed_digits_dask.py", "distributed", 3),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_script(
    script: str, module: str, num_processes: int, number: signal.Signals
) -> None:
    pytest.importorskip(module)
    process, found = started(script), set[int]()
    try:
        deadline = time.monotonic() + 100
        while len(found) < num_processes:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
            found = descendants(process.pid)
        process.send_signal(number)
        process.communicate(timeout=100)
        while any(map(is_running, found)):
            assert time.monotonic() < deadline + 100, found
            time.sleep(0.1)
    finally:
        process.kill()
        for pid in filter(is_running, found):
            os.kill(pid, signal.SIGKILL)
