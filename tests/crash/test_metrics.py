"""Metrics of a training that is killed at random moments: each step is in each sink once."""

from __future__ import annotations

import logging
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ..metrics.readers import json_lines, rows, steps_shown
from .metrics import SAVE_STEPS, is_logged, train_with_metrics
from .programs import running, server

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
    [
        ("asyncio", 20),
        ("trio", 20),
        pytest.param("asyncio", 200, marks=pytest.mark.slow),
    ],
)
def test_each_step_is_in_each_sink_once_after_kills(
    tmp_path: Path, backend: str, num_kills: int
) -> None:
    context, rng = server(*IMPORTED), random.Random(f"{backend} {num_kills}")
    saved, num_resumed = 0, 0
    for _ in range(num_kills):
        with running(context, train_with_metrics, backend, tmp_path, Connection) as run:
            # at some moment: in the opening, before a flush, in it, or after some of them
            if rng.random() < 0.8:
                run.has_begun.wait(60)
            time.sleep(rng.random() * 1.2)
            run.process.kill()
        assert not run.of("ends")
        num_resumed += sum(step > 0 for (step,) in run.of("begins"))
        saved = max([saved, *(step for (step,) in run.of("saved"))])
    assert num_resumed > num_kills // 2
    last = saved + 100
    with running(context, train_with_metrics, backend, tmp_path, Connection, last) as run:
        run.join()
    assert run.of("ends") == [(last,)]

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    logs, every = tmp_path / "logs", list(range(1, last + 1))
    logged = [step for step in every if is_logged(step)]
    assert steps_shown(logs, "number") == every
    assert steps_shown(logs, "logged") == logged
    lines, table = json_lines(logs / "m.jsonl"), rows(logs / "m.csv")
    assert [line["step"] for line in lines if "number" in line] == every
    assert [line["step"] for line in lines if "logged" in line] == logged
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert all(line["step"] == line["number"] for line in lines if "number" in line)
    assert [int(row["step"]) for row in table if row["number"]] == every
    assert [int(row["step"]) for row in table if row.get("logged")] == logged
    assert last > SAVE_STEPS * num_kills // 2
