"""The exit of a process, whose threads may still be within TensorFlow."""

import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.faults

# Which threads are left alone is private: no public name leaves one that ends at a known moment.
PROGRAM = """
import asyncio
import threading
import time
import tensorflow as tf
from asynchooks import MonitoredTrainingSession, StopAtStepHook
from asynchooks._engine.threads import WorkThread

async def main():
    server = tf.distribute.Server.create_local_server()
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        train_op = tf.compat.v1.assign_add(step, 1)
        session = MonitoredTrainingSession(server.target, hooks=[StopAtStepHook(9)])
    await session.open()
    return session, await session.run(train_op)

session, step = asyncio.run(main())
print("step", step)

def leave_alone(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    WorkThread.left_alone.add(thread)

def end():
    time.sleep(0.2)
    print("ended", flush=True)

leave_alone(end)
leave_alone(threading.Event().wait)
"""


def test_the_end_waits_for_threads_though_not_for_ever_and_an_open_session_does_not_abort() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "step 1\nended\n"), ended.stderr
