"""What processes of tests do: TensorFlow servers, and tasks of a cluster that train.

Run as a program it is the launcher: it has TensorFlow loaded already and forks a process for each
line that it reads, so that one is up after a tenth of a second. A process says what it does, line
by line, to a pipe.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynchooks import ClusterTask, SessionRunContext

Cluster = dict[str, list[str]]
Say = Callable[[str], None]

BEAT = 1.5
"""Heartbeat of these processes, in seconds."""
NOTICED_SECS = BEAT + 3 + 2
"""Within this time the silence of a ps is noticed: 3 s are patience, 2 s for a busy machine."""


def task_of(cluster: Cluster, name: str, **options: Any) -> ClusterTask:
    from asynchooks import ClusterTask

    job, index = name.split(":")
    config = {"cluster": cluster, "task": {"type": job, "index": int(index)}}
    return ClusterTask.from_tf_config(json.dumps(config), **options)


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


def counting_graph(scope: str = "", device: Any = None, stride: int = 1) -> tuple[Any, Any]:
    """A graph, and the op in it that moves its global step."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.device(device):
        return graph, tf.compat.v1.assign_add(global_step(scope), stride)


async def alone(say: Say, address: str) -> None:
    """A server outside of a cluster, which describes no task."""
    import tensorflow as tf

    server = tf.distribute.Server({"local": [address]}, job_name="local", task_index=0)
    say("up")
    server.join()


async def serving(say: Say, task: ClusterTask, linger_secs: float = 10.0) -> None:
    """A ps."""
    task.start()
    say("up")
    await task.serve(linger_secs=linger_secs)
    say("served")


async def holding(say: Say, task: ClusterTask) -> None:
    """A ps that serves until it is killed."""
    import anyio

    task.start()
    say("up")
    await anyio.sleep_forever()


async def several(say: Say, task: ClusterTask, rounds: Sequence[dict[str, Any] | None]) -> None:
    """Train several times, with a global step of its own each time.

    Args:
        rounds: what to do in each training; None: nothing.
    """
    say("up")
    is_checked = True
    for number, options in enumerate(rounds):
        if options is None:
            continue
        await working(say, task, scope=f"round{number}", is_checked=is_checked, **options)
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
        is_checked: whether to compare clusters with the ps, and to report the end to it.
        fails_on_loss: whether a task waits beside the workers that is to get the error of a loss.
        scope: what the name of the global step begins with.
    """
    import anyio

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

    if is_checked:
        _say_log(say)
    if not scope:
        say("up")
    runs, said_at, results = 0, 0.0, [0, 0]

    class Says(SessionRunHook):
        """Says what its worker does."""

        def __init__(self, number: int) -> None:
            self._number = number
            self._has_begun = False

        async def before_run(self, run_context: SessionRunContext) -> None:
            if not self._has_begun:
                self._has_begun = True
                say(f"started {self._number} {run_context.global_step.value}")

    async def worker(number: int) -> None:
        nonlocal runs, said_at
        waiter = [GlobalStepWaiterHook(waits[number])] if number < len(waits) else []
        hooks = [*waiter, Says(number), StopAtStepHook(last_step=last_step)]
        if directory is not None and task.is_chief and not number:
            hooks.append(CheckpointSaverHook(directory, save_steps=20, scaffold=chief.scaffold))
        with graph.as_default():
            session = MonitoredSession(hooks, creator, 20, recovery=Recovery(1000, 0.05, 0.25))
        async with session:
            say(f"opened {number}")
            while not session.should_stop():
                after = await session.run(train_op)
                runs += 1
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
            say(f"lost: {error}")
        scope.cancel()

    async with task if is_checked else nullcontext():
        graph, train_op = counting_graph(scope, task.device(), stride)
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
        say(f"done {results[0]} {runs} {results[1]}")


def _say_log(say: Say) -> None:
    """Have what asynchooks logs said, too."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"log {record.getMessage()}".replace("\n", " "))

    logger = logging.getLogger("asynchooks")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    each.__name__: each for each in (alone, serving, holding, several, working)
}


def play(role: str, fifo: str, backend: str, task: Any, **options: Any) -> None:
    """What a forked process does; `task` is a cluster and a name in it, if it has one."""
    import anyio

    pipe = os.open(fifo, os.O_WRONLY)

    def say(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())  # in one piece, from any thread

    async def main() -> None:
        tasks = [] if task is None else [task_of(*task)]
        await ROLES[role](say, *tasks, **options)

    try:
        anyio.run(main, backend=backend)
    except BaseException:
        say(traceback.format_exc())
        raise


def launch() -> None:
    """Do what each line says, until there are no more."""
    import tensorflow

    import asynchooks.tf

    assert tensorflow
    assert asynchooks.tf
    gc.freeze()  # else each child, at its end, takes a second to look through TensorFlow
    for line in sys.stdin:
        command, argument = line.split(" ", 1)
        if command == "start":
            child = os.fork()
            if child == 0:
                os.close(0)
                play(**json.loads(argument))
                sys.exit(0)  # as a script does: the interpreter's end is part of what is tested
            print(child, flush=True)
        else:
            _, status = os.waitpid(int(argument), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    launch()
