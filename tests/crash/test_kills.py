"""Training that is killed at random moments, or terminated, goes on from its last save."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ..checkpoints.stores import newest_step
from .programs import kill_at_random, running, server, train, uninterrupted
from .workers import MAX_ITEMS, CountingModel, train_together

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def newest_of(directory: Path, saved: int) -> int:
    """The step to go on from: a kill may come between a save and its report."""
    newest = newest_step(directory)
    assert newest >= saved
    return newest


@BACKENDS
def test_every_restart_finds_the_last_completed_save_or_a_newer_one(
    tmp_path: Path, backend: str
) -> None:
    context, args = server(), (backend, tmp_path, Connection)
    saved = kill_at_random(context, random.Random(backend), 40, 0.3, train, lambda _: args)
    last_step = 20 + newest_of(tmp_path, saved)
    with running(context, train, *args, last_step) as run:
        run.join()
    assert run.of("ends") == [(last_step, last_step, uninterrupted(last_step))]


@pytest.mark.parametrize(("backend", "feeds"), [("asyncio", True), ("trio", False)])
def test_eight_workers_train_each_item_once_after_kills(
    tmp_path: Path, backend: str, feeds: bool
) -> None:
    context, rng = server(train_together.__module__), random.Random(backend)
    args = (backend, tmp_path, Connection, feeds)
    saved = kill_at_random(context, rng, 25, 0.2, train_together, lambda _: (*args, MAX_ITEMS))
    num_items = 100 + newest_of(tmp_path, saved)
    with running(context, train_together, *args, num_items) as run:
        run.join()
    assert run.of("ends") == [(CountingModel().after(num_items).state,)]


@BACKENDS
def test_what_gets_sigterm_at_any_moment_is_saved_and_ends_by_its_signal(
    tmp_path: Path, backend: str
) -> None:
    context, rng = server(), random.Random(backend)
    for number, where in enumerate(["loop", "hook", "step", "wait", "save"] * 2):
        args = (backend, tmp_path / str(number), Connection)
        with running(context, train, *args, None, where) as run:
            run.has_begun.wait(60)
            time.sleep(rng.random() * 0.3)
            run.process.terminate()
            run.join()
        assert run.process.exitcode == 128 + signal.SIGTERM
        [(step, num_runs, first)] = run.of("ends")
        assert run.of("saved")[-1] == (step,)
        assert (num_runs, first) == (step, uninterrupted(step))
        with running(context, train, *args, step + 3) as again:
            again.join()
        assert again.of("begins") == [(step,)]
        assert again.of("ends")[-1][2] == uninterrupted(step + 3)
