"""How soon a worker that waits for a global step goes on, beside TensorFlow's polling hook.

    python -m tests.benchmarks.waiting

It does not measure what a training step costs, nor waits across threads or processes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import anyio.to_thread
import trio

from asynchooks import (
    FunctionSessionCreator,
    GlobalStep,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
)

from ._polling_waiter import answer_secs
from ._report import LOOPS, BusyModel, p50_and_p99, print_table, run_on

NUM_WAITERS, NUM_TRAINERS, DUE_AT_ONCE = 1000, 8, 10
NUM_STEPS, NUM_ROUNDS = 10_000, 5


class Training:
    """One model that several sessions train, and what its waiters saw when they went on."""

    def __init__(self) -> None:
        self.model = BusyModel()
        self.creator = SharedSessionCreator(FunctionSessionCreator(self.model.step))
        self.secs: list[float] = []
        self.runs_when_last_resumed = 0

    def session(self, *hooks: SessionRunHook) -> MonitoredSession:
        return MonitoredSession(hooks, self.creator, step_runner="inline")

    def note_resumed(self, step: int) -> None:
        self.secs.append(time.perf_counter() - self.model.done_at[step])
        self.runs_when_last_resumed = self.model.runs_started


class NoteResumed(SessionRunHook):
    """Stands behind the waiter hook and notes when that let the run go on."""

    def __init__(self, training: Training, step: int) -> None:
        self._training, self._step = training, step

    async def before_run(self, run_context: Any) -> None:
        self._training.note_resumed(self._step)


Waiter = Callable[[Training, GlobalStep, int], Coroutine[Any, Any, None]]


async def by_hook(training: Training, global_step: GlobalStep, step: int) -> None:
    """A worker of its own that waits, and then trains for one step."""
    hooks = GlobalStepWaiterHook(step), NoteResumed(training, step)
    async with training.session(*hooks) as session:
        await session.run("loss")


async def by_wait_for(training: Training, global_step: GlobalStep, step: int) -> None:
    await global_step.wait_for(step)
    training.note_resumed(step)


async def until_all_wait(step: GlobalStep, num_waiters: int) -> None:
    while step.statistics().tasks_waiting_for_step < num_waiters:
        await anyio.lowlevel.checkpoint()


async def wait_while_training(waiter: Waiter, steps: list[int]) -> Training:
    """Have one waiter at each of `steps`, then train until all have gone on."""
    training = Training()

    async def train() -> None:
        async with training.session() as session:
            while len(training.secs) < len(steps):
                await session.run("loss")

    async with training.session() as keeper, anyio.create_task_group() as group:
        for step in steps:
            group.start_soon(waiter, training, keeper.global_step, step)
        await until_all_wait(keeper.global_step, len(steps))
        for _ in range(NUM_TRAINERS):
            group.start_soon(train)
    return training


def few_at_a_time(loop: str, waiter: Waiter) -> str:
    """p50 and p99, ms from publish to resume, with 10 of 1,000 waiters due at a step."""
    steps = [100 + 20 * (i // DUE_AT_ONCE) for i in range(NUM_WAITERS)]
    runs = [run_on(loop, wait_while_training, waiter, steps) for _ in range(NUM_ROUNDS)]
    return p50_and_p99([each for training in runs for each in training.secs])


def all_at_once(loop: str, waiter: Waiter) -> str:
    """Least and median ms until the last of 1,000 has gone on; most runs that started before."""
    due = 300
    runs = [
        run_on(loop, wait_while_training, waiter, [due] * NUM_WAITERS)
        for _ in range(2 * NUM_ROUNDS)
    ]
    last = [max(training.secs) * 1e3 for training in runs]
    between = max(training.runs_when_last_resumed - due for training in runs)
    return f"{min(last):.1f} / {statistics.median(last):.1f} / {between}"


class TimerCount(trio.abc.Instrument):
    """How many timers have fired; as a trio instrument, how often trio slept for a deadline."""

    def __init__(self) -> None:
        self.fired = 0

    def counting(self, set_timer: Callable[..., Any]) -> Callable[..., Any]:
        """The event loop's method that sets a timer, with its callbacks counted."""

        def wrapped(when: float, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def fire(*callback_args: Any) -> None:
                self.fired += 1
                callback(*callback_args)

            return set_timer(when, fire, *args, **kwargs)

        return wrapped

    def before_io_wait(self, timeout: float) -> None:
        # 0 when a task is ready, a day when there is no deadline
        self.fired += 0 < timeout < 3600


@contextmanager
def counted_timers() -> Iterator[TimerCount]:
    """Count the timers that are set, and fire, within the block; on asyncio, uvloop and trio."""
    count = TimerCount()
    loop: Any = anyio.lowlevel.current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        # asyncio sets all of them by call_at, uvloop by call_later
        name = "call_at" if isinstance(loop, asyncio.BaseEventLoop) else "call_later"
        with mock.patch.object(loop, name, count.counting(getattr(loop, name))):
            yield count
        return
    trio.lowlevel.add_instrument(count)
    try:
        yield count
    finally:
        trio.lowlevel.remove_instrument(count)


async def idle_second() -> str:
    """(raw runs, timers that fired) in one second, while 1,000 workers wait."""
    training = Training()
    async with training.session() as keeper, anyio.create_task_group() as group:
        with counted_timers() as timers:
            for _ in range(NUM_WAITERS):
                group.start_soon(by_hook, training, keeper.global_step, 1)
            await until_all_wait(keeper.global_step, NUM_WAITERS)
            runs, fired = training.model.runs_started, timers.fired
            await anyio.to_thread.run_sync(time.sleep, 1.0)  # a timer of our own would count, too
            runs, fired = training.model.runs_started - runs, timers.fired - fired
        await keeper.run("loss")
    return f"{runs} / {fired}"


async def publish_secs() -> float:
    """Seconds to publish 10,000 steps, each with one waiter, and to let that one go on."""
    step = GlobalStep()
    order, secs = random.Random(0).sample(range(1, NUM_STEPS + 1), NUM_STEPS), 0.0
    async with anyio.create_task_group() as group:
        for each in order:
            group.start_soon(step.wait_for, each)
        await until_all_wait(step, NUM_STEPS)
        begun = time.perf_counter()
        for each in range(1, NUM_STEPS + 1):
            step.publish(each)
            await anyio.lowlevel.checkpoint()
        secs += time.perf_counter() - begun
    return secs


def own_step_each(loop: str) -> str:
    """Median µs for each of 10,000 steps."""
    rounds = [run_on(loop, publish_secs) for _ in range(NUM_ROUNDS)]
    return f"{statistics.median(rounds) / NUM_STEPS * 1e6:.0f}"


def main() -> None:
    few, every = "10 of 1,000 due at a step: p50 / p99 ms", "1,000 due: last (least / median) ms"
    rows = [
        [f"{what}, {waiter.__name__}", *(figure(loop, waiter) for loop in LOOPS), "-"]
        for what, figure in (
            (few, few_at_a_time),
            (f"{every} / runs before", all_at_once),
        )
        for waiter in (by_hook, by_wait_for)
    ]
    idle = [run_on(loop, idle_second) for loop in LOOPS]
    rows.append(["1,000 wait for 1 s: raw runs / timers fired", *idle, "-"])
    published = [own_step_each(loop) for loop in LOOPS]
    rows.append(["10,000 at own steps: us per published step", *published, "-"])
    mean = f"{statistics.mean(answer_secs()) * 1e3:.0f}"
    rows.append(["its own waiter: mean ms", *"---", mean])
    print_table(
        f"Waiting for a global step while {NUM_TRAINERS} sessions train on the same event loop",
        ["from publish to resume", *LOOPS, "TensorFlow"], rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
