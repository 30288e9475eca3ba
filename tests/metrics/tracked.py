"""A training program with the sink of a tracker, for a process of its own.

    python -m tests.metrics.tracked trio mlflow '[{"options": {}, "last_step": 40}]'

It prints JSON at its end: see `main`.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    MetricsHook,
    MonitoredSession,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.metrics import MlflowSink, Sink, TensorBoardSink, WandbSink

SINKS: dict[str, type[Sink]] = {"wandb": WandbSink, "mlflow": MlflowSink}


class TrainingFailedError(Exception):
    """What ends a session."""


async def until_flushed(hook: MetricsHook) -> None:
    """Wait until all points so far are durable."""
    while any(each["pending"] for each in hook.state_dict()["sinks"]):  # noqa: ASYNC110
        await anyio.sleep(0.02)


async def train(
    tracker: str,
    meet: Callable[[], Awaitable[object]],
    options: dict[str, Any],
    last_step: int,
    flush_at: int = 0,
    kill_at: int = 0,
    fail_at: int = 0,
    save: bool = False,
    grace_secs: float = 20.0,
    is_silent: bool = False,
) -> dict[str, Any]:
    """Train, and have something happen after a step.

    Args:
        tracker: of `SINKS`.
        meet: waits until all trainings of the process have called it.
        options: for its sink.
        last_step: where training ends.
        flush_at: the step after which it waits until the sink has all points, and meets the others.
        kill_at: the step after which the sink has all points and the process kills itself.
        fail_at: the step after which the session ends by an error.
        save: whether there is a checkpoint each 10 steps, of which the newest one is restored, and
            event files for TensorBoard.
        grace_secs: of the session.
        is_silent: whether URL in the options is a server that accepts connections and answers
            nothing; training goes on when one has come.
    """
    step = 0
    if is_silent:
        server = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = json.loads(json.dumps(options).replace("URL", url))

    def train_step() -> dict[str, float]:
        nonlocal step
        step += 1
        return {"loss": 1 / step}

    hook = MetricsHook(SINKS[tracker](**options), "loss", every_n_steps=1)
    hooks: list[Any] = [hook, StopAtStepHook(last_step=last_step)]
    if save:
        saver = StateDictSaver(weights={"w": np.zeros(1)})
        hooks += [
            CheckpointSaverHook("model", save_steps=10, saver=saver),
            MetricsHook(TensorBoardSink("logs"), "loss", every_n_steps=1),
        ]
    session = MonitoredSession(hooks, train_step, stop_grace_period_secs=grace_secs)
    with suppress(TrainingFailedError):
        async with session:
            step = session.global_step.value
            while not session.should_stop():
                await session.run("loss")
                if is_silent and step == 1:
                    connection = await anyio.to_thread.run_sync(server.accept)
                    assert connection
                if step in (flush_at, kill_at):
                    await until_flushed(hook)
                    await meet()
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == fail_at:
                    raise TrainingFailedError
            trained = time.monotonic()
    return {
        "step": session.global_step.value,
        "dropped": hook.num_dropped,
        "has_tensorflow": "tensorflow" in sys.modules,
        "close_secs": 0 if fail_at else time.monotonic() - trained,
        "stuck": [each.name for each in threading.enumerate() if each.name.endswith("Sink")],
    }


async def train_together(tracker: str, several: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train as each of the arguments says: each begins when the one before it has points stored."""
    results: dict[int, dict[str, Any]] = {}
    arrived = [anyio.Event() for _ in several]

    async def run(index: int) -> None:
        async def meet() -> None:
            arrived[index].set()
            for each in arrived:
                await each.wait()

        if index:
            await arrived[index - 1].wait()
        results[index] = await train(tracker, meet, **several[index])

    async with anyio.create_task_group() as group:
        for index in range(len(several)):
            group.start_soon(run, index)
    return [results[index] for index in sorted(results)]


def main() -> None:
    """Prints, for each training, the step, the points that were dropped, whether TensorFlow is
    imported, the seconds of the session's end, and the threads that hang.
    """
    backend, tracker, arguments = sys.argv[1:]
    results = anyio.run(train_together, tracker, json.loads(arguments), backend=backend)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
