"""The PyTorch recipe, killed at random moments while the loader's workers run: the same bits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import anyio
import pytest

from ..crash.programs import server
from ..support.examples import load

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="kills and forks"
    ),
]

NUM_EPOCHS, NUM_UPDATES = 6, 22  # of an epoch
LONGEST_SECS = 1.0

if "torch_recipe" not in sys.modules:
    load("torch_recipe")  # imported once, in the server that training processes are forked from


def train(backend: str, loader: str, directory: Path) -> None:
    os.setsid()  # so that a hang can be ended with the workers
    # for the loader's workers: else that of this process's own start, which takes a second
    multiprocessing.set_start_method("fork", force=True)
    args = str(directory / "model"), loader, 2, NUM_EPOCHS, 3, "cpu"
    with (directory / "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        state = anyio.run(sys.modules["torch_recipe"].train, *args, backend=backend)
    torch.save(state, directory / "part")
    (directory / "part").rename(directory / "result")


def log_of(directory: Path) -> str:
    log = directory / "log"
    return log.read_text() if log.exists() else ""


def run(context: ForkServerContext, args: tuple[str, str, Path], rng: random.Random | None) -> bool:
    """Whether it came to its end; with a generator it is killed, if it is not over by then."""
    directory = args[-1]
    process = context.Process(target=train, args=args)
    before = log_of(directory).count("training begins")
    process.start()
    try:
        if rng is None:
            process.join()
        else:
            # at some moment: while it opens and restores, or in its steps, saves and reads
            waits = rng.random() < 0.9
            while (
                waits and process.is_alive()
                and log_of(directory).count("training begins") == before
            ):  # fmt: skip
                time.sleep(0.01)
            process.join(rng.random() * LONGEST_SECS)
    finally:
        process.kill()  # it may have ended meanwhile
        process.join()
        is_killed = process.exitcode == -signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # the loader's workers
    assert is_killed or process.exitcode == 0, log_of(directory)
    return not is_killed


def assert_same(whole: Any, found: Any, where: str = "state") -> None:
    assert type(whole) is type(found), where
    if isinstance(whole, dict):
        assert list(whole) == list(found), where
        for key in whole:
            assert_same(whole[key], found[key], f"{where}[{key!r}]")
    elif isinstance(whole, (list, tuple)):
        assert len(whole) == len(found), where
        for place, pair in enumerate(zip(whole, found, strict=True)):
            assert_same(*pair, f"{where}[{place}]")
    elif isinstance(whole, torch.Tensor):
        assert torch.equal(whole, found), where
    else:
        as_bytes = [each.tobytes() if hasattr(each, "tobytes") else each for each in (whole, found)]
        assert as_bytes[0] == as_bytes[1], where


@pytest.mark.parametrize(
    ("backend", "loader", "num_kills"),
    [
        ("asyncio", "plain", 3),
        ("trio", "stateful", 3),
        pytest.param("trio", "plain", 50, marks=pytest.mark.slow),
        pytest.param("asyncio", "stateful", 50, marks=pytest.mark.slow),
    ],
)
def test_kills_change_no_bit(tmp_path: Path, backend: str, loader: str, num_kills: int) -> None:
    if loader == "stateful":
        pytest.importorskip("torchdata")
    context = server("torch._dynamo", "torchdata.stateful_dataloader", __name__)
    rng = random.Random(f"{backend}, {loader}")
    folders = [tmp_path / "whole"]
    folders[0].mkdir()
    assert run(context, (backend, loader, folders[0]), None)
    whole = torch.load(folders[0] / "result", weights_only=False)
    assert len(whole["losses"]) == NUM_EPOCHS * NUM_UPDATES
    num_killed = num_resumed = 0
    while num_killed < num_kills:
        directory = tmp_path / str(len(folders))
        directory.mkdir()
        folders.append(directory)
        args = backend, loader, directory
        while not run(context, args, rng if num_killed < num_kills else None):
            num_killed += 1
        assert_same(whole, torch.load(directory / "result", weights_only=False))
        begun = log_of(directory).split("training begins at step ")[1:]
        num_resumed += sum(not each.startswith("0\n") for each in begun)
    assert num_resumed > num_kills // 2
