"""What a save of 200 MB into an object store takes from steps, and by DCP beside torch's own call.

    python -m tests.benchmarks.remote_saving

The upload goes to moto's server of S3 over a line of 10 MB/s, both in processes of their own. It
does not measure how long an upload takes, which is the line's matter, nor several ranks.
"""

import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from asynchooks import CheckpointSaverHook, MonitoredSession

from ..support.object_stores import moto, slow_line
from ._report import is_installed, measure
from .saving import NUM_ARRAYS, SIZE, SLOWER, Times, digest, saver_of

BYTES_PER_SEC = 10e6
NUM_STEPS, SAVE_STEPS = 18_000, 8_000
"""Of some 5 ms: an upload takes 25 s."""
NUM_PAUSES = 7


async def longer_by() -> str:
    import numpy as np

    rng, times = np.random.default_rng(0), Times()
    with (
        tempfile.TemporaryDirectory() as directory,
        moto(Path(directory)) as server,
        slow_line(server.port, BYTES_PER_SEC) as port,
    ):
        os.environ.update(server.environment(port))
        saver = saver_of(lambda size: rng.random(size, np.float32))
        hook = CheckpointSaverHook(
            f"{server.url}/run", save_steps=SAVE_STEPS, saver=saver, listeners=[times],
            background=True,
        )  # fmt: skip
        async with MonitoredSession([hook], digest, step_runner="thread") as session:
            for _ in range(NUM_STEPS):
                await session.run("digest")
                times.note_step()
    # without the pause for the copy, which is not the upload's
    return times.figures("")[SLOWER]


def ratio_of_pauses() -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    from asynchooks.checkpoints import DistributedCheckpointSaver

    warnings.simplefilter("ignore")
    module = torch.nn.ParameterList([torch.ones(SIZE) for _ in range(NUM_ARRAYS)])
    saver = DistributedCheckpointSaver(module=module)
    moments: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(NUM_PAUSES):
            begun = time.perf_counter()
            write = saver.snapshot()
            ours = time.perf_counter() - begun
            write(f"{directory}/ours-{number}")
            begun = time.perf_counter()
            future: Any = dcp.async_save(
                module.state_dict(), checkpoint_id=f"{directory}/theirs-{number}", no_dist=True
            )
            moments.append((ours, time.perf_counter() - begun))
            future.result()
    mine, theirs = (statistics.median(each) for each in zip(*moments[1:], strict=True))
    return f"{mine / theirs:.2f}"


async def figures(loop: str) -> dict[str, str]:
    found = {"steps beside an upload of 200 MB at 10 MB/s take longer by": await longer_by()}
    if is_installed("torch"):
        name = "pause for a snapshot of 200 MB: DistributedCheckpointSaver / dcp.async_save"
        found[name] = ratio_of_pauses()
    return found


if __name__ == "__main__":
    measure(figures)
