"""What a save of 200 MB takes from the steps beside it, ours and TensorFlow's.

    python -m tests.benchmarks.saving

A step computes for some milliseconds without Python's lock. It does not measure how long a save
itself takes, which is the disk's matter.
"""

from __future__ import annotations

import bisect
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    StateDictSaver,
)

from ._report import Measure, Row, print_rows, rows_of, run_on

NUM_SAVES, STEPS_BETWEEN, NUM_ARRAYS, SIZE = 5, 400, 10, 5_000_000  # 10 arrays of 20 MB

SLOWER = "steps beside the background write of 200 MB take longer by, function session"
SLOWER_GRAPH = "the same, graph session"
SLOWER_THEIRS = "the same, TensorFlow's CheckpointSaverHook"
PAUSE = "pause between two steps for a save of 200 MB, ms, function session"
PAUSE_GRAPH = "the same pause, graph session"
PAUSE_THEIRS = "the same pause, TensorFlow's CheckpointSaverHook"
MEASURES = [
    Measure(SLOWER, bar="< 10 %"),
    Measure(SLOWER_GRAPH, bar="< 10 %", peer="tensorflow"),
    Measure(SLOWER_THEIRS, peer="tensorflow"),
    Measure(PAUSE),
    Measure(PAUSE_GRAPH, peer="tensorflow"),
    Measure(PAUSE_THEIRS, peer="tensorflow"),
]


@dataclass
class Times:
    """When steps were done, and when saves began and were complete; seconds."""

    steps: list[float] = field(default_factory=list)
    saves: list[list[float]] = field(default_factory=list)

    def before_save(self) -> None:
        self.saves.append([time.perf_counter()])

    def after_save(self) -> None:
        self.saves[-1].append(time.perf_counter())

    def figures(self) -> tuple[float | None, float]:
        """By which part steps beside a save take longer (None: there are none), and the pause."""
        gaps = [b - a for a, b in itertools.pairwise(self.steps)]
        beside = [gap for at, gap in zip(self.steps, gaps, strict=False) if not self._in_save(at)]
        usual = statistics.median(beside)
        complete = [each for each in self.saves if len(each) == 2]
        first, last = self.steps[0], self.steps[-1]
        longer, pauses = [], []
        for begin, end in complete:
            if not first < begin < end < last:
                continue
            low, high = (bisect.bisect(self.steps, each) for each in (begin, end))
            pauses.append(gaps[low - 1] - usual)  # while the model is copied, or written
            if high - low > 1:
                longer.append(statistics.mean(gaps[low : high - 1]) / usual - 1)
        return statistics.median(longer) if longer else None, statistics.median(pauses)

    def _in_save(self, at: float) -> bool:
        return any(begin - 0.05 <= at <= end for begin, end in self.saves)


class Listener(CheckpointSaverListener):
    def __init__(self, times: Times) -> None:
        self.times = times

    async def before_save(self, session: Any, global_step_value: int) -> None:
        self.times.before_save()

    async def after_save(self, session: Any, global_step_value: int) -> None:
        self.times.after_save()


async def train(session: MonitoredSession, fetches: Any, times: Times) -> None:
    async with session:
        while sum(len(each) == 2 for each in times.saves) <= NUM_SAVES:
            await session.run(fetches)
            times.steps.append(time.perf_counter())


def of_function(loop: str, directory: str) -> Times:
    import hashlib

    import numpy as np

    arrays = {f"a{i}": np.ones(SIZE, np.float32) for i in range(NUM_ARRAYS)}
    block, times = bytes(8_000_000), Times()

    def step() -> dict[str, Any]:
        return {"digest": hashlib.sha256(block).digest()}

    saver = StateDictSaver(arrays=arrays)
    hook = CheckpointSaverHook(
        directory, save_steps=STEPS_BETWEEN, saver=saver, listeners=[Listener(times)],
        background=True,
    )  # fmt: skip
    session = MonitoredSession([hook], FunctionSessionCreator(step), step_runner="thread")
    run_on(loop, train, session, "digest", times)
    return times


def large_model() -> tuple[Any, Any, Any]:
    """A graph with 200 MB of variables, its op of one step, and a saver."""
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
        return graph, train_op, v1.train.Saver()


def one_thread() -> Any:
    import tensorflow as tf

    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)


def of_graph(loop: str, directory: str) -> Times:
    from asynchooks import ChiefSessionCreator

    graph, train_op, saver = large_model()
    times = Times()
    hook = CheckpointSaverHook(
        directory, save_steps=STEPS_BETWEEN, saver=saver, listeners=[Listener(times)],
        background=True, save_graph_def=False,
    )  # fmt: skip
    with graph.as_default():
        creator = ChiefSessionCreator(config=one_thread())
        session = MonitoredSession([hook], creator, step_runner="thread")
    run_on(loop, train, session, train_op, times)
    return times


def of_tensorflow(directory: str) -> Times:
    import tensorflow as tf

    v1 = tf.compat.v1
    graph, train_op, saver = large_model()
    times = Times()

    class Theirs(v1.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
        def before_save(self, session: Any, global_step_value: int) -> None:
            times.before_save()

        def after_save(self, session: Any, global_step_value: int) -> None:
            times.after_save()

    hook = v1.train.CheckpointSaverHook(
        directory, save_steps=STEPS_BETWEEN, saver=saver, listeners=[Theirs()],
        save_graph_def=False,
    )  # fmt: skip
    with graph.as_default():
        creator = v1.train.ChiefSessionCreator(config=one_thread())
        with v1.train.MonitoredSession(creator, hooks=[hook]) as session:
            while len(times.saves) <= NUM_SAVES:
                session.run(train_op)
                times.steps.append(time.perf_counter())
    return times


def measured(training: Callable[[str], Times]) -> tuple[str, str]:
    directory = tempfile.mkdtemp()
    try:
        longer, pause = training(directory).figures()
    finally:
        shutil.rmtree(directory)
    return "none run" if longer is None else f"{100 * longer:.0f} %", f"{1000 * pause:.0f}"


def figures(loop: str) -> dict[str, str]:
    found = {}
    found[SLOWER], found[PAUSE] = measured(lambda directory: of_function(loop, directory))
    from ._report import is_installed

    if is_installed("tensorflow"):
        found[SLOWER_GRAPH], found[PAUSE_GRAPH] = measured(
            lambda directory: of_graph(loop, directory)
        )
        found[SLOWER_THEIRS], found[PAUSE_THEIRS] = measured(of_tensorflow)
    return found


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
