"""What many workers on one event loop cost, and whether they stop exactly where they should.

    python -m tests.benchmarks.workers

It does not compare them with anything, nor measure several processes.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from asynchooks import (
    ChiefSessionCreator,
    FunctionSessionCreator,
    MonitoredSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)

from ._fresh_process import in_fresh_process
from ._linear_model import linear_model
from ._report import LOOPS, BusyModel, print_table, run_on
from ._watch import TIMER_SECS, Watch

LAST_STEP, NUM_TRIALS = 200, 2
NUM_WORKERS = 1, 2, 4, 8, 64


def resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


Model = tuple[SessionCreator, Any, Callable[[Any], int]]
"""A creator, what to fetch, and how to read the true step from the raw session."""


def tensorflow_model() -> Model:
    import tensorflow as tf

    model = linear_model()
    with model.graph.as_default():
        step = tf.compat.v1.train.get_global_step()
        return ChiefSessionCreator(), model.train_op, lambda session: int(session.run(step))


def function_model() -> Model:
    model = BusyModel()
    creator = FunctionSessionCreator(model.step, thread_safe=True)
    return creator, "loss", lambda session: model.runs_started


MODELS = {"TensorFlow": tensorflow_model, "function": function_model}


class Crowd:
    """Workers that open, wait for each other, and then train for some steps each."""

    def __init__(self, model: str, num_workers: int, num_steps: int, step_runner: Any) -> None:
        creator, self._fetch, _ = MODELS[model]()
        self._creator = SharedSessionCreator(creator)
        self._num_workers, self._num_steps = num_workers, num_steps
        self._step_runner = step_runner
        self._num_open = 0
        self._watch = Watch()

    async def run(self) -> str:
        """Open s, steps/s, KiB of resident memory per worker that trains, largest lateness in s."""
        self._all_open = anyio.Event()
        async with self._session() as first:  # pays for what all share
            await first.run(self._fetch)
            gc.collect()
            self._kib = resident_kib()
            self._begun = time.perf_counter()
            async with anyio.create_task_group() as timers:
                timers.start_soon(self._watch.timer)
                async with anyio.create_task_group() as workers:
                    for _ in range(self._num_workers):
                        workers.start_soon(self._work)
                timers.cancel_scope.cancel()
        steps_per_sec = self._num_workers * self._num_steps / (self._trained - self._opened)
        per_worker = self._grown_kib / self._num_workers
        opening = self._opened - self._begun
        return (
            f"{opening:.2f} / {steps_per_sec:.0f} / {per_worker:.0f} / {self._watch.worst_secs:.3f}"
        )

    def _session(self) -> MonitoredSession:
        return MonitoredSession([], self._creator, step_runner=self._step_runner)

    async def _work(self) -> None:
        async with self._session() as session:
            self._num_open += 1
            if self._num_open == self._num_workers:
                self._opened = time.perf_counter()
                self._all_open.set()
            await self._all_open.wait()
            for _ in range(self._num_steps):
                await session.run(self._fetch)
            self._trained = time.perf_counter()
            if self._num_open == self._num_workers:  # the first that is done: none has closed yet
                self._grown_kib = resident_kib() - self._kib
            self._num_open -= 1


def crowd(loop: str, *args: Any) -> str:
    return run_on(loop, Crowd(*args).run)


class ReadTrueStep(SessionRunHook):
    """Reads the step from the model itself at the end, past what the session believes."""

    def __init__(self, steps: list[int], read: Callable[[Any], int]) -> None:
        self._steps = steps
        self._read = read

    async def end(self, session: Any) -> None:
        self._steps.append(self._read(session))


def stops(loop: str, model: str, step_runner: Any) -> str:
    """Which final steps occurred over all numbers of workers and trials."""
    seen = {
        run_on(loop, final_step, model, num_workers, step_runner)
        for num_workers in NUM_WORKERS
        for _ in range(NUM_TRIALS)
    }
    return ", ".join(map(str, sorted(seen)))


async def final_step(model: str, num_workers: int, step_runner: Any) -> int:
    creator, fetch, read = MODELS[model]()
    shared = SharedSessionCreator(creator, num_workers)
    steps: list[int] = []

    async def work() -> None:
        hooks = [StopAtStepHook(last_step=LAST_STEP), ReadTrueStep(steps, read)]
        async with MonitoredSession(hooks, shared, step_runner=step_runner) as session:
            while not session.should_stop():
                await session.run(fetch)

    async with anyio.create_task_group() as group:
        for _ in range(num_workers):
            group.start_soon(work)
    return max(steps)


def main() -> None:
    rows = []
    for model, num_workers, num_steps, runners in [
        ("TensorFlow", 64, 100, ["inline", "auto"]),
        ("function", 1000, 50, ["inline", "auto"]),
    ]:
        for runner in runners:
            args = model, num_workers, num_steps, runner
            name = f"{num_workers:,} workers, {model}, {runner}: open s / steps/s / KiB / late s"
            bar = "late < 0.5" if model == "function" else "-"
            figures = [in_fresh_process(crowd, loop, *args) for loop in LOOPS]
            rows.append([name, bar, *figures])
    for model in MODELS:
        for runner in ["inline", "thread"]:
            counts = ", ".join(map(str, NUM_WORKERS))
            name = f"final step, {counts} workers, {model}, {runner}"
            rows.append([name, str(LAST_STEP), *(stops(loop, model, runner) for loop in LOOPS)])
    print_table(
        "Workers that share one session. KiB: resident memory per worker; late: of a "
        f"{TIMER_SECS * 1e3:.0f} ms timer beside them",
        ["", "bar", *LOOPS],
        rows,
    )


if __name__ == "__main__":
    main()
