"""What a step of a small TensorFlow graph costs beside TensorFlow's own ways to run it.

    python -m tests.benchmarks.graph

It does not measure large graphs, threads or many workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from asynchooks import (
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)

from ._contenders import Block, called, median_ratio, run_by, secs_per_step
from ._linear_model import BATCH, LinearModel, linear_model
from ._report import Measure, Row, print_rows, rows_of, run_on

NUM_ROUNDS, BLOCK_STEPS = 31, 200
FAR_AWAY = 1_000_000_000

THEIRS = "TensorFlow's MonitoredSession"
FOUR = "StopAtStep, StepCounter, NanTensor, LoggingTensor"
FED = f"graph step fed a batch, 4 hooks / {THEIRS}, same"
CALLABLE = "graph step, 4 hooks / bare make_callable([train_op, loss])"
BARE = "graph step, 0 hooks / bare Session.run"
BY_HOOKS = {
    4: f"graph step, 4 hooks ({FOUR}) / {THEIRS}, same",
    0: f"graph step, 0 hooks / {THEIRS}, same",
    1: f"graph step, 1 hook (StopAtStep) / {THEIRS}, same",
    8: f"graph step, 8 hooks (the four twice) / {THEIRS}, same",
}
MEASURES = [
    Measure(BY_HOOKS[4], "<= 0.45", "tensorflow"),
    Measure(FED, "<= 0.30", "tensorflow"),
    Measure(CALLABLE, "<= 1.30", "tensorflow"),
    *(Measure(BY_HOOKS[num_hooks], peer="tensorflow") for num_hooks in (0, 1, 8)),
    Measure(BARE, peer="tensorflow"),
]


def hooks_of(train: Any, loss: Any, num_hooks: int) -> list[Any]:
    """0, 1, 4 or 8 hooks of `train`: our package, or TensorFlow's module."""
    four = [
        [
            train.StopAtStepHook(last_step=FAR_AWAY),
            train.StepCounterHook(every_n_steps=100),
            train.NanTensorHook(loss),
            train.LoggingTensorHook({"loss": loss}, every_n_iter=100),
        ]
        for _ in range(2)
    ]
    return [*four[0], *four[1]][:num_hooks]


class OurHooks:
    """Our hooks by the names of TensorFlow's."""

    StopAtStepHook = StopAtStepHook
    StepCounterHook = StepCounterHook
    NanTensorHook = NanTensorHook
    LoggingTensorHook = LoggingTensorHook


def feeds(model: LinearModel) -> Any:
    """A batch of 8 rows for a model that is fed, None for one that is not."""
    import numpy as np

    is_fed = model.inputs.op.type == "Placeholder"
    return {model.inputs: np.array(BATCH, np.float32)} if is_fed else None


@asynccontextmanager
async def our_session(num_hooks: int, *, is_fed: bool = False) -> AsyncIterator[Block]:
    from asynchooks import ChiefSessionCreator

    model = linear_model(is_fed=is_fed)
    with model.graph.as_default():
        hooks = hooks_of(OurHooks, model.loss, num_hooks)
        session = MonitoredSession(hooks, ChiefSessionCreator())
    async with session:
        yield run_by(session, model.train_op, feeds(model))


@asynccontextmanager
async def their_session(num_hooks: int, *, is_fed: bool = False) -> AsyncIterator[Block]:
    import tensorflow as tf

    train = tf.compat.v1.train
    model = linear_model(is_fed=is_fed)
    with model.graph.as_default():
        hooks = hooks_of(train, model.loss, num_hooks)
        session = train.MonitoredSession(train.ChiefSessionCreator(), hooks)
    feed_dict = feeds(model)

    async def block(num_steps: int) -> None:
        run, fetches = session.run, model.train_op
        for _ in range(num_steps):
            run(fetches, feed_dict)

    yield block
    session.close()


@asynccontextmanager
async def bare_session(*, is_compiled: bool) -> AsyncIterator[Block]:
    import tensorflow as tf

    model = linear_model()
    with model.graph.as_default():
        initialize = tf.compat.v1.global_variables_initializer()
    with tf.compat.v1.Session(graph=model.graph) as session:
        session.run(initialize)
        if is_compiled:
            yield called(session.make_callable([model.train_op, model.loss]))
        else:
            yield called(lambda: session.run(model.train_op))


async def ratio(
    ours: AbstractAsyncContextManager[Block], theirs: AbstractAsyncContextManager[Block]
) -> str:
    async with ours as our_block, theirs as their_block:
        blocks = {"ours": our_block, "theirs": their_block}
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(secs["ours"], secs["theirs"])


async def ratios() -> dict[str, str]:
    by_hooks = {
        name: await ratio(our_session(num_hooks), their_session(num_hooks))
        for num_hooks, name in BY_HOOKS.items()
    }
    return by_hooks | {
        FED: await ratio(our_session(4, is_fed=True), their_session(4, is_fed=True)),
        CALLABLE: await ratio(our_session(4), bare_session(is_compiled=True)),
        BARE: await ratio(our_session(0), bare_session(is_compiled=False)),
    }


def figures(loop: str) -> dict[str, str]:
    import tensorflow as tf

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
