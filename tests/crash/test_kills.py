"""Training that is killed at random moments, or terminated, goes on from its last save."""

import logging
import random
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ..checkpoints.stores import newest_step
from ..metrics.readers import json_lines, rows, steps_shown
from .programs import is_logged, kill_at_random, running, server, train, uninterrupted

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

IMPORTED = [
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.tensorflow_stub.pywrap_tensorflow",
]


@pytest.mark.parametrize(
    ("backend", "num_kills"),
    [("asyncio", 8), ("trio", 8), pytest.param("asyncio", 200, marks=pytest.mark.slow)],
)
def test_every_restart_finds_the_last_save_or_a_newer_one_and_each_step_is_in_each_sink_once(
    tmp_path: Path, backend: str, num_kills: int
) -> None:
    context, rng, logs = server(*IMPORTED), random.Random(backend), tmp_path / "logs"
    program, args = partial(train, logs=logs), (backend, tmp_path / "saved", Connection)
    # before a flush, in it, or after some of them
    saved = kill_at_random(context, rng, num_kills, 0.8, program, lambda _: args)
    newest = newest_step(tmp_path / "saved")
    assert newest >= saved > 0
    last = newest + 20
    with running(context, program, *args, last) as run:
        run.join()
    assert run.of("ends") == [(last, last, uninterrupted(last))]

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    every = list(range(1, last + 1))
    lines, table = json_lines(logs / "m.jsonl"), rows(logs / "m.csv")
    for name, steps in (("number", every), ("logged", [each for each in every if is_logged(each)])):
        assert steps_shown(logs, name) == steps
        assert [line["step"] for line in lines if name in line] == steps
        assert [int(row["step"]) for row in table if row.get(name)] == steps
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert all(line["step"] == line["number"] for line in lines if "number" in line)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_gets_sigterm_at_any_moment_is_saved_and_ends_by_its_signal(
    tmp_path: Path, backend: str
) -> None:
    context, rng, step = server(), random.Random(backend), 0
    for runner in ["auto", "thread"] * 3:
        program = partial(train, step_runner=runner)
        with running(context, program, backend, tmp_path, Connection) as run:
            run.has_begun.wait(60)
            time.sleep(rng.random() * 0.2)
            run.process.terminate()
            run.join()
        assert run.process.exitcode == 128 + signal.SIGTERM
        assert run.of("begins") == [(step,)]
        [(step, num_runs, first)] = run.of("ends")
        assert newest_step(tmp_path) == step
        assert (num_runs, first) == (step, uninterrupted(step))
