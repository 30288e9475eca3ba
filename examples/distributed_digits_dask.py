"""Handwritten digits on several Dask processes, with several sessions on the event loop of each.

The parameters live on one Dask worker; every session pulls them, computes a gradient of a small
network and pushes it. Worker i joins at step int(K * log(i + 1)), and training stops exactly at
the last step. It starts a cluster on this machine, which ends with it, or uses the one whose
scheduler is at DASK_SCHEDULER_ADDRESS.

It prints the number of sessions, the steps of each session by process, and the accuracy.
"""

from __future__ import annotations

import argparse
import math
import os
from contextlib import AsyncExitStack
from itertools import accumulate, pairwise
from typing import Any

import anyio
import numpy as np
from distributed import Client, LocalCluster
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah
from asynchooks.distributed import RemoteParameterServer, ServerAddress, host_parameter_server
from asynchooks.protocols import ProtocolHook, parse_protocol, staleness_aware

K, BATCH, HIDDEN, SEED = 40, 64, 64, 0


def digits() -> Any:
    """Training pixels, held-out pixels, training labels, held-out labels."""
    data = load_digits()
    return train_test_split(data.data / 16, data.target, test_size=0.2, random_state=SEED)


def predict(p: dict[str, Any], pixels: Any) -> tuple[Any, Any]:
    """The hidden units, and the probabilities of the ten digits."""
    hidden = np.maximum(pixels @ p["w1"] + p["b1"], 0)
    scores = np.exp(hidden @ p["w2"] + p["b2"])
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def loss_and_gradient(p: dict[str, Any], pixels: Any, labels: Any) -> tuple[float, dict[str, Any]]:
    hidden, chances = predict(p, pixels)
    error = (chances - np.eye(10)[labels]) / len(labels)
    back = error @ p["w2"].T * (hidden > 0)
    gradient = {
        "w1": pixels.T @ back,
        "b1": back.sum(0),
        "w2": hidden.T @ error,
        "b2": error.sum(0),
    }
    return float(-np.log(chances[np.arange(len(labels)), labels]).mean()), gradient


async def train_here(address: ServerAddress, workers: range, last_step: int, k: float) -> list[int]:
    """On one Dask worker: its part of the sessions; returns how many steps each one ran."""
    pixels, _, labels, _ = digits()
    num_steps = dict.fromkeys(workers, 0)

    async def work(worker: int) -> None:
        rng = np.random.default_rng([SEED, worker])

        async def step() -> dict[str, float]:
            parameters, version = await server.pull(worker)
            rows = rng.integers(len(pixels), size=BATCH)
            loss, gradient = loss_and_gradient(parameters, pixels[rows], labels[rows])
            await server.push(worker, gradient, version)
            return {"loss": loss}

        start, stop = int(k * math.log(worker + 1)), ah.StopAtStepHook(last_step=last_step)
        hooks = [ah.GlobalStepWaiterHook(start), ProtocolHook(server, worker), stop]
        creator = ah.FunctionSessionCreator(step, global_step=server.global_step)
        async with ah.MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run("loss")
                num_steps[worker] += 1

    async with RemoteParameterServer(address) as server, anyio.create_task_group() as group:
        for worker in workers:
            group.start_soon(work, worker)
    return list(num_steps.values())


async def main(protocol_name: str, last_step: int, k: float, num_processes: int) -> None:
    rng, pixels = np.random.default_rng(SEED), 64
    first = {
        "w1": rng.normal(0, 0.2, (pixels, HIDDEN)), "b1": np.zeros(HIDDEN),
        "w2": rng.normal(0, 0.2, (HIDDEN, 10)), "b2": np.zeros(10),
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        cluster: Any = os.environ.get("DASK_SCHEDULER_ADDRESS")
        if cluster is None:  # its status pages on any port, of this machine only
            cluster = await stack.enter_async_context(LocalCluster(
                n_workers=num_processes, threads_per_worker=4,
                dashboard_address="127.0.0.1:0", asynchronous=True,
            ))  # fmt: skip
        client: Any = await stack.enter_async_context(Client(cluster, asynchronous=True))
        await client.wait_for_workers(num_processes, timeout=60)
        places = await client.nthreads()  # by Dask worker: one session for each of its threads
        ends = [0, *accumulate(places.values())]
        protocol = parse_protocol(protocol_name, ends[-1])
        print(f"{ends[-1]} sessions in {len(places)} processes train by {protocol}", flush=True)
        server = await stack.enter_async_context(host_parameter_server(
            client, first, protocol, num_workers=ends[-1], learning_rate=staleness_aware(0.4)
        ))  # fmt: skip
        parts = [
            client.submit(train_here, server.address, range(*part), last_step, k, workers=[place])
            for place, part in zip(places, pairwise(ends), strict=True)
        ]
        for number, steps in enumerate(await client.gather(parts)):
            print(f"process {number}: its sessions ran {steps} steps")
        parameters, version = await server.pull(0)
        _, test_pixels, _, test_labels = digits()
        is_right = predict(parameters, test_pixels)[1].argmax(axis=1) == test_labels
        print(f"final step {version}, test accuracy {is_right.mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", default="async", help="such as kbatch-async:4, ssp:3, sync")
    parser.add_argument("--steps", type=int, default=2000, help="the last global step")
    parser.add_argument("--processes", type=int, default=3, help="Dask workers to wait for")
    options = parser.parse_args()
    # where workers wait for each other, all have to begin together
    starts_gradually = options.protocol.startswith(("async", "kbatch-async"))
    k = K if starts_gradually else 0
    anyio.run(main, options.protocol, options.steps, k, options.processes)
