"""Training on data that arrives over HTTP: binary shards, fetched several at a time, with retries.

A server on this machine stands for the data store: an index (one JSON object per line) and 30
shards of handwritten digits. It answers slowly, refuses every seventh request and cuts every
eleventh answer short. The client reads the index as it arrives, has four shards under way at a
time, checks each against its hash, shuffles rows across shards, and trains a TensorFlow model
meanwhile. The log says what share of the time training waited for data.

It prints the address of the server, what the stages have read and waited for, and the accuracy.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up notes say nothing here

import anyio
import httpx
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import asynchooks as ah
from asynchooks.data import batch, map_concurrent, prefetch, repeat, shuffle

v1 = tf.compat.v1
logger = logging.getLogger("example")

NUM_SHARDS, ANSWER_SECS, MAX_TRIES = 30, 0.02, 5


class Store:
    """The shards, and how often the store was asked."""

    def __init__(self) -> None:
        digits = load_digits()
        self.shards: dict[str, bytes] = {}
        lines = []
        for number, rows in enumerate(np.array_split(np.arange(len(digits.target)), NUM_SHARDS)):
            file = io.BytesIO()
            np.savez(file, pixels=digits.data[rows] / 16.0, labels=digits.target[rows])
            name, content = f"{number:03}.npz", file.getvalue()
            self.shards[name] = content
            digest = hashlib.sha256(content).hexdigest()
            lines.append(json.dumps({"shard": name, "sha256": digest}))
        self.index = "\n".join(lines).encode() + b"\n"
        self.requests = itertools.count(1)


def handler_of(store: Store) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            if name == "index.ndjson":
                return self.answer(store.index)
            time.sleep(ANSWER_SECS)
            number = next(store.requests)
            if number % 7 == 0:
                return self.send_error(503, "too many requests")
            return self.answer(store.shards[name], is_cut=number % 11 == 0)

        def answer(self, content: bytes, *, is_cut: bool = False) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
            self.close_connection = is_cut

        def log_message(self, *args: Any) -> None:
            """It would say each request."""

    return Handler


@contextmanager
def serving(store: Store) -> Iterator[str]:
    """Serve it, in threads of this process; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(store))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def read_index(client: httpx.AsyncClient) -> AsyncIterator[dict[str, str]]:
    try:
        async with client.stream("GET", "/index.ndjson") as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                yield json.loads(line)
    except httpx.TransportError as error:
        error.add_note(f"reading {client.base_url}index.ndjson")
        raise


async def fetch(client: httpx.AsyncClient, entry: dict[str, str]) -> dict[str, Any]:
    """A shard's arrays; tried again where the store refuses, cuts it, or sends something else."""
    for tries in itertools.count(1):
        try:
            content = (await client.get(f"/{entry['shard']}")).raise_for_status().content
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise httpx.ReadError("its hash is not that of the index")
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if tries == MAX_TRIES:
                error.add_note(f"at the shard {entry['shard']}, tried {tries} times")
                raise
            logger.info("%s: %s; again", entry["shard"], str(error).partition("\n")[0])
            await anyio.sleep(0.01 * 2**tries)
        else:
            with np.load(io.BytesIO(content)) as arrays:
                return {name: arrays[name] for name in ("pixels", "labels")}
    raise AssertionError


async def read_rows(client: httpx.AsyncClient) -> AsyncIterator[tuple[Any, Any]]:
    """One pass over all rows: what the stages within run is ended when this is closed."""
    async with map_concurrent(lambda entry: fetch(client, entry), read_index(client), 4) as shards:
        async for shard in shards:
            for row in zip(shard["pixels"], shard["labels"], strict=True):
                yield row


def build_model() -> tuple[Any, Any, Any, Any, Any]:
    pixels = v1.placeholder(tf.float32, [None, 64], "pixels")
    labels = v1.placeholder(tf.int64, [None], "labels")
    weights = v1.get_variable("weights", [64, 10], initializer=v1.zeros_initializer())
    scores = tf.matmul(pixels, weights)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
    loss = tf.reduce_mean(losses, name="loss")
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, 1), labels), tf.float32))
    step = v1.train.get_or_create_global_step()
    train_op = v1.train.GradientDescentOptimizer(0.5).minimize(loss, step)
    return pixels, labels, loss, accuracy, train_op


async def main(address: str, num_epochs: int) -> None:
    async with httpx.AsyncClient(base_url=address) as client:
        rows = shuffle(repeat(lambda: read_rows(client), num_epochs), 500, seed=1)
        source = prefetch(batch(rows, 64), 8)
        with tf.Graph().as_default():
            pixels, labels, loss, accuracy, train_op = build_model()
            hooks = [
                ah.FeedHook(source, [pixels, labels]),
                ah.DataWaitHook(source, every_n_steps=50),
                ah.LoggingTensorHook({"loss": loss}, every_n_iter=50),
            ]
            seen: list[float] = []
            async with ah.MonitoredSession(hooks, ah.ChiefSessionCreator()) as session:
                while not session.should_stop():
                    seen.append((await session.run([train_op, accuracy]))[1])
    print(source.statistics())
    steps, last = session.global_step.value, float(np.mean(seen[-20:]))
    print(f"{steps} steps, training accuracy {last:.3f} over the last 20")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with serving(Store()) as own_address:
        print(f"{NUM_SHARDS} shards are served at {own_address}; training streams them", flush=True)
        anyio.run(main, own_address, arguments.epochs, backend=arguments.backend)
