"""How soon TensorFlow's own GlobalStepWaiterHook answers, which sleeps between two looks.

It uses nothing of asynchooks.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

NUM_SAMPLES, NUM_STEPS, STEP_SECS = 16, 300, 0.01


def answer_secs() -> list[float]:
    """Seconds from the step to the answer, each of a waiter in a thread of its own.

    Each waiter has its own MonitoredSession, beside one that trains, on one in-process server.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.logging.set_verbosity(v1.logging.ERROR)
    reached: dict[int, float] = {}
    answered: dict[int, float] = {}
    looking = threading.Barrier(NUM_SAMPLES + 1)

    class Answer(v1.train.SessionRunHook):  # type: ignore[misc,name-defined]
        def __init__(self, step: int) -> None:
            self._step = step

        def before_run(self, run_context: Any) -> None:
            answered.setdefault(self._step, time.perf_counter())

    graph = tf.Graph()
    with graph.as_default():
        counted = v1.assign_add(v1.train.create_global_step(), 1)
        v1.train.GlobalStepWaiterHook(1).begin()  # makes its op before the graph is finalized
        scaffold = v1.train.Scaffold().finalize()
    server = v1.train.Server.create_local_server()

    def wait(step: int) -> None:
        hooks = [v1.train.GlobalStepWaiterHook(step), Answer(step)]
        creator = v1.train.WorkerSessionCreator(scaffold, master=server.target)
        with graph.as_default(), v1.train.MonitoredSession(creator, hooks) as session:
            looking.wait(timeout=20)
            session.run(counted)

    # spread over time, so that no step falls on a fixed place between two looks
    steps = random.Random(0).sample(range(NUM_STEPS // 2, NUM_STEPS), NUM_SAMPLES)
    threads = [threading.Thread(target=wait, args=(step,), daemon=True) for step in steps]
    chief = v1.train.ChiefSessionCreator(scaffold, master=server.target)
    with graph.as_default(), v1.train.MonitoredSession(chief) as session:
        for thread in threads:
            thread.start()
        looking.wait(timeout=20)
        for _ in range(NUM_STEPS):
            step = int(session.run(counted))
            for each in steps:
                if each <= step:
                    reached.setdefault(each, time.perf_counter())
            time.sleep(STEP_SECS)
        for thread in threads:
            thread.join()
    return [answered[step] - reached[step] for step in steps]
