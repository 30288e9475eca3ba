"""The exit of a process, whose threads may still be within TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tensorflow, pytest.mark.faults]

PROGRAM = """
import threading
from asynchooks.tf._threads import TensorFlowThreads

class Owner:
    def __init__(self):
        self.closed = threading.Event()
        TensorFlowThreads.start(self.serve, "a thread", self)

    def close(self):
        self.closed.set()

    def serve(self):
        self.closed.wait()
        TensorFlowThreads.start(lambda: print("ended", flush=True), "the next")

owner = Owner()
TensorFlowThreads.start(threading.Event().wait, "one that never ends")
"""


def test_the_end_closes_what_is_open_and_waits_for_threads_though_not_for_ever() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "ended\n")
