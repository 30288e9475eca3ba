"""What a save of 200 MB takes from the steps beside it, ours and TensorFlow's.

    python -m tests.benchmarks saving

A step computes for some milliseconds without Python's lock. It does not measure how long a save
itself takes, which is the disk's matter.
"""

import bisect
import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    MonitoredSession,
    StateDictSaver,
)

from ._report import is_installed

NUM_SAVES, STEPS_BETWEEN, NUM_ARRAYS, SIZE = 5, 400, 10, 5_000_000  # 10 arrays of 20 MB
OFTEN: Any = {"save_steps": STEPS_BETWEEN, "background": True}

BLOCK = bytes(8_000_000)
SLOWER = "steps beside the background write of 200 MB take longer by, "
PAUSE = "pause between two steps for a save of 200 MB, ms, "


class Times(CheckpointSaverListener):
    """When steps were done, and when saves began and were complete; seconds."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.saves: list[list[float]] = []

    async def before_save(self, session: Any, global_step_value: int) -> None:
        self.saves.append([time.perf_counter()])

    async def after_save(self, session: Any, global_step_value: int) -> None:
        self.saves[-1].append(time.perf_counter())

    def note_step(self) -> None:
        self.steps.append(time.perf_counter())

    @property
    def complete(self) -> list[list[float]]:
        return [each for each in self.saves if len(each) == 2]

    def figures(self, kind: str) -> dict[str, str]:
        """By which part steps beside a save take longer, and the pause."""
        gaps = [b - a for a, b in itertools.pairwise(self.steps)]
        usual, longer, pauses = statistics.median(gaps), list[float](), list[float]()
        for begin, end in self.complete:
            if not self.steps[0] < begin < end < self.steps[-1]:
                continue
            low, high = (bisect.bisect(self.steps, each) for each in (begin, end))
            pauses.append(gaps[low - 1] - usual)  # while the model is copied, or written
            if high - low > 1:
                longer.append(statistics.mean(gaps[low : high - 1]) / usual - 1)
        slower = f"{100 * statistics.median(longer):.1f} %" if longer else "none run"
        return {SLOWER + kind: slower, PAUSE + kind: f"{1e3 * statistics.median(pauses):.0f}"}


def digest() -> dict[str, Any]:
    """A step without Python's lock, as on a device."""
    return {"digest": hashlib.sha256(BLOCK).digest()}


def saver_of(fill: Any) -> StateDictSaver:
    """Of 200 MB, float32, that a function of their number makes."""
    return StateDictSaver(arrays={f"a{i}": fill(SIZE) for i in range(NUM_ARRAYS)})


async def train(session: MonitoredSession, fetches: Any, times: Times) -> None:
    async with session:
        while len(times.complete) <= NUM_SAVES:
            await session.run(fetches)
            times.note_step()


async def of_function(directory: str, times: Times) -> None:
    import numpy as np

    saver = saver_of(lambda size: np.ones(size, np.float32))
    hook = CheckpointSaverHook(directory, saver=saver, listeners=[times], **OFTEN)
    session = MonitoredSession([hook], digest, step_runner="thread")
    await train(session, "digest", times)


def large_model() -> tuple[Any, Any, Any, Any]:
    """A graph with 200 MB of variables, its op of one step, a saver, and a configuration."""
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        for i in range(NUM_ARRAYS):
            v1.get_variable(f"a{i}", (SIZE,), initializer=v1.ones_initializer)
        # an op of one thread: others take both cores, and there is nothing beside them
        image = v1.get_variable("i", (700, 700, 1), tf.uint8, v1.ones_initializer)
        noise = tf.cast(tf.range(700 * 700) * 7919 % 251, tf.uint8)
        length = tf.strings.length(tf.io.encode_png(image + tf.reshape(noise, (700, 700, 1))))
        is_empty = tf.cast(tf.equal(length, 0), tf.int64)  # so that it is computed
        train_op = v1.assign_add(step, 1 + is_empty).op
        saver = v1.train.Saver()
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    return graph, train_op, saver, config


async def of_graph(directory: str, times: Times) -> None:
    from asynchooks import ChiefSessionCreator

    graph, train_op, saver, config = large_model()
    hook = CheckpointSaverHook(
        directory, saver=saver, listeners=[times], save_graph_def=False, **OFTEN
    )
    with graph.as_default():
        creator = ChiefSessionCreator(config=config)
        session = MonitoredSession([hook], creator, step_runner="thread")
    await train(session, train_op, times)


async def of_tensorflow(directory: str, times: Times) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    graph, train_op, saver, config = large_model()

    class Theirs(v1.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
        def before_save(self, session: Any, global_step_value: int) -> None:
            times.saves.append([time.perf_counter()])

        def after_save(self, session: Any, global_step_value: int) -> None:
            times.saves[-1].append(time.perf_counter())

    hook = v1.train.CheckpointSaverHook(
        directory, save_steps=STEPS_BETWEEN, saver=saver, listeners=[Theirs()],
        save_graph_def=False,
    )  # fmt: skip
    with graph.as_default():
        creator = v1.train.ChiefSessionCreator(config=config)
        with v1.train.MonitoredSession(creator, hooks=[hook]) as session:
            while len(times.saves) <= NUM_SAVES:
                session.run(train_op)
                times.note_step()


TRAININGS: dict[str, Callable[[str, Times], Awaitable[None]]] = {
    "function session": of_function,
    "graph session": of_graph,
    "TensorFlow's CheckpointSaverHook": of_tensorflow,
}


async def figures(loop: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, training in TRAININGS.items():
        if training is of_function or is_installed("tensorflow"):
            times = Times()
            with tempfile.TemporaryDirectory() as directory:
                await training(directory, times)
            found |= times.figures(kind)
    return found
