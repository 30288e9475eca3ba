"""Whether many workers on one event loop stop exactly where they should.

    python -m tests.benchmarks.workers

It does not measure what they cost (many_workers.py does), nor several processes.
"""

from __future__ import annotations

from collections.abc import Callable
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

from ._linear_model import linear_model
from ._report import LOOPS, BusyModel, print_table, run_on

LAST_STEP, NUM_TRIALS = 200, 2
NUM_WORKERS = 1, 2, 4, 8, 64

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


class ReadTrueStep(SessionRunHook):
    """Reads the step from the model itself at the end, past what the session believes."""

    def __init__(self, steps: list[int], read: Callable[[Any], int]) -> None:
        self._steps, self._read = steps, read

    async def end(self, session: Any) -> None:
        self._steps.append(self._read(session))


async def final_step(model: Model, num_workers: int, step_runner: Any) -> int:
    creator, fetch, read = model
    shared, steps = SharedSessionCreator(creator, num_workers), list[int]()

    async def work() -> None:
        hooks = [StopAtStepHook(last_step=LAST_STEP), ReadTrueStep(steps, read)]
        async with MonitoredSession(hooks, shared, step_runner=step_runner) as session:
            while not session.should_stop():
                await session.run(fetch)

    async with anyio.create_task_group() as group:
        for _ in range(num_workers):
            group.start_soon(work)
    return max(steps)


def stops(loop: str, new_model: Callable[[], Model], step_runner: Any) -> str:
    """Which final steps occurred over all numbers of workers and trials."""
    seen = {
        run_on(loop, final_step, new_model(), num_workers, step_runner)
        for num_workers in NUM_WORKERS
        for _ in range(NUM_TRIALS)
    }
    return ", ".join(map(str, sorted(seen)))


def main() -> None:
    rows = [
        [f"{model.__name__}, {runner}", *(stops(loop, model, runner)
                                                          for loop in LOOPS)]
        for model in (tensorflow_model, function_model)
        for runner in ("inline", "thread")
    ]  # fmt: skip
    title = f"The final step of {', '.join(map(str, NUM_WORKERS))} workers that share one session"
    print_table(title, ["", *LOOPS], rows)


if __name__ == "__main__":
    main()
