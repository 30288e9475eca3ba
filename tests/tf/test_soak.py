"""The soak in small, on TensorFlow's graphs: a new one for each session.

It counts what a whole process holds, so it has a process of its own: run as a program, this file is
that process.
"""

import gc
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from ..soak import open_tensorflow, openings
from ..support.afterwards import nothing_left

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.faults


def test_openings_leave_nothing_and_add_up_to_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "asyncio\ntrio\n"


async def main() -> None:
    open_one = open_tensorflow()
    for _ in range(2):  # TensorFlow starts its pools of threads, and keeps them
        await open_one()
    gc.collect()
    gc.freeze()  # else most of the time goes into counting what TensorFlow holds
    async with nothing_left():
        readings = await openings(10, open_one)
    half, whole = readings[-3], readings[-1]
    assert whole.ours <= half.ours
    assert (whole.descriptors, whole.tasks) == (half.descriptors, half.tasks)


if __name__ == "__main__":
    for backend in ("asyncio", "trio"):
        anyio.run(main, backend=backend)
        print(backend, flush=True)
