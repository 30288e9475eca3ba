"""JAX: four workers learn real handwritten digits around a parameter server, by three protocols.

Each worker is a session on one event loop. Its step pulls the parameters, computes a gradient by a
jitted function, and pushes it. The protocol decides which gradients make an update, and which
workers wait. The server keeps NumPy arrays, which JAX takes as they are.

It prints a line for each protocol: updates, their staleness, and the accuracy on held-out digits.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah
from asynchooks.protocols import (
    Asynchronous,
    KBatchSync,
    ParameterServer,
    ProtocolHook,
    StaleSynchronous,
)

NUM_WORKERS, BATCH_SIZE, RATE = 4, 64, 0.3


def first_parameters(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(0.0, 0.2, (64, 64)).astype(np.float32), "b1": np.zeros(64, np.float32),
        "w2": rng.normal(0.0, 0.1, (64, 10)).astype(np.float32), "b2": np.zeros(10, np.float32),
    }  # fmt: skip


def scores(parameters: Any, pixels: Any) -> Any:
    hidden = jax.nn.relu(pixels @ parameters["w1"] + parameters["b1"])
    return hidden @ parameters["w2"] + parameters["b2"]


def mean_loss(parameters: Any, pixels: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(scores(parameters, pixels))
    return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()


loss_and_gradient = jax.jit(jax.value_and_grad(mean_loss))


async def work(
    server: ParameterServer, worker: int, pixels: Any, labels: Any, updates: int
) -> None:
    rng = np.random.default_rng(worker)

    async def step() -> dict[str, Any]:
        parameters, version = server.pull(worker)
        rows = rng.integers(0, len(labels), BATCH_SIZE)
        loss, gradient = loss_and_gradient(parameters, pixels[rows], labels[rows])
        # worker 3 is slow: the others make updates meanwhile
        await anyio.sleep(0.004 if worker == 3 else 0.001)
        server.push(worker, gradient, version)
        return {"loss": float(loss), "global_step": server.version}

    creator = ah.FunctionSessionCreator(step, global_step=server.global_step)
    hooks = [ProtocolHook(server, worker), ah.StopAtStepHook(last_step=updates)]
    async with ah.MonitoredSession(hooks, creator) as session:
        while not session.should_stop():
            await session.run("loss")


async def train(protocol: Any, updates: int) -> None:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        np.float32(digits.data / 16.0), digits.target, test_size=0.25, random_state=0
    )
    server = ParameterServer(
        first_parameters(0), protocol, num_workers=NUM_WORKERS, learning_rate=RATE
    )
    async with anyio.create_task_group() as group:
        for worker in range(NUM_WORKERS):
            group.start_soon(work, server, worker, train_x, train_y, updates)
    counts = server.staleness_counts()
    mean = sum(value * count for value, count in counts.items()) / sum(counts.values())
    right = scores(server.pull(0).parameters, test_x).argmax(axis=1) == test_y
    print(
        f"{protocol}: {server.version} updates of {server.num_applied} gradients, mean staleness "
        f"{mean:.1f}, accuracy {float(right.mean()):.3f}",
        flush=True,
    )


async def main(updates: int) -> None:
    for protocol in (Asynchronous(), StaleSynchronous(2), KBatchSync(2)):
        await train(protocol, updates)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("--updates", type=int, default=1500)
    arguments = parser.parse_args()
    anyio.run(partial(main, arguments.updates), backend=arguments.backend)
