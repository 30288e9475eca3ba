"""The exit of a process, whose threads may still be within TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tensorflow, pytest.mark.faults]

PROGRAM = """
import threading
from asynchooks.tf._threads import TensorFlowThread

class Owner:
    def __init__(self):
        self.closed = threading.Event()
        TensorFlowThread.close_at_exit(self)
        TensorFlowThread(self.serve, "a thread")

    def close(self):
        self.closed.set()

    def serve(self):
        self.closed.wait()
        TensorFlowThread(lambda: print("ended", flush=True), "the next")

owner = Owner()
TensorFlowThread(threading.Event().wait, "one that never ends")
"""


def test_the_end_closes_what_is_open_and_waits_for_threads_though_not_for_ever() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "ended\n")
