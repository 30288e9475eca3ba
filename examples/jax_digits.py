"""JAX: a jitted, pure update learns real handwritten digits; the step function holds its state.

The state is one pytree: parameters, Adam's moments and the random key of the dropout. Each step
donates it to the update. Checkpoints hold it as NumPy arrays, so that training that was interrupted
goes on with the same random numbers. Evaluation runs between the steps.

It prints a line for each evaluation, and the accuracy on held-out digits.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah
from asynchooks.data import batch, prefetch, repeat, shuffle

BATCH_SIZE, RATE, EVERY = 64, 3e-3, 100


def first_state(seed: int) -> dict[str, Any]:
    key, key1, key2 = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w1": 0.2 * jax.random.normal(key1, (64, 128)), "b1": jnp.zeros(128),
        "w2": 0.1 * jax.random.normal(key2, (128, 10)), "b2": jnp.zeros(10),
    }  # fmt: skip
    zeros = jax.tree.map(jnp.zeros_like, params)
    twice = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": twice, "count": jnp.zeros(()), "key": key}


def scores(params: Any, pixels: Any, key: Any = None) -> Any:
    hidden = jax.nn.relu(pixels @ params["w1"] + params["b1"])
    if key is not None:  # training: dropout
        hidden *= jax.random.bernoulli(key, 0.8, hidden.shape) / 0.8
    return hidden @ params["w2"] + params["b2"]


@partial(jax.jit, donate_argnums=0)
def update(state: Any, pixels: Any, labels: Any) -> tuple[Any, Any]:
    """One step of Adam; the arrays of the old state are gone after it."""
    key, dropout_key = jax.random.split(state["key"])

    def loss_of(params: Any) -> Any:
        logs = jax.nn.log_softmax(scores(params, pixels, dropout_key))
        return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()

    loss, gradient = jax.value_and_grad(loss_of)(state["params"])
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, state["square"], gradient)
    rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), state["params"], mean, square
    )
    return {"params": params, "mean": mean, "square": square, "count": count, "key": key}, loss


def share_right(params: Any, pixels: Any, labels: Any) -> Any:
    return (scores(params, pixels).argmax(axis=1) == labels).mean()


accuracy = jax.jit(share_right)


class Training:
    """The state, replaced by each step; as NumPy arrays by name for checkpoints."""

    def __init__(self) -> None:
        self.state = first_state(seed=0)

    def step(self, pixels: Any, labels: Any) -> dict[str, float]:
        self.state, loss = update(self.state, pixels, labels)
        return {"loss": float(loss)}  # waits for the device here, not in a hook

    def state_dict(self) -> dict[str, Any]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._plain())
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._plain())
        restored = [jnp.array(saved[jax.tree_util.keystr(path)]) for path, _ in leaves]
        state = jax.tree.unflatten(structure, restored)
        self.state = {**state, "key": jax.random.wrap_key_data(state["key"])}

    def _plain(self) -> dict[str, Any]:
        """With the key as an array."""
        return {**self.state, "key": jax.random.key_data(self.state["key"])}


async def main(directory: str, last_step: int) -> None:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        np.float32(digits.data / 16.0), digits.target, test_size=0.25, random_state=0
    )
    training = Training()

    def evaluate(session: Any, step: int) -> dict[str, float]:
        value = float(accuracy(training.state["params"], test_x, test_y))
        print(f"step {step:4d}: accuracy {value:.4f}", flush=True)
        return {"accuracy": value}

    rows = repeat(shuffle(range(len(train_y)), len(train_y), seed=1))
    batches = batch(rows, BATCH_SIZE, collate=lambda rows: (train_x[rows], train_y[rows]))
    evaluation = ah.EvaluationHook(evaluate, every_n_steps=EVERY)
    hooks = [
        ah.PreemptionHook(deadline_secs=20),
        ah.FeedHook(prefetch(batches, 2), ["pixels", "labels"]),
        ah.NanTensorHook("loss"),
        evaluation,
        ah.CheckpointSaverHook(
            directory, save_steps=EVERY, saver=ah.StateDictSaver(training=training), background=True
        ),
        ah.StopAtStepHook(last_step=last_step),
    ]
    print(f"checkpoints are kept in {directory!r}; interrupt it, and start it again", flush=True)
    async with ah.MonitoredSession(hooks, training.step) as session:
        print(f"training begins at step {session.global_step.value}", flush=True)
        while not session.should_stop():
            await session.run("loss")
    print(f"stopped by {session.stop_reason}")
    value = float(accuracy(training.state["params"], test_x, test_y))
    print(f"test accuracy {value:.4f} after {session.global_step.value} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="jax_digits")
    parser.add_argument("--backend", default="asyncio", choices=["asyncio", "trio"])
    parser.add_argument("--last-step", type=int, default=1000)
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    anyio.run(main, args.directory, args.last_step, backend=args.backend)
