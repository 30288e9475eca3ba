"""A PyTorch model that computes really, and examples that are read from afar."""

import asyncio
from typing import Any

import numpy as np

from asynchooks import FeedHook
from asynchooks.data import batch, map_concurrent, prefetch
from asynchooks.planning import timed

from . import train_for

NUM_FEATURES, NUM_HIDDEN = 256, 1024
READ_SECS, SIGMA = 0.02, 0.5


async def main(
    batch_size: int = 32, concurrency: int = 16, num_ahead: int = 1, secs: float = 20.0
) -> None:
    """Train for so many seconds.

    Args:
        batch_size: examples in a step.
        concurrency: examples that are read at a time.
        num_ahead: batches that are held ready; 0: none.
        secs: until training stops.
    """
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng()
    nn = torch.nn
    layers = nn.Sequential(
        nn.Linear(NUM_FEATURES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_HIDDEN),
        nn.ReLU(), nn.Linear(NUM_HIDDEN, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)

    @timed("read")
    async def read(index: int) -> Any:
        await asyncio.sleep(READ_SECS * rng.lognormal(-(SIGMA**2) / 2, SIGMA))
        return rng.standard_normal(NUM_FEATURES, np.float32)

    # a function of the same keyword as the step: `len` takes none
    @timed("train", input_size=lambda examples: len(examples), returns={"loss": 0.0})
    def train(examples: list[Any]) -> dict[str, float]:
        inputs = torch.from_numpy(np.stack(examples))
        optimizer.zero_grad()
        loss = (layers(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    source: Any = batch(map_concurrent(read, range(10**7), concurrency), batch_size, collate=list)
    if num_ahead:
        source = prefetch(source, num_ahead)
    await train_for(secs, train, FeedHook(source, "examples"))
