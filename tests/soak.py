"""Many steps and many openings, and what the process holds as they go on.

It judges what grows, not how long anything takes: tests compare what is read.
"""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EarlyStoppingHook,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    LoopLagHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionHook,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
)
from asynchooks.data import batch, prefetch

from .support.readings import Reading, read

FOREVER = 1_000_000_000
OPENED_STEPS = 3


class Model:
    """A few numbers that each step moves, and a summary of them."""

    def __init__(self) -> None:
        from tensorboard.compat import tf
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert tf.io  # TensorBoard's writer loads it at its first use: not while memory is traced
        self.weights = {"w": np.zeros(256)}
        value = Summary.Value(tag="loss", simple_value=0.5)
        self._summary = Summary(value=[value]).SerializeToString()

    def step(self, rate: float) -> dict[str, Any]:
        self.weights["w"] += rate
        return {"loss": 0.5, "summary": self._summary}


async def evaluate(session: Any, global_step_value: int) -> dict[str, float]:
    await anyio.lowlevel.checkpoint()
    return {"accuracy": 0.5}


def hooks_for(
    last_step: int,
    feeds: dict[Any, Any],
    loss: Any = "loss",
    summary: Any = "summary",
    directory: str | None = None,
) -> list[Any]:
    """One of each hook but for CheckpointSaverHook; they write seldom, if there is a directory."""
    every, every_summary = (2, 2) if directory is None else (1000, 100)
    steps, logs, scores = (directory and f"{directory}/{name}" for name in "abc")
    return [
        PreemptionHook(),
        StopAtStepHook(last_step=last_step),
        GlobalStepWaiterHook(wait_until_step=0),
        StepCounterHook(every_n_steps=every, output_dir=steps),
        LoggingTensorHook({"loss": loss}, every_n_iter=every),
        NanTensorHook(loss),
        SummarySaverHook(every_summary, output_dir=logs, summary_op=summary),
        FeedFnHook(lambda: feeds),
        FinalOpsHook(loss),
        EvaluationHook(evaluate, every_n_steps=every, output_dir=scores),
        EarlyStoppingHook(loss, patience=FOREVER, mode="min"),
        TimeLimitHook(secs=FOREVER),
        StallHook(secs=FOREVER),
        LoopLagHook(max_lag_secs=3600.0),
    ]


async def steps(num_steps: int, *, save_steps: int = 10_000) -> list[Reading]:
    """One session with all hooks; read after a warm-up and after each quarter, at rest."""
    model, readings = Model(), []
    # half a save later, so that no checkpoint is just being written
    quarters = [num_steps * part // 4 - save_steps // 2 for part in (1, 2, 3, 4)]
    with tempfile.TemporaryDirectory() as directory:
        saver = CheckpointSaverHook(
            f"{directory}/model", save_steps=save_steps, background=True,
            saver=StateDictSaver(weights=model.weights),
        )  # fmt: skip
        hooks = [*hooks_for(num_steps, {"rate": 0.001}, directory=directory), saver]
        async with MonitoredSession(hooks, model.step, step_runner="inline") as session:
            done = 0
            while not session.should_stop():
                await session.run("loss")
                done += 1
                if done in quarters or done == save_steps + save_steps // 2:
                    await saver.checkpointer.wait_idle()
                    for _ in range(10):  # an evaluation that has just begun ends
                        await anyio.lowlevel.checkpoint()
                    readings.append(read())
                elif done % 100 == 0:
                    await anyio.lowlevel.checkpoint()
    return readings


async def _numbers(num_items: int) -> AsyncIterator[int]:
    for number in range(num_items):
        yield number


async def items(num_items: int) -> list[Reading]:
    """Small items through prefetch, batch and run, 100 in each; read at each quarter."""
    source = prefetch(batch(prefetch(_numbers(num_items), 64), 100), 4)
    hooks = [FeedHook(source, "numbers"), DataWaitHook(source, every_n_steps=1000)]
    readings = []
    marks = {num_items // 100 * part // 20 for part in (1, 5, 10, 15, 19)}
    async with MonitoredSession(
        hooks, lambda numbers: {"sum": sum(numbers)}, step_runner="inline"
    ) as session:
        while not session.should_stop():
            await session.run("sum")
            if session.global_step.value in marks:
                readings.append(read())
    return readings


async def openings(num_openings: int, open_one: Callable[[], Awaitable[None]]) -> list[Reading]:
    """Read after a warm-up and after each quarter, while no session is open."""
    readings = []
    marks = {num_openings * part // 20 for part in (1, 5, 10, 15, 20)}
    for done in range(1, num_openings + 1):
        await open_one()
        if done in marks:
            readings.append(read())
    return readings


async def train(session: MonitoredSession, fetches: Any) -> None:
    async with session:
        while not session.should_stop():
            await session.run(fetches)
    assert session.global_step.value == OPENED_STEPS


def open_function() -> Callable[[], Awaitable[None]]:
    """What opens a session on a step function with all hooks, and trains for a few steps."""
    model, feeds = Model(), {"rate": 0.001}

    async def open_one() -> None:
        hooks = hooks_for(OPENED_STEPS, feeds)
        await train(MonitoredSession(hooks, model.step), "loss")

    return open_one


def open_tensorflow() -> Callable[[], Awaitable[None]]:
    """What builds a graph, opens a session on it with all hooks, and trains for a few steps."""
    import tensorflow as tf

    import asynchooks

    v1 = tf.compat.v1

    async def open_one() -> None:
        graph = tf.Graph()
        with graph.as_default():
            step = v1.train.get_or_create_global_step()
            rate = v1.placeholder(tf.float32, (), "rate")
            weight = v1.get_variable("weight", (), initializer=v1.zeros_initializer())
            loss = tf.square(weight - 1.0) * 0.5
            with tf.control_dependencies([v1.assign_add(weight, rate)]):
                train_op = v1.assign_add(step, 1)
            hooks = hooks_for(OPENED_STEPS, {rate: 0.1}, loss, v1.summary.scalar("loss", loss))
            session = MonitoredSession(hooks, asynchooks.ChiefSessionCreator())
        await train(session, train_op)

    return open_one
