"""Training that is killed at random moments, or terminated, goes on from its last save."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from ..checkpoints.stores import newest_step
from .programs import running, server, train, uninterrupted
from .workers import MAX_ITEMS, CountingModel, train_together

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def kill_at_random(
    context: ForkServerContext, rng: random.Random, num_kills: int, longest_secs: float,
    program: Callable[..., None], *args: Any,
) -> int:  # fmt: skip
    """Start and kill a program again and again; returns the step of its last completed save.

    Every restart goes on from the last completed save, or a newer one.
    """
    saved, num_resumed = -1, 0
    for _ in range(num_kills):
        with running(context, program, *args) as run:
            # at some moment: while it opens and restores, or between, or in its steps and saves
            if rng.random() < 0.8:
                run.has_begun.wait(60)
            time.sleep(rng.random() * longest_secs)
            run.process.kill()
        for (step,) in run.of("begins"):
            assert step >= saved
            num_resumed += step > 0
        saved = max([saved, *(step for (step,) in run.of("saved"))])
        assert not run.of("ends")
    assert num_resumed > num_kills // 2
    return saved


def newest_of(directory: Path, saved: int) -> int:
    """The step to go on from: a kill may come between a save and its report."""
    newest = newest_step(directory)
    assert newest >= saved
    return newest


@BACKENDS
def test_every_restart_finds_the_last_completed_save_or_a_newer_one(
    tmp_path: Path, backend: str
) -> None:
    context, rng = server(), random.Random(backend)
    saved = kill_at_random(context, rng, 100, 0.3, train, backend, tmp_path, Connection)
    last_step = 20 + newest_of(tmp_path, saved)
    with running(context, train, backend, tmp_path, Connection, last_step) as run:
        run.join()
    [(step, num_runs, number)] = run.of("ends")
    assert step == num_runs == last_step
    assert number == uninterrupted(last_step)


@pytest.mark.parametrize("feeds", [True, False], ids=["feed", "loop"])
@BACKENDS
def test_eight_workers_train_each_item_once_after_fifty_kills(
    tmp_path: Path, backend: str, feeds: bool
) -> None:
    context, rng = server(train_together.__module__), random.Random(f"{backend}, {feeds}")
    args = train_together, backend, tmp_path, Connection, feeds
    saved = kill_at_random(context, rng, 50, 0.2, *args, MAX_ITEMS)
    num_items = 100 + newest_of(tmp_path, saved)
    with running(context, *args, num_items) as run:
        run.join()
    [(state,)] = run.of("ends")
    assert state == CountingModel().after(num_items).state


@BACKENDS
def test_what_gets_sigterm_at_any_moment_is_saved_and_ends_by_its_signal(
    tmp_path: Path, backend: str
) -> None:
    context, rng = server(), random.Random(backend)
    for number, where in enumerate(["loop", "hook", "step", "wait", "save"] * 5):
        directory = tmp_path / str(number)
        with running(context, train, backend, directory, Connection, None, where) as run:
            run.has_begun.wait(60)
            time.sleep(rng.random() * 0.3)
            run.process.terminate()
            terminated_at = time.monotonic()
            run.join()
            assert time.monotonic() - terminated_at < 20
        assert run.process.exitcode == 128 + signal.SIGTERM
        [(step, num_runs, first)] = run.of("ends")
        assert run.of("saved")[-1] == (step,)
        assert num_runs == step
        assert first == uninterrupted(step)
        with running(context, train, backend, directory, Connection, step + 3) as again:
            again.join()
        assert again.of("begins") == [(step,)]
        assert again.of("ends")[-1][2] == uninterrupted(step + 3)
