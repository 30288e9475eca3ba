"""The PyTorch recipe, killed at random moments while the loader's workers run: the same bits."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from ..crash.programs import server

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="kills and forks"
    ),
]

ROOT = Path(__file__).parents[2]
NUM_EPOCHS, NUM_UPDATES = 12, 22  # of an epoch
LONGEST_SECS = 1.0


def recipe() -> ModuleType:
    name = "torch_recipe"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if "torch_recipe" not in sys.modules:
    recipe()  # imported once, in the server that training processes are forked from


def train(backend: str, loader: str, directory: Path, result: Path) -> None:
    os.setsid()  # so that a hang can be ended with the workers
    # for the loader's workers: else that of this process's own start, which takes a second
    multiprocessing.set_start_method("fork", force=True)
    module = recipe()
    args = str(directory), loader, 2, NUM_EPOCHS, 3, "cpu"
    with (directory.parent / "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        state = anyio.run(module.train, *args, backend=backend)
    part = result.with_suffix(".part")
    torch.save(state, part)
    part.rename(result)


def num_begun(directory: Path) -> int:
    log = directory / "log"
    return log.read_text().count("training begins") if log.exists() else 0


def run(
    context: ForkServerContext,
    backend: str,
    loader: str,
    directory: Path,
    rng: random.Random | None,
) -> bool:
    """Whether it came to its end; with a generator it is killed, if it is not over by then."""
    process = context.Process(
        target=train, args=(backend, loader, directory / "model", directory / "result")
    )
    before = num_begun(directory)
    process.start()
    try:
        if rng is None:
            process.join(60)
            assert not process.is_alive(), f"it hangs: {(directory / 'log').read_text()}"
        else:
            # at some moment: while it opens and restores, or in its steps, saves and reads
            waits = rng.random() < 0.9
            while waits and process.is_alive() and num_begun(directory) == before:
                time.sleep(0.01)
            process.join(rng.random() * LONGEST_SECS)
        process.kill()  # it may have ended meanwhile
        process.join()
        is_killed = process.exitcode == -signal.SIGKILL
        if is_killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # the loader's workers
        else:
            assert process.exitcode == 0, (directory / "log").read_text()
    finally:
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    return not is_killed


def assert_same(whole: Any, found: Any, where: str = "state") -> None:
    assert type(whole) is type(found), where
    if isinstance(whole, dict):
        assert list(whole) == list(found), where
        for key in whole:
            assert_same(whole[key], found[key], f"{where}[{key!r}]")
    elif isinstance(whole, (list, tuple)):
        assert len(whole) == len(found), where
        for place, (one, other) in enumerate(zip(whole, found, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    elif isinstance(whole, torch.Tensor):
        assert torch.equal(whole, found), where
    elif hasattr(whole, "tobytes"):
        assert whole.tobytes() == found.tobytes(), where
    else:
        assert whole == found, where


def kill_and_compare(tmp_path: Path, backend: str, loader: str, num_kills: int) -> None:
    context = server("torch._dynamo", "torchdata.stateful_dataloader", __name__)
    rng = random.Random(f"{backend}, {loader}")
    whole_path = tmp_path / "whole"
    whole_path.mkdir()
    assert run(context, backend, loader, whole_path, None)
    whole = torch.load(whole_path / "result", weights_only=False)
    assert len(whole["losses"]) == NUM_EPOCHS * NUM_UPDATES
    num_killed = num_trained = num_resumed = 0
    while num_killed < num_kills:
        directory = tmp_path / str(num_trained)
        directory.mkdir()
        while not run(context, backend, loader, directory, rng if num_killed < num_kills else None):
            num_killed += 1
        num_trained += 1
        assert_same(whole, torch.load(directory / "result", weights_only=False))
        begun = (directory / "log").read_text().split("training begins at step ")[1:]
        num_resumed += sum(not each.startswith("0\n") for each in begun)
    assert num_resumed > num_kills // 2


@pytest.mark.parametrize(("backend", "loader"), [("asyncio", "plain"), ("trio", "stateful")])
def test_three_kills_change_no_bit(tmp_path: Path, backend: str, loader: str) -> None:
    if loader == "stateful":
        pytest.importorskip("torchdata")
    kill_and_compare(tmp_path, backend, loader, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "loader"), [("trio", "plain"), ("asyncio", "stateful")])
def test_fifty_kills_change_no_bit(tmp_path: Path, backend: str, loader: str) -> None:
    if loader == "stateful":
        pytest.importorskip("torchdata")
    kill_and_compare(tmp_path, backend, loader, 50)
