"""What a step of a small TensorFlow graph costs beside TensorFlow's own ways to run it.

    python -m tests.benchmarks "graph steps"

It does not measure large graphs, threads or many workers.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asynchooks
from asynchooks import MonitoredSession

from ._contenders import FAR_AWAY, Block, called, ratio, run_by
from ._linear_model import BATCH, LinearModel, linear_model
from ._report import is_installed

NUM_ROUNDS, BLOCK_STEPS = 31, 200

THEIRS = "TensorFlow's MonitoredSession, same"


def hooks_of(train: Any, loss: Any, num_hooks: int) -> list[Any]:
    """0, 1, 4 or 8 hooks of `train`: our package, or TensorFlow's module."""
    return [
        hook
        for _ in range(2)
        for hook in (
            train.StopAtStepHook(last_step=FAR_AWAY),
            train.StepCounterHook(every_n_steps=100),
            train.NanTensorHook(loss),
            train.LoggingTensorHook({"loss": loss}, every_n_iter=100),
        )
    ][:num_hooks]


def feeds(model: LinearModel) -> Any:
    """A batch of 8 rows for a model that is fed, None for one that is not."""
    import numpy as np

    is_fed = model.inputs.op.type == "Placeholder"
    return {model.inputs: np.array(BATCH, np.float32)} if is_fed else None


@asynccontextmanager
async def our_session(num_hooks: int, *, is_fed: bool = False) -> AsyncIterator[Block]:
    model = linear_model(is_fed=is_fed)
    with model.graph.as_default():
        hooks = hooks_of(asynchooks, model.loss, num_hooks)
        session = MonitoredSession(hooks, asynchooks.ChiefSessionCreator())
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
    feed_dict, fetches = feeds(model), model.train_op
    yield called(lambda: session.run(fetches, feed_dict))
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


async def figures(loop: str) -> dict[str, str]:
    if not is_installed("tensorflow"):
        return {}
    import tensorflow as tf

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    pairs = {
        f"graph step, hooks: {num} / {THEIRS}": (our_session(num), their_session(num))
        for num in (4, 0, 1, 8)
    } | {
        f"graph step fed a batch, hooks: 4 / {THEIRS}": (
            our_session(4, is_fed=True), their_session(4, is_fed=True),
        ),
        "graph step, hooks: 4 / bare make_callable([train_op, loss])": (
            our_session(4), bare_session(is_compiled=True),
        ),
        "graph step, hooks: 0 / bare Session.run": (
            our_session(0), bare_session(is_compiled=False),
        ),
    }  # fmt: skip
    return {name: await ratio(*pair, BLOCK_STEPS, NUM_ROUNDS) for name, pair in pairs.items()}
