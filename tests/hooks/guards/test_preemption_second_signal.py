"""PreemptionHook: a second signal, and the deadline, while hooks close what they hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.faults

PROGRAM = """
import os, signal, sys
import anyio
from asynchooks import *
from asynchooks.metrics import Sink

place, closing, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]


async def close():
    print("closing", flush=True)
    if closing == "hangs":
        await anyio.sleep_forever()
    await anyio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)  # the second one
    await anyio.sleep(0.02)
    print("closed", flush=True)


class Closes(SessionRunHook):
    async def after_close(self, exception):
        await close()


class Slow(Sink):
    def write(self, point):
        pass

    def close(self):
        anyio.run(close)


async def main():
    async def step():
        await anyio.sleep(0.001)
        if session.global_step.value == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 0.5}

    is_sink = closing == "sink"
    other = MetricsHook(Slow(), "loss", every_n_steps=1) if is_sink else Closes()
    hooks = [other, StopAtStepHook(last_step=10**6)]
    deadline = 0.3 if closing == "hangs" else 20
    hooks.insert(place, PreemptionHook(deadline_secs=deadline, same_signal_secs=60))
    session = MonitoredSession(hooks, FunctionSessionCreator(step))
    try:
        async with session:
            while not session.should_stop():
                await session.run([])
    finally:
        print("behind the block", flush=True)


uses_uvloop = backend == "uvloop"
options = {"use_uvloop": True} if uses_uvloop else {}
anyio.run(main, backend="asyncio" if uses_uvloop else backend, backend_options=options)
"""


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    name: str = request.param
    return name


def run(place: int, closing: str, backend: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", PROGRAM, str(place), closing, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("closing", ["hook", "sink"])
@pytest.mark.parametrize("place", [0, 2], ids=["first", "last"])
def test_a_second_signal_while_another_hook_closes_is_the_same(
    place: int, closing: str, backend: str
) -> None:
    expected = 143, ["closing", "closed", "behind the block"]
    assert run(place, closing, backend) == expected


@pytest.mark.parametrize("place", [0, 2], ids=["first", "last"])
def test_an_after_close_that_hangs_is_ended_by_the_deadline(place: int, backend: str) -> None:
    assert run(place, "hangs", backend) == (143, ["closing"])
