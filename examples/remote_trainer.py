"""A remote trainer that works in cycles: the next step is submitted while the last is computed.

A service holds the model. The client's calls have the shape of Tinker's: each gives a future once
it is submitted, `result_async` waits for what comes of it. The service of this file is a stand-in
in real time, in a thread: a cycle of 0.1 s computes one step of those that were there when it
began. One step at a time takes two cycles each. The learner of this file submits a step, and
returns the outputs of the step before it, so that it misses no cycle.

It prints the seconds that a step takes with one and with two steps at the service, and then trains
with checkpoints: interrupt it, and start it again. The service keeps the states under their names,
a checkpoint holds the name, the step, and the position in the data.
"""

from __future__ import annotations

import argparse
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

import asynchooks as ah
from asynchooks.data import batch, prefetch, repeat

CYCLE_SECS, RATE, BATCH_SIZE, NUM_WEIGHTS = 0.1, 0.05, 32, 8


class Reply:
    """What comes of a request, as Tinker's futures give it."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self) -> Any:
        return self._future.result()

    async def result_async(self) -> Any:
        return await anyio.to_thread.run_sync(self._future.result, abandon_on_cancel=True)


class Service:
    """The stand-in: linear regression, one step a cycle; `weights` is float64 of shape (8,)."""

    def __init__(self, storage: Path | None = None) -> None:
        self.weights = self.gradient = np.zeros(NUM_WEIGHTS)
        self.storage = storage  # of the states that are saved by name
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], bool, Future[Any]]]
        self._requests = queue.SimpleQueue()
        self._is_closed = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, fn: Callable[[], Any], *, ends_step: bool = True) -> Reply:
        future: Future[Any] = Future()
        self._requests.put((fn, ends_step, future))
        return Reply(future)

    def _work(self) -> None:
        while not self._is_closed.is_set():
            begun, taken = time.monotonic(), []
            while not self._requests.empty():
                taken.append(self._requests.get())
                if taken[-1][1]:
                    break  # the rest is for later cycles
            time.sleep(CYCLE_SECS - (time.monotonic() - begun))
            for fn, _, future in taken:
                future.set_result(fn())

    def close(self) -> None:
        self._is_closed.set()

    def forward_backward(self, x: Any, y: Any) -> dict[str, float]:
        errors = x @ self.weights - y
        self.gradient = x.T @ errors / len(y)
        return {"loss": float(np.square(errors).mean())}

    def optim_step(self, rate: float) -> dict[str, float]:
        self.weights = self.weights - rate * self.gradient
        return {}

    def save(self, name: str) -> None:
        assert self.storage is not None
        self.storage.mkdir(parents=True, exist_ok=True)
        np.save(self.storage / f"{name}.npy", self.weights)

    def load(self, name: str) -> None:
        assert self.storage is not None
        self.weights = np.load(self.storage / f"{name}.npy")


class TrainingClient:
    """The calls of a remote trainer's client that a learner needs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def forward_backward_async(self, x: Any, y: Any) -> Reply:
        return self._service.submit(lambda: self._service.forward_backward(x, y), ends_step=False)

    async def optim_step_async(self, rate: float) -> Reply:
        return self._service.submit(lambda: self._service.optim_step(rate))

    def save_state(self, name: str) -> Reply:
        return self._service.submit(lambda: self._service.save(name))

    def load_state(self, name: str) -> Reply:
        return self._service.submit(lambda: self._service.load(name))


class RemoteState:
    """A saver: the service keeps the state, and the checkpoint the name of it."""

    def __init__(self, client: TrainingClient) -> None:
        self.client = client

    def save(self, path: str) -> None:
        name = Path(path).name
        self.client.save_state(name).result()  # all steps are done: see DrainFirst
        Path(path).write_text(name)

    def restore(self, path: str) -> None:
        self.client.load_state(Path(path).read_text()).result()


class Learner(ah.SessionRunHook):
    """The step function, with up to `depth` steps at the service, and the hook that drains it.

    A step returns the outputs of the oldest one whose outputs were not returned.
    """

    def __init__(self, client: TrainingClient, depth: int) -> None:
        self.client, self.depth = client, depth
        self.replies: deque[tuple[int, Reply, Reply]] = deque()  # the oldest first, with its step
        self.last: dict[str, float] = {}  # the newest outputs

    async def after_create_session(self, session: Any, coord: ah.Coordinator) -> None:
        self.global_step = session.global_step
        self.replies.clear()  # a service that was lost answers none of them

    async def step(self, x: Any, y: Any) -> dict[str, float]:
        forward = await self.client.forward_backward_async(x, y)
        optim = await self.client.optim_step_async(RATE)
        self.replies.append((self.global_step.value + 1, forward, optim))
        outputs = await self.outputs_of(*self.replies[0])
        if len(self.replies) == self.depth:
            self.replies.popleft()
        return outputs

    async def outputs_of(self, step: int, forward: Reply, optim: Reply) -> dict[str, float]:
        result = await forward.result_async()
        await optim.result_async()
        self.last = {"loss": result["loss"], "of_step": step}
        return self.last

    async def drain(self) -> None:
        for each in self.replies:
            await self.outputs_of(*each)

    async def end(self, session: Any) -> None:
        await self.drain()


class DrainFirst(ah.CheckpointSaverListener):
    """Waits before each save, so that model, step and position in the data are of one step."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self.learner.drain()


def examples() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, NUM_WEIGHTS))
    y = x @ np.arange(1.0, NUM_WEIGHTS + 1) + 0.1 * rng.normal(size=len(x))
    return list(zip(x, y, strict=True))


async def train(service: Service, depth: int, last_step: int, directory: str | None = None) -> None:
    """Train up to the last step, and print what the steps took and what came of them."""
    client = TrainingClient(service)
    learner = Learner(client, depth)
    feed = ah.FeedHook(prefetch(batch(repeat(examples()), BATCH_SIZE), 2), ["x", "y"])
    hooks: list[ah.SessionRunHook] = [learner, ah.StopAtStepHook(last_step=last_step), feed]
    if directory is not None:
        place, saver = Path(directory) / "checkpoints", RemoteState(client)
        listeners = [DrainFirst(learner)]
        saving = ah.CheckpointSaverHook(place, save_steps=20, saver=saver, listeners=listeners)
        hooks += [ah.PreemptionHook(deadline_secs=20), saving]
    async with ah.MonitoredSession(hooks, learner.step) as session:
        first, begun = session.global_step.value, None
        while not session.should_stop():
            await session.run("loss")
            begun = begun or time.monotonic()  # once the first step has returned
    num_steps, ended = session.global_step.value - first, time.monotonic()
    secs = (ended - (begun or ended)) / max(1, num_steps - 1)
    steps = f"{num_steps} steps, {secs:.2f} s each, loss {learner.last.get('loss', np.nan):.3f}"
    print(f"depth {depth}, from step {first}: {steps}", flush=True)


async def main(directory: str, last_step: int) -> None:
    print(f"the service has cycles of {CYCLE_SECS} s")
    for depth in (1, 2):
        service = Service()
        await train(service, depth, 20)
        service.close()
    print(f"checkpoints are kept in {directory!r}; interrupt it, and start it again")
    service = Service(Path(directory) / "service")
    await train(service, 2, last_step, directory)
    service.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="remote_trainer")
    parser.add_argument("--last-step", type=int, default=60)
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    anyio.run(main, arguments.directory, arguments.last_step, backend=arguments.backend)
