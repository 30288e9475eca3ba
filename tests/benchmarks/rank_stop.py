"""What the agreement of ranks costs a step, with 2 and with 4 ranks on this machine.

    python -m tests.benchmarks.rank_stop

Each rank makes blocks of steps in turns: with a bare all-reduce a step, as
DistributedDataParallel makes at least one, in a session without the hook, and in sessions with it.
It does not measure several machines, whose network takes longer.
"""

import statistics
import time
from typing import Any

from asynchooks import MonitoredSession, RankStopHook

from ..checkpoints.ranks import run_ranks

NUM_ROUNDS, NUM_STEPS = 31, 50
PROGRAM = """
from tests.benchmarks.rank_stop import figures
anyio.run(figures, rank, backend=args[0])
"""


async def figures(rank: int) -> None:
    """On each rank; the first one prints the medians."""
    import torch
    import torch.distributed as dist

    gradients = torch.zeros(10_000)

    def step() -> dict[str, float]:
        dist.all_reduce(gradients)
        return {"loss": 1.0}

    hooks: dict[str, list[Any]] = {
        "without the hook": [],
        "every_n_steps=10": [RankStopHook(10)],
        "every_n_steps=1": [RankStopHook(1)],
    }
    secs: dict[str, list[float]] = {name: [] for name in ("bare loop", *hooks)}
    sessions = {
        name: MonitoredSession(more, step, step_runner="inline") for name, more in hooks.items()
    }
    for session in sessions.values():
        await session.open()
    for _ in range(NUM_ROUNDS):
        for name, taken in secs.items():
            begun = time.perf_counter()
            for _ in range(NUM_STEPS):
                if name == "bare loop":
                    step()
                else:
                    await sessions[name].run("loss")
            taken.append((time.perf_counter() - begun) / NUM_STEPS)
    for session in sessions.values():
        await session.close()
    for name, each in secs.items() if rank == 0 else ():
        ratio = statistics.median(a / b for a, b in zip(each, secs["bare loop"], strict=True))
        print(
            f"{name}: {1e6 * statistics.median(each):.0f} us a step, {ratio:.2f} of the bare loop"
        )


def main() -> None:
    for size in (2, 4):
        for loop in ("asyncio", "trio"):
            print(f"{size} ranks, {loop}")
            print(*run_ranks(PROGRAM, size, loop)[0], sep="\n")


if __name__ == "__main__":
    main()
