"""Another number of ranks: what reads a part of the data is refused, all else resumes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .stores import REPOSITORY

pytest.importorskip("torch")
pytestmark = pytest.mark.faults

RANK = """
import logging, sys
import anyio
import torch
import torch.distributed as dist
from asynchooks import *
from asynchooks.checkpoints import DistributedCheckpointSaver
from asynchooks.data import batch, prefetch, repeat, shuffle

rank, size, port, path, num_steps, backend = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7]
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
if size > 1:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)

class Drawing:
    def __init__(self, items):
        self.items, self.position = items, 0
    def __call__(self):
        self.position += 1
        return {"x": self.items[self.position - 1]}
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]
    def __iter__(self):
        return iter(self.items)

class Counts(SessionRunHook):
    runs = 0
    async def after_run(self, run_context, run_values):
        self.runs += 1
    def state_dict(self):
        return {"runs": self.runs}
    def load_state_dict(self, state):
        self.runs = state["runs"]

part = list(range(48))[rank::size]
KINDS = {
    "list": lambda: FeedHook(part, "x"),
    "range": lambda: FeedHook(range(rank, 48, size), "x"),
    "stages": lambda: FeedHook(prefetch(batch(shuffle(part, 8, seed=1), 2), 2), "x"),
    "epochs": lambda: FeedHook(repeat(part, 9), "x"),
    "DataLoader": lambda: FeedHook(torch.utils.data.DataLoader(part, batch_size=2), "x"),
    "feed_fn": lambda: FeedFnHook(Drawing(part)),
    "loop": None,
    "in the saver": lambda: FeedFnHook(lambda: {"x": 1}),
    "begun": lambda: FeedHook(part, "x"),
    "no position": lambda: FeedFnHook(lambda: {"x": 1}),
}

async def live(kind, num_steps):
    seen = []
    def step(x):
        seen.append(x)
        return {}
    source = prefetch(part, 2)
    hook = InputPositionHook(source) if kind == "loop" else KINDS[kind]()
    others = {"loader": Drawing(part)} if kind == "in the saver" else {}
    saver = DistributedCheckpointSaver(module=torch.nn.Linear(1, 1), **others)
    saving = CheckpointSaverHook(path + "/" + kind, save_steps=2, saver=saver)
    counts = Counts()
    async with MonitoredSession([hook, counts, saving], FunctionSessionCreator(step)) as session:
        first = session.global_step.value
        batches = session.batches(source) if kind == "loop" else None
        for _ in range(num_steps):
            await session.run([], None if batches is None else {"x": await anext(batches)})
    print("RESULT", kind, first, counts.runs)

for kind in KINDS:
    try:
        anyio.run(live, kind, 0 if kind == "begun" and num_steps == "3" else int(num_steps),
                  backend=backend)
    except Exception as error:
        print("RESULT", kind, type(error).__name__, error)
if size > 1:
    dist.destroy_process_group()
"""


def train(path: Path, size: int, num_steps: int, backend: str) -> list[list[str]]:
    """What each rank prints."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    arguments = [str(path), str(num_steps), backend]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, *map(str, (rank, size, port)), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    outputs = [each.communicate(timeout=100)[0] for each in processes]
    assert [each.returncode for each in processes] == [0] * size, outputs
    return [output.splitlines() for output in outputs]


POSITIONS = ["list", "range", "stages", "epochs", "DataLoader", "feed_fn", "loop"]


@pytest.mark.parametrize(
    ("before", "after", "backend"), [(1, 2, "asyncio"), (2, 1, "trio"), (2, 3, "asyncio")]
)
def test_a_position_of_another_number_of_ranks_is_refused_on_all_and_all_else_resumes(
    tmp_path: Path, before: int, after: int, backend: str
) -> None:
    train(tmp_path, before, 3, backend)
    for lines in train(tmp_path, after, 4, backend):
        said = {line.removeprefix("RESULT "): line for line in lines if line.startswith("RESULT")}
        for kind in POSITIONS:
            [line] = [each for each in said if each.startswith(f"{kind} ")]
            assert f"was saved by {before} rank" in line
            assert f"there are {after}: the position of " in line
            assert f"Resume on {before} rank" in line
            assert f"call restore('{tmp_path}/{kind}/model.ckpt-3/model.ckpt-3')" in line
        [loader] = [each for each in said if each.startswith("in the saver ")]
        assert f"there are {after}: loader would go on" in loader
        assert "begun 0 4" in said, "nothing was trained yet"
        assert "no position 3 7" in said, "with the state of the hook that counts"
        [log] = [line for line in lines if line.startswith("LOG") and "/no position/" in line]
        assert f"was saved by {before} rank" in log


def test_the_same_number_of_ranks_resumes_each_position(tmp_path: Path) -> None:
    train(tmp_path, 2, 3, "asyncio")
    for lines in train(tmp_path, 2, 4, "asyncio"):
        kinds = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT")]
        expected = {f"{kind} 3 7" for kind in [*POSITIONS, "in the saver", "no position"]}
        assert set(kinds) == expected | {"begun 0 4"}
