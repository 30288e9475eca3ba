"""The PyTorch recipe, killed at random moments while the loader's workers run: the same bits."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import anyio
import pytest

from ..crash.programs import server
from ..support.examples import load

pytest.importorskip("torch")
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
BEGINS = "training begins at step "

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
        recipe = sys.modules["torch_recipe"]
        state = anyio.run(recipe.train, *args, backend=backend)
    (directory / "part").write_bytes(recipe.bits_of(state))
    (directory / "part").rename(directory / "result")


def run(context: ForkServerContext, args: tuple[str, str, Path], rng: random.Random | None) -> bool:
    """Whether it came to its end; with a generator it is killed, if it is not over by then."""
    log = args[-1] / "log"
    log.touch()
    num_before = log.read_text().count(BEGINS)
    process = context.Process(target=train, args=args)
    process.start()
    try:
        if rng is None:
            process.join()
        else:
            # at some moment: while it opens and restores, or in its steps, saves and reads
            waits = rng.random() < 0.9
            while waits and process.is_alive() and log.read_text().count(BEGINS) == num_before:
                time.sleep(0.01)
            process.join(rng.random() * LONGEST_SECS)
    finally:
        process.kill()  # it may have ended meanwhile
        process.join()
        is_killed = process.exitcode == -signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # the loader's workers
    assert is_killed or process.exitcode == 0, log.read_text()
    return not is_killed


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
    rng, results = random.Random(f"{backend}, {loader}"), list[bytes]()
    num_killed = num_resumed = 0
    while num_killed < num_kills:  # the first one is whole
        directory = tmp_path / str(len(results))
        directory.mkdir()
        args = backend, loader, directory
        while not run(context, args, rng if results and num_killed < num_kills else None):
            num_killed += 1
        results.append((directory / "result").read_bytes())
        log = (directory / "log").read_text()
        assert f"training ended at step {NUM_EPOCHS * NUM_UPDATES}\n" in log
        num_resumed += sum(not each.startswith("0\n") for each in log.split(BEGINS)[1:])
    assert len(set(results)) == 1
    assert num_resumed > num_kills // 2
