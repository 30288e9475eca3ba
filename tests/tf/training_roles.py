"""Roles of processes that train on a cluster with many workers each.

Run as a program it is the launcher of `cluster_processes`, which knows these roles, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .cluster_processes import ROLES, Say, launch

if TYPE_CHECKING:
    from asynchooks import ClusterTask, SessionRunContext, SessionRunValues

BEAT = 1.5
"""Heartbeat of these processes, in seconds."""
NOTICED_SECS = BEAT + 3 + 2
"""Within this time the silence of a ps is noticed: 3 s are patience, 2 s for a busy machine."""


def global_step(scope: str) -> Any:
    """A new global step in the default graph."""
    import tensorflow as tf

    v1 = tf.compat.v1
    if not scope:
        return v1.train.get_or_create_global_step()
    kinds = [v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.GLOBAL_STEP]
    with v1.variable_scope(scope):
        return v1.get_variable(
            "step", (), tf.int64, v1.zeros_initializer(), trainable=False, collections=kinds
        )


async def holding(say: Say, task: ClusterTask) -> None:
    import anyio
    import anyio.lowlevel

    task.start()
    say("up")
    await anyio.sleep_forever()


async def several(say: Say, task: ClusterTask, rounds: Sequence[dict[str, Any] | None]) -> None:
    """Train several times, with a global step of its own each time; tell what a hook raised.

    Args:
        rounds: what to do in each training; None: nothing.
    """
    say("up")
    is_checked = True
    for number, options in enumerate(rounds):
        if options is None:
            continue
        try:
            await working(say, task, scope=f"round{number}", is_checked=is_checked, **options)
        except* KeyError:
            say("raised")
        is_checked = False


async def working(
    say: Say,
    task: ClusterTask,
    last_step: int,
    workers: int = 1,
    waits: Sequence[int] = (),
    stride: int = 1,
    pace: float = 0.0,
    heartbeat: float = BEAT,
    directory: str | None = None,
    save_steps: int = 20,
    raises_at: int | None = None,
    is_checked: bool = True,
    fails_on_loss: bool = False,
    scope: str = "",
) -> None:
    """A chief or a worker process, with its workers on one shared session.

    Args:
        waits: the step that each worker waits for at first.
        stride: by how much a run moves the step.
        pace: seconds between two runs of a worker.
        directory: where the chief saves, and restores from.
        raises_at: the step at which a hook of worker 0 raises.
        is_checked: whether to compare clusters with the ps.
        fails_on_loss: whether a task waits beside the workers that is to get the error of a loss.
        scope: what the name of the global step begins with.
    """
    import anyio
    import anyio.lowlevel
    import tensorflow as tf

    from asynchooks import (
        CheckpointSaverHook,
        ChiefSessionCreator,
        GlobalStepWaiterHook,
        MonitoredSession,
        Recovery,
        SessionRunHook,
        SharedSessionCreator,
        StepSourceLostError,
        StopAtStepHook,
        WorkerSessionCreator,
    )

    say = _one_at_a_time(say)
    if is_checked:
        _tell_log(say)
    if not scope:
        say("up")
    runs, highest, said_at, results = 0, 0, 0.0, [0, 0]

    class Says(SessionRunHook):
        """Says what its worker does."""

        def __init__(self, number: int) -> None:
            self._number = number
            self._has_begun = False

        async def before_run(self, run_context: SessionRunContext) -> None:
            if not self._has_begun:
                self._has_begun = True
                say(f"started {self._number} {run_context.global_step.value}")

        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            is_told = raises_at is not None and not self._number
            if is_told and run_context.global_step.value >= (raises_at or 0):
                raise KeyError("as it was told")

    async def worker(number: int) -> None:
        nonlocal runs, highest, said_at
        waiter = [GlobalStepWaiterHook(waits[number])] if number < len(waits) else []
        hooks = [*waiter, Says(number), StopAtStepHook(last_step=last_step)]
        if directory is not None and task.is_chief and not number:
            hooks.append(
                CheckpointSaverHook(directory, save_steps=save_steps, scaffold=chief.scaffold)
            )
        with graph.as_default():
            session = MonitoredSession(hooks, creator, 20, recovery=Recovery(1000, 0.05, 0.25))
        async with session:
            say(f"opened {number}")
            while not session.should_stop():
                after = await session.run(train_op)
                runs, highest = runs + 1, max(highest, int(after))
                if time.monotonic() > said_at + 0.02:
                    said_at = time.monotonic()
                    say(f"step {after} {session.global_step.epoch}")
                if pace:
                    await anyio.sleep(pace)
        results[:] = session.global_step.value, session.global_step.epoch

    async def watch() -> None:
        """Say what becomes of the source of steps."""
        state = None
        while True:
            now = creator.handle().global_step.statistics().source
            if now is not state:
                state = now
                say(f"source {None if now is None else now.name}")
            await anyio.sleep(0.01)

    async def wait_beside() -> None:
        """Wait for a step that does not come, as no worker's."""
        step = creator.handle().global_step
        with anyio.CancelScope() as scope:
            group.start_soon(cancel_when_lost, scope)
            await step.wait_for(10**9)
        say(f"cancelled {scope.cancelled_caught}")

    async def cancel_when_lost(scope: anyio.CancelScope) -> None:
        try:
            await creator.handle().global_step.wait_for(10**9, fails_on_loss=True)
        except StepSourceLostError as error:
            say(f"told {error}")
        begun = time.monotonic()
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        say(f"left after {time.monotonic() - begun:.3f}")

    if is_checked:
        await task.__aenter__()
    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.device(task.device()):
        step = global_step(scope)
        train_op = tf.compat.v1.assign_add(step, stride)
    with graph.as_default():
        options: dict[str, Any] = {"config": task.config, "heartbeat_secs": heartbeat}
        if task.is_chief:
            chief = ChiefSessionCreator(None, task.target, checkpoint_dir=directory, **options)
            creator = SharedSessionCreator(chief)
        else:
            creator = SharedSessionCreator(
                WorkerSessionCreator(None, task.target, max_wait_secs=60, **options)
            )
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        if fails_on_loss:
            group.start_soon(wait_beside)
        async with anyio.create_task_group() as inner:
            for number in range(workers):
                inner.start_soon(worker, number)
        group.cancel_scope.cancel()
    say(f"done {results[0]} {runs} {highest} {results[1]}")


def _one_at_a_time(say: Say) -> Say:
    lock = threading.Lock()

    def said(line: str) -> None:
        with lock:
            say(line)

    return said


def _tell_log(say: Say) -> None:
    """Have what asynchooks logs said, too."""

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"log {record.getMessage()}".replace("\n", " "))

    logger = logging.getLogger("asynchooks")
    logger.addHandler(Teller())
    logger.setLevel(logging.INFO)


if __name__ == "__main__":
    ROLES |= {"holding": holding, "several": several, "working": working}
    launch()
