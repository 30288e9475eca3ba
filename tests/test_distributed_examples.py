"""The examples on several processes, run by the launcher as a reader runs them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.timeout(300), pytest.mark.faults]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def launched(options: str, script: str, *arguments: str) -> str:
    """What the processes print, each line behind the name of its task."""
    done = run("-m", "asynchooks", "launch", *options.split(), f"examples/{script}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(", ")]


@pytest.mark.tensorflow
def test_digits_are_learnt_by_workers_in_several_processes_around_a_ps() -> None:
    for module in ("tensorflow", "sklearn"):
        pytest.importorskip(module)
    printed = launched("--ps 1 --workers 2 --workers-per-process 4", "distributed_digits.py")
    rows = re.findall(
        r"^worker:(\d) \| began by the steps \[(.*)\], ran \[(.*)\] steps$", printed, re.M
    )
    assert sorted(row[0] for row in rows) == ["0", "1"], printed
    for process, starts, _ in rows:
        due = [int(100 * math.log(2 * i + int(process) + 1)) for i in range(4)]
        assert all(
            start == 0 or start > step for start, step in zip(numbers(starts), due, strict=True)
        ), printed
    assert sum(sum(numbers(steps)) for _, _, steps in rows) == 2000
    end = re.search(r"^worker:0 \| final step (\d+), test accuracy ([\d.]+)$", printed, re.M)
    assert end is not None, printed
    assert int(end[1]) == 2000
    assert float(end[2]) >= 0.95


def test_without_tf_config_the_script_says_how_to_start_it() -> None:
    done = run("examples/distributed_digits.py", TF_CONFIG="")
    assert done.returncode == 1
    assert done.stderr == (
        "there is no TF_CONFIG; on one machine: asynchooks launch --ps 1 --workers 3 "
        "--workers-per-process 8 examples/distributed_digits.py\n"
    )


def test_digits_are_learnt_by_the_launchers_dask_processes() -> None:
    for module in ("distributed", "sklearn"):
        pytest.importorskip(module)
    printed = launched(
        "--engine dask --workers 2 --workers-per-process 4", "distributed_digits_dask.py"
    )
    rows = re.findall(
        r"^script    \| process (\d): its sessions ran \[(.*)\] steps$", printed, re.M
    )
    assert [int(number) for number, _ in rows] == [0, 1]
    assert [len(numbers(row)) for _, row in rows] == [4, 4]
    end = re.search(r"^script    \| final step 2000, test accuracy ([\d.]+)$", printed, re.M)
    assert end is not None, printed
    assert float(end[1]) >= 0.95
    assert " - INFO - " not in printed
