"""What hooks and FeedHook cost around a PyTorch step on the CPU, beside the bare loop.

    python -m tests.benchmarks.torch_steps

It does not measure GPUs, nor what a DataLoader costs by itself.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import anyio.lowlevel

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.data import repeat

from ._contenders import Block, called, median_ratio, run_by, secs_per_step
from ._report import Measure, Row, print_rows, rows_of, run_on

STEP_SECS, NUM_ROUNDS, BLOCK_STEPS = 0.005, 15, 40
BATCH_SIZE, NUM_FEATURES, NUM_WORKERS = 64, 256, 2

AUTO = "4 hooks on a 5 ms torch step, auto / bare loop"
INLINE = "4 hooks on a 5 ms torch step, inline / bare loop"
SLEPT = "5 ms torch step after anyio.sleep(0) / bare loop"
THREAD = "4 hooks on a 5 ms torch step, thread / bare loop"
LOADED = "DataLoader under FeedHook, 5 ms step / torch's loop over it"
BY_WORKERS = f"DataLoader with {NUM_WORKERS} workers under FeedHook / torch's loop over it"
MEASURES = [
    Measure(AUTO, "<= 1.02", peer="torch"),
    Measure(INLINE, peer="torch"),
    Measure(THREAD, peer="torch"),
    Measure(SLEPT, peer="torch"),
    Measure(LOADED, "<= 1.1", peer="torch"),
    Measure(BY_WORKERS, "<= 1.1", peer="torch"),
]


class Training:
    """An update of a network, so large that it takes about `STEP_SECS`."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.manual_seed(0)
        self.x = self.torch.randn(BATCH_SIZE, NUM_FEATURES)
        self.y = self.torch.randn(BATCH_SIZE, 1)
        width = 128
        self._make(width)
        while self._secs() < STEP_SECS:
            width = int(width * 1.15)
            self._make(width)

    def _make(self, width: int) -> None:
        nn = self.torch.nn
        self.module = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )  # fmt: skip
        self.optimizer = self.torch.optim.AdamW(self.module.parameters())

    def _secs(self) -> float:
        secs = []
        for _ in range(9):
            begun = time.perf_counter()
            self.step()
            secs.append(time.perf_counter() - begun)
        return sorted(secs)[4]

    def step(self) -> dict[str, float]:
        return self.update(self.x, self.y)

    def update(self, x: Any, y: Any) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss = ((self.module(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


def four_hooks() -> list[Any]:
    stop, nan = StopAtStepHook(last_step=10**9), NanTensorHook("loss")
    logging = LoggingTensorHook(["loss"], every_n_iter=10**6)
    return [stop, nan, logging, StepCounterHook(every_n_steps=10**6)]


def slept(step: Callable[[], Any]) -> Block:
    """The bare loop, where the event loop gets its turn before each step: what is paid for that."""

    async def block(num_steps: int) -> None:
        for _ in range(num_steps):
            await anyio.lowlevel.checkpoint()
            step()

    return block


async def beside_bare_loop(training: Training) -> dict[str, str]:
    creator = FunctionSessionCreator(training.step)
    names: dict[Any, str] = {"auto": AUTO, "inline": INLINE, "thread": THREAD, "slept": SLEPT}
    async with (
        MonitoredSession(four_hooks(), creator, step_runner="auto") as auto,
        MonitoredSession(four_hooks(), creator, step_runner="inline") as inline,
        MonitoredSession(four_hooks(), creator, step_runner="thread") as thread,
    ):
        blocks: dict[str, Block] = {"bare": called(training.step), "slept": slept(training.step)}
        for name, session in (("auto", auto), ("inline", inline), ("thread", thread)):
            blocks[name] = run_by(session, "loss")
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return {row: median_ratio(secs[name], secs["bare"]) for name, row in names.items()}


@contextmanager
def loader(training: Training, num_workers: int) -> Iterator[Any]:
    torch = training.torch
    utils: Any = importlib.import_module("torch.utils.data")
    rows = BATCH_SIZE * BLOCK_STEPS  # a pass is a block
    data = utils.TensorDataset(torch.randn(rows, NUM_FEATURES), torch.randn(rows, 1))
    made = utils.DataLoader(
        data, batch_size=BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0,
        generator=torch.Generator(), shuffle=True,
    )  # fmt: skip
    with ExitStack() as at_end:
        if num_workers:
            at_end.callback(lambda: made._iterator._shutdown_workers())
        yield made


async def beside_torch_loop(training: Training, num_workers: int) -> str:
    creator = FunctionSessionCreator(training.update)
    with loader(training, num_workers) as fed, loader(training, num_workers) as bare:

        async def loop(num_steps: int) -> None:
            for x, y in bare:
                training.update(x, y)

        hooks = [FeedHook(repeat(fed), ["x", "y"])]
        async with MonitoredSession(hooks, creator) as session:
            blocks = {"loop": loop, "session": run_by(session, "loss")}
            secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(secs["session"], secs["loop"])


async def ratios() -> dict[str, str]:
    training = Training()
    return {
        **await beside_bare_loop(training),
        LOADED: await beside_torch_loop(training, 0),
        BY_WORKERS: await beside_torch_loop(training, NUM_WORKERS),
    }


def figures(loop: str) -> dict[str, str]:
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
