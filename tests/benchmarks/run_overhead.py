"""What `await session.run(train_op)` costs beside TensorFlow's own `MonitoredSession.run`.

    python -m tests.benchmarks.run_overhead

It does not measure feeds, threads or many workers.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from asynchooks import (
    ChiefSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    StepCounterHook,
    StopAtStepHook,
)

from ._linear_model import linear_model
from ._report import LOOPS, print_table, run_on

NUM_BLOCKS, BLOCK_STEPS, WARM_UP_STEPS = 15, 300, 50
FAR_AWAY = 1_000_000_000
OURS, THEIRS = "asynchooks", "TensorFlow MonitoredSession"
BARE_RUN, BARE_CALLABLE = "bare Session.run", "bare make_callable"


@dataclass
class Contender:
    """One way to run a step, and µs per step of each of its blocks."""

    name: str
    run_step: Callable[[], Any]
    us: list[float] = field(default_factory=list)

    async def run_block(self, num_steps: int) -> None:
        run_step = self.run_step
        begun = time.perf_counter()
        if self.name.startswith(OURS):
            for _ in range(num_steps):
                await run_step()
        else:
            for _ in range(num_steps):
                run_step()
        self.us.append((time.perf_counter() - begun) / num_steps * 1e6)


@asynccontextmanager
async def our_session(num_hooks: int) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    graph, train_op = linear_model()
    hooks = [
        GlobalStepWaiterHook(0),
        StopAtStepHook(last_step=FAR_AWAY),
        StepCounterHook(every_n_steps=100),
    ][:num_hooks]
    with graph.as_default():
        session = MonitoredSession(hooks, ChiefSessionCreator())
    async with session:
        yield lambda: session.run(train_op)


@asynccontextmanager
async def their_session(num_hooks: int) -> AsyncIterator[Callable[[], Any]]:
    import tensorflow as tf

    v1 = tf.compat.v1
    graph, train_op = linear_model()
    hooks = [
        v1.train.GlobalStepWaiterHook(0),
        v1.train.StopAtStepHook(last_step=FAR_AWAY),
        v1.train.StepCounterHook(every_n_steps=100),
    ][:num_hooks]
    with graph.as_default():
        session = v1.train.MonitoredSession(v1.train.ChiefSessionCreator(), hooks)
    yield lambda: session.run(train_op)
    session.close()


@asynccontextmanager
async def bare_session(is_compiled: bool) -> AsyncIterator[Callable[[], Any]]:
    import tensorflow as tf

    graph, train_op = linear_model()
    with graph.as_default():
        initialize = tf.compat.v1.global_variables_initializer()
    session = tf.compat.v1.Session(graph=graph)
    session.run(initialize)
    yield session.make_callable(train_op) if is_compiled else lambda: session.run(train_op)
    session.close()


async def us_per_step() -> dict[str, list[float]]:
    """µs per step of each contender's blocks, which take turns; each has a graph of its own."""
    async with AsyncExitStack() as stack:
        opened = {
            f"{OURS}, 3 hooks": our_session(3),
            f"{THEIRS}, 3 hooks": their_session(3),
            f"{OURS}, 0 hooks": our_session(0),
            f"{THEIRS}, 0 hooks": their_session(0),
            BARE_RUN: bare_session(is_compiled=False),
            BARE_CALLABLE: bare_session(is_compiled=True),
        }
        contenders = [
            Contender(name, await stack.enter_async_context(session))
            for name, session in opened.items()
        ]
        for contender in contenders:
            await contender.run_block(WARM_UP_STEPS)
            contender.us.clear()
        for block in range(NUM_BLOCKS):
            first = block % len(contenders)  # nobody always runs behind the same neighbour
            for contender in contenders[first:] + contenders[:first]:
                await contender.run_block(BLOCK_STEPS)
    return {contender.name: contender.us for contender in contenders}


def main() -> None:
    import tensorflow as tf

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    measured = {loop: run_on(loop, us_per_step) for loop in LOOPS}
    rows = [
        [f"{name}: us", "-", *(f"{statistics.median(measured[loop][name]):.0f}" for loop in LOOPS)]
        for name in measured[LOOPS[0]]
    ]
    for hooks, bar in [("3 hooks", "<= 1.00"), ("0 hooks", "-")]:
        ratios = []
        for loop in LOOPS:
            pairs = zip(
                measured[loop][f"{OURS}, {hooks}"],
                measured[loop][f"{THEIRS}, {hooks}"],
                strict=True,
            )
            ratios.append(f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}")
        rows.append([f"RATIO {OURS} / TensorFlow, {hooks}", bar, *ratios])
    print_table(
        "One step of a small TensorFlow graph, with the default step runner; "
        f"{NUM_BLOCKS} blocks of {BLOCK_STEPS} steps, taking turns",
        ["median of blocks", "bar", *LOOPS],
        rows,
    )


if __name__ == "__main__":
    main()
