"""What a save of 200 MB into an object store takes from steps, and by DCP beside torch's own call.

    python -m tests.benchmarks.remote_saving

The upload goes to moto's server of S3 over a line of 10 MB/s, both in processes of their own. It
does not measure how long an upload takes, which is the line's matter, nor several ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asynchooks import CheckpointSaverHook, FunctionSessionCreator, MonitoredSession, StateDictSaver

from ..support.object_stores import moto, slow_line
from ._report import Measure, Row, is_installed, print_rows, rows_of, run_on
from .saving import NUM_ARRAYS, SIZE, Listener, Times

BYTES_PER_SEC = 10e6
NUM_STEPS, SAVE_STEPS = 18_000, 8_000
"""Of some 5 ms: an upload takes 25 s."""
NUM_PAUSES = 7

SLOWER = "steps beside an upload of 200 MB at 10 MB/s take longer by"
PAUSE = "pause for a snapshot of 200 MB: DistributedCheckpointSaver / dcp.async_save"
MEASURES = [Measure(SLOWER, "<= 4 %"), Measure(PAUSE, "<= 1.0", peer="torch")]


async def train(session: MonitoredSession, times: Times) -> None:
    async with session:
        for _ in range(NUM_STEPS):
            await session.run("digest")
            times.steps.append(time.perf_counter())


def longer_by(loop: str) -> str:
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {f"a{i}": rng.random(SIZE, np.float32) for i in range(NUM_ARRAYS)}
    block, times = bytes(8_000_000), Times()

    def step() -> dict[str, Any]:  # without Python's lock, as a step on a device
        return {"digest": hashlib.sha256(block).digest()}

    with (
        tempfile.TemporaryDirectory() as directory,
        moto(Path(directory)) as server,
        slow_line(server.port, BYTES_PER_SEC) as port,
    ):
        os.environ.update(server.environment(port))
        hook = CheckpointSaverHook(
            f"{server.url}/run", save_steps=SAVE_STEPS, saver=StateDictSaver(arrays=arrays),
            listeners=[Listener(times)], background=True,
        )  # fmt: skip
        session = MonitoredSession([hook], FunctionSessionCreator(step), step_runner="thread")
        run_on(loop, train, session, times)
    gaps = [(b - a, a) for a, b in itertools.pairwise(times.steps)]
    saves = [each for each in times.saves if len(each) == 2]
    # without the pause for the copy, which is not the upload's
    beside = [gap for gap, at in gaps if any(a + 0.5 < at < b - 0.5 for a, b in saves)]
    alone = [gap for gap, at in gaps if not any(a - 0.5 < at < b + 0.5 for a, b in times.saves)]
    return f"{100 * (statistics.fmean(beside) / statistics.fmean(alone) - 1.0):.1f} %"


def ratio_of_pauses() -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    from asynchooks.checkpoints import DistributedCheckpointSaver

    warnings.simplefilter("ignore")
    module = torch.nn.ParameterList([torch.ones(SIZE) for _ in range(NUM_ARRAYS)])
    saver = DistributedCheckpointSaver(module=module)
    pauses: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(NUM_PAUSES):
            begun = time.perf_counter()
            write = saver.snapshot()
            pauses["ours"].append(time.perf_counter() - begun)
            write(f"{directory}/ours-{number}")
            begun = time.perf_counter()
            future: Any = dcp.async_save(
                module.state_dict(), checkpoint_id=f"{directory}/theirs-{number}", no_dist=True
            )
            pauses["theirs"].append(time.perf_counter() - begun)
            future.result()
    ours, theirs = (statistics.median(pauses[each][1:]) for each in ("ours", "theirs"))
    return f"{ours / theirs:.2f}"


def figures(loop: str) -> Mapping[str, str]:
    found = {SLOWER: longer_by(loop)}
    if is_installed("torch"):
        found[PAUSE] = ratio_of_pauses()
    return found


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
