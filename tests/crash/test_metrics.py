"""Metrics of a training that is killed at random moments: each step is in each sink once."""

from __future__ import annotations

import logging
import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ..metrics.readers import json_lines, rows, steps_shown
from .metrics import SAVE_STEPS, is_logged, train_with_metrics
from .programs import kill_at_random, running, server

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

IMPORTED = [
    train_with_metrics.__module__,
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.tensorflow_stub.pywrap_tensorflow",
]


@pytest.mark.parametrize(
    ("backend", "num_kills"),
    [("asyncio", 9), ("trio", 9), pytest.param("asyncio", 200, marks=pytest.mark.slow)],
)
def test_each_step_is_in_each_sink_once_after_kills(
    tmp_path: Path, backend: str, num_kills: int
) -> None:
    context, args = server(*IMPORTED), (backend, tmp_path, Connection)
    rng = random.Random(f"{backend} {num_kills}")
    # before a flush, in it, or after some of them
    saved = kill_at_random(context, rng, num_kills, 1.2, train_with_metrics, lambda _: args)
    last = saved + 60
    assert last > SAVE_STEPS * num_kills // 2
    with running(context, train_with_metrics, *args, last) as run:
        run.join()
    assert run.of("ends") == [(last,)]

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    logs, every = tmp_path / "logs", list(range(1, last + 1))
    logged = [step for step in every if is_logged(step)]
    lines, table = json_lines(logs / "m.jsonl"), rows(logs / "m.csv")
    for name, steps in (("number", every), ("logged", logged)):
        assert steps_shown(logs, name) == steps
        assert [line["step"] for line in lines if name in line] == steps
        assert [int(row["step"]) for row in table if row.get(name)] == steps
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert all(line["step"] == line["number"] for line in lines if "number" in line)
