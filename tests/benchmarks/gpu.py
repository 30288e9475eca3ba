"""What hooks, an event loop beside it and saves cost around a PyTorch step on a CUDA device.

    python -m tests.benchmarks.gpu

It needs a CUDA device, and measures one process on one device.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import anyio
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    StateDictSaver,
)
from asynchooks.data import prefetch, repeat

from ._contenders import called, compare, function_session
from ._report import LOOPS, median_ratio, run_on
from .torch_steps import four_hooks

NUM_ROUNDS, BLOCK_STEPS = 9, 60
BATCH_SIZE, NUM_FEATURES = 256, 1024
DEVICE = "cuda"


class Training:
    """An update of a network on the device that takes about `secs` there."""

    def __init__(self, secs: float) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(BATCH_SIZE, NUM_FEATURES, device=DEVICE)
        self.y = torch.randn(BATCH_SIZE, 1, device=DEVICE)
        depth = 2
        self._make(depth)
        while self.measure() < secs:
            depth = int(depth * 1.3) + 1
            self._make(depth)
        self.secs = self.measure()

    def _make(self, depth: int) -> None:
        hidden = [each for _ in range(depth) for each in (nn.Linear(2048, 2048), nn.ReLU())]
        layers = nn.Linear(NUM_FEATURES, 2048), *hidden, nn.Linear(2048, 1)
        self.module = nn.Sequential(*layers).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, foreach=True)

    def measure(self) -> float:
        secs = []
        for _ in range(15):
            begun = time.perf_counter()
            self.step()
            secs.append(time.perf_counter() - begun)
        return statistics.median(secs)

    def queue(self, x: Any, y: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.module(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> dict[str, Any]:
        return {"loss": self.queue(self.x, self.y).item()}

    def step_of_tensors(self) -> dict[str, Any]:
        return {"loss": self.queue(self.x, self.y)}

    def update(self, x: Any, y: Any) -> dict[str, Any]:
        moved = (each.to(DEVICE, non_blocking=True) for each in (x, y))
        return {"loss": self.queue(*moved).item()}


async def beside_bare_loop(training: Training) -> None:
    contenders: dict[str, Any] = {"bare": called(training.step)}
    for name in ("auto", "inline", "thread"):
        contenders[name] = function_session(training.step, hooks=four_hooks(), step_runner=name)
    secs = await compare(contenders, BLOCK_STEPS, NUM_ROUNDS)
    for name in ("auto", "inline", "thread"):
        ratio = median_ratio(secs[name], secs["bare"])
        print(f"4 hooks, {training.secs * 1e3:.1f} ms step, {name} / bare loop: {ratio}")


async def beside_torch_loop(training: Training) -> None:
    rows = BATCH_SIZE * BLOCK_STEPS
    data = TensorDataset(torch.randn(rows, NUM_FEATURES), torch.randn(rows, 1))

    def loader() -> Any:
        return DataLoader(
            data, BATCH_SIZE, num_workers=2, persistent_workers=True, pin_memory=True, shuffle=True,
            generator=torch.Generator(),
        )  # fmt: skip

    fed, bare = loader(), loader()

    async def loop(num_steps: int) -> None:
        for x, y in bare:
            training.update(x, y)

    hooks = [FeedHook(prefetch(repeat(fed), 2), ["x", "y"])]
    session = function_session(training.update, hooks=hooks)
    secs = await compare({"loop": loop, "session": session}, BLOCK_STEPS, NUM_ROUNDS)
    ratio = median_ratio(secs["session"], secs["loop"])
    millis = f"{training.secs * 1e3:.1f}"
    print(f"DataLoader, 2 workers, pinned, {millis} ms step / torch's loop: {ratio}")


async def lateness(step: Callable[[], Any], runner: Any, hooks: list[Any], fetches: Any) -> str:
    """How late a task beside training is that sleeps 1 ms at a time, and the rate of the steps."""
    late = []

    async def tick() -> None:
        while True:
            begun = time.perf_counter()
            await anyio.sleep(1e-3)
            late.append(time.perf_counter() - begun - 1e-3)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        async with MonitoredSession(hooks, FunctionSessionCreator(step), step_runner=runner) as it:
            for _ in range(50):
                await it.run(fetches)
            late.clear()
            begun = time.perf_counter()
            for _ in range(500):
                await it.run(fetches)
            torch.cuda.synchronize()
            rate = 500 / (time.perf_counter() - begun)
        group.cancel_scope.cancel()
    cuts = statistics.quantiles(late, n=100)
    return f"{rate:.0f} steps/s, late by {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms"


async def beside_tasks(training: Training) -> None:
    for name, step, runner, fetches in (
        ("loss.item(), auto", training.step, "auto", "loss"),
        ("loss.item(), inline", training.step, "inline", "loss"),
        ("loss.item(), thread", training.step, "thread", "loss"),
        ("tensors that each run reads, auto", training.step_of_tensors, "auto", "loss"),
        ("tensors that each run reads, thread", training.step_of_tensors, "thread", "loss"),
    ):
        print(f"{name}: {await lateness(step, runner, four_hooks(), fetches)}")
    print(f"tensors that nobody reads, auto: "
          f"{await lateness(training.step_of_tensors, 'auto', [], [])}")  # fmt: skip


async def saving(training: Training) -> None:
    """How much longer the steps of a training are that saves in the background."""
    megabytes = sum(each.nbytes for each in training.module.parameters()) / 1e6
    saver = StateDictSaver(module=training.module, optimizer=training.optimizer)
    with tempfile.TemporaryDirectory() as directory:
        hook = CheckpointSaverHook(directory, save_steps=400, saver=saver, background=True)
        async with MonitoredSession([hook], FunctionSessionCreator(training.step)) as session:
            secs = []
            for _ in range(2000):
                begun = time.perf_counter()
                await session.run("loss")
                secs.append(time.perf_counter() - begun)
    median = statistics.median(secs)
    most = sorted(secs, reverse=True)[:6]
    print(
        f"{megabytes:.0f} MB saved in the background each 400 steps: a step {median * 1e3:.2f} ms, "
        f"all steps {100 * (sum(secs) / len(secs) / median - 1):.1f} % longer, the longest "
        + ", ".join(f"{each * 1e3:.0f}" for each in most) + " ms"
    )  # fmt: skip


def main() -> None:
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    torch.set_float32_matmul_precision("high")
    long, short = Training(0.005), Training(0.001)
    for loop in LOOPS:
        print(f"-- {loop}")
        for training in (long, short):
            run_on(loop, beside_bare_loop, training)
        run_on(loop, beside_tasks, long)
    run_on("asyncio", beside_torch_loop, long)
    run_on("asyncio", saving, long)


if __name__ == "__main__":
    main()
