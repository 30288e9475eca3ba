"""How soon a worker that waits for a global step goes on, beside TensorFlow's polling hook.

    python -m tests.benchmarks.waiting

It does not measure what a training step costs, nor waits across threads or processes.
"""

import itertools
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from asynchooks import (
    GlobalStep,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
)

from ._report import BusyModel, is_installed, measure, median_ratio, p50_and_p99

NUM_WAITERS, NUM_TRAINERS, DUE_AT_ONCE = 1000, 8, 10
NUM_STEPS, NUM_ROUNDS = 10_000, 5


class Training:
    """One model that several sessions train, and how long its waiters took to go on."""

    def __init__(self) -> None:
        self.model = BusyModel()
        self.creator = SharedSessionCreator(self.model.step)
        self.secs: list[float] = []

    def session(self, *hooks: SessionRunHook) -> MonitoredSession:
        return MonitoredSession(hooks, self.creator, step_runner="inline")

    def note_resumed(self, step: int) -> None:
        self.secs.append(time.perf_counter() - self.model.done_at[step])


class NoteResumed(SessionRunHook):
    """Stands behind the waiter hook and notes when that let the run go on."""

    def __init__(self, training: Training, step: int) -> None:
        self._training, self._step = training, step

    def before_run(self, run_context: Any) -> None:
        self._training.note_resumed(self._step)


Waiter = Callable[[Training, GlobalStep, int], Coroutine[Any, Any, None]]


async def by_hook(training: Training, global_step: GlobalStep, step: int) -> None:
    """A worker of its own that waits, and then trains for one step."""
    async with training.session(GlobalStepWaiterHook(step), NoteResumed(training, step)) as session:
        await session.run("loss")


async def by_wait_for(training: Training, global_step: GlobalStep, step: int) -> None:
    await global_step.wait_for(step)
    training.note_resumed(step)


async def wait_while_training(waiter: Waiter, steps: list[int]) -> list[float]:
    """Have one waiter at each of `steps`, then train until all have gone on; seconds of each."""
    training = Training()

    async def train() -> None:
        async with training.session() as session:
            while len(training.secs) < len(steps):
                await session.run("loss")

    async with training.session() as keeper, anyio.create_task_group() as group:
        for step in steps:
            group.start_soon(waiter, training, keeper.global_step, step)
        await anyio.wait_all_tasks_blocked()
        for _ in range(NUM_TRAINERS):
            group.start_soon(train)
    return training.secs


def wakes_in_a_second(thread: int) -> int:
    """How often another thread, which is idle, is woken meanwhile."""
    status, wakes = Path(f"/proc/self/task/{thread}/status"), list[int]()
    for secs in (0.1, 1.0):  # it has to fall asleep first
        time.sleep(secs)
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
        assert found is not None
        wakes.append(int(found[1]))
    return wakes[1] - wakes[0]


async def idle_second() -> str:
    """Raw runs, and how often the event loop is woken, while 1,000 workers wait."""
    training = Training()
    async with training.session() as keeper, anyio.create_task_group() as group:
        for _ in range(NUM_WAITERS):
            group.start_soon(by_hook, training, keeper.global_step, 1)
        await anyio.wait_all_tasks_blocked()
        wakes = await anyio.to_thread.run_sync(wakes_in_a_second, threading.get_native_id())
        num_runs = len(training.model.done_at) - 1
        await keeper.run("loss")
    return f"{num_runs} / {wakes}"


async def wake_secs(wait: Callable[[], Any], wake: Callable[[], object]) -> float:
    """Seconds until the last of 1,000 has gone on."""
    async with anyio.create_task_group() as group:
        for _ in range(NUM_WAITERS):
            group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        begun = time.perf_counter()
        wake()
    return time.perf_counter() - begun


async def publish_secs() -> float:
    """Seconds to publish 10,000 steps, each with one waiter, and to let that one go on."""
    step = GlobalStep()
    async with anyio.create_task_group() as group:
        for each in random.Random(0).sample(range(1, NUM_STEPS + 1), NUM_STEPS):
            group.start_soon(step.wait_for, each)
        await anyio.wait_all_tasks_blocked()
        begun = time.perf_counter()
        for each in range(1, NUM_STEPS + 1):
            step.publish(each)
            await anyio.lowlevel.checkpoint()
    return time.perf_counter() - begun


def secs_of_tensorflow() -> list[float]:
    """From the step to the answer of TensorFlow's hook, which sleeps between two looks.

    Each waiter has a thread of its own.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.logging.set_verbosity(v1.logging.ERROR)
    # spread over time, so that no step falls on a fixed place between two looks
    steps = random.Random(0).sample(range(150, 300), 16)
    reached = [0.0]
    with tf.Graph().as_default():
        counted = v1.assign_add(v1.train.create_global_step(), 1)
        hooks = [v1.train.GlobalStepWaiterHook(step) for step in steps]
        for hook in hooks:
            hook.begin()
        initialize = v1.global_variables_initializer()
        with v1.Session() as session, ThreadPoolExecutor(len(steps)) as pool:
            session.run(initialize)

            def answered(hook: Any) -> float:
                hook.before_run(SimpleNamespace(session=session))  # as a MonitoredSession calls it
                return time.perf_counter()

            answers = [pool.submit(answered, hook) for hook in hooks]
            for _ in range(300):
                session.run(counted)
                reached.append(time.perf_counter())
                time.sleep(0.01)
            pairs = zip(answers, steps, strict=True)
            return [each.result() - reached[step] for each, step in pairs]


async def figures(loop: str) -> dict[str, str]:
    found = {}
    for waiter in (by_hook, by_wait_for):
        steps = [100 + 20 * (i // DUE_AT_ONCE) for i in range(NUM_WAITERS)]
        few = [await wait_while_training(waiter, steps) for _ in range(NUM_ROUNDS)]
        every = [
            max(await wait_while_training(waiter, [300] * NUM_WAITERS))
            for _ in range(2 * NUM_ROUNDS)
        ]
        name, taken = waiter.__name__, [*itertools.chain(*few)]
        found[f"10 of 1,000 due at a step: p50 / p99 ms, {name}"] = p50_and_p99(taken)
        last = f"{statistics.median(every) * 1e3:.1f}"
        found[f"1,000 due at once: median of the last, ms, {name}"] = last
    found["1,000 wait for 1 s: raw runs / wakes of the event loop"] = await idle_second()
    published = statistics.median([await publish_secs() for _ in range(NUM_ROUNDS)])
    found["10,000 at own steps: us per published step"] = f"{published / NUM_STEPS * 1e6:.0f}"
    of_step, of_event = list[float](), list[float]()
    for _ in range(2 * NUM_ROUNDS):
        step, event = GlobalStep(), anyio.Event()
        secs = await wake_secs(partial(step.wait_for, 1), partial(step.publish, 1))
        of_step.append(secs)
        of_event.append(await wake_secs(event.wait, event.set))
    found["1,000 waiters of one step / of one anyio.Event"] = median_ratio(of_step, of_event)
    if loop == "asyncio" and is_installed("tensorflow"):
        mean = statistics.mean(secs_of_tensorflow())
        found["TensorFlow's own waiter, of no event loop: mean ms"] = f"{mean * 1e3:.0f}"
    return found


if __name__ == "__main__":
    measure(figures)
