"""How many updates a cluster has made, over time."""

from __future__ import annotations

from contextlib import suppress

from ..._errors import StepUnreachableError
from ..._step.global_step import GlobalStep
from ..kernel._kernel import Kernel

_MOST_POINTS = 1000
"""Every second one is dropped above it."""


async def record_progress(
    step: GlobalStep, kernel: Kernel, warm_up: float, points: list[tuple[float, int]]
) -> None:
    """Note (virtual seconds, updates) behind the warm-up, some hundreds of times."""
    await kernel.sleep(float(warm_up))  # of NumPy, too
    every = 1
    with suppress(StepUnreachableError):  # no worker is left to make one
        while True:
            points.append((kernel.time, step.value))
            if len(points) > _MOST_POINTS:
                del points[1::2]
                every *= 2
            await step.wait_for(step.value + every)
