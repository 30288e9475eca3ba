"""What hooks and FeedHook cost around a PyTorch step on the CPU, beside the bare loop.

    python -m tests.benchmarks.torch_steps

It does not measure what a DataLoader costs by itself; `gpu` has the same on a CUDA device.
"""

import importlib
import statistics
import time
from contextlib import ExitStack
from typing import Any

import anyio.lowlevel

from asynchooks import (
    FeedHook,
    LoggingTensorHook,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.data import prefetch, repeat

from ._contenders import FAR_AWAY, called, compare, function_session, ratio
from ._report import is_installed, measure, median_ratio

NUM_ROUNDS, BLOCK_STEPS = 15, 40
SIZES = {"cpu": (64, 256, 256), "cuda": (256, 1024, 2048)}
"""By the device: rows of a batch, numbers in each, and units of a layer."""


class Training:
    """An update of a network of so many layers that it takes about `secs` on its device."""

    def __init__(self, secs: float = 0.005, device: str = "cpu") -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.manual_seed(0)
        self.secs, self.device = secs, device
        self.x, self.y = self.rows(1)
        depth = 2
        while self._secs_of(depth) < secs:
            depth = int(depth * 1.3) + 1

    def rows(self, num_batches: int) -> tuple[Any, Any]:
        num_rows, num_features, _ = SIZES[self.device]
        num_rows *= num_batches
        return self.torch.randn(num_rows, num_features), self.torch.randn(num_rows, 1)

    def _secs_of(self, depth: int) -> float:
        nn, (_, num_features, width) = self.torch.nn, SIZES[self.device]
        hidden = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())]
        layers = nn.Linear(num_features, width), *hidden, nn.Linear(width, 1)
        self.module = nn.Sequential(*layers).to(self.device)
        self.optimizer = self.torch.optim.SGD(self.module.parameters(), lr=1e-3, foreach=True)
        secs = []
        for _ in range(15):
            begun = time.perf_counter()
            self.step()
            secs.append(time.perf_counter() - begun)
        return statistics.median(secs)

    def step(self) -> dict[str, float]:
        return self.update(self.x, self.y)

    def update(self, x: Any, y: Any) -> dict[str, float]:
        x, y = (each.to(self.device, non_blocking=True) for each in (x, y))
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

    what = f"torch step of {training.secs * 1e3:.0f} ms"
    contenders: dict[str, Any] = {"bare": called(training.step)}
    for runner in ("auto", "inline", "thread"):
        session = function_session(training.step, hooks=four_hooks(), step_runner=runner)
        contenders[f"{what}, 4 hooks, {runner} / bare loop"] = session
    contenders[f"{what} after anyio.sleep(0) / bare loop"] = slept
    secs = await compare(contenders, BLOCK_STEPS, NUM_ROUNDS)
    bare = secs.pop("bare")
    return {name: median_ratio(each, bare) for name, each in secs.items()}


async def beside_torch_loop(training: Training, num_workers: int) -> str:
    """On a CUDA device from pinned memory, through `prefetch`."""
    is_on_cuda = training.device == "cuda"
    utils: Any = importlib.import_module("torch.utils.data")
    data = utils.TensorDataset(*training.rows(BLOCK_STEPS))  # a pass is a block
    with ExitStack() as at_end:
        loaders = []
        for _ in range(2):
            loader = utils.DataLoader(
                data, batch_size=len(training.x), num_workers=num_workers, shuffle=True,
                persistent_workers=num_workers > 0, pin_memory=is_on_cuda,
                generator=training.torch.Generator(),
            )  # fmt: skip
            loaders.append(loader)
            if num_workers:
                at_end.callback(lambda each: each._iterator._shutdown_workers(), loader)
        fed, bare = loaders

        async def loop(num_steps: int) -> None:
            for x, y in bare:
                training.update(x, y)

        source: Any = prefetch(repeat(fed), 2) if is_on_cuda else repeat(fed)
        session = function_session(training.update, hooks=[FeedHook(source, ["x", "y"])])
        return await ratio(session, loop, BLOCK_STEPS, NUM_ROUNDS)


async def figures(loop: str) -> dict[str, str]:
    if not is_installed("torch"):
        return {}
    training = Training()
    return await beside_bare_loop(training) | {
        f"DataLoader, workers: {num}, under FeedHook, 5 ms step / torch's loop over it": (
            await beside_torch_loop(training, num)
        )
        for num in (0, 2)
    }


if __name__ == "__main__":
    measure(figures)
