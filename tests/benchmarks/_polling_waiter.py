"""How soon TensorFlow's own GlobalStepWaiterHook answers, which sleeps between two looks.

It uses nothing of asynchooks.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

NUM_SAMPLES, NUM_STEPS, STEP_SECS = 16, 300, 0.01


def answer_secs() -> list[float]:
    """Seconds from the step to the answer, each of a waiter in a thread of its own."""
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.logging.set_verbosity(v1.logging.ERROR)
    # spread over time, so that no step falls on a fixed place between two looks
    steps = random.Random(0).sample(range(NUM_STEPS // 2, NUM_STEPS), NUM_SAMPLES)
    graph, reached = tf.Graph(), [0.0]
    with graph.as_default():
        counted = v1.assign_add(v1.train.create_global_step(), 1)
        hooks = [v1.train.GlobalStepWaiterHook(step) for step in steps]
        for hook in hooks:
            hook.begin()
        initialize = v1.global_variables_initializer()
    with v1.Session(graph=graph) as session, ThreadPoolExecutor(NUM_SAMPLES) as pool:
        session.run(initialize)

        def answered(hook: Any) -> float:
            hook.before_run(SimpleNamespace(session=session))  # as a MonitoredSession calls it
            return time.perf_counter()

        answers = [pool.submit(answered, hook) for hook in hooks]
        for _ in range(NUM_STEPS):
            session.run(counted)
            reached.append(time.perf_counter())
            time.sleep(STEP_SECS)
        return [each.result() - reached[step] for each, step in zip(answers, steps, strict=True)]
