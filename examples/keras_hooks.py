"""Coroutine hooks in Keras's `model.fit`: a dashboard is fed while Keras trains.

`fit` blocks its thread, so the hooks run in an event loop in another one. Here the program opens
that event loop itself, because its dashboard, a small server on the loopback address, lives in it.

It prints the port of the dashboard, the steps that it received, and the accuracy.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # fewer lines from TensorFlow at its start

import argparse
import json
from typing import Any

import anyio
import keras
from anyio.abc import SocketAttribute, SocketStream
from anyio.from_thread import start_blocking_portal
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah


class Dashboard:
    """Receives lines of JSON over TCP."""

    def __init__(self) -> None:
        self.text = b""

    async def serve(self, *, task_status: anyio.abc.TaskStatus[int]) -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        task_status.started(listener.extra(SocketAttribute.local_port))
        await listener.serve(self.receive)

    async def receive(self, stream: SocketStream) -> None:
        async with stream:
            async for data in stream:
                self.text += data


class SendLoss(ah.SessionRunHook):
    """Sends the loss every few steps; only this hook waits for a slow dashboard."""

    def __init__(self, port: int, every_n_steps: int) -> None:
        self.port = port
        self.timer = ah.SecondOrStepTimer(every_steps=every_n_steps)

    async def after_create_session(self, session: Any, coord: ah.Coordinator) -> None:
        self.stream = await anyio.connect_tcp("127.0.0.1", self.port)

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("loss")  # one of Keras's logs

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        step = run_context.global_step.value
        if self.timer.should_trigger_for_step(step):
            self.timer.update_last_triggered_step(step)
            line = json.dumps({"step": step, "loss": run_values.results})
            await self.stream.send(line.encode() + b"\n")

    async def end(self, session: Any) -> None:
        await self.stream.aclose()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await anyio.aclose_forcefully(self.stream)


def main(backend: str) -> None:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    pixels, test_pixels, labels, test_labels = train_test_split(
        digits.data / 16, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

    dashboard = Dashboard()
    with start_blocking_portal(backend) as portal:
        server, port = portal.start_task(dashboard.serve)
        print(f"a dashboard listens on port {port}; Keras trains and feeds it", flush=True)
        hooks = [
            SendLoss(port, every_n_steps=100),
            ah.StopAtStepHook(last_step=1000),
            ah.NanTensorHook("loss"),
        ]
        with ah.HooksCallback(hooks, portal=portal) as callback:
            model.fit(pixels, labels, epochs=100, verbose=0, callbacks=[callback])
        server.cancel()

    lines = [json.loads(line) for line in dashboard.text.splitlines()]
    print("the dashboard received the steps", [line["step"] for line in lines])
    _, accuracy = model.evaluate(test_pixels, test_labels, verbose=0)
    print(f"stopped at step {int(model.optimizer.iterations)}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    main(parser.parse_args().backend)
