"""What hooks and FeedHook cost around a PyTorch step on the CPU, beside the bare loop.

    python -m tests.benchmarks.torch_steps

It does not measure GPUs, nor what a DataLoader costs by itself.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio.lowlevel

from asynchooks import (
    FeedHook,
    LoggingTensorHook,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.data import repeat

from ._contenders import FAR_AWAY, called, compare, function_session
from ._report import is_installed, measure, median_ratio

STEP_SECS, NUM_ROUNDS, BLOCK_STEPS = 0.005, 15, 40
BATCH_SIZE, NUM_FEATURES = 64, 256


class Training:
    """An update of a network, so large that it takes about `STEP_SECS`."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.manual_seed(0)
        self.x = self.torch.randn(BATCH_SIZE, NUM_FEATURES)
        self.y = self.torch.randn(BATCH_SIZE, 1)
        width, secs = 128.0, 0.0
        while secs < STEP_SECS:
            secs = self._secs_of(int(width))
            width *= 1.15

    def _secs_of(self, width: int) -> float:
        nn = self.torch.nn
        self.module = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )  # fmt: skip
        self.optimizer = self.torch.optim.AdamW(self.module.parameters())
        moments = [time.perf_counter()]
        for _ in range(9):
            self.step()
            moments.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(moments))

    def step(self) -> dict[str, float]:
        return self.update(self.x, self.y)

    def update(self, x: Any, y: Any) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss = ((self.module(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


def four_hooks() -> list[Any]:
    stop, nan = StopAtStepHook(last_step=FAR_AWAY), NanTensorHook("loss")
    logging = LoggingTensorHook(["loss"], every_n_iter=10**6)
    return [stop, nan, logging, StepCounterHook(every_n_steps=10**6)]


async def beside_bare_loop(training: Training) -> dict[str, str]:
    async def slept(num_steps: int) -> None:  # what is paid for the event loop's turn
        for _ in range(num_steps):
            await anyio.lowlevel.checkpoint()
            training.step()

    def ours(runner: str) -> Any:
        return function_session(training.step, hooks=four_hooks(), step_runner=runner)

    contenders: dict[str, Any] = {"bare": called(training.step)}
    for runner in ("auto", "inline", "thread"):
        contenders[f"4 hooks on a 5 ms torch step, {runner} / bare loop"] = ours(runner)
    contenders["5 ms torch step after anyio.sleep(0) / bare loop"] = slept
    secs = await compare(contenders, BLOCK_STEPS, NUM_ROUNDS)
    bare = secs.pop("bare")
    return {name: median_ratio(each, bare) for name, each in secs.items()}


@contextmanager
def loader(torch: Any, num_workers: int) -> Iterator[Any]:
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
    with loader(training.torch, num_workers) as fed, loader(training.torch, num_workers) as bare:

        async def loop(num_steps: int) -> None:
            for x, y in bare:
                training.update(x, y)

        hooks = [FeedHook(repeat(fed), ["x", "y"])]
        session = function_session(training.update, hooks=hooks)
        secs = await compare({"loop": loop, "session": session}, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(secs["session"], secs["loop"])


async def figures(loop: str) -> dict[str, str]:
    if not is_installed("torch"):
        return {}
    training = Training()
    found = await beside_bare_loop(training)
    for num in (0, 2):
        name = f"DataLoader, workers: {num}, under FeedHook, 5 ms step / torch's loop over it"
        found[name] = await beside_torch_loop(training, num)
    return found


if __name__ == "__main__":
    measure(figures)
