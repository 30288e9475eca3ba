"""Several ranks of one PyTorch process group, each a process that runs a program."""

import os
import socket
import subprocess
import sys
import textwrap

from .stores import REPOSITORY

PRELUDE = """
import logging, sys
import anyio
import torch
import torch.distributed as dist
from asynchooks import *
from asynchooks.checkpoints import DistributedCheckpointSaver

rank, size, port, *args = sys.argv[1:]
rank, size = int(rank), int(size)
if size > 1:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
"""
EPILOGUE = """
if size > 1:
    dist.destroy_process_group()
"""


def start_ranks(program: str, size: int, *args: object) -> list[subprocess.Popen[str]]:
    """Start it on so many ranks. It has the names above."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    code = PRELUDE + textwrap.dedent(program) + EPILOGUE
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, *map(str, (rank, size, port, *args))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]


def run_ranks(program: str, size: int, *args: object) -> list[list[str]]:
    """Run it on so many ranks; returns the lines that each prints."""
    processes = start_ranks(program, size, *args)
    outputs = [each.communicate(timeout=100) for each in processes]
    assert [each.returncode for each in processes] == [0] * size, outputs
    return [output.splitlines() for output, _ in outputs]
