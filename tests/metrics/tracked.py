"""A training program with the sink of a tracker, for a process of its own.

    python -m tests.metrics.tracked trio mlflow '[{"options": {}, "last_step": 40}]'

It prints JSON at its end: see `main`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MetricsHook,
    MonitoredSession,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.metrics import MlflowSink, Sink, WandbSink

SINKS: dict[str, type[Sink]] = {"wandb": WandbSink, "mlflow": MlflowSink}
SAVE_STEPS = 10


class TrainingFailedError(Exception):
    """What ends a session."""


async def until_flushed(hook: MetricsHook) -> None:
    """Wait until all points so far are durable."""
    while any(each["pending"] for each in hook.state_dict()["sinks"]):  # noqa: ASYNC110
        await anyio.sleep(0.02)


def stop_wandb() -> None:
    """Stop the process that W&B's library has started, as a debugger or a full disk would."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:  # the process has ended
            continue
        if "wandb-core" in words[0] and str(os.getpid()) in words:
            os.kill(int(path.parent.name), signal.SIGSTOP)
            return
    raise LookupError("wandb-core does not run")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def train(
    tracker: str,
    meet: Callable[[], Awaitable[object]],
    options: dict[str, Any],
    last_step: int,
    flush_at: list[int] = [],  # noqa: B006
    kill_at: int = 0,
    stop_at: int = 0,
    fail_at: int = 0,
    save: bool = False,
    grace_secs: float = 20.0,
) -> dict[str, Any]:
    """Train, and have something happen after a step.

    Args:
        tracker: of `SINKS`.
        meet: waits until all trainings of the process have called it.
        options: for its sink.
        last_step: where training ends.
        flush_at: steps after which it waits until the sink has all points.
        kill_at: the step after which the process kills itself.
        stop_at: the step after which W&B's process is stopped.
        fail_at: the step after which the session ends by an error.
        save: whether checkpoints are written, and the newest one is restored.
        grace_secs: of the session.
    """
    step = 0

    def train_step() -> dict[str, float]:
        nonlocal step
        step += 1
        return {"loss": 1 / step}

    hook = MetricsHook(SINKS[tracker](**options), "loss", every_n_steps=1)
    hooks: list[Any] = [hook, StopAtStepHook(last_step=last_step)]
    if save:
        saver = StateDictSaver(weights={"w": np.zeros(1)})
        hooks.append(CheckpointSaverHook("model", save_steps=SAVE_STEPS, saver=saver))
    half = 0.0
    begun = time.monotonic()
    creator = FunctionSessionCreator(train_step)
    session = MonitoredSession(hooks, creator, stop_grace_period_secs=grace_secs)
    trained = begun
    with suppress(TrainingFailedError):
        async with session:
            step = session.global_step.value
            while not session.should_stop():
                await session.run("loss")
                if step in flush_at:
                    await until_flushed(hook)
                    await meet()
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == stop_at:
                    stop_wandb()
                if step == last_step // 2:
                    half = peak_mib()
                trained = time.monotonic()
                if step == fail_at:
                    raise TrainingFailedError
    return {
        "step": session.global_step.value,
        "dropped": hook.num_dropped,
        "growth": peak_mib() - half,
        "train_secs": trained - begun,
        "close_secs": time.monotonic() - trained,
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
    """Prints, for each training, the step, the points that were dropped, how the peak of memory
    grew in the second half (MiB), the seconds of training and of the session's end, and the threads
    that hang.
    """
    backend, tracker, arguments = sys.argv[1:]
    results = anyio.run(train_together, tracker, json.loads(arguments), backend=backend)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
